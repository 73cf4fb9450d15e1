// Decode attention and the fused decode step. Reference: hf_sparsekv/ops/reference/decode.py.
//
// Grid (splits, KV heads * row blocks, requests), 4 warps. A CTA attends with the query rows of one KV head over one
// contiguous range of slots; its warps take units of 16 or 32 slots in turn, each through its own ring of copies.
// Moved per slot: 4 D bytes of K and V; a step adds 12 (score read and written, position read).
// Accumulators are fp32; softmax weights are rounded to the pools' dtype for the second product, as in FlashAttention.
//
// `decode_attention` alternates keys and values in chunks with a running softmax per warp. A step reads all keys
// first and keeps their logits in shared memory: with the total known, the exact weight of every slot, its score and
// the victim are worked out while the values arrive. With several splits the last CTA to finish does that.
#pragma once

#include "decode_combine.cuh"

namespace skv {

constexpr int kSlotsAhead = 4;    // slots per lane whose scores and positions are loaded together
constexpr int kLogitsAhead = 8;   // and, by the last of several splits, with their logits

template <int kRows>
__device__ __forceinline__ void load_logits(const float* slot, float (&values)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; r += 4) {
    const float4 four = *reinterpret_cast<const float4*>(slot + r);
    values[r] = four.x;
    values[r + 1] = four.y;
    values[r + 2] = four.z;
    values[r + 3] = four.w;
  }
}

/// Puts the weights of a slot where its logits were, as T [8] per 8 rows.
template <typename T, int kRows>
__device__ __forceinline__ void store_weights(float* slot, const float (&weights)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; r += 8) {
    uint4 packed = make_uint4(pack2<T>(weights[r], weights[r + 1]), pack2<T>(weights[r + 2], weights[r + 3]), 0u, 0u);
    if (kRows >= 8) {
      packed.z = pack2<T>(weights[(r + 4) % kRows], weights[(r + 5) % kRows]);
      packed.w = pack2<T>(weights[(r + 6) % kRows], weights[(r + 7) % kRows]);
    }
    store16(reinterpret_cast<uint4*>(slot) + r / 8, packed);
  }
}

/// At least one granule, so that it may divide.
template <int D>
__device__ __forceinline__ int32_t slots_per_split(int32_t length, int32_t num_splits) {
  constexpr int kGranule = split_granule_of(D);
  return max(1, ceil_div(ceil_div(length, num_splits), kGranule)) * kGranule;
}

/// The request, head and slots of this CTA. All splits of a request cut its actual length in equal parts.
template <typename T, int D, bool kStep>
__device__ __forceinline__ SlotRange find_range(const DecodeArgs<T>& args, NewToken& token) {
  const DecodeParams& p = args.params;
  SlotRange range{};
  range.request = blockIdx.z;
  range.head = blockIdx.y / args.plan.row_blocks;
  range.victim = -1;
  int32_t length;
  if constexpr (kStep) {
    const DecodeStepState& step = p.step;
    const int64_t victim = step.victims[range.request * step.victims_stride[0] + range.head * step.victims_stride[1]];
    token.budget = step.budgets[range.request];
    token.position = step.next_position[range.request];
    token.length = min(step.lengths[range.request] + 1, token.budget);
    length = token.length;
    if (victim >= 0 && victim < length) range.victim = static_cast<int32_t>(victim);
  } else {
    length = p.lengths[range.request];
  }
  range.length = max(0, min(length, p.max_length));
  const int32_t share = slots_per_split<D>(range.length, args.plan.num_splits);
  range.begin = min(static_cast<int32_t>(blockIdx.x) * share, range.length);
  range.end = min(range.begin + share, range.length);
  return range;
}

/// Starts bringing the table entries near while the lengths are still on their way.
template <typename T>
__device__ __forceinline__ void prefetch_table(const DecodeArgs<T>& args) {
  const PoolView<T>& pool = args.k_pool;
  if (pool.table == nullptr || threadIdx.x >= kDecodeWarps) return;
  const int64_t share = args.params.max_length / args.plan.num_splits;
  const int64_t entry = min(share * blockIdx.x + threadIdx.x * 32 * 16, args.params.max_length - 1L) / pool.page_size;
  prefetch_to_l2(pool.table + blockIdx.z * pool.stride_table + entry);
}

