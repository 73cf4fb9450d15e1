// select: pooled scores and a budget decide which positions of a row stay.
//
// Grid: (K, B), one CTA of 1024 threads per row (request, KV head). Steps: pool the scores in the load, find the bin
// of the k-th largest with a histogram of the order-preserving keys (11 bits at a time), rank the few keys of that bin,
// mark the chosen in a bit mask with ties going to lower positions, scan the mask, write the kept positions in
// ascending order.
// Bytes per row: 4 * n read (again in every pass when the row does not fit in shared memory), 12 * C written.
// Accumulators: fp32 window sums, added left to right. PyTorch adds a window in another order, so two pooled
// averages within a few units in the last place of each other may rank the other way round here; max pooling is exact.
// Integer atomics only, on counts and on unordered lists that are sorted afterwards: results are deterministic.
// Reference: `select` in hf_sparsekv/ops/reference/select.py.
#pragma once

#include "compact_chain.cuh"
#include "select_block.cuh"

namespace skv {
namespace select_detail {

/// How shared memory is laid out: masks, keys that stay, then what the passes need, whose place the lists that are
/// sorted at the end take.
struct Layout {
  int num_words;         // of a bit mask, even
  int num_keys;          // in one buffer of keys, even
  int num_key_buffers;   // that stay: one per list, or one for both in turn, or none
  bool has_second;
  int capacity;

  __host__ __device__ size_t masks_bytes() const { return size_t{4} * num_words * (has_second ? 3 : 2); }
  __host__ __device__ size_t keys_bytes() const { return size_t{4} * num_keys * num_key_buffers; }
  __host__ __device__ size_t passes_bytes() const {
    return size_t{8} * kMaxListed + size_t{4} * (size_t{kBins} + kStage + (num_key_buffers == 0 ? kTile : 0));
  }
  __host__ __device__ size_t lists_bytes() const { return has_second ? size_t{8} * capacity : 0; }
  __host__ __device__ size_t bytes() const {
    return masks_bytes() + keys_bytes() + (passes_bytes() > lists_bytes() ? passes_bytes() : lists_bytes());
  }
};

/// What the passes over one list share, all of it in shared memory.
struct Scratch {
  uint64_t* listed;  // [kMaxListed]
  int* bins;         // [kBins]
  float* raw;        // [kStage]
  uint32_t* tile;    // [kTile], if no keys stay

  __device__ explicit Scratch(uint32_t* memory)
      : listed(reinterpret_cast<uint64_t*>(memory)),
        bins(reinterpret_cast<int*>(listed + kMaxListed)),
        raw(reinterpret_cast<float*>(bins + kBins)),
        tile(reinterpret_cast<uint32_t*>(raw + kStage)) {}
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

/// Chooses `count` candidates of one list into `chosen`; the list's keys stay in `keys` if kResident.
template <bool kResident>
__device__ void choose(const Row& row, const PooledRow& pooled, int count, const uint32_t* excluded, uint32_t* chosen,
                       uint32_t* keys, const Scratch& scratch, Exchange& exchange) {
  uint32_t* ties = reinterpret_cast<uint32_t*>(row.kept_before);
  const RowKeys<kResident> row_keys{
      pooled, row.begin, row.end - row.begin, excluded, scratch.raw, kResident ? keys : scratch.tile};
  const KeyRange range = row_keys.prepare();
  if (count == 0) {
    for (int word = threadIdx.x; word < row.num_words(); word += kThreads) chosen[word] = 0;
    __syncthreads();
    return;
  }
  const Cut cut = radix_select(row_keys, range, count, scratch.bins, exchange);
  mark(row_keys, cut, chosen, ties, scratch.listed, exchange);
}

/// Where a list's pooled scores come from once the passes are over: its keys, if they stayed, else memory.
struct ScoreSource {
  PooledRow pooled;
  const uint32_t* keys;  // shared, or null

