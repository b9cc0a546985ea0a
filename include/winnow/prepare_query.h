// prepare_query: projected query heads -> what attend() takes.
#pragma once

#include "winnow/norm.h"
#include "winnow/rotate.h"
#include "winnow/tensor.h"

namespace winnow {

struct PrepareQueryArgs {
  Tensor q;                               // [T, H, d] bf16, d >= 64
  Norm norm = {.kind = NormKind::kNone};  // of each head's d values; V4: kRms without weights
  Tensor positions;                       // [T] int32
  Rope rope;                              // V3.2: q is the view of the last 64 values of each head
  Tensor out;                             // [T, H, d] bf16, out; may be q
  Target target = {};
};

// out = rotate(norm(q)): the bits of the two calls, in one pass. A token whose position is outside
// the table is skipped: its rows of out stay as they are.
void prepare_query(const PrepareQueryArgs& args);

}  // namespace winnow
