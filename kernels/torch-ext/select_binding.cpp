// select: schema, argument checks, launch.

#include "../csrc/select.h"

#include "checks.h"
#include "registration.h"

namespace skv {
namespace {

constexpr int64_t kMaxGrid = 65535;       // CTAs along y
constexpr int64_t kMaxKeys = 1 << 30;     // positions are int32

ScoreList score_list(const Checks& checks, const Tensor& scores, const char* name, int64_t pooling,
                     const char* pooling_name, int64_t width, const char* width_name,
                     std::initializer_list<int64_t> shape) {
  checks.tensor(scores, name, ScalarType::Float, shape);
  checks.last_contiguous(scores, name);
  checks.require(pooling >= 0 && pooling <= 3, pooling_name, "must be 0 (none), 1 (avg), 2 (max) or 3 (forward), got ",
                 pooling);
  checks.require(width % 2 == 1 && width >= 1 && width <= kMaxPoolWidth, width_name, "must be odd, 1 to ",
                 kMaxPoolWidth, ", got ", width);
  return {static_cast<const float*>(scores.data_ptr()), scores.stride(0), scores.stride(1),
          static_cast<Pooling>(pooling), static_cast<int32_t>(width)};
}

void select(Tensor index, Tensor count, Tensor retained, Tensor scores, Tensor lengths, Tensor budgets,
            int64_t num_sinks, int64_t num_recent, int64_t pooling, int64_t pool_width,
            std::optional<Tensor> secondary, int64_t secondary_pooling, int64_t secondary_width, double share) {
  const Checks checks("select", scores, "scores");
  SelectParams params{};
  params.first = score_list(checks, scores, "scores", pooling, "pooling", pool_width, "pool_width",
                            {kAny, kAny, kAny});
  const int64_t batch = scores.size(0);
  const int64_t num_heads = scores.size(1);
  const int64_t num_keys = scores.size(2);
  if (secondary.has_value()) {
    params.second = score_list(checks, *secondary, "secondary", secondary_pooling, "secondary_pooling",
                               secondary_width, "secondary_width", {batch, num_heads, num_keys});
  }
  checks.tensor(index, "index", ScalarType::Long, {batch, num_heads, kAny});
  checks.last_contiguous(index, "index");
  checks.tensor(retained, "retained", ScalarType::Float, {batch, num_heads, index.size(2)});
  checks.last_contiguous(retained, "retained");
  checks.tensor(count, "count", ScalarType::Int, {batch});
  checks.contiguous(count, "count");
  checks.tensor(lengths, "lengths", ScalarType::Int, {batch});
  checks.contiguous(lengths, "lengths");
  checks.tensor(budgets, "budgets", ScalarType::Int, {batch});
  checks.contiguous(budgets, "budgets");
  checks.require(num_sinks >= 0 && num_sinks <= kMaxKeys, "num_sinks", "must not be negative, got ", num_sinks);
  checks.require(num_recent >= 0 && num_recent <= kMaxKeys, "num_recent", "must not be negative, got ", num_recent);
  checks.require(share >= 0.0 && share <= 1.0, "share", "must lie in [0, 1], got ", share);
  checks.require(batch <= kMaxGrid, "scores", "has too many requests: ", batch);
  checks.require(num_keys <= kMaxKeys, "scores", "has too many keys: ", num_keys);

  params.index = static_cast<int64_t*>(index.data_ptr());
  params.index_stride_request = index.stride(0);
  params.index_stride_head = index.stride(1);
  params.count = static_cast<int32_t*>(count.data_ptr());
  params.retained = static_cast<float*>(retained.data_ptr());
  params.retained_stride_request = retained.stride(0);
  params.retained_stride_head = retained.stride(1);
  params.lengths = static_cast<const int32_t*>(lengths.data_ptr());
  params.budgets = static_cast<const int32_t*>(budgets.data_ptr());
  params.batch = static_cast<int32_t>(batch);
  params.num_heads = static_cast<int32_t>(num_heads);
  params.num_keys = static_cast<int32_t>(num_keys);
  params.capacity = static_cast<int32_t>(index.size(2));
  params.num_sinks = static_cast<int32_t>(num_sinks);
  params.num_recent = static_cast<int32_t>(num_recent);
  params.share = static_cast<float>(share);
  const torch::stable::accelerator::DeviceGuard guard(checks.device());
  run_select(params, current_stream(checks.device()));
}

}  // namespace

SKV_SCHEMAS(m) {
  m.def(
      "select(Tensor(a!) index, Tensor(b!) count, Tensor(c!) retained, Tensor scores, Tensor lengths, Tensor budgets,"
      " int num_sinks, int num_recent, int pooling, int pool_width, Tensor? secondary=None, int secondary_pooling=0,"
      " int secondary_width=1, float share=1.0) -> ()");
}

SKV_CUDA_OPS(m) { m.impl("select", TORCH_BOX(&select)); }

}  // namespace skv
