// Instructions that only the decode kernel uses, beside those of common.cuh.
#pragma once

#include "common.cuh"

namespace skv {

/// One transposed 8 x 8 matrix; lanes 0 to 7 give its row addresses.
__device__ __forceinline__ uint32_t ldmatrix_x1_trans(uint32_t shared) {
  uint32_t r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];\n" : "=r"(r) : "r"(shared) : "memory");
  return r;
}

/// c += a * b with A 16 x 8 row-major and B 8 x 8 column-major; lanes hold C as in `mma_m16n8k16`.
template <typename T>
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b);

template <>
__device__ __forceinline__ void mma_m16n8k8<__nv_bfloat16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

template <>
__device__ __forceinline__ void mma_m16n8k8<__half>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

/// Waits for the oldest of `depth - 1` copy groups in flight; depth 4, 5, 6, 8 or 12. The count must be an immediate.
__device__ __forceinline__ void wait_oldest_unit(int depth) {
  if (depth == 4) {
    cp_async_wait<2>();
  } else if (depth == 5) {
    cp_async_wait<3>();
  } else if (depth == 6) {
    cp_async_wait<4>();
  } else if (depth == 8) {
    cp_async_wait<6>();
  } else {
    cp_async_wait<10>();
  }
}

/// Orders this thread's memory accesses, and those it has seen through a barrier, before its later ones as other
/// CTAs see them.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address));
}

}  // namespace skv
