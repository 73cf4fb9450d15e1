// From the warps' results to the CTA's, and from the splits' results to the request's.
#pragma once

#include "decode_scores.cuh"

namespace skv {

/// Static shared memory of a CTA.
template <int kRows>
struct DecodeScratch {
  float2 parts[kDecodeWarps][kRows];   // per warp: reference (base 2), sum of 2^(logit - reference)
  unsigned long long best[kDecodeWarps];
  float lse[kRows];                    // over all splits, base 2
  int32_t is_last;
};

struct RowTotal {
  float peak;
  float lse;   // base 2
};

template <int kRows>
__device__ __forceinline__ RowTotal total_of_row(const DecodeScratch<kRows>& scratch, int row) {
  float peak = -INFINITY;
#pragma unroll
  for (int w = 0; w < kDecodeWarps; ++w) peak = fmaxf(peak, scratch.parts[w][row].x);
  const float reference = zero_if_minus_infinity(peak);
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kDecodeWarps; ++w) sum += scratch.parts[w][row].y * exp2_fast(scratch.parts[w][row].x - reference);
  return {peak, sum > 0.0f ? peak + log2f(sum) : -INFINITY};
}

/// What a CTA's rows are called outside it.
struct RowBlock {
  int32_t pair;       // (request, KV head, row block)
  int32_t row_base;
  int32_t num_rows;   // at most tile_rows
};

/// Where a split leaves what the last one will read.
struct SplitStore {
  float* lse;      // [splits, tile_rows]
  float* out;      // [splits, tile_rows, D]
  float* logits;   // [C, tile_rows]; a step only

  template <int D, int kRows>
  static __device__ __forceinline__ SplitStore of(const DecodeParams& p, const DecodePlan& plan, int32_t pair) {
    char* base = static_cast<char*>(p.workspace);
    const int64_t part = static_cast<int64_t>(pair) * plan.num_splits * kRows;
    return {reinterpret_cast<float*>(base + plan.partial_lse_offset) + part,
            reinterpret_cast<float*>(base + plan.partial_out_offset) + part * D,
            reinterpret_cast<float*>(base + plan.logits_offset) + static_cast<int64_t>(pair) * p.max_length * kRows};
  }
};

/// Four final output elements of one row, and with the first of them the row's LSE.
template <typename T>
__device__ __forceinline__ void emit(
    const DecodeParams& p, const SlotRange& range, int row, int column, float4 value, float lse_base2) {
  const int t = row / p.group;
  const int64_t head = static_cast<int64_t>(range.head) * p.group + row % p.group;
  T* out = static_cast<T*>(p.out) + range.request * p.out_stride[0] + t * p.out_stride[1] + head * p.out_stride[2];
  const uint2 packed = make_uint2(pack2<T>(value.x, value.y), pack2<T>(value.z, value.w));
  *reinterpret_cast<uint2*>(out + column) = packed;
  if (column == 0 && p.lse != nullptr) {
    p.lse[range.request * p.lse_stride[0] + t * p.lse_stride[1] + head * p.lse_stride[2]] = lse_base2 * kLn2;
  }
}

/// Adds up the warps' outputs (fp32 [kRows, D + 4] at the start of each warp's ring). The only split writes the
/// result, one of several leaves it in the workspace. `kSharedReference`: the warps used the CTA's peak.
template <typename T, int D, int kRows, bool kSharedReference>
__device__ __forceinline__ void combine_warps(
    const DecodeArgs<T>& args, const SlotRange& range, const RowBlock& block, const DecodeScratch<kRows>& scratch,
    const unsigned char* rings) {
  const DecodePlan& plan = args.plan;
  const SplitStore store = SplitStore::of<D, kRows>(args.params, plan, block.pair);
  for (int item = threadIdx.x; item < block.num_rows * (D / 4); item += kDecodeThreads) {
    const int row = item / (D / 4);
    const int column = item % (D / 4) * 4;
    const RowTotal total = total_of_row(scratch, row);
    const float lse = zero_if_minus_infinity(total.lse);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float* out = reinterpret_cast<const float*>(rings + w * plan.ring_depth * kPlaceBytes);
      const float4 part = *reinterpret_cast<const float4*>(out + row * (D + 4) + column);
      const float reference = kSharedReference ? zero_if_minus_infinity(total.peak) : scratch.parts[w][row].x;
      const float weight = exp2_fast(reference - lse);
      sum.x = fmaf(weight, part.x, sum.x);
      sum.y = fmaf(weight, part.y, sum.y);
      sum.z = fmaf(weight, part.z, sum.z);
      sum.w = fmaf(weight, part.w, sum.w);
    }
    if (plan.num_splits == 1) {
      emit<T>(args.params, range, block.row_base + row, column, sum, total.lse);
    } else {
      const int part = blockIdx.x * kRows + row;
      *reinterpret_cast<float4*>(store.out + static_cast<int64_t>(part) * D + column) = sum;
      if (column == 0) store.lse[part] = total.lse;
    }
  }
}

