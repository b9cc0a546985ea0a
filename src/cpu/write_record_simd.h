// One record from one bf16 row in Highway vectors, byte for byte as model/write_record.h has it.
// Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_WRITE_RECORD_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_WRITE_RECORD_SIMD_H
#undef WINNOW_CPU_WRITE_RECORD_SIMD_H
#else
#define WINNOW_CPU_WRITE_RECORD_SIMD_H
#endif

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/quantizer.h"
#include "cpu/formats_simd.h"
#include "hwy/highway.h"
#include "model/records.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// How tiles become codes, found once for many of them.
struct TileQuantizer {
  explicit TileQuantizer(const core::Quantizer& quantizer)
      : q(quantizer), floor_exponent(exponent_bits(core::scale_of(quantizer, 0))) {}

  static int exponent_bits(float scale) {
    return static_cast<int>(std::bit_cast<uint32_t>(scale) >> 23);
  }
  // The exponent field of the power of two for a tile with this largest magnitude, in bits of bf16.
  // amax / 448 lies above a power of two where amax's mantissa is above 1.75, which 31 carries into
  // the exponent; a larger amax has no smaller scale, so the floor is that of amax = 0.
  int exponent_of(uint16_t most) const { return std::max((most + 31) / 128 - 8, floor_exponent); }

  core::Quantizer q;
  int floor_exponent;  // with a power of two
};

// The smallest lane. Halves first: x86 finds it among eight lanes in one instruction.
template <class D>
HWY_INLINE uint16_t smallest_lane(D d, hn::VFromD<D> v) {
#if !HWY_HAVE_SCALABLE && HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(D()) > 8) {
    const hn::Half<D> half;
    return smallest_lane(half, hn::Min(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
#endif
  return hn::GetLane(hn::MinOfLanes(d, v));
}

// A tile's largest magnitude as bits of bf16, which order as the values do.
template <int kTile>
HWY_INLINE uint16_t largest_magnitude(const bf16* x) {
  const hn::CappedTag<uint16_t, kTile> dh;
  const int lanes = static_cast<int>(hn::Lanes(dh));
  const auto mask = hn::Set(dh, uint16_t{0x7fff});
  auto below = mask;  // how far the magnitudes lie below 0x7fff
  for (int i = 0; i < kTile; i += lanes) {
    const auto bits = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i));
    below = hn::Min(below, hn::AndNot(bits, mask));
  }
  return static_cast<uint16_t>(0x7fff - smallest_lane(dh, below));
}

#if HWY_TARGET != HWY_SCALAR  // has no lane for two values

// Codes of two vectors, one in the low byte of each lane, side by side.
template <class D>
HWY_INLINE void store_low_bytes(D /*dh*/, hn::VFromD<D> first, hn::VFromD<D> second, uint8_t* to) {
  const hn::Repartition<uint8_t, D> db;
  hn::StoreU(hn::ConcatEven(db, hn::BitCast(db, second), hn::BitCast(db, first)), db, to);
}

// The codes of values, three bits of whose mantissa are kept: `rounded` has them in bits 4 to 10 of
// each lane, and zeros above them.
template <class D>
HWY_INLINE hn::VFromD<D> codes_of(D dh, hn::VFromD<D> values, hn::VFromD<D> rounded) {
  return hn::OrAnd(hn::ShiftRight<4>(rounded), hn::ShiftRight<8>(values),
                   hn::Set(dh, uint16_t{0x80}));
}

// kTile codes, two vectors at a time: round(vector of bf16 bits) gives what codes_of() takes. False
// if a value is too small for a normal code: write_small_codes() is to follow.
template <int kTile, class F>
HWY_INLINE bool write_normal_codes(const bf16* x, uint8_t* codes, F&& round) {
  const hn::CappedTag<uint16_t, kTile / 2> dh;
  const hn::RebindToSigned<decltype(dh)> di;
  constexpr int16_t kLeast = 0x80;  // of the first normal code
  const int lanes = static_cast<int>(hn::Lanes(dh));
  auto smallest = hn::Set(di, int16_t{0x7fff});
  for (int i = 0; i < kTile; i += 2 * lanes) {
    const auto first = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i));
    const auto second = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i + lanes));
    const auto first_rounded = round(dh, first);
    const auto second_rounded = round(dh, second);
    smallest =
        hn::Min(smallest, hn::Min(hn::BitCast(di, first_rounded), hn::BitCast(di, second_rounded)));
    store_low_bytes(dh, codes_of(dh, first, first_rounded), codes_of(dh, second, second_rounded),
                    codes + i);
  }
  return hn::AllFalse(di, hn::Lt(smallest, hn::Set(di, kLeast)));
}

