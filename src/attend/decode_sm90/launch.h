// Decode on Hopper: the launchers, one per record.
#pragma once

#include "attend/decode_sm90/layout.cuh"

namespace winnow::internal::attend::decode_sm90 {

// How a call is shared out: heads of a CTA, a multiple of 8; tokens at once, each CTA taking
// several where that is less than all of them and goes_on() says so.
struct Share {
  int heads, tokens;
};

void decode_v32_fp8(const Args& args, Share share, void* stream);
void decode_v32_bf16(const Args& args, Share share, void* stream);
void decode_v4_fp8(const Args& args, Share share, void* stream);
void decode_v4_bf16(const Args& args, Share share, void* stream);

// Clusters of `size` CTAs that the current device runs at once (every kernel fills a
// multiprocessor, so one answer serves all). A query: allowed while a stream is captured.
int clusters_at_once(int size);

}  // namespace winnow::internal::attend::decode_sm90
