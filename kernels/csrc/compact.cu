#include "compact.cuh"

namespace skv {

void run_compact(const CompactParams& params, cudaStream_t stream) {
  if (params.batch == 0 || params.num_heads == 0 || params.capacity == 0) return;
  const int rows_per_cta = params.chunks_per_row >= 256 ? 1 : 256 / params.chunks_per_row;
  const dim3 threads(params.chunks_per_row, rows_per_cta);
  const dim3 grid(ceil_div(params.capacity, rows_per_cta), params.num_heads, params.batch);
  launch_chained(compact_kernel, grid, threads, stream, params, "compact_kernel");
}

}  // namespace skv
