// index_query: projected heads and weights of the indexer -> what score() takes.
#pragma once

#include "winnow/rotate.h"
#include "winnow/tensor.h"
#include "winnow/write.h"

namespace winnow {

struct IndexQueryArgs {
  Tensor q;          // [T, n, 128] bf16
  Tensor weights;    // [T, n] f32 or bf16: of the projection
  Tensor positions;  // [T] int32
  Rope rope;
  // After RoPE, with sums in fp32; the index keys must be made in the same way.
  bool hadamard = false;
  // Scale of a head's 128 values: kPow2 (the default), 2^ceil(log2(max(amax, 1e-4) / 448)), or
  // kAmax, max(amax, 1e-4) / 448. Queries in bf16 have none.
  ScaleMode scale = ScaleMode::kDefault;
  float factor = 1.0f;  // n^-1/2 * 128^-1/2
  Tensor out;           // [T, n, 128] e4m3, out; or bf16, for keys in bf16 (may be q then)
  Tensor out_weights;   // [T, n] f32, out: weights * scale * factor
  Target target = {};
};

// out = e4m3(bf16(hadamard(bf16(rope(q)))) / scale): the bits of rotate() and of the quantiser of
// index keys. out_weights = (weights * scale) * factor in fp32. A token whose position is outside
// the table is skipped: its rows of both outputs stay as they are.
void index_query(const IndexQueryArgs& args);

}  // namespace winnow
