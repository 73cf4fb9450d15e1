// Launcher of the score kernel: how a problem is cut into CTAs.
#include "score.cuh"

namespace skv {
namespace {

/// Tiles per CTA. Sharing one load of the query rows between tiles saves L2 traffic, about half a tile's time; more
/// tiles mean coarser work for the multiprocessors. Takes the cut whose busiest multiprocessor has the least to do.
/// Example: 256 tiles of 8 heads on 132 multiprocessors: 4 tiles, as 4 * 4.5 < 8 * 2.5 and 16 * 1.5.
int32_t choose_tiles_per_cta(int64_t tiles, int64_t heads, int64_t multiprocessors) {
  constexpr double kQueryCost = 0.5;
  constexpr int64_t kMinCtasPerMultiprocessor = 3;
  int32_t best = 1;
  double best_cost = 0.0;
  for (int32_t candidate = 1; candidate <= 8; candidate *= 2) {
    const int64_t ctas = ceil_div<int64_t>(tiles, candidate) * heads;
    if (candidate > 1 && ctas < kMinCtasPerMultiprocessor * multiprocessors) break;
    const double cost = static_cast<double>(ceil_div(ctas, multiprocessors)) * (candidate + kQueryCost);
    if (candidate == 1 || cost < best_cost) {
      best = candidate;
      best_cost = cost;
    }
  }
  return best;
}

template <typename T, int D, int kTiles, bool kRowMax>
void launch(const ScoreParams& p, int32_t multiprocessors, cudaStream_t stream) {
  constexpr int32_t kTileKeys = kScoreWarps * kTiles * 16;
  constexpr int32_t kStageBytes = StreamedRows<D>::kStageBytes + kStageRows * static_cast<int32_t>(sizeof(float));
  constexpr int32_t kReservedBytes = 1024;  // that the driver takes per CTA
  const int32_t blocks = p.shape.group * ceil_div(p.shape.num_rows, kBlockRows);
  const int32_t num_stages = ceil_div(blocks, kStageBlocks);
  const int32_t ctas_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 3 - kReservedBytes;
  const int32_t tiles = ceil_div(p.shape.max_length, kTileKeys);
  ScorePlan plan{1, kRingSlots};
  if (static_cast<int64_t>(num_stages) * kStageBytes <= ctas_bytes) {
    plan.tiles_per_cta =
        choose_tiles_per_cta(tiles, static_cast<int64_t>(p.shape.kv_heads) * p.shape.batch, multiprocessors);
    if (plan.tiles_per_cta > 1 && num_stages > kRingSlots) plan.ring_slots = num_stages;
  }
  const auto kernel = score_kernel<T, D, kTiles, kRowMax>;
  const size_t shared_bytes = static_cast<size_t>(plan.ring_slots) * kStageBytes;
  allow_shared_memory(kernel, shared_bytes);
  const dim3 grid(ceil_div(tiles, plan.tiles_per_cta), p.shape.kv_heads, p.shape.batch);
  kernel<<<grid, kScoreThreads, shared_bytes, stream>>>(p, p.k.as<T>(), plan);
  check_launch("score_kernel");
}

/// 128-key tiles halve the query traffic and the shared memory reads per mma of 64-key tiles; those are for problems
/// that would leave multiprocessors without a second CTA.
template <typename T, int D, bool kRowMax>
void launch_tiles(const ScoreParams& p, cudaStream_t stream) {
  const int32_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t heads = static_cast<int64_t>(p.shape.kv_heads) * p.shape.batch;
  const int64_t large_tiles = ceil_div(p.shape.max_length, 128) * heads;
  if (large_tiles < 2 * multiprocessors) {
    launch<T, D, 1, kRowMax>(p, multiprocessors, stream);
  } else {
    launch<T, D, 2, kRowMax>(p, multiprocessors, stream);
  }
}

template <typename T, int D>
void launch_rows(const ScoreParams& p, cudaStream_t stream) {
  if (p.row_max) {
    launch_tiles<T, D, true>(p, stream);
  } else {
    launch_tiles<T, D, false>(p, stream);
  }
}

template <typename T>
void launch_dim(const ScoreParams& p, cudaStream_t stream) {
  if (p.shape.head_dim == 128) {
    launch_rows<T, 128>(p, stream);
  } else {
    launch_rows<T, 64>(p, stream);
  }
}

}  // namespace

void run_score(const ScoreParams& params, cudaStream_t stream) {
  if (params.shape.batch == 0 || params.shape.max_length == 0) return;
  if (params.shape.dtype == DType::kBFloat16) {
    launch_dim<__nv_bfloat16>(params, stream);
  } else {
    launch_dim<__half>(params, stream);
  }
}

}  // namespace skv
