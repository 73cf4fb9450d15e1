// Launcher of the LSE kernels.
#include "score_lse.cuh"

namespace skv {
namespace {

template <typename T, int D>
void launch_split(const LseTailParams& p, cudaStream_t stream) {
  const int32_t row_tiles = ceil_div(p.shape.group * p.shape.num_rows, kLseCtaRows);
  const dim3 grid(num_key_splits(p.shape.max_length) * row_tiles, p.shape.kv_heads, p.shape.batch);
  constexpr size_t kSharedBytes = static_cast<size_t>(kRingSlots) * StreamedRows<D>::kStageBytes;
  lse_split_kernel<T, D><<<grid, kScoreThreads, kSharedBytes, stream>>>(p, p.k.as<T>());
  check_launch("lse_split_kernel");
}

template <typename T>
void launch_dim(const LseTailParams& p, cudaStream_t stream) {
  if (p.shape.head_dim == 128) {
    launch_split<T, 128>(p, stream);
  } else {
    launch_split<T, 64>(p, stream);
  }
}

}  // namespace

void run_lse_tail(const LseTailParams& params, cudaStream_t stream) {
  if (params.shape.batch == 0) return;
  if (params.shape.max_length > 0) {
    if (params.shape.dtype == DType::kBFloat16) {
      launch_dim<__nv_bfloat16>(params, stream);
    } else {
      launch_dim<__half>(params, stream);
    }
  }
  const int32_t rows = params.shape.kv_heads * params.shape.group * params.shape.num_rows;
  lse_combine_kernel<<<dim3(ceil_div(rows, kScoreWarps), params.shape.batch), kScoreThreads, 0, stream>>>(params);
  check_launch("lse_combine_kernel");
}

}  // namespace skv
