// attend, as specified: fp64 logits, softmax and sums over the values that the records hold. With
// Precision::kFp8 queries and weights are rounded to e4m3 first, as winnow/precision.h says.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <limits>

#include "attend/kernel.h"
#include "attend/reference_fp8.h"
#include "core/arena.h"
#include "core/formats.h"
#include "model/records.h"

namespace winnow::internal::attend {

namespace {

struct Sum {  // of one head
  double o[kValueDim];
  double m, l, max;
  // kFp8: what weights are rounded relative to.
  int top;
};

// `share`: of each weight's part of the output, what its rounding leaves of it.
void add(Sum& sum, double s, const float* v, const CodedWeight& share) {
  sum.max = s > sum.max || std::isnan(s) ? s : sum.max;
  // Clamped to finite values: -inf weighs nothing, +inf weighs e^0, no infinity meets another.
  const double m = std::clamp(s > sum.m ? s : sum.m, -DBL_MAX, DBL_MAX);
  const double alpha = std::exp(sum.m - m), p = std::exp(std::min(s, DBL_MAX) - m);
  sum.l = sum.l * alpha + p;
  for (int i = 0; i < kValueDim; ++i) sum.o[i] = sum.o[i] * alpha + p * share(i) * v[i];
  sum.m = m;
}

void write(const Params& p, int64_t t, int h, const Sum& sum) {
  const bool empty = sum.l == 0;
  const double lse = sum.m + std::log(sum.l);
  // out = o / (l + e^{sink - m}) = o / l * e^lse / (e^lse + e^sink)
  const double sink = p.sink && !empty ? std::exp(p.sink[h] - sum.m) : 0;
  const int64_t at = p.out_at(t, h);
  for (int i = 0; i < kValueDim; ++i) {
    const float o = empty ? 0.0f : static_cast<float>(sum.o[i] / (sum.l + sink));
    if (p.out_f32) p.out_f32[at + i] = o;
    else p.out[at + i] = to_bf16(o);
  }
  if (p.lse)
    p.lse[p.lse_at(t, h)] =
        empty ? p.empty_lse : static_cast<float>(std::isinf(sum.max) ? sum.max : lse);
  if (p.max_logit)
    p.max_logit[t * p.max_token_stride + h * p.max_head_stride] = static_cast<float>(sum.max);
}

}  // namespace

size_t reference_workspace(const Shape& shape, int64_t) {
  Arena arena;
  arena.take<Sum>(shape.heads);
  return arena.bytes();
}

void reference(const Params& p) noexcept {
  Sum* sums = Arena(p.workspace).take<Sum>(p.heads);
  const auto [d_nope, d_rope] = with_latent(p.lists[0].format, [](auto r) {
    return std::pair{decltype(r)::kNope, decltype(r)::kRope};
  });
  const bool fp8 = p.precision == Precision::kFp8;
  for (int64_t t = 0; t < p.tokens; ++t) {
    std::fill_n(sums, p.heads,
                Sum{{}, -DBL_MAX, 0, -std::numeric_limits<double>::infinity(), INT_MIN});
    const int32_t request = p.requests ? p.requests[t * p.request_stride] : 0;
    const CodedQuery coded = fp8 ? CodedQuery(p, t, d_nope, d_rope) : CodedQuery();
    // Calls f(head, logit, record, its scales) for every valid entry and head.
    const auto for_logits = [&](auto f) {
      for (int i = 0; i < p.list_count; ++i) {
        for (int32_t c = 0; c < columns(p.lists[i], t); ++c) {
          const int32_t index = p.lists[i].indices[t * p.lists[i].index_stride + c];
          const Entry e = resolve(p.lists[i], index, request);
          if (e.page < 0) continue;
          float k[kMaxKeyDim];
          dequantize(p.lists[i], e, k);
          const RecordScales scales = fp8 ? scales_of(p.lists[i], e) : RecordScales();
          for (int h = 0; h < p.heads; ++h) {
            const bf16* q = p.q + t * p.q_token_stride + h * p.q_head_stride;
            const bf16* rope = p.q_rope + t * p.rope_token_stride + h * p.rope_head_stride;
            double dot = scales.unfit ? std::numeric_limits<double>::quiet_NaN() : 0;
            for (int d = 0; d < d_nope; ++d) dot += double{coded(to_float(q[d]))} * k[d];
            for (int d = 0; d < d_rope; ++d) dot += double{to_float(rope[d])} * k[d_nope + d];
            f(h, p.scale * dot, k, scales);
          }
        }
      }
    };
    if (fp8)
      for_logits([&](int h, double s, const float*, const RecordScales& scales) {
        sums[h].top = std::max(sums[h].top, top_of(s, scales));
      });
    for_logits([&](int h, double s, const float* k, const RecordScales& scales) {
      add(sums[h], s, k, fp8 ? CodedWeight(s, sums[h].top, scales) : CodedWeight());
    });
    for (int h = 0; h < p.heads; ++h) write(p, t, h, sums[h]);
  }
}

}  // namespace winnow::internal::attend
