// What one warp of the decode kernel does with keys and values: a ring of asynchronous copies of its own, and the two
// matrix products on each unit that arrives. Warps share nothing here, so no CTA barrier stands between units.
#pragma once

#include "decode_plan.h"
#include "decode_ptx.cuh"

namespace skv {

template <typename T>
struct DecodeArgs {
  DecodeParams params;
  DecodePlan plan;
  PoolView<T> k_pool;
  PoolView<T> v_pool;
};

/// The slots of one CTA.
struct SlotRange {
  int32_t request;
  int32_t head;     // KV head
  int32_t length;   // slots of the request, the new one included
  int32_t begin;
  int32_t end;
  int32_t victim;   // slot whose key and value are the new token's; negative: none

  __device__ __forceinline__ int32_t num_units(int unit_slots) const { return ceil_div(end - begin, unit_slots); }
};

/// Unit u of a range belongs to warp u % kDecodeWarps; `local` counts the units of one warp.
__device__ __forceinline__ int32_t unit_slot(const SlotRange& range, int32_t local, int warp, int unit_slots) {
  return range.begin + (local * kDecodeWarps + warp) * unit_slots;
}

__device__ __forceinline__ float zero_if_minus_infinity(float x) { return x == -INFINITY ? 0.0f : x; }

/// Shared addresses of the two places that hold a unit.
struct UnitAddress {
  uint32_t half[2];
};

/// Streams a warp's units through shared memory: for every chunk its keys, then its values. The ring consists of places
/// of half a unit, so that its size can be fitted finely.
template <typename T, int D, bool kStep>
class UnitRing {
 public:
  static constexpr int kUnitSlots = unit_slots_of(D);

  __device__ __forceinline__ UnitRing(
      const DecodeArgs<T>& args, const SlotRange& range, uint32_t shared, int32_t num_units, int32_t chunk_units)
      : args_(args), range_(range), shared_(shared), num_places_(2 * num_units), chunk_places_(2 * chunk_units),
        count_(min(num_places_, chunk_places_)) {
    for (int i = 0; i < args.plan.ring_depth - 2; ++i) issue();
  }

  /// The next unit, complete. It stays valid until the next call.
  __device__ __forceinline__ UnitAddress acquire() {
    wait_oldest_two(args_.plan.ring_depth);
    __syncwarp();
    // The copies are ring_depth - 2 places ahead; the two between are those that the previous unit has left.
    const int32_t place = next_place(next_place(write_));
    const UnitAddress unit{{shared_ + place * kPlaceBytes, shared_ + next_place(place) * kPlaceBytes}};
#pragma unroll 1   // copies of the code cost more than the jump
    for (int i = 0; i < 2; ++i) issue();
    return unit;
  }

 private:
  static constexpr int kPlaceSlots = kUnitSlots / 2;
  static constexpr int kPageGroup = 16;   // slots that share one look-up of the page
  static constexpr int kGroupsPerUnit = kUnitSlots / kPageGroup;
  static constexpr int kRowChunks = D / 8;
  static constexpr int kRowsAtOnce = kWarpSize / kRowChunks;

  __device__ __forceinline__ int32_t next_place(int32_t place) const {
    return place + 1 == args_.plan.ring_depth ? 0 : place + 1;
  }

  /// Starts the copy of one more place. Past the last one it commits an empty group, which keeps the count of groups.
  __device__ __forceinline__ void issue() {
    if (count_ > 0) {
      load(shared_ + write_ * kPlaceBytes);
      advance();
    }
    cp_async_commit();
    write_ = next_place(write_);
  }

  __device__ __forceinline__ void advance() {
    if (++index_ < count_) return;
    index_ = 0;
    if (is_value_) {
      first_ += count_;
      count_ = min(num_places_ - first_, chunk_places_);
    }
    is_value_ = !is_value_;
  }

  __device__ __forceinline__ int32_t group_slot(int32_t group) const {
    const int32_t slot = unit_slot(range_, group / kGroupsPerUnit, threadIdx.x / kWarpSize, kUnitSlots);
    return slot + group % kGroupsPerUnit * kPageGroup;
  }

  /// First row of a group of slots that lie in one page. Every lane looks up one of 32 groups, for keys and values.
  __device__ __forceinline__ const T* group_row(int32_t group) {
    if (group / kWarpSize != block_) {
      block_ = group / kWarpSize;
      const int32_t slot = group_slot(block_ * kWarpSize + threadIdx.x % kWarpSize);
      key_row_ = value_row_ = 0;
      if (slot < range_.end) {
        key_row_ = reinterpret_cast<uint64_t>(args_.k_pool.row(range_.request, range_.head, slot));
        value_row_ = reinterpret_cast<uint64_t>(args_.v_pool.row(range_.request, range_.head, slot));
      }
    }
    return reinterpret_cast<const T*>(__shfl_sync(kFullMask, is_value_ ? value_row_ : key_row_, group % kWarpSize));
  }

