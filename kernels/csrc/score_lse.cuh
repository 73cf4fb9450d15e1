// LSE of the last A rows of each request, for attention backends that do not return it.
//
// Split kernel: grid (key splits * tiles of 128 packed rows, K, B), 4 warps. A warp keeps 32 of the A * G query rows of
// its KV head in registers; the CTA streams the split's keys through a ring in shared memory. Each lane keeps its own
// running maximum and sum per row, so that lanes meet only at the end. Combine kernel: a warp per row.
// Bytes: D * 2 per key, KV head and row tile from device memory, D * 2 per row and split from L2, 8 out.
// Accumulators: fp32. Definition: window_lse in hf_sparsekv/ops/reference/score.py.
#pragma once

#include "score_tile.cuh"

namespace skv {

constexpr int kLseTiles = 2;
constexpr int kLseWarpRows = 16 * kLseTiles;
constexpr int kLseCtaRows = kScoreWarps * kLseWarpRows;

/// Largest logit times log2(e), and the sum of 2^(logit * log2(e) - largest). -inf and 0 while nothing was seen.
struct RunningLse {
  float largest;
  float sum;

  /// Four more logits; -inf for what the row does not see.
  __device__ __forceinline__ void add(float a, float b, float c, float d) {
    const float next = fmaxf(largest, fmaxf(fmaxf(a, b), fmaxf(c, d)));
    const float shift = next == -INFINITY ? 0.0f : next;  // -inf - -inf is no number
    sum = fmaf(sum, exp2_fast(largest - shift), exp2_fast(a - shift) + exp2_fast(b - shift)) +
          (exp2_fast(c - shift) + exp2_fast(d - shift));
    largest = next;
  }
};

/// The keys of one request and KV head, a split of them, on their way through the ring.
template <typename T, int D>
struct KeyStream {
  const PoolView<T>& pool;
  uint4* rows;        // [kRingSlots, 32, D / 8]
  int64_t b;
  int64_t kv;
  int32_t last;       // end of the split
  int32_t next;       // first key of the block that this warp copies next
  bool whole_blocks;  // 8 keys from a multiple of 8 lie one stride apart

  __device__ __forceinline__ void copy_stage(int32_t slot, int warp, int lane) {
    uint4* block = rows + (slot * kStageBlocks + warp) * kBlockRows * StreamedRows<D>::kPieces;
    const int32_t num_valid = last - next;
    const int own_row = StreamedRows<D>::lane_row(lane);
    const int column = StreamedRows<D>::lane_column(lane);
    if (whole_blocks || num_valid <= 0) {
      // Past the end there may be no table entry to look up: any legal address will do.
      const T* first = num_valid > 0 ? pool.row(b, kv, next) + own_row * pool.stride_slot : pool.data;
      StreamedRows<D>::copy_block(block, lane, first + column, pool.stride_slot, num_valid);
    } else {
#pragma unroll
      for (int r = 0; r < kBlockRows; r += StreamedRows<D>::kRowsPerCopy) {
        const bool valid = own_row + r < num_valid;
        const T* source = pool.row(b, kv, valid ? next + own_row + r : next) + column;
        const int target = StreamedRows<D>::index(own_row + r, lane % StreamedRows<D>::kPieces);
        cp_async_16_or_zero(shared_address(block + target), source, valid);
      }
    }
    next += kStageRows;
  }
};

/// Starts loading the warp's query rows: packed row r is head r / A, row r % A; past `num_packed`, the last one again.
template <typename T, int D>
__device__ __forceinline__ void fetch_queries(
    typename ResidentRows<T, D, kLseTiles>::Fetched& fetched, const LseTailParams& p, int64_t b, int64_t kv,
    int32_t first, int32_t num_packed, int lane) {
  const T* q = static_cast<const T*>(p.q.data) + b * p.q.stride_batch + kv * p.shape.group * p.q.stride_head;
#pragma unroll
  for (int i = 0; i < 2 * kLseTiles; ++i) {
    const int32_t packed = min(first + 8 * i + lane / 4, num_packed - 1);
    const int32_t head = packed / p.shape.num_rows;
    const int32_t row = packed - head * p.shape.num_rows;
    const T* source = q + head * p.q.stride_head + row * p.q.stride_row;
    ResidentRows<T, D, kLseTiles>::fetch_row(fetched, i / 2, i % 2, lane, source);
  }
}

/// Adds the 32 keys of one ring slot, the first of which is `first_key`. `position[m][half]`: of the query row.
template <bool kMasked, typename T, int D>
__device__ __forceinline__ void add_keys(
    RunningLse (&running)[kLseTiles][2], const ResidentRows<T, D, kLseTiles>& queries, const uint4* stage,
    float scale_log2, int32_t first_key, const int32_t (&position)[kLseTiles][2], int lane) {
  constexpr int kBlocks = 2;
#pragma unroll
  for (int first = 0; first < kStageBlocks; first += kBlocks) {
    float dots[kBlocks][kLseTiles][4];
    queries.template multiply<kBlocks>(dots, stage + first * kBlockRows * StreamedRows<D>::kPieces, lane);
    const int32_t key = first_key + first * kBlockRows + 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < kLseTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float logit[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          logit[i] = dots[i / 2][m][2 * half + i % 2] * scale_log2;
          if (kMasked && key + i / 2 * kBlockRows + i % 2 > position[m][half]) logit[i] = -INFINITY;
        }
        running[m][half].add(logit[0], logit[1], logit[2], logit[3]);
      }
    }
  }
}

