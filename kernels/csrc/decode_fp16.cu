#include "decode_launch.cuh"

namespace skv {

void launch_decode_fp16(const DecodeParams& params, const DecodePlan& plan, bool is_step, cudaStream_t stream) {
  launch_decode<__half>(params, plan, is_step, stream);
}

}  // namespace skv
