// The matrix product that scoring and its LSE share: a tile of rows that stays in registers, times rows that stream
// through a ring in shared memory.
//
// mma.m16n8k16 sums over k, so the columns may be taken in any order, the same on both sides. Lane t of a quad takes
// the 8 neighbouring columns 32 c + 8 t .. + 7 of chunk group c for its k indices {2t, 2t + 1, 2t + 8, 2t + 9} of two
// consecutive mma: both operands then move as whole 16-byte pieces. The resident tile comes straight from global
// memory (a quad reads 64 neighbouring bytes), the streamed rows by one 16-byte shared load per two mma, without
// ldmatrix.
#pragma once

#include "common.cuh"
#include "score.h"

namespace skv {

constexpr int kScoreWarps = 4;
constexpr int kScoreThreads = kScoreWarps * kWarpSize;
constexpr int kBlockRows = 8;                          // streamed rows that one mma takes
constexpr int kStageBlocks = kScoreWarps;              // each warp copies one block of a stage
constexpr int kStageRows = kStageBlocks * kBlockRows;
constexpr int kPrefetchStages = 3;
constexpr int kRingSlots = kPrefetchStages + 1;        // a slot is refilled one barrier after its last reader

/// 4 bytes, global to shared.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(global));
}

/// 16 bytes that this kernel reads once. Volatile, so that the load is issued where it is written: ahead of copies that
/// it should not wait for.
__device__ __forceinline__ uint4 load16_once(const void* global) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global));
  return value;
}

/// Streamed rows in shared memory, D / 8 pieces of 16 bytes each. Odd rows swap neighbouring groups of 4 pieces, so
/// that the 8 lanes which one cycle serves (two rows, 64 bytes of each) hit all 32 banks.
template <int D>
struct StreamedRows {
  static constexpr int kPieces = D / 8;
  static constexpr int kStageBytes = kStageRows * D * 2;

  static __device__ __forceinline__ int index(int row, int piece) {
    return row * kPieces + (piece ^ ((row & 1) << 2));
  }

  /// Where a lane's first piece of a block lies, as the offset of its row and its column.
  static constexpr int kRowsPerCopy = kWarpSize / kPieces;
  static __device__ __forceinline__ int lane_row(int lane) { return lane / kPieces; }
  static __device__ __forceinline__ int lane_column(int lane) { return lane % kPieces * 8; }

  /// One warp copies the first `num_valid` rows of 8 to `block`, zeros for the rest. `source` is the lane's own
  /// element of the first rows: row `lane_row`, column `lane_column`.
  template <typename T>
  static __device__ __forceinline__ void copy_block(
      uint4* block, int lane, const T* source, int64_t stride, int32_t num_valid) {
    const uint32_t target = shared_address(block + index(lane_row(lane), lane % kPieces));
#pragma unroll
    for (int r = 0; r < kBlockRows; r += kRowsPerCopy) {
      // An even number of rows further down, the swizzle is the same.
      cp_async_16_or_zero(target + r * kPieces * 16, source, lane_row(lane) + r < num_valid);
      source += kRowsPerCopy * stride;
    }
  }
};

/// kTiles * 16 rows of a warp, in registers, as the A operand. Lane 4 g + t holds rows 16 m + g and 16 m + 8 + g, in
/// each the columns 32 c + 8 t .. + 7.
template <typename T, int D, int kTiles>
struct ResidentRows {
  static constexpr int kChunks = D / 32;

  /// [m][c][s][half + 2 * i]: columns 32 c + 8 t + 4 s + 2 i and the next, of row 16 m + 8 half + g.
  uint32_t fragment[kTiles][kChunks][2][4];

  using Fetched = uint4[kTiles][2][kChunks];

  /// Starts loading this lane's part of row 16 m + 8 half + g.
  static __device__ __forceinline__ void fetch_row(Fetched& fetched, int m, int half, int lane, const T* row) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) fetched[m][half][c] = load16_once(row + 32 * c + 8 * (lane % 4));
  }

  /// Takes a fetched row over; as zeros unless `keep`. This waits for the load.
  __device__ __forceinline__ void take_row(const Fetched& fetched, int m, int half, bool keep) {
    const uint32_t mask = keep ? ~0u : 0u;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint4 piece = fetched[m][half][c];
      // The mask also makes these new values: the compiler then builds each mma's four registers once, here, and not
      // by four moves in front of every mma.
      fragment[m][c][0][half] = piece.x & mask;
      fragment[m][c][0][half + 2] = piece.y & mask;
      fragment[m][c][1][half] = piece.z & mask;
      fragment[m][c][1][half + 2] = piece.w & mask;
    }
  }

  /// dots[n][m] = mma accumulators of resident tile m with block n of the kBlocks that start at `blocks`: entries
  /// 0, 1 are resident row g, streamed rows 2 t and 2 t + 1; entries 2, 3 resident row g + 8.
  template <int kBlocks>
  __device__ __forceinline__ void multiply(float (&dots)[kBlocks][kTiles][4], const uint4* blocks, int lane) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dots[n][m][i] = 0.0f;
      }
    }
    // Chunk c of an odd row lies where chunk c ^ 1 of an even row would.
    const uint4* even = blocks + StreamedRows<D>::index(lane / 4, lane % 4);
    const uint4* odd = blocks + StreamedRows<D>::index(lane / 4, 4 + lane % 4);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint4 streamed[kBlocks];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const uint4* source = c % 2 == 0 ? even : odd;
        streamed[n] = source[n * kBlockRows * StreamedRows<D>::kPieces + c / 2 * 8];
      }
      // All accumulators take one mma before any takes its next: dependent mma stay kBlocks * kTiles apart.
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) mma_m16n8k16<T>(dots[n][m], fragment[m][c][0], streamed[n].x, streamed[n].y);
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) mma_m16n8k16<T>(dots[n][m], fragment[m][c][1], streamed[n].z, streamed[n].w);
      }
    }
  }
};

/// The value of the row that lane 4 g + t writes: t / 2 is its 16-row tile, t % 2 its half.
template <int kTiles>
__device__ __forceinline__ float own_row(const float (&values)[kTiles][2], int lane) {
  const float first = lane % 2 == 0 ? values[0][0] : values[0][1];
  const float last = lane % 2 == 0 ? values[kTiles - 1][0] : values[kTiles - 1][1];
  return lane % 4 < 2 ? first : last;
}

/// The warp's row whose value `own_row` gives.
__device__ __forceinline__ int own_row_index(int lane) { return lane % 4 / 2 * 16 + lane % 2 * 8 + lane / 4; }

/// Whether `own_row_index` lies inside a warp's rows.
template <int kTiles>
__device__ __forceinline__ bool owns_row(int lane) {
  return lane % 4 / 2 < kTiles;
}

/// `pool.row` of several slots; all table entries are requested before the first is used.
template <typename T, int kCount>
__device__ __forceinline__ void find_rows(
    const PoolView<T>& pool, int64_t b, int64_t kv, const int32_t (&slots)[kCount], const T* (&rows)[kCount]) {
  int64_t pages[kCount];
  int32_t offsets[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    pages[i] = b;
    offsets[i] = slots[i];
  }
  if (pool.table != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t entry = slots[i] / pool.page_size;
      pages[i] = pool.table[b * pool.stride_table + entry];
      offsets[i] = slots[i] - entry * pool.page_size;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    rows[i] = pool.data + pages[i] * pool.stride_page + kv * pool.stride_head + offsets[i] * pool.stride_slot;
  }
}

}  // namespace skv
