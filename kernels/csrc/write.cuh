// write: new keys and values to their slots, and optionally the slots' positions.
//
// Grid: one row (token, KV head) per threadIdx.y, 16 bytes of K and of V per thread; a CTA holds about 256 threads.
// Bytes per row: D * item size read and written, twice; no arithmetic.
// Reference: `write_slots` in hf_sparsekv/ops/reference/decode.py.
#pragma once

#include "common.cuh"
#include "write.h"

namespace skv {

__global__ void write_kernel(const WriteParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t token = row / p.num_heads;
  const int32_t head = static_cast<int32_t>(row - token * p.num_heads);
  if (token >= p.num_tokens) return;
  const int64_t slot = p.slots[token * p.slots_stride_token + head * p.slots_stride_head];
  if (slot < 0) return;

  const int chunk = threadIdx.x;
  const uint4* k = static_cast<const uint4*>(p.k) + token * p.k_stride_token + head * p.k_stride_head;
  const uint4* v = static_cast<const uint4*>(p.v) + token * p.v_stride_token + head * p.v_stride_head;
  const uint4 new_k = k[chunk];
  const uint4 new_v = v[chunk];

  // Without a block table a page is a whole request, so a flat slot splits the same way as a paged one.
  int64_t page = token;
  int64_t offset = slot;
  if (p.is_flat || p.k_pool.table != nullptr) {
    const int64_t entry = slot / p.k_pool.page_size;
    offset = slot - entry * p.k_pool.page_size;
    page = p.is_flat ? entry : p.k_pool.table[token * p.k_pool.stride_table + entry];
  }
  const PoolView<uint4> k_pool = p.k_pool.as<uint4>();
  const PoolView<uint4> v_pool = p.v_pool.as<uint4>();
  k_pool.data[page * k_pool.stride_page + head * k_pool.stride_head + offset * k_pool.stride_slot + chunk] = new_k;
  v_pool.data[page * v_pool.stride_page + head * v_pool.stride_head + offset * v_pool.stride_slot + chunk] = new_v;
  if (p.positions != nullptr && chunk == 0) {
    const int64_t owner = p.is_flat ? page : token;
    const int64_t place = p.is_flat ? offset : slot;
    p.positions[owner * p.positions_stride_page + head * p.positions_stride_head + place] = p.new_positions[token];
  }
}

}  // namespace skv