/// Keys and values in chunks; leaves each row's reference and sum in `scratch.parts`.
template <typename T, int D, int kRows>
__device__ __forceinline__ void attend_in_chunks(
    UnitRing<T, D, false>& ring, WarpTile<T, D, kRows>& tile, const SlotRange& range, int32_t num_units, float* logits,
    float scale_log2, DecodeScratch<kRows>& scratch) {
  constexpr int kUnitSlots = UnitRing<T, D, false>::kUnitSlots;
  constexpr int kTiles = WarpTile<T, D, kRows>::kTiles;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  float reference[kTiles];   // what the output so far is relative to
#pragma unroll
  for (int n = 0; n < kTiles; ++n) reference[n] = -INFINITY;
  for (int32_t first = 0; first < num_units; first += kChunkSlots / kUnitSlots) {
    const int32_t count = min(kChunkSlots / kUnitSlots, num_units - first);
    for (int32_t i = 0; i < count; ++i) {
      const UnitAddress unit = ring.acquire();
      tile.score_unit(
          unit, logits + i * kUnitSlots * kRows, unit_slot(range, first + i, warp, kUnitSlots), scale_log2);
    }
    float row_reference[kRows];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float peak = tile.row_peak(n);   // over all chunks so far
      tile.rescale(n, exp2_fast(reference[n] - zero_if_minus_infinity(peak)));
      reference[n] = peak;
#pragma unroll
      for (int r = 0; r < min(8, kRows); ++r) row_reference[8 * n + r] = zero_if_minus_infinity(__shfl_sync(kFullMask, peak, 4 * r));
    }
    __syncwarp();
#pragma unroll 1
    for (int32_t j = lane; j < count * kUnitSlots; j += kWarpSize) {
      float weights[kRows];
      load_logits(logits + j * kRows, weights);
#pragma unroll
      for (int r = 0; r < kRows; ++r) weights[r] = exp2_fast(weights[r] - row_reference[r]);
      store_weights<T>(logits + j * kRows, weights);
    }
    __syncwarp();
    for (int32_t i = 0; i < count; ++i) {
      const UnitAddress unit = ring.acquire();
      tile.value_unit(unit, shared_address(logits + i * kUnitSlots * kRows));
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float sum = tile.row_sum(n, reference[n]);
    if (lane % 4 == 0 && lane / 4 < kRows) scratch.parts[warp][lane / 4 + 8 * n] = make_float2(reference[n], sum);
  }
}

/// Turns a warp's logits into weights relative to the CTA's peaks. The only split also updates the scores of these
/// slots, the first of which are in `ahead`; one of several leaves the logits for the last CTA.
template <typename T, int D, int kRows>
__device__ __forceinline__ void weigh_slots(
    const DecodeArgs<T>& args, const SlotRange& range, const RowBlock& block, int32_t num_slots, float* logits,
    const DecodeScratch<kRows>& scratch, ScoreUpdate& scores, SlotState (&states)[kSlotsAhead]) {
  constexpr int kUnitSlots = UnitRing<T, D, true>::kUnitSlots;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const bool is_only_split = args.plan.num_splits == 1;
  const bool keep_logits = !is_only_split && !args.params.step.score_by_position;
  const SplitStore store = SplitStore::of<D, kRows>(args.params, args.plan, block.pair);
  const RowTotal total = total_of_row(scratch, min(lane / 4, kRows - 1));
  const float own_peak = zero_if_minus_infinity(total.peak);
  const float own_factor = exp2_fast(own_peak - zero_if_minus_infinity(total.lse)) / args.params.group;
  float peak[kRows];
  float factor[kRows];   // from 2^(logit - peak) to the share in the mean over the group
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    peak[r] = __shfl_sync(kFullMask, own_peak, 4 * r);
    factor[r] = r < args.params.group ? __shfl_sync(kFullMask, own_factor, 4 * r) : 0.0f;
  }
  for (int32_t first = lane; first < num_slots; first += kWarpSize * kSlotsAhead) {
#pragma unroll
    for (int i = 0; i < kSlotsAhead; ++i) {
      const int32_t j = first + i * kWarpSize;
      const int32_t slot = unit_slot(range, j / kUnitSlots, warp, kUnitSlots) + j % kUnitSlots;
      if (is_only_split && first != lane) states[i] = scores.load(slot, slot < range.end);
    }
#pragma unroll
    for (int i = 0; i < kSlotsAhead; ++i) {
      const int32_t j = first + i * kWarpSize;
      if (j >= num_slots) break;
      const int32_t slot = unit_slot(range, j / kUnitSlots, warp, kUnitSlots) + j % kUnitSlots;
      float weights[kRows];
      load_logits(logits + j * kRows, weights);
      if (keep_logits && slot < range.end) {
#pragma unroll
        for (int r = 0; r < kRows; r += 4) {
          *reinterpret_cast<float4*>(store.logits + static_cast<int64_t>(slot) * kRows + r) =
              make_float4(weights[r], weights[r + 1], weights[r + 2], weights[r + 3]);
        }
      }
      float mean = 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        weights[r] = exp2_fast(weights[r] - peak[r]);
        mean = fmaf(factor[r], weights[r], mean);
      }
      store_weights<T>(logits + j * kRows, weights);
      if (is_only_split && slot < range.end) scores.visit(slot, states[i], mean);
    }
  }
}

