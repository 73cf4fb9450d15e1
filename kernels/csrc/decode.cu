// Launchers of the decode kernels: plan, check the workspace, pick the dtype.
#include <string>

#include "decode_launch.cuh"

namespace skv {
namespace {

DeviceFacts current_device() {
  DeviceFacts facts{};
  facts.num_multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  facts.shared_per_multiprocessor = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  facts.shared_per_block = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  facts.shared_reserved = device_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  return facts;
}

void run(const DecodeParams& params, bool is_step, cudaStream_t stream) {
  if (params.batch == 0) return;
  const DecodePlan plan = plan_decode(params, is_step, params.workspace != nullptr, current_device());
  if ((is_step || plan.num_splits > 1) && params.workspace_bytes < plan.workspace_bytes) {
    throw std::runtime_error("decode: argument `workspace` has " + std::to_string(params.workspace_bytes) +
                             " bytes, this launch needs " + std::to_string(plan.workspace_bytes));
  }
  if (params.dtype == DType::kBFloat16) {
    launch_decode_bf16(params, plan, is_step, stream);
  } else {
    launch_decode_fp16(params, plan, is_step, stream);
  }
}

}  // namespace

void run_decode_attention(const DecodeParams& params, cudaStream_t stream) { run(params, false, stream); }

void run_decode_step(const DecodeParams& params, cudaStream_t stream) { run(params, true, stream); }

int64_t decode_workspace_bytes(const DecodeParams& params, bool is_step) {
  return plan_decode(params, is_step, true, current_device()).workspace_bytes;
}

}  // namespace skv
