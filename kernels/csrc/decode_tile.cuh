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

/// Streams a warp's units through shared memory: for every chunk its keys, then its values.
template <typename T, int D, bool kStep>
class UnitRing {
 public:
  static constexpr int kUnitSlots = kUnitBytes / (D * 2);

  __device__ __forceinline__ UnitRing(
      const DecodeArgs<T>& args, const SlotRange& range, uint32_t shared, int32_t num_units, int32_t chunk_units)
      : args_(args), range_(range), shared_(shared), num_units_(num_units), chunk_units_(chunk_units),
        count_(min(num_units, chunk_units)) {
    for (int i = 0; i < args.plan.ring_depth - 1; ++i) issue();
  }

  /// Shared address of the next unit, complete. It stays valid until the next call.
  __device__ __forceinline__ uint32_t acquire() {
    wait_oldest_unit(args_.plan.ring_depth);
    __syncwarp();
    const uint32_t unit = shared_ + read_ * kUnitBytes;
    read_ = next_place(read_);
    issue();  // into the place that the previous unit has left
    return unit;
  }

 private:
  __device__ __forceinline__ int32_t next_place(int32_t place) const {
    return place + 1 == args_.plan.ring_depth ? 0 : place + 1;
  }

  /// Starts the copy of one more unit. Past the last one it commits an empty group, which keeps the count of groups.
  __device__ __forceinline__ void issue() {
    if (count_ > 0) {
      load(shared_ + write_ * kUnitBytes);
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
      count_ = min(num_units_ - first_, chunk_units_);
    }
    is_value_ = !is_value_;
  }

  __device__ __forceinline__ void load(uint32_t shared) const {
    constexpr int kRowChunks = D / 8;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const PoolView<T>& pool = is_value_ ? args_.v_pool : args_.k_pool;
    const int32_t slot0 = unit_slot(range_, first_ + index_, warp, kUnitSlots);
    const T* fresh = kStep ? new_row(is_value_) : nullptr;
    const bool one_page = pool.table == nullptr || pool.page_size % kUnitSlots == 0;
    const T* first = one_page ? pool.row(range_.request, range_.head, slot0) : nullptr;
#pragma unroll
    for (int i = 0; i < kUnitBytes / 16 / kWarpSize; ++i) {
      const int row = (lane + i * kWarpSize) / kRowChunks;
      const int chunk = (lane + i * kWarpSize) % kRowChunks;
      const int32_t slot = slot0 + row;
      const bool valid = slot < range_.end;
      const T* source = pool.data;
      if (one_page) {
        source = first + row * pool.stride_slot;
      } else if (valid) {
        source = pool.row(range_.request, range_.head, slot);
      }
      // The pool's own row of the victim is being overwritten meanwhile: nobody reads it.
      if (kStep && slot == range_.victim) source = fresh;
      cp_async_16_or_zero(shared + row * (D * 2) + swizzle_chunk(row, chunk) * 16, source + chunk * 8, valid);
    }
  }

  __device__ __forceinline__ const T* new_row(bool is_value) const {
    const DecodeStepState& step = args_.params.step;
    const T* data = static_cast<const T*>(is_value ? step.v : step.k);
    const int64_t* stride = is_value ? step.v_stride : step.k_stride;
    return data + range_.request * stride[0] + range_.head * stride[1];
  }

  const DecodeArgs<T>& args_;
  const SlotRange& range_;
  uint32_t shared_;
  int32_t num_units_;
  int32_t chunk_units_;
  int32_t count_;              // units of the current chunk
  int32_t first_ = 0;          // of the current chunk
  int32_t index_ = 0;          // in the current chunk
  bool is_value_ = false;
  int32_t read_ = 0;
  int32_t write_ = 0;
};

/// Queries, running softmax and output of one warp. Rows are query rows of one KV head, row = t * G + g, padded to 8
/// or 16; a lane holds the rows lane / 4 (+ 8) of logits and the rows 2 * (lane % 4) + {0, 1} (+ 8) of the output.
template <typename T, int D, int kRows>
struct WarpTile {
  static constexpr int kTiles = kRows > 8 ? 2 : 1;
  static constexpr int kUnitSlots = kUnitBytes / (D * 2);

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
  __device__ __forceinline__ void score_unit(uint32_t unit, float* logits, int32_t slot0, float scale_log2) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int part = 0; part < kUnitSlots / 8; ++part) {
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      float c_odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};   // a second sum halves the chain of dependent products
      const int row = part * 8 + lane % 8;
#pragma unroll
      for (int k = 0; k < D / 32; ++k) {
        uint32_t b[4];
        ldmatrix_x4(b, unit + row * (D * 2) + swizzle_chunk(row, 4 * k + lane / 8) * 16);
        multiply_keys(c, 2 * k, b[0], b[1]);
        multiply_keys(c_odd, 2 * k + 1, b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] += c_odd[i];
      const int column = part * 8 + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float low = slot0 + column < limit[n] ? c[2 * n] * scale_log2 : -INFINITY;
        const float high = slot0 + column + 1 < limit[n] ? c[2 * n + 1] * scale_log2 : -INFINITY;
        if (kRows >= 8 || lane / 4 < kRows) {
          logits[column * kRows + lane / 4 + 8 * n] = low;
          logits[(column + 1) * kRows + lane / 4 + 8 * n] = high;
        }
        accumulate(n, low, high);
      }
    }
  }

  /// out += weights * values, for a unit of values and its `weights`: T [kUnitSlots, 8 * kTiles] at the places where
  /// the logits were.
  __device__ __forceinline__ void value_unit(uint32_t unit, uint32_t weights) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int part = 0; part < kUnitSlots / 8; ++part) {
      const int row = part * 8 + lane % 8;
      uint32_t b[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) b[n] = ldmatrix_x1_trans(weights + row * (kRows * 4) + n * 16);
#pragma unroll
      for (int m = 0; m < D / 32; ++m) {
        uint32_t a[4];
        ldmatrix_x4_trans(a, unit + row * (D * 2) + swizzle_chunk(row, 4 * m + lane / 8) * 16);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma_m16n8k8<T>(out[2 * m][n], a[0], a[1], b[n]);
          mma_m16n8k8<T>(out[2 * m + 1][n], a[2], a[3], b[n]);
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

  __device__ __forceinline__ void accumulate(int n, float low, float high) {
    const float higher = fmaxf(peak[n], fmaxf(low, high));
    const float reference = zero_if_minus_infinity(higher);
    sum[n] = sum[n] * exp2_fast(peak[n] - reference) + exp2_fast(low - reference) + exp2_fast(high - reference);
    peak[n] = higher;
  }
};

}  // namespace skv