/// All keys, then softmax and scores, then all values.
template <typename T, int D, int kRows>
__device__ __forceinline__ void attend_and_score(
    const DecodeArgs<T>& args, UnitRing<T, D, true>& ring, WarpTile<T, D, kRows>& tile, const SlotRange& range,
    const RowBlock& block, int32_t num_units, float* logits, DecodeScratch<kRows>& scratch, ScoreUpdate& scores) {
  constexpr int kUnitSlots = UnitRing<T, D, true>::kUnitSlots;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  SlotState ahead[kSlotsAhead];
#pragma unroll
  for (int i = 0; i < kSlotsAhead; ++i) {
    const int32_t j = lane + i * kWarpSize;
    const int32_t slot = unit_slot(range, j / kUnitSlots, warp, kUnitSlots) + j % kUnitSlots;
    ahead[i] = scores.load(slot, args.plan.num_splits == 1 && slot < range.end);
  }
  const float scale_log2 = args.params.scale * kLog2e;
  for (int32_t i = 0; i < num_units; ++i) {
    const UnitAddress unit = ring.acquire();
    tile.score_unit(unit, logits + i * kUnitSlots * kRows, unit_slot(range, i, warp, kUnitSlots), scale_log2);
  }
  const float peak = tile.row_peak(0);
  const float sum = tile.row_sum(0, peak);
  if (lane % 4 == 0 && lane / 4 < kRows) scratch.parts[warp][lane / 4] = make_float2(peak, sum);
  __syncthreads();
  weigh_slots<T, D, kRows>(args, range, block, num_units * kUnitSlots, logits, scratch, scores, ahead);
  __syncwarp();
  for (int32_t i = 0; i < num_units; ++i) {
    const UnitAddress unit = ring.acquire();
    tile.value_unit(unit, shared_address(logits + i * kUnitSlots * kRows));
  }
}

