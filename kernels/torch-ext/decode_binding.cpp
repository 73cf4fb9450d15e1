// decode_step, decode_attention and decode_workspace_bytes: schemas, argument checks, launch.
// Definition: hf_sparsekv/ops/reference/decode.py. Shapes as in csrc/decode.h.
//
// The workspace is uint8, at least `decode_workspace_bytes` long and zero when first used. Every launch leaves it fit
// for the next one of any sizes, so one workspace, as long as the longest need, serves all launches of a stream.
#include <limits>

#include "../csrc/decode.h"
#include "checks.h"
#include "registration.h"

namespace skv {
namespace {

constexpr int64_t kMaxGrid = 65535;   // of a grid's second and third dimension
constexpr int64_t kMaxLength = int64_t{1} << 30;

void set_sizes(const Checks& checks, const Tensor& q, const Tensor& k_pool, int64_t max_length, int64_t num_splits,
               DecodeParams& params) {
  const int64_t heads = q.size(q.dim() - 2);
  const int64_t dim = q.size(q.dim() - 1);
  const int64_t kv_heads = k_pool.size(1);
  const int64_t num_rows = q.dim() == 4 ? q.size(1) : 1;
  checks.require(dim == 64 || dim == 128, "q", "must have head dim 64 or 128, got ", dim);
  checks.require(kv_heads >= 1 && heads >= 1 && heads % kv_heads == 0 && heads / kv_heads <= kDecodeMaxGroup, "q",
                 "must have 1 to ", kDecodeMaxGroup, " heads per head of `k_pool` (", kv_heads, "), got ", heads);
  checks.require(num_rows >= 1 && num_rows <= kDecodeMaxRows, "q", "must have 1 to ", kDecodeMaxRows,
                 " rows per request, got ", num_rows);
  checks.require(q.size(0) <= kMaxGrid && kv_heads * kDecodeMaxRows <= kMaxGrid, "q", "has too many requests or heads");
  checks.require(max_length >= 1 && max_length <= kMaxLength, "max_length", "must be 1 to ", kMaxLength, ", got ",
                 max_length);
  checks.require(num_splits >= 0 && num_splits <= kDecodeMaxSplits, "num_splits", "must be 0 to ", kDecodeMaxSplits,
                 ", got ", num_splits);
  params.batch = static_cast<int32_t>(q.size(0));
  params.kv_heads = static_cast<int32_t>(kv_heads);
  params.group = static_cast<int32_t>(heads / kv_heads);
  params.num_rows = static_cast<int32_t>(num_rows);
  params.head_dim = static_cast<int32_t>(dim);
  params.max_length = static_cast<int32_t>(max_length);
  params.num_splits = static_cast<int32_t>(num_splits);
  params.dtype = row_dtype(q);
}

/// Strides of request, row and head of a tensor with or without a row dimension.
void set_row_strides(const Tensor& t, bool has_rows, int64_t (&stride)[3]) {
  stride[0] = t.stride(0);
  stride[1] = has_rows ? t.stride(1) : 0;
  stride[2] = t.stride(has_rows ? 2 : 1);
}

void set_pools(const Checks& checks, const Tensor& k_pool, const Tensor& v_pool, const Tensor& q,
               const std::optional<Tensor>& table, int64_t max_length, DecodeParams& params) {
  checks.pool(k_pool, "k_pool", table, "block_table", params.batch, params.kv_heads, params.head_dim);
  checks.pool(v_pool, "v_pool", table, "block_table", params.batch, params.kv_heads, params.head_dim);
  checks.same_dtype(k_pool, "k_pool", q, "q");
  checks.same_dtype(v_pool, "v_pool", q, "q");
  checks.require(v_pool.size(0) == k_pool.size(0) && v_pool.size(2) == k_pool.size(2), "v_pool",
                 "must have the pages of `k_pool`: ", k_pool.size(0), " of ", k_pool.size(2), " slots, got ",
                 v_pool.size(0), " of ", v_pool.size(2));
  const int64_t page_size = k_pool.size(2);
  checks.require(page_size >= 1 && page_size <= std::numeric_limits<int32_t>::max(), "k_pool",
                 "must have at least one slot per page, got ", page_size);
  const int64_t capacity = table.has_value() ? table->size(1) * page_size : page_size;
  checks.require(capacity >= max_length, "k_pool", "holds ", capacity, " slots per request, fewer than the ",
                 max_length, " asked for");
  params.k_pool = pool_view(k_pool, table);
  params.v_pool = pool_view(v_pool, table);
}

void set_workspace(const Checks& checks, const Tensor& workspace, DecodeParams& params) {
  checks.tensor(workspace, "workspace", ScalarType::Byte, {kAny});
  checks.contiguous(workspace, "workspace");
  checks.require(reinterpret_cast<uintptr_t>(workspace.data_ptr()) % 16 == 0, "workspace",
                 "must start at a 16-byte boundary");
  params.workspace = workspace.data_ptr();
  params.workspace_bytes = workspace.numel();
}

template <typename T>
T* per_request(const Checks& checks, const Tensor& t, const char* name, int64_t batch) {
  checks.tensor(t, name, ScalarType::Int, {batch});
  checks.contiguous(t, name);
  return static_cast<T*>(t.data_ptr());
}

void set_head_strides(const Tensor& t, int64_t (&stride)[2]) {
  stride[0] = t.stride(0);
  stride[1] = t.stride(1);
}

/// positions, scores and victims: what a step keeps per slot and per head.
void set_slots(const Checks& checks, const Tensor& positions, const Tensor& scores, const Tensor& victims,
               const DecodeParams& params, DecodeStepState& step) {
  checks.tensor(positions, "positions", ScalarType::Int, {params.batch, params.kv_heads, params.max_length});
  checks.last_contiguous(positions, "positions");
  checks.tensor(scores, "scores", ScalarType::Float, {params.batch, params.kv_heads, params.max_length});
  checks.last_contiguous(scores, "scores");
  checks.tensor(victims, "victims", ScalarType::Long, {params.batch, params.kv_heads});
  step.positions = static_cast<int32_t*>(positions.data_ptr());
  step.scores = static_cast<float*>(scores.data_ptr());
  step.victims = static_cast<int64_t*>(victims.data_ptr());
  set_head_strides(positions, step.positions_stride);
  set_head_strides(scores, step.scores_stride);
  set_head_strides(victims, step.victims_stride);
}

void set_new_token(const Checks& checks, const Tensor& k, const Tensor& v, const Tensor& q, const DecodeParams& params,
                   DecodeStepState& step) {
  checks.rows(k, "k", {params.batch, params.kv_heads, params.head_dim});
  checks.rows(v, "v", {params.batch, params.kv_heads, params.head_dim});
  checks.same_dtype(k, "k", q, "q");
  checks.same_dtype(v, "v", q, "q");
  step.k = k.data_ptr();
  step.v = v.data_ptr();
  set_head_strides(k, step.k_stride);
  set_head_strides(v, step.v_stride);
}

void decode_step(
    Tensor out, Tensor k_pool, Tensor v_pool, Tensor positions, Tensor scores, Tensor lengths, Tensor victims,
    Tensor next_position, Tensor workspace, Tensor q, Tensor k, Tensor v, Tensor budgets,
    std::optional<Tensor> block_table, double scale, double decay, double gain, int64_t num_sinks, int64_t num_recent,
    bool score_by_position, int64_t num_splits) {
  const Checks checks("decode_step", q, "q");
  checks.rows(q, "q", {kAny, kAny, kAny});
  checks.rows(out, "out", {q.size(0), q.size(1), q.size(2)});
  checks.same_dtype(out, "out", q, "q");
  checks.require(k_pool.dim() == 4, "k_pool", "must be [P, K, S, D], got ", k_pool.dim(), " dimensions");
  checks.require(scores.dim() == 3, "scores", "must be [B, K, C], got ", scores.dim(), " dimensions");
  checks.require(num_sinks >= 0 && num_sinks <= kMaxLength, "num_sinks", "must not be negative, got ", num_sinks);
  checks.require(num_recent >= 0 && num_recent <= kMaxLength, "num_recent", "must not be negative, got ", num_recent);
  DecodeParams params{};
  set_sizes(checks, q, k_pool, scores.size(2), num_splits, params);
  checks.require(params.batch <= kDecodeCounters, "q", "must have at most ", kDecodeCounters, " requests, got ",
                 params.batch);
  set_pools(checks, k_pool, v_pool, q, block_table, scores.size(2), params);
  set_workspace(checks, workspace, params);
  params.q = q.data_ptr();
  params.out = out.data_ptr();
  set_row_strides(q, false, params.q_stride);
  set_row_strides(out, false, params.out_stride);
  params.scale = static_cast<float>(scale);

  DecodeStepState& step = params.step;
  set_new_token(checks, k, v, q, params, step);
  set_slots(checks, positions, scores, victims, params, step);
  step.lengths = per_request<int32_t>(checks, lengths, "lengths", params.batch);
  step.budgets = per_request<const int32_t>(checks, budgets, "budgets", params.batch);
  step.next_position = per_request<int32_t>(checks, next_position, "next_position", params.batch);
  step.decay = static_cast<float>(decay);
  step.gain = static_cast<float>(gain);
  step.num_sinks = static_cast<int32_t>(num_sinks);
  step.num_recent = static_cast<int32_t>(num_recent);
  step.score_by_position = score_by_position;
  const torch::stable::accelerator::DeviceGuard guard(checks.device());
  run_decode_step(params, current_stream(checks.device()));
}

void decode_attention(
    Tensor out, std::optional<Tensor> lse, std::optional<Tensor> workspace, Tensor q, Tensor k_pool, Tensor v_pool,
    Tensor lengths, std::optional<Tensor> block_table, double scale, int64_t max_length, int64_t num_splits) {
  const Checks checks("decode_attention", q, "q");
  const bool has_rows = q.dim() == 4;
  checks.require(q.dim() == 3 || has_rows, "q", "must be [B, H, D] or [B, T, H, D], got ", q.dim(), " dimensions");
  checks.require(k_pool.dim() == 4, "k_pool", "must be [P, K, S, D], got ", k_pool.dim(), " dimensions");
  if (has_rows) {
    checks.rows(q, "q", {kAny, kAny, kAny, kAny});
    checks.rows(out, "out", {q.size(0), q.size(1), q.size(2), q.size(3)});
  } else {
    checks.rows(q, "q", {kAny, kAny, kAny});
    checks.rows(out, "out", {q.size(0), q.size(1), q.size(2)});
  }
  checks.same_dtype(out, "out", q, "q");
  checks.require(num_splits <= 1 || workspace.has_value(), "workspace", "is needed for ", num_splits, " splits");
  DecodeParams params{};
  set_sizes(checks, q, k_pool, max_length, num_splits, params);
  set_pools(checks, k_pool, v_pool, q, block_table, max_length, params);
  if (workspace.has_value()) set_workspace(checks, *workspace, params);
  params.q = q.data_ptr();
  params.out = out.data_ptr();
  set_row_strides(q, has_rows, params.q_stride);
  set_row_strides(out, has_rows, params.out_stride);
  if (lse.has_value()) {
    if (has_rows) {
      checks.tensor(*lse, "lse", ScalarType::Float, {q.size(0), q.size(1), q.size(2)});
    } else {
      checks.tensor(*lse, "lse", ScalarType::Float, {q.size(0), q.size(1)});
    }
    params.lse = static_cast<float*>(lse->data_ptr());
    set_row_strides(*lse, has_rows, params.lse_stride);
  }
  params.lengths = per_request<const int32_t>(checks, lengths, "lengths", params.batch);
  params.scale = static_cast<float>(scale);
  const torch::stable::accelerator::DeviceGuard guard(checks.device());
  run_decode_attention(params, current_stream(checks.device()));
}

int64_t workspace_bytes(int64_t batch, int64_t kv_heads, int64_t group_size, int64_t num_rows, int64_t head_dim,
                        int64_t max_length, bool is_step, int64_t num_splits) {
  const bool valid = batch >= 0 && batch <= kMaxGrid && kv_heads >= 1 && kv_heads <= kMaxGrid && group_size >= 1 &&
                     group_size <= kDecodeMaxGroup && num_rows >= 1 && num_rows <= (is_step ? 1 : kDecodeMaxRows) &&
                     (head_dim == 64 || head_dim == 128) && max_length >= 1 && max_length <= kMaxLength &&
                     num_splits >= 0 && num_splits <= kDecodeMaxSplits;
  if (!valid) {
    throw std::runtime_error("hf_sparsekv_kernels.decode_workspace_bytes: sizes that decode does not take");
  }
  DecodeParams params{};
  params.batch = static_cast<int32_t>(batch);
  params.kv_heads = static_cast<int32_t>(kv_heads);
  params.group = static_cast<int32_t>(group_size);
  params.num_rows = static_cast<int32_t>(num_rows);
  params.head_dim = static_cast<int32_t>(head_dim);
  params.max_length = static_cast<int32_t>(max_length);
  params.num_splits = static_cast<int32_t>(num_splits);
  return decode_workspace_bytes(params, is_step);
}

}  // namespace

SKV_SCHEMAS(m) {
  m.def(
      "decode_step(Tensor(a!) out, Tensor(b!) k_pool, Tensor(c!) v_pool, Tensor(d!) positions, Tensor(e!) scores,"
      " Tensor(f!) lengths, Tensor(g!) victims, Tensor(h!) next_position, Tensor(i!) workspace, Tensor q, Tensor k,"
      " Tensor v, Tensor budgets, Tensor? block_table, float scale, float decay, float gain, int num_sinks,"
      " int num_recent, bool score_by_position, int num_splits=0) -> ()");
  m.def(
      "decode_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, Tensor q, Tensor k_pool,"
      " Tensor v_pool, Tensor lengths, Tensor? block_table, float scale, int max_length, int num_splits=0) -> ()");
  m.def(
      "decode_workspace_bytes(int batch, int kv_heads, int group_size, int num_rows, int head_dim, int max_length,"
      " bool is_step, int num_splits=0) -> int");
}

SKV_CUDA_OPS(m) {
  m.impl("decode_step", TORCH_BOX(&decode_step));
  m.impl("decode_attention", TORCH_BOX(&decode_attention));
}

// Takes no tensor, so no device picks an implementation.
SKV_IMPL_IN(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
  m.impl("decode_workspace_bytes", TORCH_BOX(&workspace_bytes));
}

}  // namespace skv
