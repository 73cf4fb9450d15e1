// How a decode launch is cut: splits, ring depth, shared memory, workspace. Host code; the kernel reads the result.
#pragma once

#include <cstdint>

#include "decode.h"

namespace skv {

constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = 32 * kDecodeWarps;

/// A ring consists of places of this many bytes: 8 rows of D = 128 or 16 rows of D = 64.
constexpr int kPlaceBytes = 2048;

/// A warp takes two places at a time.
__host__ __device__ constexpr int unit_slots_of(int head_dim) { return kPlaceBytes / head_dim; }

/// Ranges of slots given to a split are multiples of this, so that every warp gets whole units.
__host__ __device__ constexpr int split_granule_of(int head_dim) { return kDecodeWarps * unit_slots_of(head_dim); }

/// Slots of one warp between two softmax updates of `decode_attention`; a step keeps its whole range.
constexpr int kChunkSlots = 64;

struct DecodePlan {
  int32_t num_splits;
  int32_t ring_depth;          // places per warp: 4, 5, 6, 8 or 12
  int32_t warp_slots;          // slots whose logits a warp keeps in shared memory
  int32_t tile_rows;           // query rows per CTA, padded: 4, 8 or 16
  int32_t row_blocks;          // CTAs along the query rows
  int64_t shared_bytes;
  int64_t partial_lse_offset;  // bytes into the workspace: fp32 [pairs, splits, tile_rows], base 2
  int64_t partial_out_offset;  // fp32 [pairs, splits, tile_rows, D]
  int64_t logits_offset;       // fp32 [pairs, C, tile_rows], base 2; a step with splits only
  int64_t workspace_bytes;
};

/// What the plan depends on besides the sizes.
struct DeviceFacts {
  int32_t num_multiprocessors;
  int32_t shared_per_multiprocessor;
  int32_t shared_per_block;    // with opt-in
  int32_t shared_reserved;     // per block
};

/// `may_split` is false without a workspace. Throws std::runtime_error when nothing fits the shared memory.
DecodePlan plan_decode(const DecodeParams& params, bool is_step, bool may_split, const DeviceFacts& device);

}  // namespace skv
