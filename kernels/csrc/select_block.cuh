// Collective steps of one CTA: exclusive scan, radix select, marking the chosen in a bit mask, sorting.
// Part of select.cuh; every function here is called by all threads of the CTA.
#pragma once

#include "select_row.cuh"

namespace skv {
namespace select_detail {

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
static_assert(kBins == 2 * kThreads, "find_digit gives two bins to each thread");

/// Shared memory through which the collective steps talk.
struct Exchange {
  int warp_totals[kWarps];
  uint32_t digit;
  int remaining;
  int in_bin;
  int num_sorted_first;
  int num_sorted_second;
};

/// Which keys are chosen: all >= `low`, and of those equal to `tie` the `num_ties` at the lowest positions.
struct Cut {
  uint32_t low;
  uint32_t tie;
  int num_ties;
};

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

/// Adds one to a bin for each lane with `counts`. Lanes that agree add together: a row of equal scores would
/// otherwise queue 32 deep at one address.
__device__ __forceinline__ void count_digit(int* bins, bool counts, uint32_t digit) {
  const unsigned voters = __ballot_sync(kFullMask, counts);
  if (voters == 0) return;
  const int leader = __ffs(voters) - 1;
  const uint32_t common = __shfl_sync(kFullMask, digit, leader);
  if (__all_sync(kFullMask, !counts || digit == common)) {
    if (threadIdx.x % kWarpSize == leader) atomicAdd(&bins[common], __popc(voters));
  } else if (counts) {
    atomicAdd(&bins[digit], 1);
  }
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

/// The cut that chooses the `k` largest keys, 1 <= k <= number of candidates, in at most three passes.
template <bool kResident>
__device__ Cut radix_select(const RowKeys<kResident>& row_keys, int k, int* bins, Exchange& exchange) {
  uint32_t prefix = 0;
  int shift = 32;
  while (true) {
    const int above_shift = shift;  // bits from here up are decided
    shift = max(shift - kDigitBits, 0);
    const uint32_t mask = (1u << (above_shift - shift)) - 1;
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) bins[bin] = 0;
    __syncthreads();
    row_keys.for_each_tile([&](const uint32_t* tile, int, int size) {
      for (int start = 0; start < size; start += kThreads) {
        const int i = start + threadIdx.x;
        const uint32_t key = i < size ? tile[i] : kNotCandidate;
        const bool counts = key != kNotCandidate && (above_shift == 32 || key >> above_shift == prefix);
        count_digit(bins, counts, key >> shift & mask);
      }
    });
    __syncthreads();
    find_digit(bins, k, exchange);
    prefix = prefix << (above_shift - shift) | exchange.digit;
    k = exchange.remaining;
    if (k == exchange.in_bin) return {prefix << shift, 0, 0};  // the whole bin: no need to look closer
    if (shift == 0) return {prefix + 1, prefix, k};
    __syncthreads();  // the exchange is read before the next pass writes it
  }
}

/// The lowest `count` set bits.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t bits, int count) {
  if (count <= 0) return 0;
  while (__popc(bits) > count) bits ^= 1u << (31 - __clz(bits));
  return bits;
}

/// Sets the bits of the chosen positions. `chosen` and `ties`: shared, one word per 32 positions, written whole.
template <bool kResident>
__device__ void mark(const RowKeys<kResident>& row_keys, const Cut& cut, uint32_t* chosen, uint32_t* ties,
                     Exchange& exchange) {
  row_keys.for_each_tile([&](const uint32_t* tile, int base, int size) {
    for (int start = 0; start < size; start += kThreads) {
      const int i = start + threadIdx.x;
      const uint32_t key = i < size ? tile[i] : kNotCandidate;
      const uint32_t above = __ballot_sync(kFullMask, key != kNotCandidate && key >= cut.low);
      const uint32_t equal = __ballot_sync(kFullMask, cut.num_ties > 0 && key == cut.tie);
      if (i % kWarpSize == 0 && i < size) {
        chosen[(base + i) / kWarpSize] = above;
        ties[(base + i) / kWarpSize] = equal;
      }
    }
  });
  __syncthreads();
  if (cut.num_ties == 0) return;
  const int num_words = ceil_div(row_keys.row.n, kWarpSize);
  int before_chunk = 0;
  for (int start = 0; start < num_words; start += kThreads) {
    const int word = start + threadIdx.x;
    const uint32_t equal = word < num_words ? ties[word] : 0;
    int total;
    const int before = before_chunk + exclusive_scan(__popc(equal), exchange, total);
    if (equal != 0) chosen[word] |= lowest_bits(equal, cut.num_ties - before);
    before_chunk += total;
  }
  __syncthreads();
}

/// Sorts values[0 .. length) in shared memory, largest first. Bitonic with a mirrored first step, so that every
/// exchange goes one way and the places past `length` need no padding.
template <typename Key>
__device__ void sort_descending(Key* values, int length) {
  for (int size = 2; size / 2 < length; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const bool is_mirrored = stride == size / 2;
      for (int pair = threadIdx.x;; pair += kThreads) {
        const int block = pair / stride;
        const int low = 2 * stride * block + pair % stride;
        if (low >= length) break;
        const int high = is_mirrored ? 2 * stride * (block + 1) - 1 - pair % stride : low + stride;
        if (high < length && values[low] < values[high]) {
          const Key larger = values[high];
          values[high] = values[low];
          values[low] = larger;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace select_detail
}  // namespace skv
