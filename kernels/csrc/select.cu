#include "select.cuh"

namespace skv {
namespace {

using select_detail::Layout;

constexpr size_t kStaticBytes = 512;  // of the kernel, rounded up
static_assert(sizeof(select_detail::Exchange) <= kStaticBytes);

template <bool kResident, bool kHasSecond>
void launch(const SelectParams& params, const Layout& layout, cudaStream_t stream) {
  const auto kernel = select_detail::select_kernel<kResident, kHasSecond>;
  allow_shared_memory(kernel, layout.bytes());
  const dim3 grid(params.num_heads, params.batch);
  kernel<<<grid, select_detail::kThreads, layout.bytes(), stream>>>(params, layout);
  check_launch("select_kernel");
}

}  // namespace

void run_select(const SelectParams& params, cudaStream_t stream) {
  if (params.batch == 0 || params.num_heads == 0) return;
  const bool has_second = params.second.scores != nullptr;
  Layout layout{};
  layout.num_words = ceil_div(params.num_keys, 64) * 2;
  layout.num_keys = ceil_div(params.num_keys, 2) * 2;
  layout.num_key_buffers = has_second ? 2 : 1;
  layout.has_second = has_second;
  layout.capacity = params.capacity < params.num_keys ? params.capacity : params.num_keys;

  const size_t limit =
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticBytes;
  while (layout.bytes() > limit && layout.num_key_buffers > 0) --layout.num_key_buffers;
  const bool is_resident = layout.num_key_buffers > 0;
  if (layout.bytes() > limit) {
    throw std::runtime_error(
        "hf_sparsekv_kernels.select: " + std::to_string(params.num_keys) + " keys per row (argument `scores`) with " +
        std::to_string(params.capacity) + " kept (argument `index`) need " + std::to_string(layout.bytes()) +
        " bytes of shared memory, this GPU has " + std::to_string(limit));
  }
  if (has_second) {
    is_resident ? launch<true, true>(params, layout, stream) : launch<false, true>(params, layout, stream);
  } else {
    is_resident ? launch<true, false>(params, layout, stream) : launch<false, false>(params, layout, stream);
  }
}

}  // namespace skv
