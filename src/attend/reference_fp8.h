// Precision::kFp8 as specified in winnow/precision.h: how queries and weights are rounded to e4m3.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>

#include "attend/kernel.h"
#include "core/formats.h"
#include "model/records.h"

namespace winnow::internal::attend {

// The scales of a record.
struct RecordScales {
  float of[8] = {};
  int tiles = 0;
  // Columns of a tile.
  int columns = 1;
  // The exponent of the largest one, at least -54.
  int lambda = -54;
  // Whether one is 2^67 or more: what it says is NaN then.
  bool unfit = false;
};

inline RecordScales scales_of(const ListView& list, const Entry& e) {
  RecordScales scales;
  with_latent(list.format, [&](auto record) {
    using R = decltype(record);
    if constexpr (R::kQuantized) {
      const auto* at = reinterpret_cast<const typename R::Scale*>(
          list.data + e.page * list.page_stride + R::scales(e.offset, list.page));
      scales.tiles = R::kTiles;
      scales.columns = R::kTile;
      for (int t = 0; t < R::kTiles; ++t) {
        if constexpr (sizeof(typename R::Scale) == 1) scales.of[t] = from_ue8m0(at[t]);
        else scales.of[t] = at[t];
        const float size = std::fabs(scales.of[t]);
        scales.unfit |= size >= 0x1p67f;
        if (size > 0x1p-54f && size < 0x1p67f)
          scales.lambda = std::max(scales.lambda, std::ilogb(size));
      }
    }
  });
  return scales;
}

// The NoPE part of a token's queries: rounded relative to the largest value of all heads.
class CodedQuery {
 public:
  CodedQuery() = default;
  CodedQuery(const Params& p, int64_t token, int d_nope, int d_rope) : rounds_(true) {
    float most = 0;
    for (int64_t h = 0; h < p.heads; ++h) {
      const bf16* q = p.q + token * p.q_token_stride + h * p.q_head_stride;
      const bf16* rope = p.q_rope + token * p.rope_token_stride + h * p.rope_head_stride;
      for (int d = 0; d < d_nope; ++d) most = std::max(most, std::fabs(to_float(q[d])));
      for (int d = 0; d < d_rope; ++d) most = std::max(most, std::fabs(to_float(rope[d])));
    }
    exponent_ = 7 - (most == 0          ? -60
                     : std::isinf(most) ? 9
                                        : std::clamp(std::ilogb(most), -60, 100));
  }
  float operator()(float x) const {
    if (!rounds_) return x;
    // An infinity becomes NaN.
    return std::ldexp(to_float(to_e4m3(std::ldexp(x, exponent_) + 0 * x)), -exponent_);
  }

 private:
  bool rounds_ = false;
  int exponent_ = 0;
};

// The power of two that a logit's weight, times its record's largest scale, is at most half below.
inline int top_of(double s, const RecordScales& scales) {
  const double x = s * 1.4426950408889634 + scales.lambda;
  return x > INT_MIN && x < INT_MAX ? static_cast<int>(std::ceil(x)) : INT_MIN;
}

// What rounding leaves of a weight's part of each column.
class CodedWeight {
 public:
  CodedWeight() = default;
  CodedWeight(double s, int top, const RecordScales& scales) : columns_(scales.columns) {
    for (int t = 0; t < scales.tiles; ++t) {
      const double exact = std::exp2(s * 1.4426950408889634 - top + 4) * scales.of[t];
      if (exact != 0 && std::isfinite(exact))
        share_[t] = to_float(to_e4m3(static_cast<float>(exact))) / exact;
    }
  }
  double operator()(int column) const {
    const int tile = column / columns_;
    return tile < 8 ? share_[tile] : 1;
  }

 private:
  double share_[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  int columns_ = kValueDim;
};

}  // namespace winnow::internal::attend