// Codes of x / 2^(exponent - 127). `offset` rounds, and takes the scale and the difference of the
// biases from the exponent, all in the 16 bits of a bf16.
template <int kTile>
HWY_INLINE bool write_powers(uint16_t offset, const bf16* x, uint8_t* codes) {
  return write_normal_codes<kTile>(x, codes, [offset](auto dh, auto bits) HWY_ATTR {
    const auto magnitude = hn::And(bits, hn::Set(dh, uint16_t{0x7fff}));
    const auto odd = hn::And(hn::ShiftRight<4>(bits), hn::Set(dh, uint16_t{1}));
    return hn::Add(hn::Add(magnitude, hn::Set(dh, offset)), odd);
  });
}

// Codes of quotients: rounded(vector of floats) gives their bits, rounded at bit 20.
template <int kTile, class F>
HWY_INLINE bool write_floats(const bf16* x, uint8_t* codes, F&& rounded) {
  return write_normal_codes<kTile>(x, codes, [&](auto dh, auto bits) HWY_ATTR {
    const hn::RepartitionToWide<decltype(dh)> du;
    const hn::RebindToFloat<decltype(du)> df;
    const auto offset = hn::Set(du, static_cast<uint32_t>(-120) << 23);  // of the exponents
    const auto upper = hn::Set(du, 0xffff0000u);
    // Neighbours share a lane of 32 bits: the even one is its low half.
    const auto both = hn::BitCast(du, hn::And(bits, hn::Set(dh, uint16_t{0x7fff})));
    const auto even = rounded(df, hn::BitCast(df, hn::ShiftLeft<16>(both)), offset);
    const auto odd = rounded(df, hn::BitCast(df, hn::And(both, upper)), offset);
    return hn::BitCast(dh, hn::OrAnd(hn::ShiftRight<16>(even), odd, upper));
  });
}

// By products with one factor, ties down: core::ties_round_down() says when.
template <int kTile>
HWY_INLINE bool write_products(float factor, const bf16* x, uint8_t* codes) {
  return write_floats<kTile>(x, codes, [factor](auto df, auto v, auto offset) HWY_ATTR {
    const hn::RebindToUnsigned<decltype(df)> du;
    const auto round = hn::Add(offset, hn::Set(du, 0x7ffffu));
    return hn::Add(hn::BitCast(du, hn::Mul(v, hn::Set(df, factor))), round);
  });
}

// By quotients, ties to even, for scales from 2^-80 to 2^100. The inverse has two parts, by which
// fused products are the quotients (quantizer_test).
template <int kTile>
HWY_NOINLINE bool write_quotients(float scale, const bf16* x, uint8_t* codes) {
  const core::TwoPartInverse inverse(scale);
  return write_floats<kTile>(x, codes, [&](auto df, auto v, auto offset) HWY_ATTR {
    const hn::RebindToUnsigned<decltype(df)> du;
#if HWY_NATIVE_FMA
    const auto quotient =
        hn::MulAdd(v, hn::Set(df, inverse.high), hn::Mul(v, hn::Set(df, inverse.low)));
#else
    const auto quotient = hn::Div(v, hn::Set(df, scale));
#endif
    const auto u = hn::BitCast(du, quotient);
    const auto odd = hn::And(hn::ShiftRight<20>(u), hn::Set(du, 1u));
    return hn::Add(hn::Add(hn::Add(u, offset), hn::Set(du, 0x7ffffu)), odd);
  });
}

#endif  // HWY_SCALAR

// Writes the codes of a tile again where a value below 2^-6 scales is among a vector's: those
// become zeros or subnormal codes.
template <int kTile>
HWY_NOINLINE void write_small_codes(float scale, const bf16* x, uint8_t* codes) {
  const hn::CappedTag<float, kTile> df;
  const int lanes = static_cast<int>(hn::Lanes(df));
  for (int i = 0; i < kTile; i += lanes) {
    const auto v = load_bf16(df, x + i);
    if (hn::AllFalse(df, hn::Lt(hn::Abs(v), hn::Set(df, scale * 0x1p-6f)))) continue;
    store_e4m3(df, hn::Div(v, hn::Set(df, scale)), codes + i);
  }
}

