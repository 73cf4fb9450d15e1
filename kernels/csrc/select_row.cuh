// The pooled scores of one row as sortable keys: staged through shared memory tile by tile, kept there when they fit.
// Part of select.cuh; every function here is called by all threads of the CTA unless it says otherwise.
#pragma once

#include "common.cuh"
#include "select.h"

namespace skv {
namespace select_detail {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kRun = 5;                   // neighbours pooled by one thread; odd, so that lanes hit 32 banks
constexpr int kTile = kThreads * kRun;    // positions per tile; a multiple of 32
constexpr int kStage = kTile + kMaxPoolWidth - 1;

/// A row of scores and the window [j - left, j + right] that position j takes its value from.
struct PooledRow {
  const float* scores;  // [n]
  int n;
  int left;
  int right;
  bool is_avg;

  __device__ PooledRow(const ScoreList& list, int64_t request, int64_t head, int length)
      : scores(list.scores + request * list.stride_request + head * list.stride_head), n(length) {
    const int width = list.pooling == Pooling::kNone ? 1 : list.width;
    is_avg = list.pooling == Pooling::kAvg;
    left = list.pooling == Pooling::kForward ? width - 1 : width / 2;
    right = list.pooling == Pooling::kForward ? 0 : width / 2;
  }

  /// What a score outside the row counts as.
  __device__ float neutral() const { return is_avg ? 0.0f : -INFINITY; }

  /// A window's value from its sum or maximum; the window is cut at the row's ends, not padded.
  __device__ float finish(float combined, int j) const {
    if (!is_avg) return combined;
    return combined / static_cast<float>(min(j + right, n - 1) - max(j - left, 0) + 1);
  }

  /// One position's pooled score straight from memory. Adds in the order of `pool_run`, so both give the same bits.
  __device__ float at(int j) const {
    float combined = neutral();
    const int last = min(j + right, n - 1);
#pragma unroll 4
    for (int i = max(j - left, 0); i <= last; ++i) {
      combined = is_avg ? combined + scores[i] : fmaxf(combined, scores[i]);
    }
    return finish(combined, j);
  }
};

/// Combines raw[r .. r + width - 1] into combined[r] for kRun neighbours, each from left to right: `width` + 4 loads
/// where separate windows would take 5 * `width`, and no subtraction that would lose digits. Per thread.
template <bool kAvg>
__device__ __forceinline__ void pool_run(const float* raw, int width, float (&combined)[kRun]) {
  const auto add = [](float a, float b) { return kAvg ? a + b : fmaxf(a, b); };
  if (width < kRun) {
    for (int i = 0; i < width; ++i) {
#pragma unroll
      for (int r = 0; r < kRun; ++r) combined[r] = add(combined[r], raw[r + i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRun - 1; ++i) {
    const float value = raw[i];
#pragma unroll
    for (int r = 0; r <= i; ++r) combined[r] = add(combined[r], value);
  }
  for (int i = kRun - 1; i < width; ++i) {
    const float value = raw[i];
#pragma unroll
    for (int r = 0; r < kRun; ++r) combined[r] = add(combined[r], value);
  }
#pragma unroll
  for (int i = 0; i < kRun - 1; ++i) {
    const float value = raw[width + i];
#pragma unroll
    for (int r = i + 1; r < kRun; ++r) combined[r] = add(combined[r], value);
  }
}

/// A range of keys, both ends included.
struct KeyRange {
  uint32_t low;
  uint32_t high;

  __device__ __forceinline__ void add(uint32_t key) {
    low = min(low, key);
    high = max(high, key);
  }
};

/// The row's keys, `order_key` of every pooled score, and which positions may be chosen.
/// Resident: all of them stay in shared memory. Else one tile does, and every pass pools the row again.
template <bool kResident>
struct RowKeys {
  PooledRow row;
  int candidates_begin;
  int num_candidates;
  const uint32_t* excluded;  // bit per position, or null
  float* raw;                // shared [kStage]
  uint32_t* keys;            // shared [n] or [kTile]

  __device__ __forceinline__ bool is_candidate(int j) const {
    const bool inside = static_cast<uint32_t>(j - candidates_begin) < static_cast<uint32_t>(num_candidates);
    return inside && (excluded == nullptr || (excluded[j / kWarpSize] >> (j % kWarpSize) & 1u) == 0);
  }

  /// Fills a tile; `range` grows by this thread's candidates.
  __device__ void load_tile(int base, uint32_t* tile, KeyRange& range) const {
    const int size = min(kTile, row.n - base);
    const int staged = size + row.left + row.right;
#pragma unroll 5
    for (int s = threadIdx.x; s < staged; s += kThreads) {
      const int i = base - row.left + s;
      raw[s] = i >= 0 && i < row.n ? __ldg(row.scores + i) : row.neutral();
    }
    __syncthreads();
    const int start = threadIdx.x * kRun;
    if (start < size) {
      float combined[kRun];
#pragma unroll
      for (int r = 0; r < kRun; ++r) combined[r] = row.neutral();
      const int width = row.left + row.right + 1;
      row.is_avg ? pool_run<true>(raw + start, width, combined) : pool_run<false>(raw + start, width, combined);
#pragma unroll
      for (int r = 0; r < kRun; ++r) {
        const int j = base + start + r;
        if (start + r >= size) continue;
        const uint32_t key = order_key(row.finish(combined[r], j));
        tile[start + r] = key;
        if (is_candidate(j)) range.add(key);
      }
    }
    __syncthreads();
  }

  /// Once, before the passes. Gives a range that holds this thread's candidates: the closer, the fewer passes.
  __device__ KeyRange prepare() const {
    if constexpr (!kResident) return {0, ~0u};
    KeyRange range{~0u, 0};
    for (int base = 0; base < row.n; base += kTile) load_tile(base, keys + base, range);
    return range;
  }

  /// visit(tile, base, size) with keys of positions base .. base + size - 1; base is a multiple of 32.
  template <typename Visit>
  __device__ void for_each_tile(Visit visit) const {
    if constexpr (kResident) {
      visit(static_cast<const uint32_t*>(keys), 0, row.n);
    } else {
      KeyRange unused{~0u, 0};
      for (int base = 0; base < row.n; base += kTile) {
        load_tile(base, keys, unused);
        visit(static_cast<const uint32_t*>(keys), base, min(kTile, row.n - base));
        __syncthreads();
      }
    }
  }
};

}  // namespace select_detail
}  // namespace skv
