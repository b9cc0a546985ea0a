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
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/quantizer.h"
#include "cpu/formats_simd.h"
#include "cpu/stream_simd.h"
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

// Writes the codes of a tile again where a value below `least` (bits of bf16) is among a vector's:
// those become zeros or subnormal codes. quotient(vector of values) gives what is rounded.
template <int kTile, class F>
HWY_INLINE void write_small_codes(uint16_t least, const bf16* x, uint8_t* codes, F&& quotient) {
  const hn::CappedTag<float, kTile> df;
  const hn::Rebind<uint16_t, decltype(df)> dh;
  const int lanes = static_cast<int>(hn::Lanes(df));
  for (int i = 0; i < kTile; i += lanes) {
    const auto bits = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i));
    const auto magnitude = hn::And(bits, hn::Set(dh, uint16_t{0x7fff}));
    if (hn::AllFalse(dh, hn::Lt(magnitude, hn::Set(dh, least)))) continue;
    store_e4m3(df, quotient(df, load_bf16(df, x + i)), codes + i);
  }
}

// Codes of x / 2^(exponent - 127): three bits of the mantissa are kept, in the 16 bits of a bf16.
// For exponents above 6, whose smallest normal code is a normal bf16.
template <int kTile>
HWY_INLINE void write_codes(int exponent, const bf16* x, uint8_t* codes) {
  const auto least = static_cast<uint16_t>((exponent - 6) * 128);  // that code's value, as bits
  const hn::CappedTag<uint16_t, kTile> dh;
  const hn::RebindToSigned<decltype(dh)> di;
  const hn::Rebind<uint8_t, decltype(di)> db;
  const int lanes = static_cast<int>(hn::Lanes(dh));
  // Rounds, and takes the scale and the difference of the biases from the exponent.
  const auto round = hn::Set(dh, static_cast<uint16_t>(7 - (exponent - 7) * 128));
  const auto one = hn::Set(dh, uint16_t{1});
  auto smallest = hn::Set(dh, uint16_t{0x7fff});
  for (int i = 0; i < kTile; i += lanes) {
    const auto bits = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i));
    const auto magnitude = hn::And(bits, hn::Set(dh, uint16_t{0x7fff}));
    smallest = hn::Min(smallest, magnitude);
    const auto odd = hn::And(hn::ShiftRight<4>(bits), one);
    const auto code = hn::ShiftRight<4>(hn::Add(hn::Add(magnitude, round), odd));
    const auto sign = hn::And(hn::ShiftRight<8>(bits), hn::Set(dh, uint16_t{0x80}));
    hn::StoreU(hn::DemoteTo(db, hn::BitCast(di, hn::Or(code, sign))), db, codes + i);
  }
  if (hn::AllFalse(dh, hn::Lt(smallest, hn::Set(dh, least)))) return;
  const float factor = std::bit_cast<float>(static_cast<uint32_t>(254 - exponent) << 23);
  write_small_codes<kTile>(least, x, codes, [&](auto d, auto v) HWY_ATTR {
    return hn::Mul(v, hn::Set(d, factor));  // x / s = x * (1 / s) exactly
  });
}

