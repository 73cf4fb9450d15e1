// Column sums (or maxima) of exp(scale * q.k - LSE): what the last A rows of each request pay to every key.
//
// Grid (key tiles / kTilesPerCta, K, B), 4 warps. A warp keeps 16 * kTiles keys in registers; the CTA streams the
// A * G query rows of its KV head, head after head, through a ring in shared memory. Each key's sum ends in one quad:
// no atomics, and the same bits whatever the tiling of the grid.
// Bytes: D * 2 per key and KV head from device memory, A * G * D * 2 per CTA from L2, 4 (8 with cosine) out.
// Accumulators: fp32 for logits, sums, maxima and cosines. The anchor is fp32: its dot is fp32 FMA on the keys in
// registers, as rounding it to the keys' dtype for an mma row would cost 2^-9 relative, far outside the policy.
// Definition: window_score in hf_sparsekv/ops/reference/score.py. Exponentials from a stored LSE in a second pass
// over the keys: FlashAttention-2's backward pass (arXiv 2307.08691, section 3.1).
#pragma once

#include "score_tile.cuh"

namespace skv {

/// How a launch is cut; chosen by the launcher.
struct ScorePlan {
  int32_t tiles_per_cta;  // more than 1 only if all query rows fit in the ring
  int32_t ring_slots;
};

/// The query rows of one KV head on their way through the ring: head after head, in blocks of 8 rows, of which each
/// warp copies every fourth. A head's last block is filled up with rows of zeros and an LSE of +inf: weight 0.
template <typename T, int D>
struct QueryStream {
  const ScoreParams& p;
  uint4* rows;              // [slots, 32, D / 8]
  float* row_lse;           // [slots, 32]
  int32_t blocks_per_head;
  int32_t head;             // of the block that this warp copies next
  int32_t block;
  const T* source;          // this lane's element of that block, see copy_block
  const float* lse_source;  // this lane's row of that block, for the first 8 lanes

  __device__ __forceinline__ QueryStream(
      const ScoreParams& params, const ScorePlan& plan, uint4* ring, int64_t b, int64_t kv, int warp, int lane)
      : p(params),
        rows(ring),
        row_lse(reinterpret_cast<float*>(ring + plan.ring_slots * (StreamedRows<D>::kStageBytes / 16))),
        blocks_per_head(ceil_div(params.shape.num_rows, kBlockRows)),
        head(0),
        block(0),
        source(static_cast<const T*>(params.q.data) + b * params.q.stride_batch +
               kv * params.shape.group * params.q.stride_head +
               StreamedRows<D>::lane_row(lane) * params.q.stride_row + StreamedRows<D>::lane_column(lane)),
        lse_source(params.lse + b * params.lse_stride_batch + kv * params.shape.group * params.lse_stride_head +
                   lane * params.lse_stride_row) {
    advance(warp);
  }

  __device__ __forceinline__ int32_t num_stages() const {
    return ceil_div(p.shape.group * blocks_per_head, kStageBlocks);
  }

  __device__ __forceinline__ void advance(int32_t blocks) {
    block += blocks;
    source += blocks * kBlockRows * p.q.stride_row;
    lse_source += blocks * kBlockRows * p.lse_stride_row;
    while (block >= blocks_per_head) {
      block -= blocks_per_head;
      ++head;
      source += p.q.stride_head - blocks_per_head * kBlockRows * p.q.stride_row;
      lse_source += p.lse_stride_head - blocks_per_head * kBlockRows * p.lse_stride_row;
    }
  }

  /// The next stage into `slot`, every warp its block. Past the last head: zeros.
  __device__ __forceinline__ void copy_stage(int32_t slot, int warp, int lane) {
    const int32_t num_valid = head < p.shape.group ? p.shape.num_rows - block * kBlockRows : 0;
    const int32_t target = slot * kStageBlocks + warp;
    StreamedRows<D>::copy_block(
        rows + target * kBlockRows * StreamedRows<D>::kPieces, lane, source, p.q.stride_row, num_valid);
    if (lane < kBlockRows) {
      float* lse = row_lse + target * kBlockRows + lane;
      if (lane < num_valid) {
        cp_async_4(shared_address(lse), lse_source);
      } else {
        *lse = INFINITY;
      }
    }
    advance(kStageBlocks);
  }

