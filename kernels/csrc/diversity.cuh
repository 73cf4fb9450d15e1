// How unlike the others each token of a head is: minus the cosine between its un-rotated key and the keys' mean
// direction, the same of its value, each standardised over the head's tokens, added.
//
// Three kernels, each started while the one before ends, keys and values side by side in the first two:
//   direction: grid (splits, 2 K, B), 4 warps. Sum of x / |x| over a split.
//   distance:  the same grid. Adds the splits' sums up, and writes (mean cosine - cosine) per token, and the first two
//              moments of that per split. It walks the grid backwards: what was read last is still in the L2.
//   finish:    grid (N / 1024, K, B), 8 warps. Adds the moments up, standardises both parts and adds them.
// D / 16 lanes share a row; each has the 8 columns from 8 i and the 8 from D / 2 + 8 i, and so whole pairs of RoPE's
// rotate-half layout. Every sum has a fixed order that depends on the request's own length alone.
//
// Bytes: 2 * D * 2 per token and KV head, read twice; 4 out, 8 written and read in between; D * 4 per split and head,
// written once and read by every CTA of the head. Accumulators: fp32.
// The mean cosine of unit vectors u to the direction of their sum s is |s| / n, known before any cosine is: moments
// about it do not cancel, however alike the tokens are.
// Definition: kv_diversity in hf_sparsekv/ops/reference/diversity.py (KeyDiff, arXiv 2504.15364, section 3, extended).
#pragma once

#include "compact_chain.cuh"
#include "diversity.h"
#include "score_tile.cuh"

namespace skv {

constexpr int kDiversityWarps = 4;
constexpr int kDiversityThreads = kDiversityWarps * kWarpSize;
constexpr int kDiversityUnroll = 4;  // rows in flight per lane
constexpr int kFinishThreads = 256;
constexpr int kFinishTokens = 4;     // per thread

constexpr float kMinDirectionNorm = 1e-12f;      // torch.nn.functional.normalize's
constexpr float kMinCosineNorm = 1e-8f;          // torch.nn.functional.cosine_similarity's
constexpr float kMinDeviation = 1.1920929e-07f;  // fp32's eps: tokens that are all alike

/// Which rows a CTA reads.
struct SplitTask {
  int64_t batch;
  int64_t head;
  bool is_value;
  int32_t length;  // of the request
  int32_t split;
  int32_t first;
  int32_t last;    // behind the last token; <= first: nothing to do
  int64_t cell;    // of [2, B, K]

  __device__ __forceinline__ SplitTask(const DiversityParams& p, int32_t x, int32_t y, int32_t z) {
    is_value = y >= p.kv_heads;
    head = is_value ? y - p.kv_heads : y;
    batch = z;
    length = max(min(p.lengths[batch], p.max_length), 0);
    split = x;
    const int32_t step = keys_per_split(length);
    first = min(x * step, length);  // at most 64 * step: no overflow
    last = min(first + step, length);
    cell = (static_cast<int64_t>(is_value) * p.batch + batch) * p.kv_heads + head;
  }
};

/// sin and cos of an angle, within 1e-6 up to 2^22 turns. Two steps take whole turns off: the first is exact, as both
/// operands are multiples of one power of two that the result can hold; the special function unit then works where it is
/// accurate.
__device__ __forceinline__ void sincos_fast(float angle, float& sine, float& cosine) {
  constexpr float kTurnsPerRadian = 0.15915494f;
  constexpr float kTurnHigh = 6.2831855f;      // 2 pi in fp32
  constexpr float kTurnLow = -1.7484556e-7f;   // what that lacks
  constexpr float kRound = 12582912.0f;        // 1.5 * 2^23: adding it rounds to a whole number
  const float turns = __fadd_rn(__fmaf_rn(angle, kTurnsPerRadian, kRound), -kRound);
  const float rest = __fmaf_rn(-turns, kTurnLow, __fmaf_rn(-turns, kTurnHigh, angle));
  sine = __sinf(rest);
  cosine = __cosf(rest);
}

/// A lane's share of the rows of one split: where they are, and how they are turned back.
template <typename T, int D>
struct LaneRows {
  static constexpr int kLanes = D / 16;               // per row
  static constexpr int kRows = kWarpSize / kLanes;    // per warp and step
  static constexpr int kStep = kDiversityWarps * kRows;

