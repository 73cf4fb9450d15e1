// Programmatic dependent launch (Hopper and later): a kernel may be started while the one before it still runs, and
// then waits for that one's results. This hides the launches of compact behind select and of kv_diversity's kernels
// behind one another.
#pragma once

#include "common.cuh"

namespace skv {

/// From here on the next kernel of the stream may be started, if it was launched by `launch_chained`.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}

/// Returns when everything that the stream did before this kernel is done and visible. In a kernel launched by
/// `launch_chained` every thread calls it, before it touches memory that others may still be writing or reading and
/// before it may return: what comes after this kernel relies on that.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

template <typename Params>
inline void launch_chained(
    void (*kernel)(Params), dim3 grid, dim3 threads, cudaStream_t stream, const Params& params, const char* name) {
  cudaLaunchAttribute chained{};
  chained.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  chained.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &chained;
  config.numAttrs = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), name);
}

}  // namespace skv