/// Whether this CTA is the last of its splits to come here; then all of them have left their results.
template <typename T, int kRows>
__device__ __forceinline__ bool is_last_split(
    const DecodeArgs<T>& args, const RowBlock& block, DecodeScratch<kRows>& scratch) {
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* counter = static_cast<int32_t*>(args.params.workspace) + kDecodeCounters + block.pair;
    fence_device();
    scratch.is_last = atomicAdd(counter, 1) == args.plan.num_splits - 1;
    fence_device();
    if (scratch.is_last) *counter = 0;
  }
  __syncthreads();
  return scratch.is_last != 0;
}

/// Merges the splits that hold slots, in their order, and writes the output. `weights` is shared memory for
/// kRows * kDecodeMaxSplits floats. Leaves the LSE of each row in `scratch.lse`.
template <typename T, int D, int kRows>
__device__ __forceinline__ void combine_splits(
    const DecodeArgs<T>& args, const SlotRange& range, const RowBlock& block, int num_used,
    DecodeScratch<kRows>& scratch, float* weights) {
  const SplitStore store = SplitStore::of<D, kRows>(args.params, args.plan, block.pair);
  const int lane = threadIdx.x % kWarpSize;
  for (int row = threadIdx.x / kWarpSize; row < block.num_rows; row += kDecodeWarps) {
    float lse[kDecodeMaxSplits / kWarpSize];
    float peak = -INFINITY;
#pragma unroll
    for (int i = 0; i < kDecodeMaxSplits / kWarpSize; ++i) {
      const int split = lane + i * kWarpSize;
      lse[i] = split < num_used ? __ldcg(store.lse + split * kRows + row) : -INFINITY;
      peak = fmaxf(peak, lse[i]);
    }
    peak = warp_max(peak);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kDecodeMaxSplits / kWarpSize; ++i) sum += exp2_fast(lse[i] - zero_if_minus_infinity(peak));
    sum = warp_sum(sum);
    const float total = sum > 0.0f ? peak + log2f(sum) : -INFINITY;
#pragma unroll
    for (int i = 0; i < kDecodeMaxSplits / kWarpSize; ++i) {
      weights[row * kDecodeMaxSplits + lane + i * kWarpSize] = exp2_fast(lse[i] - zero_if_minus_infinity(total));
    }
    if (lane == 0) scratch.lse[row] = total;
  }
  __syncthreads();
  for (int item = threadIdx.x; item < block.num_rows * (D / 4); item += kDecodeThreads) {
    const int row = item / (D / 4);
    const int column = item % (D / 4) * 4;
    const float4* parts = reinterpret_cast<const float4*>(store.out + row * D + column);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int split = 0; split < num_used; ++split) {
      const float weight = weights[row * kDecodeMaxSplits + split];
      const float4 part = __ldcg(parts + split * (kRows * D / 4));
      sum.x = fmaf(weight, part.x, sum.x);
      sum.y = fmaf(weight, part.y, sum.y);
      sum.z = fmaf(weight, part.z, sum.z);
      sum.w = fmaf(weight, part.w, sum.w);
    }
    emit<T>(args.params, range, block.row_base + row, column, sum, scratch.lse[row]);
  }
}

}  // namespace skv