// The same with a scale that is no power of two, from 2^-80 to 2^100. The inverse has two parts, by
// which fused products are the quotients (quantizer_test). kTiesDown: of one product by less, as
// core::ties_round_down() has it.
template <int kTile, bool kTiesDown>
HWY_INLINE void write_quotients(float scale, const bf16* x, uint8_t* codes) {
#if HWY_NATIVE_FMA
  const core::TwoPartInverse inverse(scale);
  const auto quotient = [&](auto d, auto v) HWY_ATTR {
    return hn::MulAdd(v, hn::Set(d, inverse.high), hn::Mul(v, hn::Set(d, inverse.low)));
  };
#else
  const auto quotient = [&](auto d, auto v) HWY_ATTR { return hn::Div(v, hn::Set(d, scale)); };
#endif
  const auto signed_quotient = [&](auto d, auto v) HWY_ATTR {  // a zero keeps its sign
    return hn::CopySign(quotient(d, v), v);
  };
#if HWY_TARGET == HWY_SCALAR  // has no lane for two values
  write_small_codes<kTile>(0x8000, x, codes, signed_quotient);
#else
  const hn::CappedTag<uint16_t, kTile> dh;
  const hn::RepartitionToWide<decltype(dh)> du;
  const hn::RebindToFloat<decltype(du)> df;
  const hn::RebindToSigned<decltype(dh)> di;
  const hn::Rebind<uint8_t, decltype(di)> db;
  const int lanes = static_cast<int>(hn::Lanes(dh));
  const auto upper = hn::Set(du, 0xffff0000u);
  // Rounds at bit 20 and takes 120 from the exponent; no carry reaches the sign.
  const auto round = hn::Set(du, 0xc407ffffu);
  const float below = core::factor_below(scale);
  const auto rounded = [&](auto v) HWY_ATTR {
    if constexpr (kTiesDown) return hn::Add(hn::BitCast(du, hn::Mul(v, hn::Set(df, below))), round);
    const auto u = hn::BitCast(du, quotient(df, v));
    const auto odd = hn::And(hn::ShiftRight<20>(u), hn::Set(du, 1u));
    return hn::Add(hn::Add(u, round), odd);
  };
  auto smallest = hn::Set(dh, uint16_t{0x7fff});
  for (int i = 0; i < kTile; i += lanes) {
    const auto bits = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i));
    smallest = hn::Min(smallest, hn::And(bits, hn::Set(dh, uint16_t{0x7fff})));
    // Neighbours share a lane of 32 bits: the even one is its low half.
    const auto both = hn::BitCast(du, bits);
    const auto even = rounded(hn::BitCast(df, hn::ShiftLeft<16>(both)));
    const auto odd = rounded(hn::BitCast(df, hn::And(both, upper)));
    const auto halves = hn::BitCast(dh, hn::Or(hn::ShiftRight<16>(even), hn::And(odd, upper)));
    const auto code = hn::And(hn::ShiftRight<4>(halves), hn::Set(dh, uint16_t{0x7f}));
    const auto sign = hn::And(hn::ShiftRight<8>(halves), hn::Set(dh, uint16_t{0x80}));
    hn::StoreU(hn::DemoteTo(db, hn::BitCast(di, hn::Or(code, sign))), db, codes + i);
  }
  // The first value whose quotient is 2^-6 or more.
  const uint32_t limit = std::bit_cast<uint32_t>(scale * 0x1p-6f);
  const auto least = static_cast<uint16_t>((limit >> 16) + ((limit & 0xffff) != 0));
  if (hn::AllFalse(dh, hn::Lt(smallest, hn::Set(dh, least)))) return;
  write_small_codes<kTile>(least, x, codes, signed_quotient);
#endif
}

// Any tile: NaN and infinities, too.
template <int kTile>
HWY_INLINE float write_any_tile(const core::Quantizer& q, const bf16* x, uint8_t* codes) {
  const hn::CappedTag<float, kTile> df;
  const int lanes = static_cast<int>(hn::Lanes(df));
  auto amax = hn::Zero(df);
  for (int i = 0; i < kTile; i += lanes) amax = max_magnitude(df, amax, load_bf16(df, x + i));
  const float s = core::scale_of(q, hn::GetLane(hn::MaxOfLanes(df, amax)));
  if (q.power_of_two) {  // x / s = x * (1 / s) exactly
    const auto factor = hn::Set(df, 1 / s);
    for (int i = 0; i < kTile; i += lanes)
      store_e4m3(df, hn::Mul(load_bf16(df, x + i), factor), codes + i);
  } else {
    const auto scale = hn::Set(df, s);
    for (int i = 0; i < kTile; i += lanes)
      store_e4m3(df, hn::Div(load_bf16(df, x + i), scale), codes + i);
  }
  return s;
}

