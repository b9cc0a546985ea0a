#include "attend/decode_sm90/decode.cuh"
#include "attend/decode_sm90/launch.h"

namespace winnow::internal::attend::decode_sm90 {

void launch_v4_bf16(const Args& args, Share share, cudaStream_t stream) {
  launch_heads<RowTraits<V4Bf16>, 64>(args, share, stream);
}

}  // namespace winnow::internal::attend::decode_sm90
