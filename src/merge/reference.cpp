// merge, as specified, in fp64.
#include <cmath>
#include <limits>

#include "core/formats.h"
#include "merge/kernel.h"

namespace winnow::internal::merge {

namespace {

void row(const Params& p, int64_t t, int64_t h) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const auto lse = [&](int64_t i) -> double {
    return p.partial_lse[i * p.lse_part_stride + t * p.lse_token_stride + h * p.lse_head_stride];
  };
  double max = -kInf, sum = 0;
  for (int64_t i = 0; i < p.parts; ++i)
    if (!std::isinf(lse(i)) && !(lse(i) <= max)) max = lse(i);
  for (int64_t i = 0; i < p.parts; ++i)
    if (!std::isinf(lse(i))) sum += std::exp(lse(i) - max);
  // The sink weighs like one more part whose output is zero, but stays out of lse.
  const double whole = sum + (p.sink ? std::exp(p.sink[h] - max) : 0);
  for (int64_t d = 0; d < p.d_v; ++d) {
    double o = 0;
    for (int64_t i = 0; i < p.parts; ++i) {
      if (std::isinf(lse(i))) continue;
      const int64_t at = i * p.part_stride + t * p.token_stride + h * p.head_stride + d;
      const float x = p.partial_bf16 ? to_float(static_cast<const bf16*>(p.partial_out)[at])
                                     : static_cast<const float*>(p.partial_out)[at];
      o += std::exp(lse(i) - max) / whole * x;
    }
    const int64_t at = t * p.out_token_stride + h * p.out_head_stride + d;
    if (p.out_bf16) static_cast<bf16*>(p.out)[at] = to_bf16(static_cast<float>(o));
    else static_cast<float*>(p.out)[at] = static_cast<float>(o);
  }
  // No part: max = -inf, sum = 0, and the loops above left zeros.
  if (p.lse)
    p.lse[t * p.out_lse_token_stride + h * p.out_lse_head_stride] =
        static_cast<float>(sum == 0 ? -kInf : max + std::log(sum));
}

}  // namespace

void reference(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t h = 0; h < p.heads; ++h) row(p, t, h);
}

}  // namespace winnow::internal::merge
