// One head's row of a partial result: adding two of them, storing it for the merge, and writing the
// answer. 512 values each, so a row is 2 KB in (1 KB of halves) and 1 KB out; bound by the cache it
// comes from.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "attend/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attend/cpu/rows.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::attend::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using internal::cpu::HWY_NAMESPACE::store_bf16;

// acc = acc * a + part * b
void blend_row(float* acc, const float* part, float a, float b) {
  const hn::ScalableTag<float> d;
  const auto va = hn::Set(d, a), vb = hn::Set(d, b);
  for (size_t i = 0; i < kValueDim; i += hn::Lanes(d)) {
    const auto scaled = hn::Mul(hn::LoadU(d, acc + i), va);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, part + i), vb, scaled), d, acc + i);
  }
}

using F16 = hn::Rebind<hwy::float16_t, hn::ScalableTag<float>>;

// acc = acc * a + half * b
void blend_half(float* acc, const uint16_t* half, float a, float b) {
  const hn::ScalableTag<float> d;
  const auto va = hn::Set(d, a), vb = hn::Set(d, b);
  const auto* from = reinterpret_cast<const hwy::float16_t*>(half);
  for (size_t i = 0; i < kValueDim; i += hn::Lanes(d)) {
    const auto x = hn::PromoteTo(d, hn::LoadU(F16(), from + i));
    hn::StoreU(hn::MulAdd(x, vb, hn::Mul(hn::LoadU(d, acc + i), va)), d, acc + i);
  }
}

// Exponent, biased, of the largest magnitude; 255 if a value is infinite or NaN.
int largest_exponent(const float* o) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  auto top = hn::Zero(di);
  for (size_t i = 0; i < kValueDim; i += hn::Lanes(d))
    top = hn::Max(top, hn::BitCast(di, hn::Abs(hn::LoadU(d, o + i))));
  return hn::GetLane(hn::MaxOfLanes(di, top)) >> 23;
}

// half = fp16(o * factor)
void round_row(const float* o, float factor, uint16_t* half) {
  const hn::ScalableTag<float> d;
  const auto f = hn::Set(d, factor);
  auto* to = reinterpret_cast<hwy::float16_t*>(half);
  for (size_t i = 0; i < kValueDim; i += hn::Lanes(d))
    hn::StoreU(hn::DemoteTo(F16(), hn::Mul(hn::LoadU(d, o + i), f)), F16(), to + i);
}

// out = bf16(o * factor)
void write_row(const float* o, float factor, bf16* out) {
  const hn::ScalableTag<float> d;
  const auto f = hn::Set(d, factor);
  for (size_t i = 0; i < kValueDim; i += hn::Lanes(d))
    store_bf16(d, hn::Mul(hn::LoadU(d, o + i), f), out + i);
}
void write_row_f32(const float* o, float factor, float* out) {
  const hn::ScalableTag<float> d;
  const auto f = hn::Set(d, factor);
  for (size_t i = 0; i < kValueDim; i += hn::Lanes(d))
    hn::StoreU(hn::Mul(hn::LoadU(d, o + i), f), d, out + i);
}

}  // namespace winnow::internal::attend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::attend::cpu {

HWY_EXPORT(blend_row);
HWY_EXPORT(blend_half);
HWY_EXPORT(largest_exponent);
HWY_EXPORT(round_row);
HWY_EXPORT(write_row);
HWY_EXPORT(write_row_f32);

namespace {

// acc = acc + part; `blend` does the values with the two factors.
template <class Part, class Blend>
void fold_with(Partial& acc, const Part& part, const Blend& blend) {
  if (part.l == 0) return;  // nothing was read
  const float m = acc.m > part.m ? acc.m : part.m;
  const float a = std::exp(acc.m - m), b = std::exp(part.m - m);
  blend(a, b);
  acc.l = acc.l * a + part.l * b;
  acc.w = acc.w * a + part.w * b;
  acc.m = m;
  acc.max = acc.max > part.max ? acc.max : part.max;
}

}  // namespace

void fold(Partial& acc, const Partial& part) noexcept {
  fold_with(acc, part, [&](float a, float b) {
    HWY_DYNAMIC_DISPATCH(blend_row)(acc.o, part.o, a, b);
  });
}

void fold(Partial& acc, const StoredPart& part) noexcept {
  fold_with(acc, part, [&](float a, float b) {
    if (part.unit == 0) HWY_DYNAMIC_DISPATCH(blend_row)(acc.o, part.o, a, b);
    else HWY_DYNAMIC_DISPATCH(blend_half)(acc.o, part.half, a, b * part.unit);
  });
}

void store(const Partial& part, bool rounded, StoredPart& to) noexcept {
  to.m = part.m;
  to.l = part.l;
  to.max = part.max;
  to.w = part.w;
  to.unit = 0;
  const int exponent = rounded ? HWY_DYNAMIC_DISPATCH(largest_exponent)(part.o) : 255;
  if (exponent >= 254) {  // from 2^127 on, rounding could give 2^128
    std::memcpy(to.o, part.o, sizeof part.o);
    return;
  }
  // The largest half is in [2^14, 2^15), or below where the unit would not be a normal number.
  const int unit = std::max(exponent - 14, 1);
  to.unit = std::bit_cast<float>(unit << 23);
  HWY_DYNAMIC_DISPATCH(round_row)(part.o, std::bit_cast<float>((254 - unit) << 23), to.half);
}

void load(const StoredPart& part, Partial& to) noexcept {
  to.m = part.m;
  to.l = part.l;
  to.max = part.max;
  to.w = part.w;
  if (part.unit == 0) {
    std::memcpy(to.o, part.o, sizeof part.o);
    return;
  }
  std::memset(to.o, 0, sizeof to.o);
  HWY_DYNAMIC_DISPATCH(blend_half)(to.o, part.half, 0, part.unit);
}

void finish(const Params& p, int64_t token, int32_t head, const Partial& part) noexcept {
  const bool empty = part.l == 0;
  const int64_t at = p.out_at(token, head);
  if (empty) {
    if (p.out_f32) std::fill_n(p.out_f32 + at, kValueDim, 0.0f);
    else std::fill_n(p.out + at, kValueDim, bf16{0});
  } else {
    // out = o / (l + e^{sink - m}) = o / l * e^lse / (e^lse + e^sink); a sink of +inf divides by
    // infinity, one of -inf adds nothing.
    const float sink = p.sink ? std::exp(p.sink[head] - part.m) : 0.0f;
    // o / w instead of o / l: the rounding of a weight that dominates falls out.
    const float factor = part.l / part.w / (part.l + sink);
    if (p.out_f32) HWY_DYNAMIC_DISPATCH(write_row_f32)(part.o, factor, p.out_f32 + at);
    else HWY_DYNAMIC_DISPATCH(write_row)(part.o, factor, p.out + at);
  }
  // A NaN among the logits is a NaN in the sum, and in all three results.
  const float max = std::isnan(part.l) ? part.l : part.max;
  if (p.lse)
    p.lse[p.lse_at(token, head)] = empty             ? p.empty_lse
                                   : std::isinf(max) ? max
                                                     : part.m + std::log(part.l);
  if (p.max_logit)
    p.max_logit[token * p.max_token_stride + head * p.max_head_stride] =
        empty ? -std::numeric_limits<float>::infinity() : max;
}

}  // namespace winnow::internal::attend::cpu
#endif  // HWY_ONCE