  const T* data;
  int64_t stride;
  const int64_t* positions;  // null: token j has position j
  int64_t positions_stride;
  float inv_freq[8];
  bool turns;
  int32_t own_first;  // this lane's first token
  int32_t last;

  __device__ __forceinline__ LaneRows(const DiversityParams& p, const SplitTask& task) {
    const int lane = threadIdx.x % kWarpSize;
    const int column = lane % kLanes * 8;
    const TokenRows& rows = task.is_value ? p.values : p.keys;
    data = static_cast<const T*>(rows.data) + task.batch * rows.stride_batch + task.head * rows.stride_head + column;
    stride = rows.stride_token;
    turns = !task.is_value && p.inv_freq != nullptr;
    positions = nullptr;
    positions_stride = p.positions_stride_token;
    if (p.positions != nullptr) {
      positions = p.positions + task.batch * p.positions_stride_batch + task.head * p.positions_stride_head;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) inv_freq[i] = turns ? p.inv_freq[column + i] : 0.0f;
    own_first = task.first + static_cast<int32_t>(threadIdx.x) / kLanes;
    last = task.last;
  }

  /// Rows on their way into registers.
  struct Batch {
    uint4 low[kDiversityUnroll];
    uint4 high[kDiversityUnroll];
    float position[kDiversityUnroll];
  };

  /// Starts loading this lane's rows `token + i * kStep`; in place of rows that are not there another.
  __device__ __forceinline__ void fetch(Batch& batch, int32_t token) const {
#pragma unroll
    for (int i = 0; i < kDiversityUnroll; ++i) {
      const int32_t at = min(token + i * kStep, last - 1);
      const T* row = data + at * stride;
      batch.low[i] = load16_once(row);
      batch.high[i] = load16_once(row + D / 2);
      batch.position[i] = static_cast<float>(at);
      if (turns && positions != nullptr) batch.position[i] = static_cast<float>(__ldg(positions + at * positions_stride));
    }
  }

  /// Calls `take(token, is_there, low, high)` for every row, low and high being this lane's columns from 8 i and from
  /// D / 2 + 8 i. All lanes of a warp call equally often. `batch` holds the first rows already.
  template <typename Take>
  __device__ __forceinline__ void for_each(Batch& batch, const Take& take) const {
    const int32_t warp_offset = static_cast<int32_t>(threadIdx.x) % kWarpSize / kLanes;
    int32_t token = own_first;
    while (true) {
#pragma unroll
      for (int i = 0; i < kDiversityUnroll; ++i) {
        float first[8];
        float second[8];
        unpack(first, batch.low[i]);
        unpack(second, batch.high[i]);
        if (turns) turn_back(first, second, batch.position[i]);
        take(token + i * kStep, token + i * kStep < last, first, second);
      }
      token += kDiversityUnroll * kStep;
      if (token - warp_offset >= last) return;
      fetch(batch, token);
    }
  }

