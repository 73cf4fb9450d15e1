// Collective steps of one CTA: exclusive scan, radix select, marking the chosen in a bit mask, sorting.
// Part of select.cuh; every function here is called by all threads of the CTA.
#pragma once

#include "select_row.cuh"

namespace skv {
namespace select_detail {

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
static_assert(kBins == 2 * kThreads, "find_digit gives two bins to each thread");

constexpr int kMaxListed = 128;

/// Shared memory through which the collective steps talk.
struct Exchange {
  int warp_totals[kWarps];
  KeyRange warp_ranges[kWarps];
  uint32_t digit;
  int remaining;
  int in_bin;
  int num_listed;
  int num_sorted_first;
  int num_sorted_second;
};

/// Which keys are chosen: all above `range`, and `remaining` of the `in_range` keys inside it.
struct Cut {
  KeyRange range;
  int remaining;
  int in_range;
};

/// Sorts by key, of equal keys the lower position first.
__device__ __forceinline__ uint64_t ranked_key(uint32_t key, int position) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~position);
}

__device__ __forceinline__ int ranked_position(uint64_t ranked) {
  return static_cast<int>(~static_cast<uint32_t>(ranked));
}

/// Sum of `value` over the threads before this one; `total` gets the sum over all.
__device__ __forceinline__ int exclusive_scan(int value, Exchange& exchange, int& total) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int before = __shfl_up_sync(kFullMask, inclusive, offset);
    if (lane >= offset) inclusive += before;
  }
  if (lane == kWarpSize - 1) exchange.warp_totals[warp] = inclusive;
  __syncthreads();
  const int of_warp = exchange.warp_totals[lane];  // kWarps == 32 lanes
  const int before = __reduce_add_sync(kFullMask, lane < warp ? of_warp : 0);
  total = __reduce_add_sync(kFullMask, of_warp);
  __syncthreads();  // the totals may be overwritten from here on
  return before + inclusive - value;
}

/// The CTA's range from those of its threads.
__device__ __forceinline__ KeyRange merge_ranges(KeyRange range, Exchange& exchange) {
  const int lane = threadIdx.x % kWarpSize;
  range = {__reduce_min_sync(kFullMask, range.low), __reduce_max_sync(kFullMask, range.high)};
  if (lane == 0) exchange.warp_ranges[threadIdx.x / kWarpSize] = range;
  __syncthreads();
  range = exchange.warp_ranges[lane];  // kWarps == 32 lanes
  return {__reduce_min_sync(kFullMask, range.low), __reduce_max_sync(kFullMask, range.high)};
}

/// The bin in which the k-th largest lies (exchange.digit), how many of that bin belong to the k largest
/// (exchange.remaining) and how many it holds (exchange.in_bin).
__device__ __forceinline__ void find_digit(const int* bins, int k, Exchange& exchange) {
  const int high = kBins - 1 - 2 * threadIdx.x;
  const int in_high = bins[high];
  const int in_low = bins[high - 1];
  int total;
  const int above = exclusive_scan(in_high + in_low, exchange, total);
  if (above < k && k <= above + in_high + in_low) {
    const bool is_high = k <= above + in_high;
    exchange.digit = is_high ? high : high - 1;
    exchange.remaining = k - above - (is_high ? 0 : in_high);
    exchange.in_bin = is_high ? in_high : in_low;
  }
  __syncthreads();
}

/// The cut that chooses the `k` largest keys, 1 <= k <= number of candidates. The first pass spreads the bins over
/// the keys that there are, not over all floats; so one pass mostly leaves few enough keys to be ranked one by one.
template <bool kResident>
__device__ Cut radix_select(const RowKeys<kResident>& row_keys, KeyRange range, int k, int* bins, Exchange& exchange) {
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) bins[bin] = 0;
  if constexpr (kResident) range = merge_ranges(range, exchange);
  if (threadIdx.x == 0) exchange.num_listed = 0;
  while (true) {
    const int shift = max(kWarpSize - __clz(range.high - range.low) - kDigitBits, 0);
    __syncthreads();
    row_keys.for_each_tile([&](const uint32_t* tile, int base, int size) {
#pragma unroll 5
      for (int i = threadIdx.x; i < size; i += kThreads) {
        const uint32_t above_low = tile[i] - range.low;
        if (above_low <= range.high - range.low && row_keys.is_candidate(base + i)) {
          atomicAdd(&bins[above_low >> shift], 1);
        }
      }
    });
    __syncthreads();
    find_digit(bins, k, exchange);
    k = exchange.remaining;
    range.low += exchange.digit << shift;
    range.high = range.low + min(range.high - range.low, (1u << shift) - 1);
    const int in_bin = exchange.in_bin;
    if (k == in_bin || in_bin <= kMaxListed || range.low == range.high) return {range, k, in_bin};
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) bins[bin] = 0;
  }
}

/// The lowest `count` set bits.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t bits, int count) {
  if (count <= 0) return 0;
  while (__popc(bits) > count) bits ^= 1u << (31 - __clz(bits));
  return bits;
}

