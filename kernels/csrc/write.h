// Storing new keys and values. Reference: `write_slots` in hf_sparsekv/ops/reference/decode.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "types.h"

namespace skv {

/// New rows and where they go. Pools and rows are in units of 16 bytes (uint4), whatever their dtype.
struct WriteParams {
  PoolView<void> k_pool;         // [P, K, S, D]
  PoolView<void> v_pool;         // [P, K, S, D]; shares the block table
  const void* k;                 // [T, K, D]
  const void* v;                 // [T, K, D]
  int64_t k_stride_token;
  int64_t k_stride_head;
  int64_t v_stride_token;
  int64_t v_stride_head;
  const int64_t* slots;          // [T, K]: slot of request t; or [T]: page * S + offset, for every head. < 0: skip
  int64_t slots_stride_token;
  int64_t slots_stride_head;     // 0 when all heads share the slot
  int32_t* positions;            // [B, K, C], or [P, K, S] with `is_flat`; null: not kept
  int64_t positions_stride_page;
  int64_t positions_stride_head;
  const int32_t* new_positions;  // [T]
  int64_t num_tokens;            // T
  int32_t num_heads;             // K
  int32_t chunks_per_row;        // D * item size / 16
  bool is_flat;                  // slots address pages directly: no block table
};

void run_write(const WriteParams& params, cudaStream_t stream);

}  // namespace skv
