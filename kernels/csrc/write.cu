#include "write.cuh"

namespace skv {

void run_write(const WriteParams& params, cudaStream_t stream) {
  const int64_t num_rows = params.num_tokens * params.num_heads;
  if (num_rows == 0) return;
  const int rows_per_cta = params.chunks_per_row >= 256 ? 1 : 256 / params.chunks_per_row;
  const dim3 threads(params.chunks_per_row, rows_per_cta);
  const int64_t num_ctas = ceil_div<int64_t>(num_rows, rows_per_cta);
  write_kernel<<<static_cast<unsigned>(num_ctas), threads, 0, stream>>>(params);
  check_launch("write_kernel");
}

}  // namespace skv
