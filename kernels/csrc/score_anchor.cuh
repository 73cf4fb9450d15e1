// Mean of the keys' directions k / |k|, the point that key diversity is measured from.
//
// Split kernel: grid (key splits, K, B), 4 warps; D / 8 lanes read a key, 16 bytes each, and agree on its norm.
// Sum kernel: grid (K, B), adds the splits. Both add in a fixed order.
// Bytes: D * 2 per key and KV head; D * 4 per split, written and read. Accumulators: fp32.
// Definition: key_anchor in hf_sparsekv/ops/reference/score.py (KeyDiff, arXiv 2504.15364, section 3).
#pragma once

#include "score_tile.cuh"

namespace skv {

constexpr int kAnchorUnroll = 8;  // keys in flight per lane
constexpr int kSumGroups = 4;     // splits that the sum kernel reads at once

/// Adds k / |k| of this lane's 8 columns. All lanes of the warp take part; `piece` of an absent key is 0.
template <typename T, int D>
__device__ __forceinline__ void add_direction(float (&total)[8], const uint4& piece) {
  constexpr float kMinNorm = 1e-12f;  // torch.nn.functional.normalize's
  const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
  float key[8];
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 k = unpack2<T>(pairs[i]);
    key[2 * i] = k.x;
    key[2 * i + 1] = k.y;
    square = fmaf(k.x, k.x, fmaf(k.y, k.y, square));
  }
  const float inverse = 1.0f / fmaxf(sqrtf(group_sum<D / 8>(square)), kMinNorm);
#pragma unroll
  for (int i = 0; i < 8; ++i) total[i] = fmaf(key[i], inverse, total[i]);
}

template <typename T, int D>
__global__ void __launch_bounds__(kScoreThreads) anchor_split_kernel(const KeyAnchorParams p, const PoolView<T> pool) {
  constexpr int kLanes = D / 8;                 // per key
  constexpr int kKeys = kWarpSize / kLanes;     // per warp and step
  constexpr int kStep = kScoreWarps * kKeys;
  __shared__ float per_warp[kScoreWarps][D];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t kv = blockIdx.y;
  const int64_t b = blockIdx.z;
  const int32_t split_first = blockIdx.x * keys_per_split(p.shape.max_length);
  const int32_t split_last =
      min(split_first + keys_per_split(p.shape.max_length), min(p.lengths[b], p.shape.max_length));
  if (split_first >= split_last) return;  // the sum kernel does not look here

  float total[8] = {};
  const int column = lane % kLanes * 8;
  for (int32_t first = split_first + warp * kKeys + lane / kLanes; first - lane / kLanes < split_last;
       first += kAnchorUnroll * kStep) {
    int32_t slots[kAnchorUnroll];
    const T* rows[kAnchorUnroll];
    uint4 pieces[kAnchorUnroll];
#pragma unroll
    for (int i = 0; i < kAnchorUnroll; ++i) slots[i] = min(first + i * kStep, split_last - 1);
    find_rows(pool, b, kv, slots, rows);
#pragma unroll
    for (int i = 0; i < kAnchorUnroll; ++i) pieces[i] = load16_readonly(rows[i] + column);
#pragma unroll
    for (int i = 0; i < kAnchorUnroll; ++i) {
      if (first + i * kStep >= split_last) pieces[i] = make_uint4(0, 0, 0, 0);
      add_direction<T, D>(total, pieces[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
      total[i] += __shfl_xor_sync(kFullMask, total[i], offset);
    }
    if (lane < kLanes) per_warp[warp][column + i] = total[i];
  }
  __syncthreads();
  if (threadIdx.x >= D) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kScoreWarps; ++w) sum += per_warp[w][threadIdx.x];
  const int64_t split = (b * p.shape.kv_heads + kv) * num_key_splits(p.shape.max_length) + blockIdx.x;
  p.workspace[split * D + threadIdx.x] = sum;
}

template <int D>
__global__ void __launch_bounds__(D * kSumGroups) anchor_sum_kernel(const KeyAnchorParams p) {
  __shared__ float per_group[kSumGroups][D];
  const int column = threadIdx.x % D;
  const int group = threadIdx.x / D;
  const int64_t head = static_cast<int64_t>(blockIdx.y) * p.shape.kv_heads + blockIdx.x;
  const int32_t length = max(p.lengths[blockIdx.y], 0);
  const int32_t num_keys = min(length, p.shape.max_length);
  const int32_t num_used = num_keys == 0 ? 0 : ceil_div(num_keys, keys_per_split(p.shape.max_length));
  const float* partial = p.workspace + head * num_key_splits(p.shape.max_length) * D + column;
  float sum = 0.0f;
#pragma unroll 4
  for (int32_t split = group; split < num_used; split += kSumGroups) sum += partial[static_cast<int64_t>(split) * D];
  per_group[group][column] = sum;
  __syncthreads();
  if (group != 0) return;
#pragma unroll
  for (int g = 1; g < kSumGroups; ++g) sum += per_group[g][column];
  p.anchor[head * D + column] = sum / static_cast<float>(max(length, 1));
}

}  // namespace skv
