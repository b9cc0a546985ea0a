#include "core/prologue.h"

#include <cmath>

namespace winnow::internal::core {

NormParams checked_norm(const Check& check, const Norm& norm, int64_t width) {
  if (norm.kind == NormKind::kNone) return {};
  check.that(norm.kind == NormKind::kRms || norm.kind == NormKind::kLayer, "norm.kind",
             "kNone, kRms or kLayer", cat("number ", static_cast<int>(norm.kind)));
  check.that(std::isfinite(norm.eps) && norm.eps > 0, "norm.eps", "a number above 0",
             cat(norm.eps));
  NormParams p;
  p.kind = norm.kind;
  p.eps = norm.eps;
  if (check.optional(norm.weight, "norm.weight", DType::kF32, {width}))
    p.weight = static_cast<const float*>(norm.weight.data);
  if (check.optional(norm.bias, "norm.bias", DType::kF32, {width}))
    p.bias = static_cast<const float*>(norm.bias.data);
  return p;
}

RopeParams checked_rope(const Check& check, const Rope& rope) {
  check.strided(rope.table, "rope.table", DType::kF32, {Check::kAny, 2, kPairs});
  check.that(rope.pairs == RopePairs::kInterleaved || rope.pairs == RopePairs::kHalf, "rope.pairs",
             "kInterleaved or kHalf", cat("number ", static_cast<int>(rope.pairs)));
  check.that(rope.slice == RopeSlice::kLast || rope.slice == RopeSlice::kFirst, "rope.slice",
             "kLast or kFirst", cat("number ", static_cast<int>(rope.slice)));
  // An empty table may have no data, which kernels would take for no RoPE: it has no position.
  static constexpr float kNone = 0;
  RopeParams p;
  p.table = rope.table.data ? static_cast<const float*>(rope.table.data) : &kNone;
  p.positions = rope.table.shape[0];
  p.position_stride = rope.table.stride[0];
  p.sine_stride = rope.table.stride[1];
  p.pair_stride = rope.table.stride[2];
  p.half = rope.pairs == RopePairs::kHalf;
  p.first = rope.slice == RopeSlice::kFirst;
  p.inverse = rope.inverse;
  return p;
}

}  // namespace winnow::internal::core
