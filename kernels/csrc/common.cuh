// Small device helpers that every kernel of this folder may use: tensor-core and copy instructions, reductions,
// 16-byte accesses. No torch headers, no state.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "types.h"

namespace skv {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// ---- host ----------------------------------------------------------------------------------------------------

/// Throws on a CUDA error; the binding layer turns the exception into a Python error.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

/// To be called right after a launch; reports a bad configuration, not faults inside the kernel.
inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

/// Raises a kernel's dynamic shared memory limit where 48 KB is not enough.
template <typename Kernel>
inline void allow_shared_memory(Kernel kernel, size_t bytes) {
  if (bytes > 48 * 1024) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
  }
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

template <typename Int>
__host__ __device__ constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

// ---- 16-byte accesses ----------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load16(const void* source) { return *reinterpret_cast<const uint4*>(source); }

/// Through the read-only path; the memory must not be written by this kernel.
__device__ __forceinline__ uint4 load16_readonly(const void* source) {
  return __ldg(reinterpret_cast<const uint4*>(source));
}

__device__ __forceinline__ void store16(void* target, uint4 value) { *reinterpret_cast<uint4*>(target) = value; }

// ---- asynchronous copies (sm_80 and later) -------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// 16 bytes, global to shared, past L1. Both addresses 16-byte aligned.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared), "l"(global) : "memory");
}

/// As `cp_async_16`, but stores zeros and reads nothing when `valid` is false (the address must still be legal
/// to form, not to read).
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// Waits until at most `kPending` of this thread's groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// Column of 16-byte chunk `chunk` of row `row`, so that 8 rows read by ldmatrix hit 8 different banks.
/// For rows of at least 8 chunks (128 bytes).
__device__ __forceinline__ int swizzle_chunk(int row, int chunk) { return chunk ^ (row & 7); }

// ---- tensor cores --------------------------------------------------------------------------------------------

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared)
               : "memory");
}

/// c += a * b with A 16 x 16 row-major, B 16 x 8 column-major, C fp32 16 x 8. In lane l, c[0], c[1] are row l / 4,
/// columns 2 * (l % 4) and + 1; c[2], c[3] are row l / 4 + 8.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two floats rounded to T, `low` in the lower half: the order in which mma fragments hold neighbours.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&packed);
}

template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  const __half2 packed = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&packed);
}

/// The inverse of `pack2`.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t packed) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&packed));
}

template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t packed) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

// ---- arithmetic and reductions -------------------------------------------------------------------------------

/// 2^x by the special function unit, about 2 ulp; exp2(-inf) = 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x) by the special function unit; log2(0) = -inf.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// Reductions over aligned groups of `kWidth` lanes (4: the quad that shares an mma row; 32: the warp). The xor
/// order is fixed, so results do not depend on scheduling.
template <int kWidth = kWarpSize>
__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

template <int kWidth = kWarpSize>
__device__ __forceinline__ float group_max(float value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
}

__device__ __forceinline__ float quad_sum(float value) { return group_sum<4>(value); }
__device__ __forceinline__ float quad_max(float value) { return group_max<4>(value); }
__device__ __forceinline__ float warp_sum(float value) { return group_sum<kWarpSize>(value); }
__device__ __forceinline__ float warp_max(float value) { return group_max<kWarpSize>(value); }

/// uint32 whose unsigned order is the order of the floats (-inf lowest; NaN above +inf or below -inf by sign).
/// -0 and +0 get one key, as they compare equal.
__device__ __forceinline__ uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/// The inverse of `order_key`.
__device__ __forceinline__ float order_value(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

}  // namespace skv
