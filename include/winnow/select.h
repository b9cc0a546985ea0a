// select: logits, valid range -> top-k logical token ids.
#pragma once

#include "winnow/tensor.h"

namespace winnow {

class Plan;

struct SelectArgs {
  const Plan* plan = nullptr;
  Tensor logits;          // [T, N] f32, rows of any stride
  Tensor starts = {};     // [T] int32: first valid column, optional (0)
  Tensor ends = {};       // [T] int32: one past the last valid column, optional (N)
  Tensor ids;             // [T, K] int32, out
  bool relative = false;  // give column - start (clamped to the row) instead of column
  Target target = {};
};

// The K largest of the valid range of each row, exactly: ties go to the lowest index, NaN ranks
// below everything (-inf included), -0 equals +0. Output ascends; a range shorter than K is given
// whole, then -1. Entries outside the range are never read. Deterministic.
void select(const SelectArgs& args);

}  // namespace winnow
