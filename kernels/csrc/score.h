// Scoring of keys by the last query rows of each request, the LSE of those rows, and the mean key direction.
// Definition: hf_sparsekv/ops/reference/score.py.
//
// Shapes: B request, H query head, K KV head, G = H / K, A scored query rows, N longest length, D head dim.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "types.h"

namespace skv {

/// The last A queries of each request, right-aligned; rows that do not exist (A > length) may hold anything.
struct QueryRows {
  const void* data;      // bf16 or fp16 [B, H, A, D], last dim contiguous, rows 16-byte aligned
  int64_t stride_batch;  // in elements
  int64_t stride_head;
  int64_t stride_row;
};

/// What the three ops share.
struct WindowShape {
  DType dtype;
  int32_t head_dim;    // D: 64 or 128
  int32_t batch;       // B
  int32_t kv_heads;    // K
  int32_t group;       // G
  int32_t num_rows;    // A; unused by key_anchor
  int32_t max_length;  // N, an upper bound of lengths
};

struct ScoreParams {
  WindowShape shape;
  QueryRows q;
  PoolView<void> k;
  const int32_t* lengths;    // [B]
  const float* lse;          // [B, H, A], natural log
  int64_t lse_stride_batch;
  int64_t lse_stride_head;
  int64_t lse_stride_row;
  const float* value_norm;   // [B, K, N] or null
  int64_t norm_stride_batch;
  int64_t norm_stride_head;
  const float* anchor;       // [B, K, D] contiguous, or null
  float* score;              // [B, K, N]; 0 at and past the length
  int64_t score_stride_batch;
  int64_t score_stride_head;
  float* cosine;             // [B, K, N], null without anchor; 0 past the length
  int64_t cosine_stride_batch;
  int64_t cosine_stride_head;
  float scale_log2;          // factor on the logits, times log2(e)
  bool row_max;              // rows: max instead of mean
  bool group_max;            // query heads of a KV head: max instead of mean
};

struct LseTailParams {
  WindowShape shape;
  QueryRows q;
  PoolView<void> k;
  const int32_t* lengths;  // [B]
  float* lse;              // [B, H, A], natural log; -inf for rows that do not exist
  int64_t lse_stride_batch;
  int64_t lse_stride_head;
  int64_t lse_stride_row;
  float2* workspace;       // [B, H, A, num_key_splits(N)]: (largest logit * log2(e), sum of exponentials above it)
  float scale_log2;
};

struct KeyAnchorParams {
  WindowShape shape;
  PoolView<void> k;
  const int32_t* lengths;  // [B]
  float* anchor;           // [B, K, D] contiguous; 0 for a request without keys
  float* workspace;        // [B, K, num_key_splits(N), D]: sums of k / |k|
};

constexpr int32_t kSplitUnit = 128;
constexpr int32_t kMaxKeySplits = 64;

/// Keys that one CTA of lse_tail or key_anchor reads. It depends on N alone, so that a request gets the same bits in
/// any batch.
constexpr int32_t keys_per_split(int32_t max_length) {
  const int32_t units = (max_length + kSplitUnit - 1) / kSplitUnit;
  return kSplitUnit * (units > kMaxKeySplits ? (units + kMaxKeySplits - 1) / kMaxKeySplits : 1);
}

/// Sizes the workspaces; at most min(64, ceil(N / 128)).
constexpr int32_t num_key_splits(int32_t max_length) {
  return (max_length + keys_per_split(max_length) - 1) / keys_per_split(max_length);
}

void run_score(const ScoreParams& params, cudaStream_t stream);
void run_lse_tail(const LseTailParams& params, cudaStream_t stream);
void run_key_anchor(const KeyAnchorParams& params, cudaStream_t stream);

}  // namespace skv
