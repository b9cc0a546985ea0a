#include "attend/decode_sm90/decode.cuh"
#include "attend/decode_sm90/launch.h"
#include "attend/decode_sm90/score_codes.cuh"

namespace winnow::internal::attend::decode_sm90 {

void launch_v32_codes(const Args& args, Share share, cudaStream_t stream) {
  keep_error(launch_way<CodeRow, 64>(args, share.tokens, stream));
}

}  // namespace winnow::internal::attend::decode_sm90