  /// The first stages, as many as may be in flight.
  __device__ __forceinline__ void start(int32_t num_stages, int warp, int lane) {
    for (int32_t stage = 0; stage < kPrefetchStages; ++stage) {
      if (stage < num_stages) copy_stage(stage, warp, lane);
      cp_async_commit();
    }
  }
};

/// Running reduction over the query rows for the keys of one warp; a lane sees the rows 2 t and 2 t + 1 of a block.
template <int kTiles, bool kRowMax>
struct KeyReduction {
  float row[kTiles][2];    // over rows, of this head alone if heads are folded
  float group[kTiles][2];  // over finished heads
  int32_t block;           // of the current head

  __device__ __forceinline__ void reset() {
    block = 0;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) row[m][0] = row[m][1] = group[m][0] = group[m][1] = 0.0f;
  }

  __device__ __forceinline__ void add(int m, int half, float weight) {
    row[m][half] = kRowMax ? fmaxf(row[m][half], weight) : row[m][half] + weight;
  }

  static __device__ __forceinline__ float over_quad(float value) {
    return kRowMax ? quad_max(value) : quad_sum(value);
  }

  /// Ends a head when rows and heads are reduced differently; equal reductions need no border between heads.
  __device__ __forceinline__ void fold_head() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float head = over_quad(row[m][half]);
        group[m][half] = kRowMax ? group[m][half] + head : fmaxf(group[m][half], head);
        row[m][half] = 0.0f;
      }
    }
  }

  /// The result of the key that `own_row_index` names.
  __device__ __forceinline__ float result(bool fold_heads, int lane) {
    if (!fold_heads) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) group[m][half] = over_quad(row[m][half]);
      }
    }
    return own_row<kTiles>(group, lane);
  }
};

/// Adds the weights of the 32 query rows in one ring slot. `first_row[m][half]`: the first row that sees the key.
template <bool kMasked, typename T, int D, int kTiles, bool kRowMax>
__device__ __forceinline__ void add_stage(
    KeyReduction<kTiles, kRowMax>& sums, const ResidentRows<T, D, kTiles>& keys, const QueryStream<T, D>& stream,
    int32_t slot, const int32_t (&first_row)[kTiles][2], int lane) {
  constexpr int kBlocks = 4 / kTiles;  // 4 accumulators in flight either way
  const bool fold_heads = stream.p.row_max != stream.p.group_max;
  const float scale = stream.p.scale_log2;
#pragma unroll
  for (int first = 0; first < kStageBlocks; first += kBlocks) {
    float dots[kBlocks][kTiles][4];
    const int32_t block = slot * kStageBlocks + first;
    keys.template multiply<kBlocks>(dots, stream.rows + block * kBlockRows * StreamedRows<D>::kPieces, lane);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int column = 2 * (lane % 4);
      float2 lse = *reinterpret_cast<const float2*>(stream.row_lse + (block + n) * kBlockRows + column);
      lse.x *= kLog2e;
      lse.y *= kLog2e;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float weight = exp2_fast(fmaf(dots[n][m][i], scale, i % 2 == 0 ? -lse.x : -lse.y));
          // A select, not a product: rows that do not exist may hold NaN.
          if (kMasked && sums.block * kBlockRows + column + i % 2 < first_row[m][i / 2]) weight = 0.0f;
          sums.add(m, i / 2, weight);
        }
      }
      if (++sums.block == stream.blocks_per_head) {
        sums.block = 0;
        if (fold_heads) sums.fold_head();
      }
    }
  }
}

