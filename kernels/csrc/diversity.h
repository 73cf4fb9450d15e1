// How unlike the others each key, without its rotation, and each value of a head is.
// Definition: kv_diversity in hf_sparsekv/ops/reference/diversity.py.
//
// Shapes: B request, K KV head, N longest length, D head dim, S splits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "score.h"
#include "types.h"

namespace skv {

/// Keys or values [B, K, N, D]: last dim contiguous, rows 16-byte aligned; strides in elements. Tokens past a
/// request's length are not read.
struct TokenRows {
  const void* data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_token;
};

struct DiversityParams {
  DType dtype;
  int32_t head_dim;    // D: 64 or 128
  int32_t batch;       // B
  int32_t kv_heads;    // K
  int32_t max_length;  // N, an upper bound of lengths
  TokenRows keys;
  TokenRows values;
  const int32_t* lengths;    // [B]
  const float* inv_freq;     // [D / 2], or null: keys are compared as they are
  const int64_t* positions;  // [B, K, N] below 2^24, or null: token j has position j
  int64_t positions_stride_batch;
  int64_t positions_stride_head;
  int64_t positions_stride_token;
  float* diversity;          // [B, K, N]; 0 past the length; holds the keys' part between the kernels
  int64_t diversity_stride_batch;
  int64_t diversity_stride_head;
  // The workspace, keys before values where there is a 2; of S splits, those of a request's own length are used.
  float* directions;         // [2, B, K, S, D]: sums of x / |x|, 16-byte aligned
  float2* moments;           // [2, B, K, S]: sum and sum of squares of what a split adds to `diversity` and `apart`
  float* apart;              // [B, K, N]: the values' part
};

/// S, an upper bound of the splits of any request of up to `max_length` tokens. A request is cut by its own length
/// (`keys_per_split`), so that it gets the same bits in any batch.
constexpr int32_t max_diversity_splits(int32_t max_length) {
  const int32_t units = (max_length + kSplitUnit - 1) / kSplitUnit;
  return units > kMaxKeySplits ? kMaxKeySplits : units;
}

/// fp32 entries of the workspace.
constexpr int64_t diversity_workspace(int64_t batch, int64_t kv_heads, int32_t max_length, int32_t head_dim) {
  return batch * kv_heads * (2LL * max_diversity_splits(max_length) * (head_dim + 2) + max_length);
}

void run_diversity(const DiversityParams& params, cudaStream_t stream);

}  // namespace skv
