// Which positions stay. Reference: `select` and `pool_scores` in hf_sparsekv/ops/reference/select.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace skv {

constexpr int kMaxPoolWidth = 41;

/// The bindings' codes for the reference's "none", "avg", "max", "forward".
enum class Pooling : int32_t { kNone, kAvg, kMax, kForward };

/// One list of scores and how it is pooled.
struct ScoreList {
  const float* scores;  // [B, K, N], last dim contiguous; null: there is no such list
  int64_t stride_request;
  int64_t stride_head;
  Pooling pooling;
  int32_t width;        // odd, 1 to kMaxPoolWidth
};

struct SelectParams {
  int64_t* index;       // [B, K, C] out: kept positions, ascending, then -1
  int64_t index_stride_request;
  int64_t index_stride_head;
  int32_t* count;       // [B] out
  float* retained;      // [B, K, C] out: one score per kept token, then 0
  int64_t retained_stride_request;
  int64_t retained_stride_head;
  ScoreList first;
  ScoreList second;     // optional
  const int32_t* lengths;  // [B]
  const int32_t* budgets;  // [B], each <= C
  int32_t batch;        // B
  int32_t num_heads;    // K
  int32_t num_keys;     // N
  int32_t capacity;     // C
  int32_t num_sinks;
  int32_t num_recent;
  float share;          // of the free places, the part that the first list fills
};

/// Throws when shared memory cannot hold the bookkeeping of a row (N keys: 0.25 bytes each, 0.375 with two lists, and
/// 50 KB; two lists also 8 bytes per kept token). With two lists 131,072 keys fit everywhere; a capacity of 6,000
/// fits on Ada and 20,000 on Hopper.
void run_select(const SelectParams& params, cudaStream_t stream);

}  // namespace skv
