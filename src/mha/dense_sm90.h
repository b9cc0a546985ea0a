// attend_mha by wgmma on the device: see dense_sm90.cu.
#pragma once

#include "mha/kernel.h"

namespace winnow::internal::mha::dense {

inline constexpr int kKeyDim = 192, kValueDim = 128;
inline constexpr int kTokens = 128, kKeys = 64;  // of a tile, of a block
inline constexpr int kConsumers = 256, kProducers = 128;

// Named barriers of a CTA; 0 is __syncthreads().
enum NamedBarrier : int {
  // The consumers meet before a chunk's bits are overwritten, and when they are written.
  kConsumersMeet = 1,
};

struct Task {
  Params p;
  int64_t tiles = 0;         // of tokens
  bool whole_words = false;  // bits can be read 64 at a time
};

}  // namespace winnow::internal::mha::dense
