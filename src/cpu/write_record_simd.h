// One record from one bf16 row in Highway vectors, byte for byte as model/write_record.h has it.
// Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_WRITE_RECORD_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_WRITE_RECORD_SIMD_H
#undef WINNOW_CPU_WRITE_RECORD_SIMD_H
#else
#define WINNOW_CPU_WRITE_RECORD_SIMD_H
#endif

#include <bit>
#include <cstring>

#include "core/quantizer.h"
#include "cpu/formats_simd.h"
#include "hwy/highway.h"
#include "model/records.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A tile's largest magnitude as bits of bf16, which order as the values do.
template <int kTile>
HWY_INLINE uint16_t largest_magnitude(const bf16* x) {
  const hn::CappedTag<uint16_t, kTile> dh;
  const int lanes = static_cast<int>(hn::Lanes(dh));
  auto most = hn::Zero(dh);
  for (int i = 0; i < kTile; i += lanes) {
    const auto bits = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i));
    most = hn::Max(most, hn::And(bits, hn::Set(dh, uint16_t{0x7fff})));
  }
  return hn::GetLane(hn::MaxOfLanes(dh, most));
}

// Codes of x / 2^exponent: three bits of the mantissa are kept, in the 16 bits of a bf16. False if
// a magnitude lies below `least`, from which on all of them are normal e4m3.
template <int kTile>
HWY_INLINE bool write_normal_codes(int bias, uint16_t least, const bf16* x, uint8_t* codes) {
  const hn::CappedTag<uint16_t, kTile> dh;
  const hn::RebindToSigned<decltype(dh)> di;
  const hn::Rebind<uint8_t, decltype(di)> db;
  const int lanes = static_cast<int>(hn::Lanes(dh));
  const auto rebias = hn::Set(dh, static_cast<uint16_t>(bias));
  auto smallest = hn::Set(dh, uint16_t{0x7fff});
  for (int i = 0; i < kTile; i += lanes) {
    const auto bits = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i));
    const auto magnitude = hn::And(bits, hn::Set(dh, uint16_t{0x7fff}));
    smallest = hn::Min(smallest, magnitude);
    const auto u = hn::Sub(magnitude, rebias);
    const auto odd = hn::And(hn::ShiftRight<4>(u), hn::Set(dh, uint16_t{1}));
    const auto rounded = hn::ShiftRight<4>(hn::Add(u, hn::Add(odd, hn::Set(dh, uint16_t{7}))));
    const auto sign = hn::And(hn::ShiftRight<8>(bits), hn::Set(dh, uint16_t{0x80}));
    hn::StoreU(hn::DemoteTo(db, hn::BitCast(di, hn::Or(rounded, sign))), db, codes + i);
  }
  return hn::AllFalse(dh, hn::Lt(smallest, hn::Set(dh, least)));
}

// The same with a scale that is no power of two.
template <int kTile>
HWY_INLINE bool write_normal_quotients(float scale, const bf16* x, uint8_t* codes) {
  const hn::CappedTag<float, kTile> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<uint8_t, decltype(df)> db;
  const int lanes = static_cast<int>(hn::Lanes(df));
  const auto divisor = hn::Set(df, scale);
  auto smallest = hn::Set(du, 0x7fffffffu);
  for (int i = 0; i < kTile; i += lanes) {
    const auto u = hn::BitCast(du, hn::Div(load_bf16(df, x + i), divisor));
    const auto odd = hn::And(hn::ShiftRight<20>(u), hn::Set(du, 1u));
    // Rounds, and takes 120 from the exponent; the sign is put back behind it.
    const auto a = hn::And(u, hn::Set(du, 0x7fffffffu));
    smallest = hn::Min(smallest, a);
    const auto code = hn::ShiftRight<20>(hn::Add(a, hn::Add(odd, hn::Set(du, 0xc407ffffu))));
    const auto sign = hn::And(hn::ShiftRight<24>(u), hn::Set(du, 0x80u));
    hn::StoreU(hn::DemoteTo(db, hn::BitCast(di, hn::Or(code, sign))), db, codes + i);
  }
  return hn::AllFalse(du, hn::Lt(smallest, hn::Set(du, 0x3c800000u)));  // 2^-6
}

// Any tile: NaN, infinities, values that become zero or a subnormal code.
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
HWY_INLINE float write_tile(const core::Quantizer& q, uint16_t most, const bf16* x,
                            uint8_t* codes) {
  if (most >= 0x7f80) return write_any_tile<kTile>(q, x, codes);
  const float s = core::scale_of(q, core::to_float(bf16{most}));
  bool normal = false;
  if (q.power_of_two) {
    const int exponent = static_cast<int>(std::bit_cast<uint32_t>(s) >> 23) - 127;
    // The bits of 2^(exponent - 6), where that is a normal bf16.
    const int least = (exponent - 6 + 127) * 128;
    normal = least > 0 && write_normal_codes<kTile>((exponent + 120) * 128,
                                                    static_cast<uint16_t>(least), x, codes);
  } else {
    normal = write_normal_quotients<kTile>(s, x, codes);
  }
  return normal ? s : write_any_tile<kTile>(q, x, codes);
}
template <int kTile>
HWY_INLINE float write_tile(const core::Quantizer& q, const bf16* x, uint8_t* codes) {
  return write_tile<kTile>(q, largest_magnitude<kTile>(x), x, codes);
}

// Values [0, R::kNope) stand at `values`, the RoPE part (formats that have one) at `rope`.
template <class R>
HWY_INLINE void write_record(const core::Quantizer& quantizer, const bf16* values, const bf16* rope,
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