/// Merges the lanes of each quad and stores the warp's rows.
__device__ __forceinline__ void store_partial(
    const RunningLse (&running)[kLseTiles][2], float2* target, int32_t num_splits, int32_t first, int32_t num_rows,
    int lane) {
  float largest[kLseTiles][2];
  float sum[kLseTiles][2];
#pragma unroll
  for (int m = 0; m < kLseTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[m][half] = quad_max(running[m][half].largest);
      const float shift = largest[m][half] == -INFINITY ? 0.0f : largest[m][half];
      sum[m][half] = quad_sum(running[m][half].sum * exp2_fast(running[m][half].largest - shift));
    }
  }
  const int32_t row = first + own_row_index(lane);
  if (row >= num_rows) return;
  target[static_cast<int64_t>(row) * num_splits] =
      make_float2(own_row<kLseTiles>(largest, lane), own_row<kLseTiles>(sum, lane));
}

template <typename T, int D>
__global__ void __launch_bounds__(kScoreThreads, 3) lse_split_kernel(const LseTailParams p, const PoolView<T> pool) {
  extern __shared__ uint4 ring[];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t kv = blockIdx.y;
  const int64_t b = blockIdx.z;
  const int32_t num_splits = num_key_splits(p.shape.max_length);
  const int32_t split = blockIdx.x % num_splits;
  const int32_t length = p.lengths[b];
  const int32_t split_first = split * keys_per_split(p.shape.max_length);
  const int32_t split_last = min(split_first + keys_per_split(p.shape.max_length), min(length, p.shape.max_length));
  if (split_first >= split_last) return;  // the combine kernel does not look here

  const int32_t num_rows = p.shape.group * p.shape.num_rows;
  const int32_t first_row = blockIdx.x / num_splits * kLseCtaRows + warp * kLseWarpRows;
  typename ResidentRows<T, D, kLseTiles>::Fetched fetched;
  fetch_queries<T, D>(fetched, p, b, kv, first_row, num_rows, lane);
  KeyStream<T, D> stream{
      pool, ring, b, kv, split_last, split_first + warp * kBlockRows, pool.table == nullptr || pool.page_size % 8 == 0};
  const int32_t num_stages = ceil_div(split_last - split_first, kStageRows);
  for (int32_t stage = 0; stage < kPrefetchStages; ++stage) {
    if (stage < num_stages) stream.copy_stage(stage, warp, lane);
    cp_async_commit();
  }

  ResidentRows<T, D, kLseTiles> queries;
  const int32_t first_position = length - p.shape.num_rows;
  int32_t position[kLseTiles][2];
  RunningLse running[kLseTiles][2];
#pragma unroll
  for (int i = 0; i < 2 * kLseTiles; ++i) {
    queries.take_row(fetched, i / 2, i % 2, first_row + 8 * i + lane / 4 < num_rows);
    position[i / 2][i % 2] = first_position + (first_row + 8 * i + lane / 4) % p.shape.num_rows;
    running[i / 2][i % 2] = {-INFINITY, 0.0f};
  }
  for (int32_t stage = 0; stage < num_stages; ++stage) {
    const int32_t slot = stage % kRingSlots;
    cp_async_wait<kPrefetchStages - 1>();
    __syncthreads();  // the stage is here for every warp, and every warp is done with the slot refilled below
    if (stage + kPrefetchStages < num_stages) stream.copy_stage((stage + kPrefetchStages) % kRingSlots, warp, lane);
    cp_async_commit();
    if (first_row >= num_rows) continue;
    const uint4* rows = ring + slot * (StreamedRows<D>::kStageBytes / 16);
    const int32_t first_key = split_first + stage * kStageRows;
    if (first_key + kStageRows - 1 > first_position) {
      add_keys<true>(running, queries, rows, p.scale_log2, first_key, position, lane);
    } else {
      add_keys<false>(running, queries, rows, p.scale_log2, first_key, position, lane);
    }
  }
  float2* target = p.workspace + (b * p.shape.kv_heads + kv) * num_rows * num_splits + split;
  store_partial(running, target, num_splits, first_row, num_rows, lane);
}

/// Grid (rows / 4, B), a warp per row of [H, A]: merges the splits that hold keys, in one fixed order.
__global__ void __launch_bounds__(kScoreThreads) lse_combine_kernel(const LseTailParams p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t b = blockIdx.y;
  const int32_t heads = p.shape.kv_heads * p.shape.group;
  const int32_t packed = blockIdx.x * kScoreWarps + threadIdx.x / kWarpSize;
  if (packed >= heads * p.shape.num_rows) return;
  const int32_t length = p.lengths[b];
  const int32_t num_splits = num_key_splits(p.shape.max_length);
  const int32_t num_keys = min(max(length, 0), p.shape.max_length);
  const int32_t num_used = num_keys == 0 ? 0 : ceil_div(num_keys, keys_per_split(p.shape.max_length));
  const int32_t head = packed / p.shape.num_rows;
  const int32_t row = packed - head * p.shape.num_rows;

  const float2* partial = p.workspace + (b * heads * p.shape.num_rows + packed) * num_splits;
  float largest = -INFINITY;
  for (int32_t split = lane; split < num_used; split += kWarpSize) largest = fmaxf(largest, partial[split].x);
  largest = warp_max(largest);
  float sum = 0.0f;
  for (int32_t split = lane; split < num_used; split += kWarpSize) {
    if (partial[split].y > 0.0f) sum += partial[split].y * exp2_fast(partial[split].x - largest);
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  const bool exists = row >= p.shape.num_rows - length;
  p.lse[b * p.lse_stride_batch + head * p.lse_stride_head + row * p.lse_stride_row] =
      exists && num_used > 0 ? largest * kLn2 + logf(sum) : -INFINITY;
}

}  // namespace skv
