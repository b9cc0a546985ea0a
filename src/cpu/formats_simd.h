// bf16 and e4m3 in Highway vectors, bit for bit as core/formats.h has them. Included once per
// target, after hwy/highway.h, by files that hwy/foreach_target.h compiles several times.
#if defined(WINNOW_CPU_FORMATS_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_FORMATS_SIMD_H
#undef WINNOW_CPU_FORMATS_SIMD_H
#else
#define WINNOW_CPU_FORMATS_SIMD_H
#endif

#include <cstdint>

#include "cpu/isa.h"
#include "hwy/highway.h"
#include "winnow/tensor.h"

// Behind the arguments of a lambda: GCC otherwise calls some that stand in loops.
#undef WINNOW_INLINED
#define WINNOW_INLINED HWY_ATTR __attribute__((always_inline))

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Lanes(df) bf16 values as floats. 3 instructions.
template <class DF>
HWY_INLINE hn::VFromD<DF> load_bf16(DF df, const bf16* from) {
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<uint16_t, DF> dh;
  const auto u = hn::PromoteTo(du, hn::LoadU(dh, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(df, hn::ShiftLeft<16>(u));
}

// Which NaNs a rounding to bf16 may meet. Those of bf16 values and of arithmetic have a low half of
// zeros, which rounding leaves alone. Others, of fp32 inputs, could be carried into a zero.
enum class Nans { kAny, kOfBf16 };

// The bits of the float rounded to nearest even bf16, in the high half of each lane (the low half
// is anything); NaN stays NaN (quieted).
template <Nans kNans = Nans::kAny, class DF>
HWY_INLINE hn::VFromD<hn::RebindToUnsigned<DF>> round_to_bf16(DF /*df*/, hn::VFromD<DF> v) {
  const hn::RebindToUnsigned<DF> du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(u, hn::Set(du, 0x7fffu)), odd);
  if constexpr (kNans == Nans::kOfBf16) return rounded;
  const auto quiet = hn::Or(u, hn::Set(du, 0x400000u));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

template <Nans kNans = Nans::kAny, class DF>
HWY_INLINE void store_bf16(DF df, hn::VFromD<DF> v, bf16* to) {
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<uint16_t, DF> dh;
  // 0..65535: demotes as it is.
  const auto high = hn::BitCast(di, hn::ShiftRight<16>(round_to_bf16<kNans>(df, v)));
  hn::StoreU(hn::DemoteTo(dh, high), dh, reinterpret_cast<uint16_t*>(to));
}

// Rounding by AVX-512 BF16's instruction, for which this Highway has no target: a tenth of the
// operations, but subnormal floats become zeros of their sign. So it is for values that become e4m3
// codes by scales of 2^-100 or more, where they become zeros anyway.
enum class Rounding { kPlain, kFlushing, kChecked };  // the last: plain again where zeros came out
#undef WINNOW_FLUSHING_ROUNDING
#if HWY_TARGET == HWY_AVX3 && (!defined(__clang__) || defined(__AVX512BF16__))
#define WINNOW_FLUSHING_ROUNDING 1
// `first` in the lower half.
HWY_INLINE hn::Vec512<uint16_t> round_flushing(hn::Vec512<float> first, hn::Vec512<float> second) {
  __m512i both;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(first.raw), "v"(second.raw));
  return hn::Vec512<uint16_t>{both};
}
// Values at even places, then those at odd ones, brought into turn.
HWY_INLINE hn::Vec512<uint16_t> in_turn(hn::Vec512<uint16_t> parts) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return hn::Vec512<uint16_t>{_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), parts.raw)};
}
// Adds the products of 32 bf16 values, two in each lane; subnormal values and sums count as zeros.
HWY_INLINE hn::Vec512<float> add_products(hn::Vec512<float> sum, hn::Vec512<uint16_t> a,
                                          hn::Vec512<uint16_t> b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
  return sum;
}
inline bool can_round_flushing() { return isa().avx512_bf16; }
#else
#define WINNOW_FLUSHING_ROUNDING 0
inline bool can_round_flushing() { return false; }
#endif

