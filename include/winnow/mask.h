// mask: rows of top-k ids -> sets as bits, which attend_mha() reads.
#pragma once

#include "winnow/tensor.h"

namespace winnow {

struct TopkMaskArgs {
  Tensor ids;           // [T, K] int32
  Tensor lengths = {};  // [T] int32, optional: ids outside [0, lengths[t]) are ignored
  // [T, M] uint8, out: bit j % 8 of byte j / 8 = key j selected; 8 * M bounds the keys
  Tensor mask;
  Target target = {};
};

// The set of each row of ids as bits. Every byte of mask is written.
void topk_mask(const TopkMaskArgs& args);

}  // namespace winnow
