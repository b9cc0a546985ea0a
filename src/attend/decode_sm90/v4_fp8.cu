#include "attend/decode_sm90/decode.cuh"
#include "attend/decode_sm90/launch.h"

namespace winnow::internal::attend::decode_sm90 {

void decode_v4_fp8(const Args& args, Share share, void* stream) {
  launch_size<Row<V4Fp8>, 64>(args, share, stream);
}

}  // namespace winnow::internal::attend::decode_sm90