/// Negative cosine between the anchor and the key that `own_row_index` names.
template <typename T, int D, int kTiles>
__device__ __forceinline__ float negative_cosine(
    const ResidentRows<T, D, kTiles>& keys, const float* anchor, int lane) {
  constexpr float kMinNorm = 1e-8f;  // torch.nn.functional.cosine_similarity's
  float dot[kTiles][2] = {};
  float square[kTiles][2] = {};
  float anchor_square = 0.0f;
#pragma unroll
  for (int c = 0; c < D / 32; ++c) {
    float direction[8];
    const float4* source = reinterpret_cast<const float4*>(anchor + 32 * c + 8 * (lane % 4));
    *reinterpret_cast<float4*>(direction) = __ldg(source);
    *reinterpret_cast<float4*>(direction + 4) = __ldg(source + 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) anchor_square = fmaf(direction[i], direction[i], anchor_square);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 k = unpack2<T>(keys.fragment[m][c][i / 2][half + i % 2 * 2]);
          dot[m][half] = fmaf(k.x, direction[2 * i], fmaf(k.y, direction[2 * i + 1], dot[m][half]));
          square[m][half] = fmaf(k.x, k.x, fmaf(k.y, k.y, square[m][half]));
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      dot[m][half] = quad_sum(dot[m][half]);
      square[m][half] = quad_sum(square[m][half]);
    }
  }
  const float anchor_norm = fmaxf(sqrtf(quad_sum(anchor_square)), kMinNorm);
  const float key_norm = fmaxf(sqrtf(own_row<kTiles>(square, lane)), kMinNorm);
  return -own_row<kTiles>(dot, lane) / (key_norm * anchor_norm);
}

/// 1 / min(A, length) for mean rows, times 1 / G for mean heads.
__device__ __forceinline__ float mean_factor(const ScoreParams& p, int32_t length) {
  float factor = p.row_max ? 1.0f : 1.0f / static_cast<float>(min(p.shape.num_rows, length));
  if (!p.group_max) factor /= static_cast<float>(p.shape.group);
  return factor;
}

/// Zeros for the keys [first, last) of one KV head.
__device__ __forceinline__ void write_zeros(const ScoreParams& p, int64_t b, int64_t kv, int32_t first, int32_t last) {
#pragma unroll 1
  for (int32_t key = first + threadIdx.x; key < last; key += kScoreThreads) {
    p.score[b * p.score_stride_batch + kv * p.score_stride_head + key] = 0.0f;
    if (p.cosine != nullptr) p.cosine[b * p.cosine_stride_batch + kv * p.cosine_stride_head + key] = 0.0f;
  }
}

/// Starts loading the warp's keys [first, first + 16 * kTiles); past `num_keys`, the last one again.
template <typename T, int D, int kTiles>
__device__ __forceinline__ void fetch_keys(
    typename ResidentRows<T, D, kTiles>::Fetched& fetched, const PoolView<T>& pool, int64_t b, int64_t kv,
    int32_t first, int32_t num_keys, int lane) {
  int32_t slots[2 * kTiles];
  const T* rows[2 * kTiles];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) slots[i] = min(first + 8 * i + lane / 4, num_keys - 1);
  find_rows(pool, b, kv, slots, rows);
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) ResidentRows<T, D, kTiles>::fetch_row(fetched, i / 2, i % 2, lane, rows[i]);
}

/// Starts moving the next tile's keys to L2, a key per thread, so that device memory stays busy while this tile is
/// multiplied.
template <typename T, int D, int32_t kTileKeys>
__device__ __forceinline__ void prefetch_keys(
    const PoolView<T>& pool, int64_t b, int64_t kv, int32_t first, int32_t last) {
  static_assert(kTileKeys <= kScoreThreads);
  constexpr int kLineElements = 128 / sizeof(T);
  const int32_t key = first + threadIdx.x;
  if (threadIdx.x >= kTileKeys || key >= last) return;
  const T* row = pool.row(b, kv, key);
#pragma unroll
  for (int column = 0; column < D; column += kLineElements) prefetch_l2(row + column);
}

