// Ops: score, lse_tail, key_anchor. Definition: hf_sparsekv/ops/reference/score.py.
//
// Workspaces are fp32, contiguous, of any shape with at least as many entries as csrc/score.h asks for:
//   lse_tail: 2 * B * H * A * num_key_splits(N);  key_anchor: B * K * D * num_key_splits(N);
//   num_key_splits(N) <= min(64, ceil(N / 128)).
#include <limits>

#include "../csrc/score.h"
#include "checks.h"
#include "registration.h"

namespace skv {
namespace {

constexpr int64_t kMaxGrid = 65535;           // of a grid's second and third dimension
constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr double kLog2OfE = 1.4426950408889634074;

/// D, N and the pool; what all three ops take.
WindowShape check_keys(
    const Checks& checks, const Tensor& k_pool, const Tensor& lengths, const std::optional<Tensor>& table,
    int64_t max_length) {
  checks.require(k_pool.dim() == 4, "k_pool", "must be [P, K, S, D], got ", k_pool.dim(), " dimensions");
  const int64_t kv_heads = k_pool.size(1);
  const int64_t dim = k_pool.size(3);
  checks.require(lengths.dim() == 1, "lengths", "must be [B], got ", lengths.dim(), " dimensions");
  const int64_t batch = lengths.size(0);
  checks.require(dim == 64 || dim == 128, "k_pool", "must have head dim 64 or 128, got ", dim);
  checks.require(kv_heads >= 1 && kv_heads <= kMaxGrid, "k_pool", "must have 1 to ", kMaxGrid, " heads, got ",
                 kv_heads);
  checks.require(k_pool.size(2) >= 1 || max_length == 0, "k_pool", "has pages without slots");
  checks.require(batch <= kMaxGrid, "lengths", "must hold at most ", kMaxGrid, " requests, got ", batch);
  checks.pool(k_pool, "k_pool", table, "block_table", batch, kv_heads, dim);
  checks.tensor(lengths, "lengths", ScalarType::Int, {batch});
  checks.contiguous(lengths, "lengths");
  const int64_t capacity = table.has_value() ? table->size(1) * k_pool.size(2) : k_pool.size(2);
  checks.require(k_pool.size(2) <= std::numeric_limits<int32_t>::max(), "k_pool", "has too many slots per page");
  checks.require(max_length >= 0 && max_length <= kMaxLength && max_length <= capacity, "max_length",
                 "must lie in 0 to ", capacity, ", the slots that a request can have, got ", max_length);
  WindowShape shape{};
  shape.dtype = row_dtype(k_pool);
  shape.head_dim = static_cast<int32_t>(dim);
  shape.batch = static_cast<int32_t>(batch);
  shape.kv_heads = static_cast<int32_t>(kv_heads);
  shape.max_length = static_cast<int32_t>(max_length);
  return shape;
}

/// The query rows; sets G and A.
QueryRows check_queries(const Checks& checks, const Tensor& q, const Tensor& k_pool, WindowShape& shape) {
  checks.rows(q, "q", {shape.batch, kAny, kAny, shape.head_dim});
  checks.same_dtype(k_pool, "k_pool", q, "q");
  const int64_t heads = q.size(1);
  const int64_t num_rows = q.size(2);
  checks.require(heads >= 1 && heads % shape.kv_heads == 0, "q", "must have a multiple of k_pool's ", shape.kv_heads,
                 " heads, got ", heads);
  checks.require(num_rows >= 1, "q", "must have at least one row");
  checks.require(heads * num_rows <= (int64_t{1} << 24), "q", "has too many rows: ", heads, " * ", num_rows);
  shape.group = static_cast<int32_t>(heads / shape.kv_heads);
  shape.num_rows = static_cast<int32_t>(num_rows);
  return {q.data_ptr(), q.stride(0), q.stride(1), q.stride(2)};
}

/// A fp32 output or factor [B, K, N], contiguous in N.
void check_per_key(const Checks& checks, const Tensor& t, const char* name, const WindowShape& shape) {
  checks.tensor(t, name, ScalarType::Float, {shape.batch, shape.kv_heads, shape.max_length});
  checks.last_contiguous(t, name);
}

void check_workspace(const Checks& checks, const Tensor& workspace, int64_t num_entries) {
  checks.require(workspace.is_cuda() && workspace.get_device_index() == checks.device(), "workspace",
                 "must be on CUDA device ", checks.device());
  checks.require(workspace.scalar_type() == ScalarType::Float, "workspace", "must be float32, got ",
                 dtype_name(workspace.scalar_type()));
  checks.contiguous(workspace, "workspace");
  checks.require(workspace.numel() >= num_entries, "workspace", "must have at least ", num_entries, " entries, got ",
                 workspace.numel());
}

bool is_max(const Checks& checks, int64_t reduction, const char* name) {
  checks.require(reduction == 0 || reduction == 1, name, "must be 0 (mean) or 1 (max), got ", reduction);
  return reduction == 1;
}

/// The two optional inputs and the output that comes with the anchor.
void check_extras(
    const Checks& checks, const std::optional<Tensor>& cosine, const std::optional<Tensor>& value_norm,
    const std::optional<Tensor>& anchor, ScoreParams& params) {
  const WindowShape& shape = params.shape;
  if (value_norm.has_value()) {
    check_per_key(checks, *value_norm, "value_norm", shape);
    params.value_norm = static_cast<const float*>(value_norm->data_ptr());
    params.norm_stride_batch = value_norm->stride(0);
    params.norm_stride_head = value_norm->stride(1);
  }
  checks.require(anchor.has_value() == cosine.has_value(), "cosine", "must be given exactly when `anchor` is");
  if (!anchor.has_value()) return;
  checks.tensor(*anchor, "anchor", ScalarType::Float, {shape.batch, shape.kv_heads, shape.head_dim});
  checks.contiguous(*anchor, "anchor");
  checks.aligned16(*anchor, "anchor");
  check_per_key(checks, *cosine, "cosine", shape);
  params.anchor = static_cast<const float*>(anchor->data_ptr());
  params.cosine = static_cast<float*>(cosine->data_ptr());
  params.cosine_stride_batch = cosine->stride(0);
  params.cosine_stride_head = cosine->stride(1);
}

void score(
    Tensor score, std::optional<Tensor> cosine, Tensor q, Tensor k_pool, Tensor lse, Tensor lengths,
    std::optional<Tensor> block_table, std::optional<Tensor> value_norm, std::optional<Tensor> anchor, double scale,
    int64_t max_length, int64_t row_reduction, int64_t group_reduction) {
  const Checks checks("score", k_pool, "k_pool");
  ScoreParams params{};
  params.shape = check_keys(checks, k_pool, lengths, block_table, max_length);
  params.q = check_queries(checks, q, k_pool, params.shape);
  params.k = pool_view(k_pool, block_table);
  params.lengths = static_cast<const int32_t*>(lengths.data_ptr());
  checks.tensor(lse, "lse", ScalarType::Float, {params.shape.batch, q.size(1), q.size(2)});
  params.lse = static_cast<const float*>(lse.data_ptr());
  params.lse_stride_batch = lse.stride(0);
  params.lse_stride_head = lse.stride(1);
  params.lse_stride_row = lse.stride(2);
  check_per_key(checks, score, "score", params.shape);
  params.score = static_cast<float*>(score.data_ptr());
  params.score_stride_batch = score.stride(0);
  params.score_stride_head = score.stride(1);
  check_extras(checks, cosine, value_norm, anchor, params);
  params.scale_log2 = static_cast<float>(scale * kLog2OfE);
  params.row_max = is_max(checks, row_reduction, "row_reduction");
  params.group_max = is_max(checks, group_reduction, "group_reduction");
  const torch::stable::accelerator::DeviceGuard guard(checks.device());
  run_score(params, current_stream(checks.device()));
}

void lse_tail(
    Tensor lse, Tensor workspace, Tensor q, Tensor k_pool, Tensor lengths, std::optional<Tensor> block_table,
    double scale, int64_t max_length) {
  const Checks checks("lse_tail", k_pool, "k_pool");
  LseTailParams params{};
  params.shape = check_keys(checks, k_pool, lengths, block_table, max_length);
  params.q = check_queries(checks, q, k_pool, params.shape);
  params.k = pool_view(k_pool, block_table);
  params.lengths = static_cast<const int32_t*>(lengths.data_ptr());
  checks.tensor(lse, "lse", ScalarType::Float, {params.shape.batch, q.size(1), q.size(2)});
  params.lse = static_cast<float*>(lse.data_ptr());
  params.lse_stride_batch = lse.stride(0);
  params.lse_stride_head = lse.stride(1);
  params.lse_stride_row = lse.stride(2);
  check_workspace(checks, workspace, 2 * lse.numel() * num_key_splits(params.shape.max_length));
  checks.require(reinterpret_cast<uintptr_t>(workspace.data_ptr()) % sizeof(float2) == 0, "workspace",
                 "must start at an 8-byte boundary");
  params.workspace = static_cast<float2*>(workspace.data_ptr());
  params.scale_log2 = static_cast<float>(scale * kLog2OfE);
  const torch::stable::accelerator::DeviceGuard guard(checks.device());
  run_lse_tail(params, current_stream(checks.device()));
}

void key_anchor(
    Tensor anchor, Tensor workspace, Tensor k_pool, Tensor lengths, std::optional<Tensor> block_table,
    int64_t max_length) {
  const Checks checks("key_anchor", k_pool, "k_pool");
  KeyAnchorParams params{};
  params.shape = check_keys(checks, k_pool, lengths, block_table, max_length);
  params.k = pool_view(k_pool, block_table);
  params.lengths = static_cast<const int32_t*>(lengths.data_ptr());
  checks.tensor(anchor, "anchor", ScalarType::Float,
                {params.shape.batch, params.shape.kv_heads, params.shape.head_dim});
  checks.contiguous(anchor, "anchor");
  params.anchor = static_cast<float*>(anchor.data_ptr());
  check_workspace(checks, workspace, anchor.numel() * num_key_splits(params.shape.max_length));
  params.workspace = static_cast<float*>(workspace.data_ptr());
  const torch::stable::accelerator::DeviceGuard guard(checks.device());
  run_key_anchor(params, current_stream(checks.device()));
}

}  // namespace
}  // namespace skv

SKV_SCHEMAS(m) {
  m.def(
      "score(Tensor(a!) score, Tensor(b!)? cosine, Tensor q, Tensor k_pool, Tensor lse, Tensor lengths, "
      "Tensor? block_table, Tensor? value_norm, Tensor? anchor, float scale, int max_length, int row_reduction, "
      "int group_reduction) -> ()");
  m.def(
      "lse_tail(Tensor(a!) lse, Tensor(b!) workspace, Tensor q, Tensor k_pool, Tensor lengths, Tensor? block_table, "
      "float scale, int max_length) -> ()");
  m.def(
      "key_anchor(Tensor(a!) anchor, Tensor(b!) workspace, Tensor k_pool, Tensor lengths, Tensor? block_table, "
      "int max_length) -> ()");
}

SKV_CUDA_OPS(m) {
  m.impl("score", TORCH_BOX(&skv::score));
  m.impl("lse_tail", TORCH_BOX(&skv::lse_tail));
  m.impl("key_anchor", TORCH_BOX(&skv::key_anchor));
}