 private:
  static __device__ __forceinline__ void unpack(float (&values)[8], const uint4& piece) {
    const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack2<T>(pairs[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }

  __device__ __forceinline__ void turn_back(float (&first)[8], float (&second)[8], float position) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sine;
      float cosine;
      sincos_fast(position * inv_freq[i], sine, cosine);
      const float x = first[i];
      const float y = second[i];
      first[i] = fmaf(x, cosine, y * sine);
      second[i] = fmaf(y, cosine, -x * sine);
    }
  }
};

/// Sum over the lanes of a warp that hold the same columns of different rows.
template <int kLanes>
__device__ __forceinline__ float sum_over_rows(float value) {
#pragma unroll
  for (int offset = kLanes; offset < kWarpSize; offset *= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

__device__ __forceinline__ float square_of(const float (&first)[8], const float (&second)[8]) {
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) square = fmaf(first[i], first[i], fmaf(second[i], second[i], square));
  return square;
}

template <typename T, int D>
__global__ void __launch_bounds__(kDiversityThreads) direction_kernel(const DiversityParams p) {
  constexpr int kLanes = LaneRows<T, D>::kLanes;
  __shared__ float per_warp[kDiversityWarps][D];
  allow_next_kernel();
  const SplitTask task(p, blockIdx.x, blockIdx.y, blockIdx.z);
  if (task.first >= task.last) return;  // the next kernel does not look here

  const LaneRows<T, D> rows(p, task);
  typename LaneRows<T, D>::Batch batch;
  rows.fetch(batch, rows.own_first);
  float low[8] = {};
  float high[8] = {};
  rows.for_each(batch, [&](int32_t, bool is_there, const float (&first)[8], const float (&second)[8]) {
    const float norm = sqrtf(group_sum<kLanes>(square_of(first, second)));
    if (!is_there) return;
    const float inverse = 1.0f / fmaxf(norm, kMinDirectionNorm);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      low[i] = fmaf(first[i], inverse, low[i]);
      high[i] = fmaf(second[i], inverse, high[i]);
    }
  });
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    low[i] = sum_over_rows<kLanes>(low[i]);
    high[i] = sum_over_rows<kLanes>(high[i]);
    if (lane < kLanes) {
      per_warp[warp][lane * 8 + i] = low[i];
      per_warp[warp][D / 2 + lane * 8 + i] = high[i];
    }
  }
  __syncthreads();
  if (threadIdx.x >= D) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kDiversityWarps; ++w) sum += per_warp[w][threadIdx.x];
  p.directions[(task.cell * max_diversity_splits(p.max_length) + task.split) * D + threadIdx.x] = sum;
}

/// The sum of a head's directions, in shared memory, added up by the whole CTA.
template <int D>
__device__ __forceinline__ void add_directions(float (&total)[D], const DiversityParams& p, const SplitTask& task) {
  constexpr int kVectors = D / 4;                          // float4 per split
  constexpr int kGroups = kDiversityThreads / kVectors;    // splits read at once
  __shared__ float4 per_group[kGroups][kVectors];
  const int vector = threadIdx.x % kVectors;
  const int group = threadIdx.x / kVectors;
  const int32_t num_splits = ceil_div(task.length, keys_per_split(task.length));
  const float4* partial = reinterpret_cast<const float4*>(p.directions) +
                          task.cell * max_diversity_splits(p.max_length) * kVectors + vector;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int32_t split = group; split < num_splits; split += kGroups) {
    const float4 more = partial[split * kVectors];
    sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
  }
  per_group[group][vector] = sum;
  __syncthreads();
  if (threadIdx.x < D) {
    const float* columns = reinterpret_cast<const float*>(per_group);
    float column = columns[threadIdx.x];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) column += columns[g * D + threadIdx.x];
    total[threadIdx.x] = column;
  }
  __syncthreads();
}