  __device__ __forceinline__ void load(uint32_t shared) {
    const int lane = threadIdx.x % kWarpSize;
    const int chunk = lane % kRowChunks;
    const PoolView<T>& pool = is_value_ ? args_.v_pool : args_.k_pool;
    const int32_t place = first_ + index_;
    const int32_t group = place * kPlaceSlots / kPageGroup;
    const int32_t slot0 = group_slot(group) + place * kPlaceSlots % kPageGroup;
    const bool has_victim = kStep && range_.victim >= slot0 && range_.victim < slot0 + kPlaceSlots;
    const bool one_page = pool.table == nullptr || pool.page_size % kPageGroup == 0;
    if (!one_page || has_victim || slot0 + kPlaceSlots > range_.end) {
      load_row_by_row(pool, shared, slot0);
      return;
    }
    const int row0 = lane / kRowChunks + place * kPlaceSlots % kPageGroup;
    const T* source = group_row(group) + row0 * pool.stride_slot + chunk * 8;
    const int64_t step = kRowsAtOnce * pool.stride_slot;
#pragma unroll
    for (int i = 0; i < kPlaceSlots / kRowsAtOnce; ++i) {
      const int row = lane / kRowChunks + i * kRowsAtOnce;
      cp_async_16(shared + row * (D * 2) + swizzle_chunk(row, chunk) * 16, source + i * step);
    }
  }

  /// Any page size, slots past the end, and the new token.
  __device__ __forceinline__ void load_row_by_row(const PoolView<T>& pool, uint32_t shared, int32_t slot0) const {
    const int lane = threadIdx.x % kWarpSize;
    const int chunk = lane % kRowChunks;
#pragma unroll 1
    for (int row = lane / kRowChunks; row < kPlaceSlots; row += kRowsAtOnce) {
      const int32_t slot = slot0 + row;
      const bool valid = slot < range_.end;
      const T* source = pool.data;
      // The pool's own row of the victim is being overwritten meanwhile: nobody reads it.
      if (kStep && slot == range_.victim) {
        source = new_row();
      } else if (valid) {
        source = pool.row(range_.request, range_.head, slot);
      }
      cp_async_16_or_zero(shared + row * (D * 2) + swizzle_chunk(row, chunk) * 16, source + chunk * 8, valid);
    }
  }

  __device__ __forceinline__ const T* new_row() const {
    const DecodeStepState& step = args_.params.step;
    const T* data = static_cast<const T*>(is_value_ ? step.v : step.k);
    const int64_t* stride = is_value_ ? step.v_stride : step.k_stride;
    return data + range_.request * stride[0] + range_.head * stride[1];
  }

  const DecodeArgs<T>& args_;
  const SlotRange& range_;
  uint32_t shared_;
  int32_t num_places_;
  int32_t chunk_places_;
  int32_t count_;              // places of the current chunk
  int32_t first_ = 0;          // of the current chunk
  int32_t index_ = 0;          // in the current chunk
  bool is_value_ = false;
  int32_t write_ = 0;
  int32_t block_ = -1;         // the 32 groups whose rows are at hand
  uint64_t key_row_ = 0;       // of this lane's group
  uint64_t value_row_ = 0;
};

/// Queries, running softmax and output of one warp. Rows are query rows of one KV head, row = t * G + g, padded to 8
/// or 16; a lane holds the rows lane / 4 (+ 8) of logits and the rows 2 * (lane % 4) + {0, 1} (+ 8) of the output.
template <typename T, int D, int kRows>
struct WarpTile {
  static constexpr int kTiles = kRows > 8 ? 2 : 1;
  static constexpr int kUnitSlots = unit_slots_of(D);
  static constexpr int kParts = kUnitSlots / 8;

  uint32_t q[D / 16][2][kTiles];   // dims 16 k + 2 * (lane % 4) + {0, 1}, and + 8
  float out[D / 16][kTiles][4];    // dims 16 m + lane / 4 (first two) and + 8
  float peak[kTiles];              // this lane's largest logit, base 2
  float sum[kTiles];               // of this lane's 2^(logit - peak)
  int32_t limit[kTiles];           // the row sees the slots below it

  /// `row_base` is the first row of this CTA; `group` rows of one position follow each other.
  __device__ __forceinline__ void start(const DecodeParams& p, const SlotRange& range, int row_base) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = row_base + lane / 4 + 8 * n;
      const bool valid = row < p.group * p.num_rows;
      const int64_t offset = range.request * p.q_stride[0] + (row / p.group) * p.q_stride[1] +
                             (static_cast<int64_t>(range.head) * p.group + row % p.group) * p.q_stride[2];
      const uint32_t* source = reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.q) + offset) + lane % 4;
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        q[k][0][n] = valid ? __ldg(source + 8 * k) : 0u;
        q[k][1][n] = valid ? __ldg(source + 8 * k + 4) : 0u;
      }
      peak[n] = -INFINITY;
      sum[n] = 0.0f;
      limit[n] = min(range.end, range.length - p.num_rows + 1 + row / p.group);
