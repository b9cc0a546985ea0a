// select: logits, valid range -> top-k logical token ids.
#pragma once

#include "winnow/tensor.h"

namespace winnow {

class Plan;

// V4.1's two levels: a source layer finds the blocks of columns that hold its largest logits, and
// later layers select inside these alone. Block b has columns [b * size, (b + 1) * size).
struct SelectBlocks {
  int32_t size = 8;
  // [T, B] int32, optional: ids come from these blocks alone. Numbers ascend, as `best` gives them;
  // one that is not larger than all before it, or lies past the row's end, names nothing.
  Tensor within = {};
  // [T, B] int32, out, optional: the B blocks with the largest logits of the valid range,
  // ascending, then -1. The block of the last valid column is always among them; others follow
  // their largest logit, by select()'s order.
  Tensor best = {};
};

struct SelectArgs {
  const Plan* plan = nullptr;
  Tensor logits;       // [T, N] f32, rows of any stride
  Tensor starts = {};  // [T] int32: first valid column, optional (0)
  Tensor ends = {};    // [T] int32: one past the last valid column, optional (N)
  Tensor ids;          // [T, K] int32, out
  // [T, K] f32, out, optional: the logits at these ids; -inf where an id is -1.
  Tensor values = {};
  bool relative = false;  // give column - start (clamped to the row) instead of column
  SelectBlocks blocks = {};
  Target target = {};
};

// The K largest of the valid range of each row, exactly: ties go to the lowest index, NaN ranks
// below everything (-inf included), -0 equals +0. Output ascends; a range shorter than K is given
// whole, then -1. Entries outside the range are never read. Deterministic.
void select(const SelectArgs& args);

}  // namespace winnow
