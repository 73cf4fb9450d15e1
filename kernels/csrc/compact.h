// Gathering the kept keys and values. Reference: `compact` in hf_sparsekv/ops/reference/select.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "types.h"

namespace skv {

/// Pools are in units of 16 bytes (uint4), whatever their dtype.
struct CompactParams {
  PoolView<void> k_out;        // [Po, K, So, D], or [B, K, C, D] without a table
  PoolView<void> v_out;        // as k_out; shares its table
  PoolView<void> k_pool;       // [P, K, S, D]
  PoolView<void> v_pool;       // as k_pool; shares its table
  const int64_t* index;        // [B, K, C]: slot per kept token, < 0 for none
  int64_t index_stride_request;
  int64_t index_stride_head;
  int32_t batch;               // B
  int32_t num_heads;           // K
  int32_t capacity;            // C
  int32_t chunks_per_row;      // D * item size / 16
};

void run_compact(const CompactParams& params, cudaStream_t stream);

}  // namespace skv
