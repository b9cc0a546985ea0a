// Vector helpers of the attention kernels: conversions and an exponential. Included once per
// Highway target, after hwy/highway.h.
#include "core/arithmetic.h"
#include "core/formats.h"
#include "cpu/formats_simd.h"

#if defined(WINNOW_CPU_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_VECTORS_INL_H_
#undef WINNOW_CPU_VECTORS_INL_H_
#else
#define WINNOW_CPU_VECTORS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// e^x for x <= 0, to 2 ulp: x = n ln2 + r, |r| <= ln2 / 2, a polynomial of degree 6 for e^r (its
// next term, r^7 / 5040, is below 2^-23), and 2^n added to the exponent. 0 below -87; NaN stays.
template <class D>
HWY_INLINE hn::Vec<D> exp_negative(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto low = hn::Set(d, -87.0f);
  const auto tiny = hn::Lt(x, low);
  const auto t = hn::IfThenElse(tiny, low, x);
  const auto n = hn::NearestInt(hn::Mul(t, hn::Set(d, kLog2e)));
  const auto fn = hn::ConvertTo(d, n);
  auto r = hn::NegMulAdd(fn, hn::Set(d, 0.693359375f), t);  // ln2 in two steps: the first is exact
  r = hn::NegMulAdd(fn, hn::Set(d, -2.12194440e-4f), r);
  auto y = hn::Set(d, 1.0f / 720);
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f / 120));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f / 24));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f / 6));
  y = hn::MulAdd(y, r, hn::Set(d, 0.5f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f));
  // n >= -126: the sum of exponents stays normal.
  y = hn::BitCast(d, hn::Add(hn::BitCast(di, y), hn::ShiftLeft<23>(n)));
  y = hn::IfThenZeroElse(tiny, y);
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
