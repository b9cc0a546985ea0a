// Decode on Hopper: the launchers, one per record.
#pragma once

#include "attend/decode_sm90/layout.cuh"

namespace winnow::internal::attend::decode_sm90 {

// How a call is shared out over CTAs.
struct Share {
  // Heads of a CTA, a multiple of 8.
  int heads;
  // Tokens at once. Where that is less than all and takes_many_tokens() allows it, each CTA takes
  // several, one after the other.
  int tokens;
};

void launch_v32_fp8(const Args& args, Share share, cudaStream_t stream);
// Codes multiplied as they are stored; share.heads is 64.
void launch_v32_codes(const Args& args, Share share, cudaStream_t stream);
void launch_v32_bf16(const Args& args, Share share, cudaStream_t stream);
void launch_v4_fp8(const Args& args, Share share, cudaStream_t stream);
void launch_v4_bf16(const Args& args, Share share, cudaStream_t stream);

// Clusters of `size` CTAs that the current device runs at once (every kernel fills a
// multiprocessor, so one answer serves all). A query: allowed while a stream is captured. 0: the
// device could not say.
int clusters_at_once(int size);

}  // namespace winnow::internal::attend::decode_sm90