#if HWY_TARGET != HWY_SCALAR
// Two vectors as one: the high halves of both, `first` in the lower half.
template <Nans kNans, Rounding kRounding, class DF>
HWY_INLINE hn::VFromD<hn::Repartition<uint16_t, DF>> round_pair(DF df, hn::VFromD<DF> first,
                                                                hn::VFromD<DF> second) {
  const hn::Repartition<uint16_t, DF> dh;
#if WINNOW_FLUSHING_ROUNDING
  if constexpr (kRounding != Rounding::kPlain) {
    const auto both = round_flushing(first, second);
    if constexpr (kRounding == Rounding::kFlushing) return both;
    const auto magnitudes = hn::And(both, hn::Set(dh, uint16_t{0x7fff}));
    if (HWY_LIKELY(hn::AllFalse(dh, hn::Eq(magnitudes, hn::Zero(dh))))) return both;
  }
#endif
  const auto low = hn::BitCast(dh, round_to_bf16<kNans>(df, first));
  const auto high = hn::BitCast(dh, round_to_bf16<kNans>(df, second));
  return hn::ConcatOdd(dh, high, low);
}
#endif

// Two vectors next to each other.
template <Nans kNans = Nans::kAny, Rounding kRounding = Rounding::kPlain, class DF>
HWY_INLINE void store_bf16_pair(DF df, hn::VFromD<DF> first, hn::VFromD<DF> second, bf16* to) {
#if HWY_TARGET == HWY_SCALAR
  store_bf16<kNans>(df, first, to);
  store_bf16<kNans>(df, second, to + 1);
#else
  const hn::Repartition<uint16_t, DF> dh;
  hn::StoreU(round_pair<kNans, kRounding>(df, first, second), dh, reinterpret_cast<uint16_t*>(to));
#endif
}

// The same of values at even places and at odd ones, which share lanes of 32 bits.
template <Nans kNans, Rounding kRounding, class DF>
HWY_INLINE void store_parts(DF df, hn::VFromD<DF> even, hn::VFromD<DF> odd, bf16* to) {
#if WINNOW_FLUSHING_ROUNDING
  if constexpr (kRounding != Rounding::kPlain) {
    const hn::Repartition<uint16_t, DF> dh;
    const auto parts = round_pair<kNans, kRounding>(df, even, odd);
    return hn::StoreU(in_turn(parts), dh, reinterpret_cast<uint16_t*>(to));
  }
#endif
  const hn::RebindToUnsigned<DF> du;
  const auto low = hn::ShiftRight<16>(round_to_bf16<kNans>(df, even));
  const auto high = hn::And(round_to_bf16<kNans>(df, odd), hn::Set(du, 0xffff0000u));
  hn::StoreU(hn::Or(low, high), du, reinterpret_cast<uint32_t*>(to));
}

// How a row's values stand in memory: in turn, or in blocks of two vectors, of which the first has
// the values at even places and the second those at odd ones.
enum class Order { kInTurn, kParted };

// Values at even places and at odd ones, 16 bits each.
template <class V>
struct Parts {
  V even, odd;
};
template <Order kOrder, class D>
HWY_INLINE Parts<hn::VFromD<D>> load_parts(D d, const bf16* x) {
  const auto* bits = reinterpret_cast<const uint16_t*>(x);
  const auto first = hn::LoadU(d, bits);
  const auto second = hn::LoadU(d, bits + hn::Lanes(d));
#if HWY_TARGET != HWY_SCALAR
  if constexpr (kOrder == Order::kInTurn)
    return {hn::ConcatEven(d, second, first), hn::ConcatOdd(d, second, first)};
#endif
  return {first, second};
}

// Values [0, count) from their turn into parts. Out may be x.
template <int kCount>
HWY_INLINE void part_values(const bf16* x, bf16* out) {
#if HWY_TARGET != HWY_SCALAR
  const hn::CappedTag<uint16_t, 32> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < kCount; i += 2 * lanes) {
    const auto parts = load_parts<Order::kInTurn>(d, x + i);
    hn::StoreU(parts.even, d, reinterpret_cast<uint16_t*>(out + i));
    hn::StoreU(parts.odd, d, reinterpret_cast<uint16_t*>(out + i + lanes));
  }
#endif
}

