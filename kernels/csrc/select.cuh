// select: pooled scores and a budget decide which positions of a row stay.
//
// Grid: (K, B), one CTA of 1024 threads per row (request, KV head). Steps: pool the scores in the load, find the
// k-th largest by radix select (11 + 11 + 10 bits of order-preserving keys), mark the chosen in a bit mask with ties
// going to lower positions, scan the mask, write the kept positions in ascending order.
// Bytes per row: 4 * n read (again in every pass when the row does not fit in shared memory), 12 * C written.
// Accumulators: fp32 window sums, added left to right. PyTorch adds a window in another order, so two pooled
// averages within a few units in the last place of each other may rank the other way round here; max pooling is exact.
// Integer atomics only, on counts and on unordered lists that are sorted afterwards: results are deterministic.
// Reference: `select` in hf_sparsekv/ops/reference/select.py.
#pragma once

#include "select_block.cuh"

namespace skv {
namespace select_detail {

/// How shared memory is laid out. The lists that are sorted at the end take the place of keys, stage and bins.
struct Layout {
  int num_words;   // of a bit mask, even
  int num_keys;    // kept in shared memory at once
  bool has_second;
  int capacity;

  __host__ __device__ size_t masks_bytes() const { return size_t{4} * num_words * (has_second ? 3 : 2); }
  __host__ __device__ size_t passes_bytes() const {
    return size_t{4} * (size_t{kBins} + kStage + num_keys);
  }
  __host__ __device__ size_t lists_bytes() const { return has_second ? size_t{8} * capacity : 0; }
  __host__ __device__ size_t bytes() const {
    return masks_bytes() + (passes_bytes() > lists_bytes() ? passes_bytes() : lists_bytes());
  }
};

/// One CTA's row: what is forced, how many places are free, and the masks of what is chosen.
struct Row {
  int64_t request;
  int64_t head;
  int n;             // tokens
  int num_kept;      // min(n, budget)
  int begin;         // candidates are [begin, end); everything before and after is forced
  int end;
  int num_first;     // places filled by the first list
  int num_second;
  uint32_t* first;   // shared masks, one bit per position
  uint32_t* second;  // null without a second list
  int* kept_before;  // shared: kept positions before each word; until they are known, the mask of ties

  __device__ int num_words() const { return ceil_div(n, kWarpSize); }

  __device__ uint32_t kept_word(int word) const {
    const int base = word * kWarpSize;
    uint32_t kept = first[word] | (second != nullptr ? second[word] : 0);
    kept |= bits_below(begin - base);
    kept |= bits_below(n - base) & ~bits_below(end - base);
    return kept;
  }

  /// Place in the output of a kept position.
  __device__ int place(int position) const {
    const int word = position / kWarpSize;
    return kept_before[word] + __popc(kept_word(word) & bits_below(position % kWarpSize));
  }