// Any tile. NaN does not count as the largest value, an infinity counts as the largest float.
template <int kTile>
HWY_NOINLINE float write_any_tile(const core::Quantizer& q, const bf16* x, uint8_t* codes) {
  const hn::CappedTag<float, kTile> df;
  const int lanes = static_cast<int>(hn::Lanes(df));
  auto amax = hn::Zero(df);
  for (int i = 0; i < kTile; i += lanes) amax = max_magnitude(df, amax, load_bf16(df, x + i));
  const float s = core::scale_of(q, hn::GetLane(hn::MaxOfLanes(df, amax)));
  for (int i = 0; i < kTile; i += lanes)
    store_e4m3(df, hn::Div(load_bf16(df, x + i), hn::Set(df, s)), codes + i);
  return s;
}

// Encodes one tile, whose largest magnitude is known, and gives its scale. Values of a tile seldom
// lie 2^14 apart: then all codes are normal, which takes a third of the instructions or, with a
// power of two, a quarter.
template <int kTile>
HWY_INLINE float write_tile(const TileQuantizer& quantizer, [[maybe_unused]] uint16_t most,
                            const bf16* x, uint8_t* codes) {
#if HWY_TARGET != HWY_SCALAR
  constexpr uint16_t kInfinity = 0x7f80;
  const core::Quantizer& q = quantizer.q;
  float scale;
  bool normal;
  if (q.power_of_two) {
    const int exponent = quantizer.exponent_of(most);
    // From 7 on the smallest normal code is that of a normal bf16.
    if (most >= kInfinity || exponent <= 6) return write_any_tile<kTile>(q, x, codes);
    scale = std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
    normal = write_powers<kTile>(static_cast<uint16_t>(7 - (exponent - 7) * 128), x, codes);
  } else {
    const float amax = core::to_float(bf16{most});
    scale = core::scale_of(q, amax);
    // Outside of this range quotients cannot be made of products.
    if (most >= kInfinity || scale < 0x1p-80f || scale > 0x1p100f)
      return write_any_tile<kTile>(q, x, codes);
    const bool floored = q.floor_amax ? amax < q.floor : scale <= q.floor;
    normal = !floored && core::ties_round_down(most)
                 ? write_products<kTile>(core::factor_below(scale), x, codes)
                 : write_quotients<kTile>(scale, x, codes);
  }
  if (!normal) write_small_codes<kTile>(scale, x, codes);
  return scale;
#else
  return write_any_tile<kTile>(quantizer.q, x, codes);
#endif
}
template <int kTile>
HWY_INLINE float write_tile(const TileQuantizer& quantizer, const bf16* x, uint8_t* codes) {
  return write_tile<kTile>(quantizer, largest_magnitude<kTile>(x), x, codes);
}

// Asks for the lines of a record that will be written.
template <class R>
HWY_INLINE void prefetch_record(const std::byte* page, int64_t offset, int64_t page_size) {
  constexpr int64_t kLine = 64;
  const std::byte* row = page + R::row(offset, page_size);
  for (int64_t at = 0; at < R::kRowBytes; at += kLine) __builtin_prefetch(row + at, 1);
  if constexpr (R::kQuantized) __builtin_prefetch(page + R::scales(offset, page_size), 1);
}

// Values [0, R::kNope) stand at `values`, the RoPE part (formats that have one) at `rope`.
template <class R>
HWY_INLINE void write_record(const TileQuantizer& quantizer, const bf16* values, const bf16* rope,
                             std::byte* page, int64_t offset, int64_t page_size) {
  std::byte* row = page + R::row(offset, page_size);
  if constexpr (R::kQuantized) {
    std::byte* scales = page + R::scales(offset, page_size);
    std::memset(scales, 0, R::kScaleBytes);
    // All of them first: a tile's codes wait for its own.
    uint16_t most[R::kTiles];
    for (int tile = 0; tile < R::kTiles; ++tile)
      most[tile] = largest_magnitude<R::kTile>(values + tile * R::kTile);
    for (int tile = 0; tile < R::kTiles; ++tile)
      core::put_scale(reinterpret_cast<typename R::Scale*>(scales) + tile,
                      write_tile<R::kTile>(quantizer, most[tile], values + tile * R::kTile,
                                           reinterpret_cast<uint8_t*>(row) + tile * R::kTile));
    if constexpr (R::kRope > 0)
      std::memcpy(page + R::rope(offset, page_size), rope, R::kRope * sizeof(bf16));
  } else {
    std::memcpy(row, values, R::kNope * sizeof(bf16));
    if constexpr (R::kRope > 0)
      std::memcpy(row + R::kNope * sizeof(bf16), rope, R::kRope * sizeof(bf16));
  }
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