// Values [0, count) from their parts into turn.
template <int kCount>
HWY_INLINE void join_parts(const bf16* x, bf16* out) {
  const hn::CappedTag<uint16_t, 32> d;
  const hn::CappedTag<uint32_t, 16> du;
  const hn::Rebind<uint16_t, decltype(du)> dh;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const int half = static_cast<int>(hn::Lanes(du));
  const auto* from = reinterpret_cast<const uint16_t*>(x);
  for (int i = 0; i < kCount; i += 2 * lanes)
    for (int j = 0; j < lanes; j += half) {
      const auto even = hn::PromoteTo(du, hn::LoadU(dh, from + i + j));
      const auto odd = hn::PromoteTo(du, hn::LoadU(dh, from + i + lanes + j));
      hn::StoreU(hn::Or(even, hn::ShiftLeft<16>(odd)), du,
                 reinterpret_cast<uint32_t*>(out + i + 2 * j));
    }
}

// Whether a NaN is among x[0, count), a multiple of 16; infinities of both signs count as one.
HWY_INLINE bool has_nan(const float* x, int64_t count) {
  const hn::CappedTag<float, 16> df;
  auto sum = hn::Zero(df);
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(df)))
    sum = hn::Add(sum, hn::LoadU(df, x + i));
  return !hn::AllFalse(df, hn::IsNaN(sum));
}

// Lanes(df) e4m3 codes as floats, without passing through subnormal floats (slow on some CPUs, zero
// on others that flush them).
template <class DF>
HWY_INLINE hn::VFromD<DF> load_e4m3(DF df, const uint8_t* from) {
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<uint8_t, DF> db;
  const auto code = hn::PromoteTo(du, hn::LoadU(db, from));
  const auto low = hn::And(code, hn::Set(du, 0x7fu));
  const auto shifted = hn::ShiftLeft<20>(low);
  const auto normal = hn::BitCast(df, hn::Add(shifted, hn::Set(du, 120u << 23)));
  // Exponent field 0: m * 2^-9 = 2^-6 (1 + m/8) - 2^-6.
  const auto small =
      hn::Sub(hn::BitCast(df, hn::Add(shifted, hn::Set(du, 121u << 23))), hn::Set(df, 0x1p-6f));
  auto v = hn::IfThenElse(hn::RebindMask(df, hn::Lt(low, hn::Set(du, 8u))), small, normal);
  const auto nan = hn::BitCast(df, hn::Set(du, 0x7fc00000u));
  v = hn::IfThenElse(hn::RebindMask(df, hn::Eq(low, hn::Set(du, 0x7fu))), nan, v);
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(du, 0x80u)));
  return hn::Or(v, hn::BitCast(df, sign));
}

// Rounds to nearest even, saturates at +-448, NaN keeps its sign.
template <class DF>
HWY_INLINE void store_e4m3(DF df, hn::VFromD<DF> v, uint8_t* to) {
  const hn::RebindToUnsigned<DF> du;
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<uint8_t, DF> db;
  const auto a = hn::Min(hn::Abs(v), hn::Set(df, 448.0f));
  // From 2^-6 on: keep three bits of mantissa, rebias the exponent from 127 to 7.
  const auto u = hn::BitCast(du, a);
  const auto odd = hn::And(hn::ShiftRight<20>(u), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<20>(hn::Add(u, hn::Add(odd, hn::Set(du, 0x7ffffu))));
  const auto normal = hn::Sub(rounded, hn::Set(du, 120u << 3));
  // Below: floats in [2^14, 2^15) are 2^-9 apart, so the addition rounds to steps of 2^-9.
  const auto magic = hn::Set(df, 0x1p14f);
  const auto small = hn::Sub(hn::BitCast(du, hn::Add(a, magic)), hn::BitCast(du, magic));
  auto code = hn::IfThenElse(hn::RebindMask(du, hn::Lt(a, hn::Set(df, 0x1p-6f))), small, normal);
  code = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7fu), code);
  const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(du, v)), hn::Set(du, 0x80u));
  hn::StoreU(hn::DemoteTo(db, hn::BitCast(di, hn::Or(code, sign))), db, to);
}

// The largest magnitude: NaN does not count, an infinity counts as the largest finite float.
template <class DF>
HWY_INLINE hn::VFromD<DF> max_magnitude(DF df, hn::VFromD<DF> so_far, hn::VFromD<DF> v) {
  const auto a = hn::Min(hn::Abs(v), hn::Set(df, 3.402823466e38f));
  return hn::Max(so_far, hn::IfThenZeroElse(hn::IsNaN(v), a));
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
