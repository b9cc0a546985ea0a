#include "attend/decode_sm90/decode.cuh"
#include "attend/decode_sm90/launch.h"

namespace winnow::internal::attend::decode_sm90 {

void decode_v32_bf16(const Args& args, Share share, void* stream) {
  launch_size<Row<V32Bf16>, 48>(args, share, stream);
}

}  // namespace winnow::internal::attend::decode_sm90
