// One head's row of a partial result: adding two of them, and writing the answer. 512 values each,
// so a row is 2 KB in and 1 KB out; bound by the cache it comes from.
#include <cmath>
#include <limits>

#include "attend/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attend/rows.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "attend/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::attention::HWY_NAMESPACE {

// acc = acc * a + part * b
void blend_row(float* acc, const float* part, float a, float b) {
  const hn::ScalableTag<float> d;
  const auto va = hn::Set(d, a), vb = hn::Set(d, b);
  for (size_t i = 0; i < kValueDim; i += hn::Lanes(d)) {
    const auto scaled = hn::Mul(hn::LoadU(d, acc + i), va);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, part + i), vb, scaled), d, acc + i);
  }
}

// out = bf16(o * factor)
void write_row(const float* o, float factor, bf16* out) {
  const hn::ScalableTag<float> d;
  const auto f = hn::Set(d, factor);
  for (size_t i = 0; i < kValueDim; i += hn::Lanes(d))
    store_bf16(d, hn::Mul(hn::LoadU(d, o + i), f), out + i);
}

}  // namespace winnow::attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::attention {

HWY_EXPORT(blend_row);
HWY_EXPORT(write_row);

void fold(Partial& acc, const Partial& part) noexcept {
  if (part.l == 0) return;  // nothing was read
  const float m = acc.m > part.m ? acc.m : part.m;
  const float a = std::exp(acc.m - m), b = std::exp(part.m - m);
  HWY_DYNAMIC_DISPATCH(blend_row)(acc.o, part.o, a, b);
  acc.l = acc.l * a + part.l * b;
  acc.w = acc.w * a + part.w * b;
  acc.m = m;
  acc.max = acc.max > part.max ? acc.max : part.max;
}

void finish(const Params& p, int64_t token, int32_t head, const Partial& part) noexcept {
  const bool empty = part.l == 0;
  bf16* out = p.out + token * p.out_token_stride + head * p.out_head_stride;
  if (empty) {
    for (int i = 0; i < kValueDim; ++i) out[i] = {0};
  } else {
    // out = o / (l + e^{sink - m}) = o / l * e^lse / (e^lse + e^sink); a sink of +inf divides by
    // infinity, one of -inf adds nothing.
    const float sink = p.sink ? std::exp(p.sink[head] - part.m) : 0.0f;
    // o / w instead of o / l: the rounding of a weight that dominates falls out.
    HWY_DYNAMIC_DISPATCH(write_row)(part.o, part.l / part.w / (part.l + sink), out);
  }
  // A NaN among the logits is a NaN in the sum, and in all three results.
  const float max = std::isnan(part.l) ? part.l : part.max;
  if (p.lse)
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = empty ? p.empty_lse
                                                                   : std::isinf(max)
                                                                       ? max
                                                                       : part.m + std::log(part.l);
  if (p.max_logit)
    p.max_logit[token * p.max_token_stride + head * p.max_head_stride] =
        empty ? -std::numeric_limits<float>::infinity() : max;
}

}  // namespace winnow::attention
#endif  // HWY_ONCE
