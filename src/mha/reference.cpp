// attend_mha, as specified, in fp64.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/arena.h"
#include "core/formats.h"
#include "mha/kernel.h"

namespace winnow::internal::mha {

namespace {

void row(const Params& p, int64_t t, int64_t h, const uint64_t* bits, double* o) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const bf16* q = p.q + t * p.q_token_stride + h * p.q_head_stride;
  const auto logit = [&](int64_t r) {
    const bf16* k = p.k + r * p.k_row_stride + h * p.k_head_stride;
    double dot = 0;
    for (int64_t d = 0; d < p.d_qk; ++d) dot += double{to_float(q[d])} * to_float(k[d]);
    return p.scale * dot + bias_of(p, t, r - start_of(p, t));
  };
  const auto in_set = [&](int64_t r) { return bits[r / 64] >> r % 64 & 1; };
  // Two passes over the logits. A logit of -inf weighs nothing; no infinity meets another.
  double max = -kInf, sum = 0;
  for (int64_t r = 0; r < p.rows; ++r)
    if (in_set(r)) max = std::max(max, logit(r));
  const double m =
      std::clamp(max, -std::numeric_limits<double>::max(), std::numeric_limits<double>::max());
  for (int64_t d = 0; d < p.d_v; ++d) o[d] = 0;
  for (int64_t r = 0; r < p.rows; ++r) {
    if (!in_set(r)) continue;
    const double w = std::exp(std::min(logit(r), std::numeric_limits<double>::max()) - m);
    const bf16* v = p.v + r * p.v_row_stride + h * p.v_head_stride;
    sum += w;
    for (int64_t d = 0; d < p.d_v; ++d) o[d] += w * to_float(v[d]);
  }
  const double whole = sum + (p.sink ? std::exp(p.sink[h] - m) : 0);
  bf16* out = p.out + t * p.out_token_stride + h * p.out_head_stride;
  for (int64_t d = 0; d < p.d_v; ++d)
    out[d] = to_bf16(sum == 0 ? 0.0f : static_cast<float>(o[d] / whole));
  if (p.lse)
    p.lse[t * p.lse_token_stride + h * p.lse_head_stride] =
        sum == 0 ? p.empty_lse : static_cast<float>(m + std::log(sum));
}

}  // namespace

size_t reference_workspace(const Shape& s) {
  Arena arena;
  arena.take<uint64_t>(words(s.rows)), arena.take<double>(s.d_v);
  return arena.bytes();
}

void reference(const Params& p) noexcept {
  Arena arena(p.workspace);
  uint64_t* bits = arena.take<uint64_t>(words(p.rows));
  double* o = arena.take<double>(p.d_v);
  for (int64_t t = 0; t < p.tokens; ++t) {
    build_set(p, t, bits);
    for (int64_t h = 0; h < p.heads; ++h) row(p, t, h, bits, o);
  }
}

}  // namespace winnow::internal::mha