#pragma unroll
      for (int m = 0; m < D / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
      }
    }
  }

  /// Logits of a unit of keys, base 2, to `logits` [kUnitSlots, kRows]; those past a row's limit are -inf.
  __device__ __forceinline__ void score_unit(const UnitAddress& unit, float* logits, int32_t slot0, float scale_log2) {
    const int lane = threadIdx.x % kWarpSize;
    float c[kParts][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float c_odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};   // a second sum halves the chain of dependent products
#pragma unroll
      for (int i = 0; i < 4; ++i) c[part][i] = 0.0f;
#pragma unroll
      for (int k = 0; k < D / 32; ++k) {
        uint32_t b[4];
        ldmatrix_x4(b, row_address(unit, part) + swizzle_chunk(lane % 8, 4 * k + lane / 8) * 16);
        multiply_keys(c[part], 2 * k, b[0], b[1]);
        multiply_keys(c_odd, 2 * k + 1, b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) c[part][i] += c_odd[i];
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float values[2 * kParts];
#pragma unroll
      for (int i = 0; i < 2 * kParts; ++i) {
        const int column = i / 2 * 8 + 2 * (lane % 4) + i % 2;
        values[i] = slot0 + column < limit[n] ? c[i / 2][2 * n + i % 2] * scale_log2 : -INFINITY;
        if (kRows >= 8 || lane / 4 < kRows) logits[column * kRows + lane / 4 + 8 * n] = values[i];
      }
      accumulate(n, values);
    }
  }

  /// out += weights * values, for a unit of values and its `weights`: T [kUnitSlots, 8 * kTiles] at the places where
  /// the logits were.
  __device__ __forceinline__ void value_unit(const UnitAddress& unit, uint32_t weights) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int part = 0; part < kParts; part += 2) {
      uint32_t b[kTiles][2];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        ldmatrix_x2_trans(b[n], weights + (part * 8 + lane % 16) * (kRows * 4) + n * 16);
      }
#pragma unroll
      for (int m = 0; m < D / 32; ++m) {
        const uint32_t chunk = swizzle_chunk(lane % 8, 4 * m + lane / 8) * 16;
        uint32_t low[4], high[4];   // slots 0 to 7 and 8 to 15; dims 32 m + 8 i
        ldmatrix_x4_trans(low, row_address(unit, part) + chunk);
        ldmatrix_x4_trans(high, row_address(unit, part + 1) + chunk);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t a[4] = {low[2 * i], low[2 * i + 1], high[2 * i], high[2 * i + 1]};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) mma_m16n8k16<T>(out[2 * m + i][n], a, b[n][0], b[n][1]);
        }
      }
    }
  }

  /// Largest logit of row lane / 4 + 8 n over the warp's slots.
  __device__ __forceinline__ float row_peak(int n) const { return quad_max(peak[n]); }

  /// Sum of 2^(logit - reference) of that row.
  __device__ __forceinline__ float row_sum(int n, float reference) const {
    return quad_sum(sum[n] * exp2_fast(peak[n] - zero_if_minus_infinity(reference)));
  }

  /// Multiplies the output of each row by a factor that the lanes of that row hold.
  __device__ __forceinline__ void rescale(int n, float factor) {
    const int lane = threadIdx.x % kWarpSize;
    const float even = __shfl_sync(kFullMask, factor, 8 * (lane % 4));
    const float odd = __shfl_sync(kFullMask, factor, 8 * (lane % 4) + 4);
#pragma unroll
    for (int m = 0; m < D / 16; ++m) {
      out[m][n][0] *= even;
      out[m][n][1] *= odd;
      out[m][n][2] *= even;
      out[m][n][3] *= odd;
    }
  }

  /// Writes the output as fp32 [kRows, D + 4] (padded against bank conflicts).
  __device__ __forceinline__ void store_output(float* target) const {
    const int lane = threadIdx.x % kWarpSize;
    const int row = 2 * (lane % 4);
    if (kRows < 8 && row >= kRows) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < D / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          target[(row + 8 * n + i % 2) * (D + 4) + 16 * m + lane / 4 + 8 * (i / 2)] = out[m][n][i];
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply_keys(float (&c)[4], int k, uint32_t b0, uint32_t b1) const {
    const uint32_t a[4] = {q[k][0][0], kTiles > 1 ? q[k][0][kTiles - 1] : 0u,
                           q[k][1][0], kTiles > 1 ? q[k][1][kTiles - 1] : 0u};
    mma_m16n8k16<T>(c, a, b0, b1);
  }

  /// Row lane % 8 of 8 rows of a unit.
  static __device__ __forceinline__ uint32_t row_address(const UnitAddress& unit, int part) {
    constexpr int kHalf = kParts / 2;
    return unit.half[part / kHalf] + (part % kHalf * 8 + threadIdx.x % 8) * (D * 2);
  }

  __device__ __forceinline__ void accumulate(int n, const float (&values)[2 * kParts]) {
    float higher = peak[n];
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i) higher = fmaxf(higher, values[i]);
    const float reference = zero_if_minus_infinity(higher);
    float added = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i) added += exp2_fast(values[i] - reference);
    sum[n] = sum[n] * exp2_fast(peak[n] - reference) + added;
    peak[n] = higher;
  }
};

}  // namespace skv
