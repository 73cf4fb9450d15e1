// kv_diversity: schema, argument checks, launch. Definition: hf_sparsekv/ops/reference/diversity.py.
//
// The workspace is fp32, contiguous, 16-byte aligned, of any shape with at least as many entries as
// csrc/diversity.h asks for: B * K * (2 * S * (D + 2) + N), S = min(64, ceil(N / 128)).

#include "../csrc/diversity.h"

#include "checks.h"
#include "registration.h"

namespace skv {
namespace {

constexpr int64_t kMaxGrid = 65535;  // of a grid's second and third dimension
constexpr int64_t kMaxLength = int64_t{1} << 30;

TokenRows token_rows(const Tensor& t) { return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

/// Sizes, rows and lengths.
DiversityParams check_rows(const Checks& checks, const Tensor& keys, const Tensor& values, const Tensor& lengths) {
  checks.rows(keys, "keys", {kAny, kAny, kAny, kAny});
  const int64_t batch = keys.size(0);
  const int64_t kv_heads = keys.size(1);
  const int64_t num_keys = keys.size(2);
  const int64_t dim = keys.size(3);
  checks.require(dim == 64 || dim == 128, "keys", "must have head dim 64 or 128, got ", dim);
  checks.require(kv_heads >= 1 && 2 * kv_heads <= kMaxGrid, "keys", "must have 1 to ", kMaxGrid / 2, " heads, got ",
                 kv_heads);
  checks.require(batch <= kMaxGrid, "keys", "must hold at most ", kMaxGrid, " requests, got ", batch);
  checks.require(num_keys <= kMaxLength, "keys", "must hold at most ", kMaxLength, " tokens, got ", num_keys);
  checks.rows(values, "values", {batch, kv_heads, num_keys, dim});
  checks.same_dtype(values, "values", keys, "keys");
  checks.tensor(lengths, "lengths", ScalarType::Int, {batch});
  checks.contiguous(lengths, "lengths");
  DiversityParams params{};
  params.dtype = row_dtype(keys);
  params.head_dim = static_cast<int32_t>(dim);
  params.batch = static_cast<int32_t>(batch);
  params.kv_heads = static_cast<int32_t>(kv_heads);
  params.max_length = static_cast<int32_t>(num_keys);
  params.keys = token_rows(keys);
  params.values = token_rows(values);
  params.lengths = static_cast<const int32_t*>(lengths.data_ptr());
  return params;
}

void set_rotation(
    DiversityParams& params, const Checks& checks, const std::optional<Tensor>& inv_freq,
    const std::optional<Tensor>& positions) {
  if (inv_freq.has_value()) {
    checks.tensor(*inv_freq, "inv_freq", ScalarType::Float, {params.head_dim / 2});
    checks.contiguous(*inv_freq, "inv_freq");
    params.inv_freq = static_cast<const float*>(inv_freq->data_ptr());
  }
  if (!positions.has_value()) return;
  checks.require(inv_freq.has_value(), "positions", "must not be given without `inv_freq`");
  checks.tensor(*positions, "positions", ScalarType::Long, {params.batch, params.kv_heads, params.max_length});
  params.positions = static_cast<const int64_t*>(positions->data_ptr());
  params.positions_stride_batch = positions->stride(0);
  params.positions_stride_head = positions->stride(1);
  params.positions_stride_token = positions->stride(2);
}

void set_workspace(DiversityParams& params, const Checks& checks, const Tensor& workspace) {
  const int64_t needed = diversity_workspace(params.batch, params.kv_heads, params.max_length, params.head_dim);
  checks.tensor(workspace, "workspace", ScalarType::Float, {kAny});
  checks.contiguous(workspace, "workspace");
  checks.aligned16(workspace, "workspace");
  checks.require(workspace.numel() >= needed, "workspace", "must have at least ", needed, " entries, got ",
                 workspace.numel());
  const int64_t cells = 2 * static_cast<int64_t>(params.batch) * params.kv_heads *
                        max_diversity_splits(params.max_length);
  params.directions = static_cast<float*>(workspace.data_ptr());
  params.moments = reinterpret_cast<float2*>(params.directions + cells * params.head_dim);
  params.apart = params.directions + cells * (params.head_dim + 2);
}

void kv_diversity(
    Tensor diversity, Tensor workspace, Tensor keys, Tensor values, Tensor lengths, std::optional<Tensor> inv_freq,
    std::optional<Tensor> positions) {
  const Checks checks("kv_diversity", keys, "keys");
  DiversityParams params = check_rows(checks, keys, values, lengths);
  set_rotation(params, checks, inv_freq, positions);
  checks.tensor(diversity, "diversity", ScalarType::Float, {params.batch, params.kv_heads, params.max_length});
  checks.last_contiguous(diversity, "diversity");
  params.diversity = static_cast<float*>(diversity.data_ptr());
  params.diversity_stride_batch = diversity.stride(0);
  params.diversity_stride_head = diversity.stride(1);
  set_workspace(params, checks, workspace);
  const torch::stable::accelerator::DeviceGuard guard(checks.device());
  run_diversity(params, current_stream(checks.device()));
}

}  // namespace

SKV_SCHEMAS(m) {
  m.def(
      "kv_diversity(Tensor(a!) diversity, Tensor(b!) workspace, Tensor keys, Tensor values, Tensor lengths, "
      "Tensor? inv_freq=None, Tensor? positions=None) -> ()");
}

SKV_CUDA_OPS(m) { m.impl("kv_diversity", TORCH_BOX(&kv_diversity)); }

}  // namespace skv
