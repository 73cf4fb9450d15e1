// compact: schema, argument checks, launch.

#include "../csrc/compact.h"
#include "checks.h"
#include "registration.h"

namespace skv {
namespace {

constexpr int64_t kMaxChunks = 1024;  // threads of a CTA
constexpr int64_t kMaxGrid = 65535;   // CTAs along y and z

void compact(Tensor k_out, Tensor v_out, Tensor k_pool, Tensor v_pool, Tensor index,
             std::optional<Tensor> in_table, std::optional<Tensor> out_table) {
  const Checks checks("compact", k_pool, "k_pool");
  checks.copied_rows(k_pool, "k_pool", {kAny, kAny, kAny, kAny});
  const int64_t num_heads = k_pool.size(1);
  const int64_t dim = k_pool.size(3);
  checks.copied_rows(v_pool, "v_pool", {k_pool.size(0), num_heads, k_pool.size(2), dim});
  checks.tensor(index, "index", ScalarType::Long, {kAny, num_heads, kAny});
  checks.last_contiguous(index, "index");
  const int64_t batch = index.size(0);
  const int64_t capacity = index.size(2);
  checks.copied_rows(k_out, "k_out", {kAny, num_heads, kAny, dim});
  checks.copied_rows(v_out, "v_out", {k_out.size(0), num_heads, k_out.size(2), dim});
  checks.same_dtype(v_pool, "v_pool", k_pool, "k_pool");
  checks.same_dtype(k_out, "k_out", k_pool, "k_pool");
  checks.same_dtype(v_out, "v_out", k_pool, "k_pool");
  checks.paging(k_pool, "k_pool", in_table, "in_table", batch);
  checks.paging(k_out, "k_out", out_table, "out_table", batch);
  const int64_t num_places = out_table.has_value() ? out_table->size(1) * k_out.size(2) : k_out.size(2);
  checks.require(num_places >= capacity, "k_out", "has ", num_places, " slots per request, `index` names ", capacity);
  checks.require(batch <= kMaxGrid && num_heads <= kMaxGrid, "index", "has too many requests or heads");

  CompactParams params{};
  params.k_out = chunk_view(k_out, out_table);
  params.v_out = chunk_view(v_out, out_table);
  params.k_pool = chunk_view(k_pool, in_table);
  params.v_pool = chunk_view(v_pool, in_table);
  params.index = static_cast<const int64_t*>(index.data_ptr());
  params.index_stride_request = index.stride(0);
  params.index_stride_head = index.stride(1);
  params.batch = static_cast<int32_t>(batch);
  params.num_heads = static_cast<int32_t>(num_heads);
  params.capacity = static_cast<int32_t>(capacity);
  params.chunks_per_row = static_cast<int32_t>(dim * static_cast<int64_t>(k_pool.element_size()) / 16);
  checks.require(params.chunks_per_row <= kMaxChunks, "k_pool", "has too large a head dim: ", dim);
  const torch::stable::accelerator::DeviceGuard guard(checks.device());
  run_compact(params, current_stream(checks.device()));
}

}  // namespace

SKV_SCHEMAS(m) {
  m.def(
      "compact(Tensor(a!) k_out, Tensor(b!) v_out, Tensor k_pool, Tensor v_pool, Tensor index,"
      " Tensor? in_table=None, Tensor? out_table=None) -> ()");
}

SKV_CUDA_OPS(m) { m.impl("compact", TORCH_BOX(&compact)); }

}  // namespace skv
