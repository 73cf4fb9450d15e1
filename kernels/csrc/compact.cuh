// compact: the kept keys and values of every request and KV head, gathered into a dense tensor or into pages.
//
// Grid: (ceil(C / rows per CTA), K, B); one kept row per threadIdx.y, 16 bytes of K and of V per thread.
// Bytes per kept token and KV head: 2 * D * item size read, as many written, 8 of the index; no arithmetic.
// The output must not overlap the input: rows move in no particular order.
// Reference: `compact` in hf_sparsekv/ops/reference/select.py.
#pragma once

#include "compact.h"
#include "compact_chain.cuh"

namespace skv {

__global__ void compact_kernel(const CompactParams p) {
  wait_for_previous_kernel();
  const int32_t target = blockIdx.x * blockDim.y + threadIdx.y;
  const int32_t head = blockIdx.y;
  const int32_t request = blockIdx.z;
  if (target >= p.capacity) return;
  const int64_t source = p.index[request * p.index_stride_request + head * p.index_stride_head + target];
  const bool is_absent = source < 0;
  // Pages behind absent tokens may not exist; a dense output gets the reference's zeros.
  if (is_absent && p.k_out.table != nullptr) return;

  const int chunk = threadIdx.x;
  uint4 k = make_uint4(0, 0, 0, 0);
  uint4 v = k;
  if (!is_absent) {
    k = load16_readonly(p.k_pool.as<uint4>().row(request, head, static_cast<int32_t>(source)) + chunk);
    v = load16_readonly(p.v_pool.as<uint4>().row(request, head, static_cast<int32_t>(source)) + chunk);
  }
  store16(p.k_out.as<uint4>().row(request, head, target) + chunk, k);
  store16(p.v_out.as<uint4>().row(request, head, target) + chunk, v);
}

}  // namespace skv
