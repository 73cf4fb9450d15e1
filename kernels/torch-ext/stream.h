// The stream that the caller's torch is using.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

namespace skv {

/// torch's current CUDA stream of a device.
///
/// The C function that tells it lives in libtorch_cuda.so, which CPU-only torch does not have and which torch loads
/// without making its symbols global. Linking against it would tie this library to CUDA builds of torch; asking the
/// already loaded library for the symbol lets one file load everywhere.
inline cudaStream_t current_stream(int32_t device_index) {
  using Getter = int32_t (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    if (symbol == nullptr) {
      throw std::runtime_error("hf_sparsekv_kernels: this torch has no CUDA (libtorch_cuda.so is not loaded)");
    }
    return reinterpret_cast<Getter>(symbol);
  }();
  void* stream = nullptr;
  if (getter(device_index, &stream) != 0) {
    throw std::runtime_error("hf_sparsekv_kernels: torch did not tell its current CUDA stream");
  }
  return static_cast<cudaStream_t>(stream);
}

}  // namespace skv