/// Fills `sums` with all query rows. For a CTA's first tile the rows still stream in; later ones find them in the ring.
template <typename T, int D, int kTiles, bool kRowMax>
__device__ __forceinline__ void add_all_rows(
    KeyReduction<kTiles, kRowMax>& sums, const ResidentRows<T, D, kTiles>& keys, QueryStream<T, D>& stream,
    const ScorePlan& plan, int32_t num_stages, bool is_first_tile, bool is_masked,
    const int32_t (&first_row)[kTiles][2]) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  sums.reset();
  int32_t slot = 0;
  for (int32_t stage = 0; stage < num_stages; ++stage) {
    if (is_first_tile) {
      cp_async_wait<kPrefetchStages - 1>();
      __syncthreads();  // the stage is here for every warp, and every warp is done with the slot refilled below
      if (stage + kPrefetchStages < num_stages) {
        const int32_t target = slot + kPrefetchStages;
        stream.copy_stage(target < plan.ring_slots ? target : target - plan.ring_slots, warp, lane);
      }
      cp_async_commit();
    }
    if (is_masked) {
      add_stage<true>(sums, keys, stream, slot, first_row, lane);
    } else {
      add_stage<false>(sums, keys, stream, slot, first_row, lane);
    }
    slot = slot + 1 == plan.ring_slots ? 0 : slot + 1;
  }
}

template <typename T, int D, int kTiles, bool kRowMax>
__global__ void __launch_bounds__(kScoreThreads, 4) score_kernel(
    const ScoreParams p, const PoolView<T> pool, const ScorePlan plan) {
  constexpr int32_t kTileKeys = kScoreWarps * kTiles * 16;
  extern __shared__ uint4 ring[];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t kv = blockIdx.y;
  const int64_t b = blockIdx.z;
  const int32_t length = p.lengths[b];
  const int32_t num_keys = min(length, p.shape.max_length);  // never reads past N, whatever the lengths hold
  const int32_t cta_first = blockIdx.x * plan.tiles_per_cta * kTileKeys;
  const int32_t cta_last = min(cta_first + plan.tiles_per_cta * kTileKeys, p.shape.max_length);
  const int32_t work_last = min(cta_last, num_keys);
  write_zeros(p, b, kv, max(cta_first, num_keys), cta_last);
  if (work_last <= cta_first) return;

  QueryStream<T, D> stream(p, plan, ring, b, kv, warp, lane);
  const int32_t num_stages = stream.num_stages();
  const int32_t first_position = length - p.shape.num_rows;
  for (int32_t tile_first = cta_first; tile_first < work_last; tile_first += kTileKeys) {
    const bool is_first_tile = tile_first == cta_first;
    const int32_t warp_first = tile_first + warp * kTiles * 16;
    typename ResidentRows<T, D, kTiles>::Fetched fetched;
    fetch_keys<T, D, kTiles>(fetched, pool, b, kv, warp_first, num_keys, lane);
    if (is_first_tile) stream.start(num_stages, warp, lane);
    prefetch_keys<T, D, kTileKeys>(pool, b, kv, tile_first + kTileKeys, work_last);

    ResidentRows<T, D, kTiles> keys;
    int32_t first_row[kTiles][2];  // row i sees key j from i = j - first_position on
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int32_t own_key = warp_first + 8 * i + lane / 4;
      keys.take_row(fetched, i / 2, i % 2, own_key < num_keys);
      first_row[i / 2][i % 2] = own_key - first_position;
    }
    const int32_t key = warp_first + own_row_index(lane);
    const bool writes = owns_row<kTiles>(lane) && key < num_keys;
    if (p.anchor != nullptr) {
      const float cosine = negative_cosine<T, D, kTiles>(keys, p.anchor + (b * p.shape.kv_heads + kv) * D, lane);
      if (writes) p.cosine[b * p.cosine_stride_batch + kv * p.cosine_stride_head + key] = cosine;
    }

    KeyReduction<kTiles, kRowMax> sums;
    const bool is_masked = tile_first + kTileKeys - 1 > first_position;
    add_all_rows(sums, keys, stream, plan, num_stages, is_first_tile, is_masked, first_row);
    float score = sums.result(p.row_max != p.group_max, lane) * mean_factor(p, length);
    if (!writes) continue;
    if (p.value_norm != nullptr) score *= p.value_norm[b * p.norm_stride_batch + kv * p.norm_stride_head + key];
    p.score[b * p.score_stride_batch + kv * p.score_stride_head + key] = score;
  }
}

}  // namespace skv
