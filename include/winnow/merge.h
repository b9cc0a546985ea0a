// merge: results over disjoint parts of the keys -> the result over all of them.
#pragma once

#include "winnow/tensor.h"

namespace winnow {

struct MergeArgs {
  Tensor partial_out;  // [P, T, H, d_v] f32 or bf16: results over P disjoint parts of the lists
  Tensor partial_lse;  // [P, T, H] f32, natural; +inf and -inf both mean "empty"
  Tensor sink = {};    // [H] f32, optional, applied once, here
  Tensor out;          // [T, H, d_v] bf16 or f32
  Tensor lse = {};     // [T, H] f32, optional; -inf where all parts are empty
  Target target = {};
};

// lse = ln sum e^{lse_p}, out = sum e^{lse_p - lse} out_p. All parts empty: (0, -inf).
void merge(const MergeArgs& args);

}  // namespace winnow
