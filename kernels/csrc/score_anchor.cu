// Launcher of the key anchor kernels.
#include "score_anchor.cuh"

namespace skv {
namespace {

template <typename T, int D>
void launch(const KeyAnchorParams& p, cudaStream_t stream) {
  if (p.shape.max_length > 0) {
    const dim3 grid(num_key_splits(p.shape.max_length), p.shape.kv_heads, p.shape.batch);
    anchor_split_kernel<T, D><<<grid, kScoreThreads, 0, stream>>>(p, p.k.as<T>());
    check_launch("anchor_split_kernel");
  }
  anchor_sum_kernel<D><<<dim3(p.shape.kv_heads, p.shape.batch), D * kSumGroups, 0, stream>>>(p);
  check_launch("anchor_sum_kernel");
}

template <typename T>
void launch_dim(const KeyAnchorParams& p, cudaStream_t stream) {
  if (p.shape.head_dim == 128) {
    launch<T, 128>(p, stream);
  } else {
    launch<T, 64>(p, stream);
  }
}

}  // namespace

void run_key_anchor(const KeyAnchorParams& params, cudaStream_t stream) {
  if (params.shape.batch == 0) return;
  if (params.shape.dtype == DType::kBFloat16) {
    launch_dim<__nv_bfloat16>(params, stream);
  } else {
    launch_dim<__half>(params, stream);
  }
}

}  // namespace skv