/// Scores of all slots of a head from the logits that its splits left, by the last CTA.
template <typename T, int D, int kRows>
__device__ __forceinline__ void score_all_slots(
    const DecodeArgs<T>& args, const SlotRange& range, const RowBlock& block, const DecodeScratch<kRows>& scratch,
    ScoreUpdate& scores) {
  const SplitStore store = SplitStore::of<D, kRows>(args.params, args.plan, block.pair);
  const bool has_logits = !args.params.step.score_by_position;
  const float group_share = 1.0f / args.params.group;
  float lse[kRows];   // a padding row's weights become 0
#pragma unroll
  for (int r = 0; r < kRows; ++r) lse[r] = r < args.params.group ? scratch.lse[r] : INFINITY;
  for (int32_t first = threadIdx.x; first < range.length; first += kDecodeThreads * kLogitsAhead) {
    SlotState states[kLogitsAhead];
    float4 logits[kLogitsAhead][kRows / 4];
#pragma unroll
    for (int i = 0; i < kLogitsAhead; ++i) {
      const int32_t slot = first + i * kDecodeThreads;
      states[i] = scores.load(slot, slot < range.length);
#pragma unroll
      for (int r = 0; r < kRows / 4; ++r) {
        const float* source = store.logits + static_cast<int64_t>(slot) * kRows + 4 * r;
        const bool valid = has_logits && slot < range.length;
        logits[i][r] = valid ? __ldcg(reinterpret_cast<const float4*>(source)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
#pragma unroll
    for (int i = 0; i < kLogitsAhead; ++i) {
      const int32_t slot = first + i * kDecodeThreads;
      if (slot >= range.length) break;
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 four = logits[i][r / 4];
        const float logit = r % 4 == 0 ? four.x : r % 4 == 1 ? four.y : r % 4 == 2 ? four.z : four.w;
        sum += exp2_fast(logit - lse[r]);
      }
      scores.visit(slot, states[i], sum * group_share);
    }
  }
}

/// The best victim over the CTA; valid in thread 0 after the barrier inside.
template <int kRows>
__device__ __forceinline__ unsigned long long best_of_cta(DecodeScratch<kRows>& scratch, const ScoreUpdate& scores) {
  const unsigned long long best = warp_min(scores.best());
  if (threadIdx.x % kWarpSize == 0) scratch.best[threadIdx.x / kWarpSize] = best;
  __syncthreads();
  return min(min(scratch.best[0], scratch.best[1]), min(scratch.best[2], scratch.best[3]));
}

template <int kRows>
__device__ __forceinline__ RowBlock find_rows(const DecodeParams& p, const DecodePlan& plan) {
  RowBlock block{};
  block.pair = blockIdx.z * gridDim.y + blockIdx.y;
  block.row_base = blockIdx.y % plan.row_blocks * kRows;
  block.num_rows = min(kRows, p.group * p.num_rows - block.row_base);
  return block;
}

template <typename T, int D, int kRows>
__global__ void __launch_bounds__(kDecodeThreads, kRows > 8 ? 3 : 4)
    decode_attention_kernel(const __grid_constant__ DecodeArgs<T> args) {
  constexpr int kUnitSlots = UnitRing<T, D, false>::kUnitSlots;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ DecodeScratch<kRows> scratch;
  const DecodePlan& plan = args.plan;
  const int warp = threadIdx.x / kWarpSize;
  unsigned char* own_ring = shared + warp * plan.ring_depth * kPlaceBytes;
  float* logits = reinterpret_cast<float*>(shared + kDecodeWarps * plan.ring_depth * kPlaceBytes) +
                  warp * plan.warp_slots * kRows;
  prefetch_table(args);
  NewToken unused{};
  const SlotRange range = find_range<T, D, false>(args, unused);
  const RowBlock block = find_rows<kRows>(args.params, plan);
  const int32_t num_units = ceil_div(max(range.num_units(kUnitSlots) - warp, 0), kDecodeWarps);
  UnitRing<T, D, false> ring(args, range, shared_address(own_ring), num_units, kChunkSlots / kUnitSlots);
  WarpTile<T, D, kRows> tile;
  tile.start(args.params, range, block.row_base);
  attend_in_chunks<T, D, kRows>(ring, tile, range, num_units, logits, args.params.scale * kLog2e, scratch);
  __syncwarp();
  tile.store_output(reinterpret_cast<float*>(own_ring));
  __syncthreads();
  combine_warps<T, D, kRows, false>(args, range, block, scratch, shared);
  if (plan.num_splits == 1 || !is_last_split(args, block, scratch)) return;
  const int32_t num_used = ceil_div(range.length, slots_per_split<D>(range.length, plan.num_splits));
  combine_splits<T, D, kRows>(args, range, block, num_used, scratch, reinterpret_cast<float*>(shared));
}

template <typename T, int D, int kRows>
__global__ void __launch_bounds__(kDecodeThreads, 4) decode_step_kernel(const __grid_constant__ DecodeArgs<T> args) {
  constexpr int kUnitSlots = UnitRing<T, D, true>::kUnitSlots;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ DecodeScratch<kRows> scratch;
  const DecodePlan& plan = args.plan;
  const int warp = threadIdx.x / kWarpSize;
  unsigned char* own_ring = shared + warp * plan.ring_depth * kPlaceBytes;
  float* logits = reinterpret_cast<float*>(shared + kDecodeWarps * plan.ring_depth * kPlaceBytes) +
                  warp * plan.warp_slots * kRows;
  prefetch_table(args);
  NewToken token{};
  const SlotRange range = find_range<T, D, true>(args, token);
  const RowBlock block = find_rows<kRows>(args.params, plan);
  const int32_t num_units = ceil_div(max(range.num_units(kUnitSlots) - warp, 0), kDecodeWarps);
  UnitRing<T, D, true> ring(args, range, shared_address(own_ring), num_units, num_units);
  WarpTile<T, D, kRows> tile;
  tile.start(args.params, range, block.row_base);
  if (warp == 0) write_new_token<T, D>(args, range);
  const int32_t arrived = arrive_at_request(args.params, range.request);
  ScoreUpdate scores(args.params.step, range, token.position);
  attend_and_score<T, D, kRows>(args, ring, tile, range, block, num_units, logits, scratch, scores);
  __syncwarp();
  tile.store_output(reinterpret_cast<float*>(own_ring));
  unsigned long long best = best_of_cta(scratch, scores);
  combine_warps<T, D, kRows, true>(args, range, block, scratch, shared);
  advance_request(args.params, range.request, token, arrived);
  if (plan.num_splits > 1) {
    if (!is_last_split(args, block, scratch)) return;
    const int32_t num_used = ceil_div(range.length, slots_per_split<D>(range.length, plan.num_splits));
    combine_splits<T, D, kRows>(args, range, block, num_used, scratch, reinterpret_cast<float*>(shared));
    score_all_slots<T, D, kRows>(args, range, block, scratch, scores);
    best = best_of_cta(scratch, scores);
  }
  if (threadIdx.x == 0) write_victim(args.params.step, range, token, best);
}

}  // namespace skv
