// write_kv and write_kv_packed: schemas, argument checks, launch.

#include "../csrc/write.h"
#include "checks.h"
#include "registration.h"

namespace skv {
namespace {

constexpr int64_t kMaxChunks = 1024;  // threads of a CTA

/// What both ops share: pools, rows and positions. `owners` and `places` are the leading and last sizes that the
/// positions must have.
WriteParams write_params(const Checks& checks, const Tensor& k_pool, const Tensor& v_pool, const Tensor& k,
                         const Tensor& v, const std::optional<Tensor>& table) {
  checks.copied_rows(k_pool, "k_pool", {kAny, kAny, kAny, kAny});
  checks.copied_rows(v_pool, "v_pool", {k_pool.size(0), k_pool.size(1), k_pool.size(2), k_pool.size(3)});
  checks.copied_rows(k, "k", {kAny, k_pool.size(1), k_pool.size(3)});
  checks.copied_rows(v, "v", {k.size(0), k_pool.size(1), k_pool.size(3)});
  checks.same_dtype(v_pool, "v_pool", k_pool, "k_pool");
  checks.same_dtype(k, "k", k_pool, "k_pool");
  checks.same_dtype(v, "v", k_pool, "k_pool");
  const int64_t per_chunk = 16 / static_cast<int64_t>(k_pool.element_size());
  checks.require(k_pool.size(3) / per_chunk <= kMaxChunks, "k_pool", "has too large a head dim: ", k_pool.size(3));

  WriteParams params{};
  params.k_pool = chunk_view(k_pool, table);
  params.v_pool = chunk_view(v_pool, table);
  params.k = k.data_ptr();
  params.v = v.data_ptr();
  params.k_stride_token = k.stride(0) / per_chunk;
  params.k_stride_head = k.stride(1) / per_chunk;
  params.v_stride_token = v.stride(0) / per_chunk;
  params.v_stride_head = v.stride(1) / per_chunk;
  params.num_tokens = k.size(0);
  params.num_heads = static_cast<int32_t>(k_pool.size(1));
  params.chunks_per_row = static_cast<int32_t>(k_pool.size(3) / per_chunk);
  return params;
}

void set_positions(WriteParams& params, const Checks& checks, const std::optional<Tensor>& positions,
                   const std::optional<Tensor>& new_positions, int64_t num_owners, int64_t num_places) {
  checks.require(positions.has_value() == new_positions.has_value(), "new_positions",
                 "must be given exactly when `positions` is");
  if (!positions.has_value()) return;
  checks.tensor(*positions, "positions", ScalarType::Int, {num_owners, params.num_heads, num_places});
  checks.last_contiguous(*positions, "positions");
  checks.tensor(*new_positions, "new_positions", ScalarType::Int, {params.num_tokens});
  checks.contiguous(*new_positions, "new_positions");
  params.positions = static_cast<int32_t*>(positions->data_ptr());
  params.positions_stride_page = positions->stride(0);
  params.positions_stride_head = positions->stride(1);
  params.new_positions = static_cast<const int32_t*>(new_positions->data_ptr());
}

void launch(const WriteParams& params, const Checks& checks) {
  const torch::stable::accelerator::DeviceGuard guard(checks.device());
  run_write(params, current_stream(checks.device()));
}

void write_kv(Tensor k_pool, Tensor v_pool, Tensor k, Tensor v, Tensor slots, std::optional<Tensor> block_table,
              std::optional<Tensor> positions, std::optional<Tensor> new_positions) {
  const Checks checks("write_kv", k_pool, "k_pool");
  WriteParams params = write_params(checks, k_pool, v_pool, k, v, block_table);
  checks.paging(k_pool, "k_pool", block_table, "block_table", params.num_tokens);
  checks.tensor(slots, "slots", ScalarType::Long, {params.num_tokens, params.num_heads});
  params.slots = static_cast<const int64_t*>(slots.data_ptr());
  params.slots_stride_token = slots.stride(0);
  params.slots_stride_head = slots.stride(1);
  set_positions(params, checks, positions, new_positions, params.num_tokens, kAny);
  launch(params, checks);
}

void write_kv_packed(Tensor k_pool, Tensor v_pool, Tensor k, Tensor v, Tensor slot_mapping,
                     std::optional<Tensor> positions, std::optional<Tensor> new_positions) {
  const Checks checks("write_kv_packed", k_pool, "k_pool");
  WriteParams params = write_params(checks, k_pool, v_pool, k, v, std::nullopt);
  checks.tensor(slot_mapping, "slot_mapping", ScalarType::Long, {params.num_tokens});
  params.slots = static_cast<const int64_t*>(slot_mapping.data_ptr());
  params.slots_stride_token = slot_mapping.stride(0);
  params.is_flat = true;
  set_positions(params, checks, positions, new_positions, k_pool.size(0), k_pool.size(2));
  launch(params, checks);
}

}  // namespace

SKV_SCHEMAS(m) {
  m.def(
      "write_kv(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor k, Tensor v, Tensor slots, Tensor? block_table=None,"
      " Tensor(c!)? positions=None, Tensor? new_positions=None) -> ()");
  m.def(
      "write_kv_packed(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor k, Tensor v, Tensor slot_mapping,"
      " Tensor(c!)? positions=None, Tensor? new_positions=None) -> ()");
}

SKV_CUDA_OPS(m) {
  m.impl("write_kv", TORCH_BOX(&write_kv));
  m.impl("write_kv_packed", TORCH_BOX(&write_kv_packed));
}

}  // namespace skv
