// Instructions that only the decode kernel uses, beside those of common.cuh.
#pragma once

#include "common.cuh"

namespace skv {

/// Waits for the oldest two of `depth - 2` copy groups in flight; depth 4, 5, 6, 8 or 12. The count must be an
/// immediate.
__device__ __forceinline__ void wait_oldest_two(int depth) {
  if (depth == 5) {
    cp_async_wait<1>();
  } else if (depth == 6) {
    cp_async_wait<2>();
  } else if (depth == 8) {
    cp_async_wait<4>();
  } else if (depth == 12) {
    cp_async_wait<8>();
  } else {
    cp_async_wait<0>();
  }
}

/// Orders this thread's memory accesses, and those it has seen through a barrier, before its later ones as other
/// CTAs see them.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address));
}

}  // namespace skv
