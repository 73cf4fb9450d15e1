// Launcher of the diversity kernels.
#include "diversity.cuh"

namespace skv {
namespace {

template <typename T, int D>
void launch(const DiversityParams& p, cudaStream_t stream) {
  const dim3 splits(max_diversity_splits(p.max_length), 2 * p.kv_heads, p.batch);
  direction_kernel<T, D><<<splits, kDiversityThreads, 0, stream>>>(p);
  check_launch("direction_kernel");
  launch_chained(distance_kernel<T, D>, splits, kDiversityThreads, stream, p, "distance_kernel");
  const dim3 tokens(ceil_div(p.max_length, kFinishThreads * kFinishTokens), p.kv_heads, p.batch);
  launch_chained(finish_kernel<kFinishTokens>, tokens, kFinishThreads, stream, p, "finish_kernel");
}

template <typename T>
void launch_dim(const DiversityParams& p, cudaStream_t stream) {
  if (p.head_dim == 128) {
    launch<T, 128>(p, stream);
  } else {
    launch<T, 64>(p, stream);
  }
}

}  // namespace

void run_diversity(const DiversityParams& params, cudaStream_t stream) {
  if (params.batch == 0 || params.max_length == 0) return;
  if (params.dtype == DType::kBFloat16) {
    launch_dim<__nv_bfloat16>(params, stream);
  } else {
    launch_dim<__half>(params, stream);
  }
}

}  // namespace skv