// Encodes one tile, whose largest magnitude is known, and gives its scale. Values of a tile seldom
// lie 2^14 apart: then all codes are normal, which takes half the instructions or, with a power of
// two, a quarter.
template <int kTile>
HWY_INLINE float write_tile(const TileQuantizer& quantizer, uint16_t most, const bf16* x,
                            uint8_t* codes) {
  constexpr float kLeastScale = 0x1p-80f;
  constexpr float kMostScale = 0x1p100f;
  const bool finite = most < 0x7f80;
  if (finite && quantizer.q.power_of_two) {
    const int exponent = quantizer.exponent_of(most);
    if (exponent > 6) {
      write_codes<kTile>(exponent, x, codes);
      return std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
    }
  } else if (finite) {
    const core::Quantizer& q = quantizer.q;
    const float amax = core::to_float(bf16{most});
    const float s = core::scale_of(q, amax);
    if (s >= kLeastScale && s <= kMostScale) {
      const bool floored = q.floor_amax ? amax < q.floor : s <= q.floor;
      if (!floored && core::ties_round_down(most)) write_quotients<kTile, true>(s, x, codes);
      else write_quotients<kTile, false>(s, x, codes);
      return s;
    }
  }
  return write_any_tile<kTile>(quantizer.q, x, codes);
}
template <int kTile>
HWY_INLINE float write_tile(const TileQuantizer& quantizer, const bf16* x, uint8_t* codes) {
  return write_tile<kTile>(quantizer, largest_magnitude<kTile>(x), x, codes);
}

// Where a record goes: its row, and its scales, which are part of the row or stand by themselves.
template <class R>
struct RecordPlace {
  RecordPlace(std::byte* page, int64_t offset, int64_t page_size)
      : row(page + R::row(offset, page_size)) {
    if constexpr (R::kQuantized) scales = page + R::scales(offset, page_size);
  }
  std::byte* row;
  std::byte* scales = nullptr;
};

// Asks for the lines of a record that will be written.
template <class R>
HWY_INLINE void prefetch_record(const RecordPlace<R>& to) {
  for (int64_t at = 0; at < R::kRowBytes; at += kLine) __builtin_prefetch(to.row + at, 1);
  if constexpr (R::kQuantized) __builtin_prefetch(to.scales, 1);
}

// Values [0, R::kNope) stand at `values`, the RoPE part (formats that have one) at `rope`. Gives
// the least of the tiles' largest magnitudes, as bits of bf16.
template <class R>
HWY_INLINE uint16_t write_record(const TileQuantizer& quantizer, const bf16* values,
                                 const bf16* rope, const RecordPlace<R>& to) {
  if constexpr (R::kQuantized) {
    std::memset(to.scales, 0, R::kScaleBytes);
    // All of them first: a tile's codes wait for its own.
    uint16_t most[R::kTiles];
    for (int tile = 0; tile < R::kTiles; ++tile)
      most[tile] = largest_magnitude<R::kTile>(values + tile * R::kTile);
    for (int tile = 0; tile < R::kTiles; ++tile)
      core::put_scale(reinterpret_cast<typename R::Scale*>(to.scales) + tile,
                      write_tile<R::kTile>(quantizer, most[tile], values + tile * R::kTile,
                                           reinterpret_cast<uint8_t*>(to.row) + tile * R::kTile));
    if constexpr (R::kRope > 0) std::memcpy(to.row + R::rope(0, 1), rope, R::kRope * sizeof(bf16));
    return *std::min_element(most, most + R::kTiles);
  } else {
    std::memcpy(to.row, values, R::kNope * sizeof(bf16));
    if constexpr (R::kRope > 0)
      std::memcpy(to.row + R::kNope * sizeof(bf16), rope, R::kRope * sizeof(bf16));
    return 0;
  }
}

// Whether so many records of a call go past the caches: rows of whole lines can.
template <class R>
bool past_caches(const core::Pages& pages, int64_t records) {
  if constexpr (R::kRowBytes % kLine != 0) return false;
  return is_long(records * R::kRowBytes) && pages.stride % kLine == 0 && at_line(pages.data);
}

// The same as write_record, with the row past the caches. FlushStream() belongs behind the last
// record.
template <class R>
HWY_INLINE void stream_record(const TileQuantizer& quantizer, const bf16* values, const bf16* rope,
                              const RecordPlace<R>& to) {
  if constexpr (R::kQuantized) {
    alignas(kLine) std::byte row[R::kRowBytes];
    RecordPlace<R> here = to;
    here.row = row;
    write_record<R>(quantizer, values, rope, here);
    stream_lines(row, R::kRowBytes, to.row);
  } else {
    stream_lines(values, R::kNope * sizeof(bf16), to.row);
    stream_lines(rope, R::kRope * sizeof(bf16), to.row + R::kNope * sizeof(bf16));
  }
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
