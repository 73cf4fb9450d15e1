// Instantiates and launches the decode kernels of one dtype.
#pragma once

#include <atomic>

#include "decode.cuh"

namespace skv {

/// Raises a kernel's shared memory limit once per device, to all that a CTA may have, and gives shared memory the
/// whole of the L1, so that as many CTAs fit as were planned.
template <auto kKernel>
inline void prepare_kernel() {
  static std::atomic<uint64_t> prepared{0};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((prepared.load() & bit) != 0 && device < 64) return;
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes");
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  allow_shared_memory(kKernel, static_cast<size_t>(most) - attributes.sharedSizeBytes);
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  static_cast<int>(cudaSharedmemCarveoutMaxShared)),
             "cudaFuncSetAttribute(PreferredSharedMemoryCarveout)");
  prepared.fetch_or(bit);
}

template <auto kKernel, typename T>
inline void launch_kernel(const DecodeArgs<T>& args, cudaStream_t stream) {
  prepare_kernel<kKernel>();
  const DecodeParams& p = args.params;
  const dim3 grid(args.plan.num_splits, p.kv_heads * args.plan.row_blocks, p.batch);
  kKernel<<<grid, kDecodeThreads, static_cast<size_t>(args.plan.shared_bytes), stream>>>(args);
  check_launch("decode");
}

template <typename T, int D>
inline void launch_decode_dim(const DecodeArgs<T>& args, bool is_step, cudaStream_t stream) {
  if (is_step && args.plan.tile_rows == 4) {
    launch_kernel<decode_step_kernel<T, D, 4>>(args, stream);
  } else if (is_step) {
    launch_kernel<decode_step_kernel<T, D, 8>>(args, stream);
  } else if (args.plan.tile_rows == 4) {
    launch_kernel<decode_attention_kernel<T, D, 4>>(args, stream);
  } else if (args.plan.tile_rows == 8) {
    launch_kernel<decode_attention_kernel<T, D, 8>>(args, stream);
  } else {
    launch_kernel<decode_attention_kernel<T, D, 16>>(args, stream);
  }
}

template <typename T>
inline void launch_decode(const DecodeParams& params, const DecodePlan& plan, bool is_step, cudaStream_t stream) {
  const DecodeArgs<T> args{params, plan, params.k_pool.as<T>(), params.v_pool.as<T>()};
  if (params.head_dim == 64) {
    launch_decode_dim<T, 64>(args, is_step, stream);
  } else {
    launch_decode_dim<T, 128>(args, is_step, stream);
  }
}

void launch_decode_bf16(const DecodeParams& params, const DecodePlan& plan, bool is_step, cudaStream_t stream);
void launch_decode_fp16(const DecodeParams& params, const DecodePlan& plan, bool is_step, cudaStream_t stream);

}  // namespace skv