  static __device__ uint32_t bits_below(int count) {
    if (count <= 0) return 0;
    return count >= kWarpSize ? kFullMask : (1u << count) - 1;
  }
};

__device__ inline bool has_bit(const uint32_t* mask, int position) {
  return (mask[position / kWarpSize] >> (position % kWarpSize) & 1u) != 0;
}

__device__ inline Row describe_row(const SelectParams& p) {
  Row row{};
  row.head = blockIdx.x;
  row.request = blockIdx.y;
  row.n = min(max(p.lengths[row.request], 0), p.num_keys);
  row.num_kept = min(row.n, min(max(p.budgets[row.request], 0), p.capacity));
  row.begin = min(p.num_sinks, row.n);
  row.end = max(row.n - p.num_recent, row.begin);
  const int num_candidates = row.end - row.begin;
  const int num_free = min(max(row.num_kept - (row.n - num_candidates), 0), num_candidates);
  // The product in fp32, as PyTorch multiplies an integer tensor by a number.
  row.num_first = p.second.scores == nullptr ? num_free : static_cast<int>(floorf(num_free * p.share));
  row.num_second = num_free - row.num_first;
  return row;
}

/// Chooses `count` candidates of one list into `chosen`.
template <bool kResident>
__device__ void choose(const Row& row, const ScoreList& list, int count, const uint32_t* excluded, uint32_t* chosen,
                       uint32_t* scratch, Exchange& exchange) {
  uint32_t* ties = reinterpret_cast<uint32_t*>(row.kept_before);
  int* bins = reinterpret_cast<int*>(scratch);
  float* raw = reinterpret_cast<float*>(bins + kBins);
  uint32_t* keys = reinterpret_cast<uint32_t*>(raw + kStage);
  if (count == 0) {
    for (int word = threadIdx.x; word < row.num_words(); word += kThreads) chosen[word] = 0;
    __syncthreads();
    return;
  }
  const PooledRow pooled(list, row.request, row.head, row.n);
  const RowKeys<kResident> row_keys{pooled, row.begin, row.end, excluded, raw, keys};
  row_keys.prepare();
  const Cut cut = radix_select(row_keys, count, bins, exchange);
  mark(row_keys, cut, chosen, ties, exchange);
}

/// Positions in ascending order: row.kept_before, then every kept position to its place.
__device__ inline void write_index(const Row& row, int64_t* index, Exchange& exchange) {
  int before_chunk = 0;
  for (int start = 0; start < row.num_words(); start += kThreads) {
    const int word = start + threadIdx.x;
    int total;
    const int kept = word < row.num_words() ? __popc(row.kept_word(word)) : 0;
    const int before = before_chunk + exclusive_scan(kept, exchange, total);
    if (word < row.num_words()) row.kept_before[word] = before;
    before_chunk += total;
  }
  __syncthreads();
  for (int position = threadIdx.x; position < row.n; position += kThreads) {
    const uint32_t kept = row.kept_word(position / kWarpSize);
    if ((kept >> (position % kWarpSize) & 1u) == 0) continue;
    const int place = row.place(position);
    if (place < row.num_kept) index[place] = position;
  }
}

/// Retained scores of the tokens that the second list chose: rank r of m takes the first list's chosen score of
/// the same relative rank.
__device__ inline void write_borrowed(const SelectParams& p, const Row& row, const int64_t* index, float* retained,
                                      uint32_t* scratch, Exchange& exchange) {
  uint64_t* by_second = reinterpret_cast<uint64_t*>(scratch);                       // [num_second]
  uint32_t* by_first = reinterpret_cast<uint32_t*>(by_second + row.num_second);     // [num_first]
  const PooledRow first(p.first, row.request, row.head, row.n);
  const PooledRow second(p.second, row.request, row.head, row.n);
  if (threadIdx.x == 0) exchange.num_sorted_first = exchange.num_sorted_second = 0;
  __syncthreads();
  for (int place = threadIdx.x; place < row.num_kept; place += kThreads) {
    const int position = static_cast<int>(index[place]);
    if (has_bit(row.first, position)) {
      by_first[atomicAdd(&exchange.num_sorted_first, 1)] = order_key(first.at(position));
    } else if (has_bit(row.second, position)) {
      // Descending order of the complement puts the lower of two equal positions first.
      const uint64_t key = static_cast<uint64_t>(order_key(second.at(position))) << 32;
      by_second[atomicAdd(&exchange.num_sorted_second, 1)] = key | static_cast<uint32_t>(~position);
    }
  }
  __syncthreads();
  sort_descending(by_first, row.num_first);
  sort_descending(by_second, row.num_second);
  for (int rank = threadIdx.x; rank < row.num_second; rank += kThreads) {
    const int position = static_cast<int>(~static_cast<uint32_t>(by_second[rank]));
    const int64_t twin = static_cast<int64_t>(rank) * row.num_first / row.num_second;
    retained[row.place(position)] = order_value(by_first[twin]);
  }
}

template <bool kResident, bool kHasSecond>
__global__ void __launch_bounds__(kThreads) select_kernel(const SelectParams p, const Layout layout) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ Exchange exchange;
  Row row = describe_row(p);
  int64_t* index = p.index + row.request * p.index_stride_request + row.head * p.index_stride_head;
  float* retained = p.retained + row.request * p.retained_stride_request + row.head * p.retained_stride_head;
  if (row.head == 0 && threadIdx.x == 0) p.count[row.request] = row.num_kept;
  for (int place = row.num_kept + threadIdx.x; place < p.capacity; place += kThreads) {
    index[place] = -1;
    retained[place] = 0.0f;
  }
  const PooledRow pooled(p.first, row.request, row.head, row.n);
  if (row.num_kept == row.n) {  // nothing is evicted
    for (int place = threadIdx.x; place < row.n; place += kThreads) {
      index[place] = place;
      retained[place] = pooled.at(place);
    }
    return;
  }

  row.first = shared;
  row.kept_before = reinterpret_cast<int*>(shared + layout.num_words);
  row.second = kHasSecond ? shared + 2 * layout.num_words : nullptr;
  uint32_t* scratch = shared + layout.masks_bytes() / 4;
  choose<kResident>(row, p.first, row.num_first, nullptr, row.first, scratch, exchange);
  if constexpr (kHasSecond) {
    choose<kResident>(row, p.second, row.num_second, row.first, row.second, scratch, exchange);
  }
  write_index(row, index, exchange);
  __syncthreads();  // makes this CTA's index visible to all its threads
  const bool borrows = kHasSecond && row.num_first > 0 && row.num_second > 0;
  for (int place = threadIdx.x; place < row.num_kept; place += kThreads) {
    const int position = static_cast<int>(index[place]);
    if (borrows && has_bit(row.second, position)) continue;
    retained[place] = pooled.at(position);
  }
  if constexpr (kHasSecond) {
    if (borrows) write_borrowed(p, row, index, retained, scratch, exchange);
  }
}

}  // namespace select_detail
}  // namespace skv
