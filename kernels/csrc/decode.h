// Decode attention over stored slots, and the fused decode step of a window layer: parameters and launchers.
// Definition: hf_sparsekv/ops/reference/decode.py.
//
// Shapes: B request, T query row, H query head, K KV head, G = H / K, D head dim, C slots per request.
#pragma once

#include "types.h"

namespace skv {

constexpr int kDecodeMaxGroup = 8;
constexpr int kDecodeMaxRows = 8;
constexpr int kDecodeMaxSplits = 64;

/// The workspace begins with two arrays of int32 counters of this length each: warps per request that have read its
/// length, finished splits per (request, KV head, row block). They must be zero before the first launch; every launch
/// leaves them zero. Their place does not depend on shapes, so launches of one stream may share a workspace.
constexpr int64_t kDecodeCounters = 8192;

/// What a decode step changes besides its output; unused by `run_decode_attention`.
struct DecodeStepState {
  const void* k;            // [B, K, D] new key, dtype of the pools
  const void* v;            // [B, K, D] new value
  int64_t k_stride[2];      // request, head
  int64_t v_stride[2];
  int32_t* positions;       // [B, K, C]
  int64_t positions_stride[2];
  float* scores;            // [B, K, C]
  int64_t scores_stride[2];
  int32_t* lengths;         // [B] slots in use before this token
  const int32_t* budgets;   // [B] each at most C
  int64_t* victims;         // [B, K]
  int64_t victims_stride[2];
  int32_t* next_position;   // [B]
  float decay;
  float gain;
  int32_t num_sinks;
  int32_t num_recent;
  bool score_by_position;
};

struct DecodeParams {
  void* out;                // [B, T, H, D], last dim contiguous
  int64_t out_stride[3];    // request, row, head
  float* lse;               // [B, T, H] natural log, or null
  int64_t lse_stride[3];
  const void* q;            // [B, T, H, D]
  int64_t q_stride[3];
  PoolView<void> k_pool;    // [P, K, S, D]
  PoolView<void> v_pool;
  const int32_t* lengths;   // [B]; a step reads `step.lengths` instead
  void* workspace;          // see kDecodeCounters; null allows one split only
  int64_t workspace_bytes;
  float scale;
  int32_t batch;
  int32_t kv_heads;
  int32_t group;            // G, 1 to 8
  int32_t num_rows;         // T, 1 to 8; 1 in a step
  int32_t head_dim;         // 64 or 128
  int32_t max_length;       // C, upper bound of the lengths
  int32_t num_splits;       // 0: chosen from B, K, C and the number of multiprocessors
  DType dtype;
  DecodeStepState step;
};

/// Row i of T sees the slots below lengths - T + 1 + i.
void run_decode_attention(const DecodeParams& params, cudaStream_t stream);

/// One new token per request: write it, attend, update the scores, find the next victim, advance the lengths.
void run_decode_step(const DecodeParams& params, cudaStream_t stream);

/// Bytes that a launch with these sizes (batch to num_splits of `params`) needs on the current device.
int64_t decode_workspace_bytes(const DecodeParams& params, bool is_step);

}  // namespace skv