/// Chooses `count` of the equal keys in `ties`, lower positions first.
__device__ inline void choose_ties(int num_words, int count, const uint32_t* ties, uint32_t* chosen,
                                   Exchange& exchange) {
  int before_chunk = 0;
  for (int start = 0; start < num_words; start += kThreads) {
    const int word = start + threadIdx.x;
    const uint32_t equal = word < num_words ? ties[word] : 0;
    int total;
    const int before = before_chunk + exclusive_scan(__popc(equal), exchange, total);
    if (equal != 0) chosen[word] |= lowest_bits(equal, count - before);
    before_chunk += total;
  }
  __syncthreads();
}

/// Chooses the `count` largest of at most kMaxListed keys by comparing each with all.
__device__ inline void choose_listed(const uint64_t* listed, int num_listed, int count, uint32_t* chosen) {
  if (threadIdx.x < num_listed) {
    const uint64_t own = listed[threadIdx.x];
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < num_listed; ++i) rank += listed[i] > own ? 1 : 0;
    const int position = ranked_position(own);
    if (rank < count) atomicOr(&chosen[position / kWarpSize], 1u << (position % kWarpSize));
  }
  __syncthreads();
}

/// Sets the bits of the chosen positions. `chosen` and `ties`: shared, one word per 32 positions, written whole.
/// `listed`: shared [kMaxListed].
template <bool kResident>
__device__ void mark(const RowKeys<kResident>& row_keys, const Cut& cut, uint32_t* chosen, uint32_t* ties,
                     uint64_t* listed, Exchange& exchange) {
  const bool takes_all = cut.remaining == cut.in_range;
  const bool lists = !takes_all && cut.in_range <= kMaxListed;
  const bool notes_ties = !takes_all && !lists;
  row_keys.for_each_tile([&](const uint32_t* tile, int base, int size) {
#pragma unroll 5
    for (int start = 0; start < size; start += kThreads) {
      const int i = start + threadIdx.x;
      const uint32_t key = i < size ? tile[i] : 0;
      const bool reaches = i < size && key >= cut.range.low && row_keys.is_candidate(base + i);
      const bool is_above = reaches && (takes_all || key > cut.range.high);
      const uint32_t above = __ballot_sync(kFullMask, is_above);
      const uint32_t equal = notes_ties ? __ballot_sync(kFullMask, reaches && !is_above) : 0;
      if (i % kWarpSize == 0 && i < size) {
        chosen[(base + i) / kWarpSize] = above;
        if (notes_ties) ties[(base + i) / kWarpSize] = equal;
      }
      if (lists && reaches && !is_above) listed[atomicAdd(&exchange.num_listed, 1)] = ranked_key(key, base + i);
    }
  });
  __syncthreads();
  if (notes_ties) choose_ties(ceil_div(row_keys.row.n, kWarpSize), cut.remaining, ties, chosen, exchange);
  if (lists) choose_listed(listed, cut.in_range, cut.remaining, chosen);
}

/// One step of a descending sort by `num_threads` threads, of which this is `thread`; see sort_descending.
template <typename Key>
__device__ __forceinline__ void exchange_pairs(
    Key* values, int length, int log_stride, bool is_mirrored, int thread, int num_threads) {
  const int stride = 1 << log_stride;
  for (int pair = thread;; pair += num_threads) {
    const int offset = pair & (stride - 1);
    const int low = ((pair >> log_stride) << (log_stride + 1)) + offset;
    if (low >= length) return;
    const int high = is_mirrored ? low - offset + 2 * stride - 1 - offset : low + stride;
    if (high >= length) continue;
    const Key first = values[low];
    const Key second = values[high];
    if (first < second) {
      values[low] = second;
      values[high] = first;
    }
  }
}

/// Sorts two lists in shared memory at once, largest first, each by half of the threads. Bitonic with a mirrored first
/// step, so that every exchange goes one way and the places past a list's end need no padding.
template <typename KeyA, typename KeyB>
__device__ void sort_descending(KeyA* a, int length_a, KeyB* b, int length_b) {
  constexpr int kHalf = kThreads / 2;
  const int length = max(length_a, length_b);
  for (int log_size = 1; (1 << (log_size - 1)) < length; ++log_size) {
    for (int log_stride = log_size - 1; log_stride >= 0; --log_stride) {
      const bool is_mirrored = log_stride == log_size - 1;
      const int log_next = log_stride > 0 ? log_stride - 1 : log_size;
      if (threadIdx.x < kHalf) {
        exchange_pairs(a, length_a, log_stride, is_mirrored, threadIdx.x, kHalf);
      } else {
        exchange_pairs(b, length_b, log_stride, is_mirrored, threadIdx.x - kHalf, kHalf);
      }
      // 32 pairs at strides up to 32 are 64 neighbours, which one warp keeps for itself.
      if (log_stride > 5 || log_next > 5) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

}  // namespace select_detail
}  // namespace skv