  __device__ uint32_t key(int position) const {
    return keys != nullptr ? keys[position] : order_key(pooled.at(position));
  }
  __device__ float value(int position) const {
    return keys != nullptr ? order_value(keys[position]) : pooled.at(position);
  }
};

/// Kept positions in ascending order and their scores; `borrows`: not the scores of what the second list chose.
__device__ inline void write_kept(const Row& row, const ScoreSource& scores, bool borrows, int64_t* index,
                                  float* retained, Exchange& exchange) {
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
  // Lane l looks up the l-th of the warp's next 32 words; then all lanes write out one after the other.
  const int lane = threadIdx.x % kWarpSize;
  for (int start = threadIdx.x / kWarpSize; start < row.num_words(); start += kThreads) {
    const int own_word = start + lane * kWarps;
    const bool exists = own_word < row.num_words();
    const uint32_t own_kept = exists ? row.kept_word(own_word) : 0;
    const int own_before = exists ? row.kept_before[own_word] : 0;
    const int num_turns = min(kWarpSize, ceil_div(row.num_words() - start, kWarps));
#pragma unroll 4
    for (int turn = 0; turn < num_turns; ++turn) {
      const uint32_t kept = __shfl_sync(kFullMask, own_kept, turn);
      const int place = __shfl_sync(kFullMask, own_before, turn) + __popc(kept & ((1u << lane) - 1));
      if ((kept >> lane & 1u) == 0 || place >= row.num_kept) continue;
      const int position = (start + turn * kWarps) * kWarpSize + lane;
      index[place] = position;
      if (!borrows || !has_bit(row.second, position)) retained[place] = scores.value(position);
    }
  }
}

/// The warp's places in a list that `counter` fills, one for each bit of `word`; this lane's comes back.
__device__ __forceinline__ int take_places(uint32_t word, int& counter) {
  const int lane = threadIdx.x % kWarpSize;
  int first = 0;
  if (lane == 0 && word != 0) first = atomicAdd(&counter, __popc(word));
  return __shfl_sync(kFullMask, first, 0) + __popc(word & Row::bits_below(lane));
}

/// Retained scores of the tokens that the second list chose: rank r of m takes the first list's chosen score of
/// the same relative rank. `lists`: shared, not part of any keys.
__device__ inline void write_borrowed(const Row& row, const ScoreSource& first, const ScoreSource& second,
                                      float* retained, uint32_t* lists, Exchange& exchange) {
  uint64_t* by_second = reinterpret_cast<uint64_t*>(lists);                         // [num_second]
  uint32_t* by_first = reinterpret_cast<uint32_t*>(by_second + row.num_second);     // [num_first]
  if (threadIdx.x == 0) exchange.num_sorted_first = exchange.num_sorted_second = 0;
  __syncthreads();
  const int lane = threadIdx.x % kWarpSize;
  for (int word = threadIdx.x / kWarpSize; word < row.num_words(); word += kWarps) {
    const int position = word * kWarpSize + lane;
    const int first_place = take_places(row.first[word], exchange.num_sorted_first);
    const int second_place = take_places(row.second[word], exchange.num_sorted_second);
    if (has_bit(row.first, position)) by_first[first_place] = first.key(position);
    if (has_bit(row.second, position)) by_second[second_place] = ranked_key(second.key(position), position);
  }
  __syncthreads();
  sort_descending(by_first, row.num_first, by_second, row.num_second);
  for (int rank = threadIdx.x; rank < row.num_second; rank += kThreads) {
    // The lists fit in shared memory: the product stays below 2^31.
    const int twin = rank * row.num_first / row.num_second;
    retained[row.place(ranked_position(by_second[rank]))] = order_value(by_first[twin]);
  }
}

template <bool kResident, bool kHasSecond>
__global__ void __launch_bounds__(kThreads) select_kernel(const SelectParams p, const Layout layout) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ Exchange exchange;
  allow_next_kernel();
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
  uint32_t* keys = shared + layout.masks_bytes() / 4;
  uint32_t* second_keys = keys + (layout.num_key_buffers == 2 ? layout.num_keys : 0);
  uint32_t* rest = keys + layout.keys_bytes() / 4;
  const Scratch scratch(rest);
  choose<kResident>(row, pooled, row.num_first, nullptr, row.first, keys, scratch, exchange);
  const bool first_stays = kResident && (!kHasSecond || layout.num_key_buffers == 2);
  const ScoreSource first{pooled, first_stays ? keys : nullptr};
  if constexpr (kHasSecond) {
    const PooledRow pooled_second(p.second, row.request, row.head, row.n);
    const ScoreSource second{pooled_second, kResident ? second_keys : nullptr};
    choose<kResident>(row, pooled_second, row.num_second, row.first, row.second, second_keys, scratch, exchange);
    const bool borrows = row.num_first > 0 && row.num_second > 0;
    write_kept(row, first, borrows, index, retained, exchange);
    if (borrows) write_borrowed(row, first, second, retained, rest, exchange);
  } else {
    write_kept(row, first, false, index, retained, exchange);
  }
}

}  // namespace select_detail
}  // namespace skv
