// The score half of a decode step: per-slot state, its update, and the next victim.
#pragma once

#include "decode_tile.cuh"

namespace skv {

/// The new token of one request, and the request's state once it is in.
struct NewToken {
  int32_t length;          // slots in use, this token included
  int32_t budget;
  int32_t position;        // of this token
};

struct SlotState {
  float score;
  int32_t position;
};

/// Smaller is evicted first: order of the score, then of the slot.
__device__ __forceinline__ unsigned long long victim_key(float score, int32_t slot) {
  return (static_cast<unsigned long long>(order_key(score)) << 32) | static_cast<uint32_t>(slot);
}

__device__ __forceinline__ unsigned long long warp_min(unsigned long long key) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) key = min(key, __shfl_xor_sync(kFullMask, key, offset));
  return key;
}

/// Updates the scores of one KV head, slot by slot, and remembers the best victim that this thread has met.
class ScoreUpdate {
 public:
  __device__ __forceinline__ ScoreUpdate(const DecodeStepState& step, const SlotRange& range, int32_t position)
      : scores_(step.scores + range.request * step.scores_stride[0] + range.head * step.scores_stride[1]),
        positions_(step.positions + range.request * step.positions_stride[0] + range.head * step.positions_stride[1]),
        decay_(step.decay),
        gain_(step.gain),
        by_position_(step.score_by_position),
        num_sinks_(step.num_sinks),
        // Recent is meant once the next token is in: it is at position + 1.
        oldest_recent_(position + 2 - step.num_recent),
        victim_(range.victim),
        position_(position),
        best_(victim_key(INFINITY, 0)) {}

  __device__ __forceinline__ SlotState load(int32_t slot, bool valid) const {
    if (!valid) return {0.0f, 0};
    return {scores_[slot], positions_[slot]};
  }

  /// `weight` is the slot's softmax weight, mean over the group.
  __device__ __forceinline__ void visit(int32_t slot, SlotState state, float weight) {
    const bool is_new = slot == victim_;
    if (is_new) {
      state = {by_position_ ? static_cast<float>(position_) : 0.0f, position_};
      positions_[slot] = position_;
    }
    if (!by_position_) state.score = __fmaf_rn(gain_, weight, __fmul_rn(decay_, state.score));
    if (!by_position_ || is_new) scores_[slot] = state.score;
    const bool is_protected = state.position < num_sinks_ || state.position >= oldest_recent_;
    best_ = min(best_, victim_key(is_protected ? INFINITY : state.score, slot));
  }

  __device__ __forceinline__ unsigned long long best() const { return best_; }

 private:
  float* scores_;
  int32_t* positions_;
  float decay_;
  float gain_;
  bool by_position_;
  int32_t num_sinks_;
  int32_t oldest_recent_;
  int32_t victim_;
  int32_t position_;
  unsigned long long best_;
};

/// Stores the new key and value in the victim's slot, if this range holds it. One warp; D / 8 lanes each.
template <typename T, int D>
__device__ __forceinline__ void write_new_token(const DecodeArgs<T>& args, const SlotRange& range) {
  constexpr int kRowChunks = D / 8;
  const int lane = threadIdx.x % kWarpSize;
  if (range.victim < range.begin || range.victim >= range.end || lane >= 2 * kRowChunks) return;
  const DecodeStepState& step = args.params.step;
  const bool is_value = lane >= kRowChunks;
  const int offset = lane % kRowChunks * 8;
  const int64_t* stride = is_value ? step.v_stride : step.k_stride;
  const T* source = static_cast<const T*>(is_value ? step.v : step.k) + range.request * stride[0] +
                    range.head * stride[1];
  const PoolView<T>& pool = is_value ? args.v_pool : args.k_pool;
  store16(pool.row(range.request, range.head, range.victim) + offset, load16(source + offset));
}

/// Counts this warp as done with reading the request's length and position. Returns, in lane 0, how many were before;
/// asked early and looked at late, the answer costs no time.
__device__ __forceinline__ int32_t arrive_at_request(const DecodeParams& p, int32_t request) {
  __syncwarp();
  if (threadIdx.x % kWarpSize != 0) return 0;
  fence_device();
  return atomicAdd(static_cast<int32_t*>(p.workspace) + request, 1);
}

/// The last of a request's warps advances its length and position: all have read the old ones.
__device__ __forceinline__ void advance_request(
    const DecodeParams& p, int32_t request, const NewToken& token, int32_t arrived) {
  const int32_t num_warps = p.kv_heads * kDecodeWarps * static_cast<int32_t>(gridDim.x);
  if (threadIdx.x % kWarpSize != 0 || arrived != num_warps - 1) return;
  p.step.lengths[request] = token.length;
  p.step.next_position[request] = token.position + 1;
  static_cast<int32_t*>(p.workspace)[request] = 0;
}

__device__ __forceinline__ void write_victim(
    const DecodeStepState& step, const SlotRange& range, const NewToken& token, unsigned long long best) {
  const bool is_full = token.length >= token.budget;
  step.victims[range.request * step.victims_stride[0] + range.head * step.victims_stride[1]] =
      is_full ? static_cast<int64_t>(best & 0xffffffffu) : token.length;
}

}  // namespace skv