template <typename T, int D>
__global__ void __launch_bounds__(kDiversityThreads) distance_kernel(const DiversityParams p) {
  constexpr int kLanes = LaneRows<T, D>::kLanes;
  __shared__ float total[D];
  __shared__ float2 per_warp[kDiversityWarps];
  allow_next_kernel();
  const SplitTask task(p, gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y, gridDim.z - 1 - blockIdx.z);
  if (task.first >= task.last) {
    wait_for_previous_kernel();
    return;
  }
  const LaneRows<T, D> rows(p, task);
  typename LaneRows<T, D>::Batch batch;
  rows.fetch(batch, rows.own_first);  // the rows are there, whatever the kernel before still does
  wait_for_previous_kernel();
  add_directions<D>(total, p, task);

  const int lane = threadIdx.x % kWarpSize;
  float low[8];
  float high[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    low[i] = total[lane % kLanes * 8 + i];
    high[i] = total[D / 2 + lane % kLanes * 8 + i];
  }
  const float norm = sqrtf(group_sum<kLanes>(square_of(low, high)));
  const float inverse = 1.0f / fmaxf(norm, kMinCosineNorm);
  const float mean = norm / static_cast<float>(task.length);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    low[i] *= inverse;
    high[i] *= inverse;
  }
  float* out = task.is_value
                   ? p.apart + (task.batch * p.kv_heads + task.head) * static_cast<int64_t>(p.max_length)
                   : p.diversity + task.batch * p.diversity_stride_batch + task.head * p.diversity_stride_head;
  float2 moments = make_float2(0.0f, 0.0f);
  rows.for_each(batch, [&](int32_t token, bool is_there, const float (&first)[8], const float (&second)[8]) {
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) dot = fmaf(first[i], low[i], fmaf(second[i], high[i], dot));
    dot = group_sum<kLanes>(dot);
    const float own_norm = sqrtf(group_sum<kLanes>(square_of(first, second)));
    if (!is_there) return;
    const float distance = mean - dot / fmaxf(own_norm, kMinCosineNorm);
    moments = make_float2(moments.x + distance, fmaf(distance, distance, moments.y));
    if (lane % kLanes == 0) out[token] = distance;
  });
  moments = make_float2(sum_over_rows<kLanes>(moments.x), sum_over_rows<kLanes>(moments.y));
  if (lane == 0) per_warp[threadIdx.x / kWarpSize] = moments;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int w = 1; w < kDiversityWarps; ++w) {
    moments = make_float2(moments.x + per_warp[w].x, moments.y + per_warp[w].y);
  }
  p.moments[task.cell * max_diversity_splits(p.max_length) + task.split] = moments;
}

/// A template only so that several sources may include it.
template <int kTokens>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const DiversityParams p) {
  __shared__ float2 scale[2];  // of keys and values: (mean, 1 / deviation)
  const int64_t head = blockIdx.y;
  const int64_t batch = blockIdx.z;
  const int32_t length = max(min(p.lengths[batch], p.max_length), 0);
  const int32_t num_splits = max_diversity_splits(p.max_length);
  const int32_t used = length == 0 ? 0 : ceil_div(length, keys_per_split(length));
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  wait_for_previous_kernel();
  if (warp < 2) {
    const float2* partial = p.moments + ((warp * p.batch + batch) * p.kv_heads + head) * num_splits;
    float2 sum = make_float2(0.0f, 0.0f);
    for (int32_t split = lane; split < used; split += kWarpSize) {
      sum = make_float2(sum.x + partial[split].x, sum.y + partial[split].y);
    }
    const float count = static_cast<float>(max(length, 1));
    const float mean = warp_sum(sum.x) / count;
    const float variance = fmaf(-mean, mean, warp_sum(sum.y) / count);
    if (lane == 0) scale[warp] = make_float2(mean, 1.0f / fmaxf(sqrtf(fmaxf(variance, 0.0f)), kMinDeviation));
  }
  __syncthreads();
  const float2 of_keys = scale[0];
  const float2 of_values = scale[1];
  float* out = p.diversity + batch * p.diversity_stride_batch + head * p.diversity_stride_head;
  const float* apart = p.apart + (batch * p.kv_heads + head) * static_cast<int64_t>(p.max_length);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int32_t token = (static_cast<int32_t>(blockIdx.x) * kTokens + i) * kFinishThreads + threadIdx.x;
    if (token >= p.max_length) return;
    float sum = 0.0f;
    if (token < length) {
      sum = (out[token] - of_keys.x) * of_keys.y + (apart[token] - of_values.x) * of_values.y;
    }
    out[token] = sum;
  }
}

}  // namespace skv
