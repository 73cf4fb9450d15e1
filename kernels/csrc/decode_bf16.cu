#include "decode_launch.cuh"

namespace skv {

void launch_decode_bf16(const DecodeParams& params, const DecodePlan& plan, bool is_step, cudaStream_t stream) {
  launch_decode<__nv_bfloat16>(params, plan, is_step, stream);
}

}  // namespace skv
