// Tiles of bf16 values as e4m3 codes in Highway vectors, bit for bit as core/quantizer.h has them.
// Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_CODES_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_CODES_SIMD_H
#undef WINNOW_CPU_CODES_SIMD_H
#else
#define WINNOW_CPU_CODES_SIMD_H
#endif

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/quantizer.h"
#include "cpu/formats_simd.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Constants of encoding. In memory, since GCC makes those that it knows anew for every tile, by way
// of general registers, which took a seventh of the time of a V4 record's codes.
struct CodeBits {
  static constexpr int kMost = 32;  // lanes
  CodeBits() {
    std::fill_n(first, kMost, uint16_t{0x00ff});
    std::fill_n(magnitude, kMost, uint16_t{0x7f7f});
    std::fill_n(eight, kMost, uint16_t{0x0808});
    std::fill_n(above, kMost, uint16_t{0x7800});
    std::fill_n(odd, kMost, uint16_t{0x0010});
    std::fill_n(one, kMost, uint16_t{1});
    std::fill_n(rebias, kMost, static_cast<uint16_t>(8 - 121 * 128));
    for (int i = 0; i < kMost; ++i) upper[i] = i % 2 ? 0xffff : 0;
  }
  HWY_ALIGN uint16_t first[kMost];      // of two codes in 16 bits
  HWY_ALIGN uint16_t magnitude[kMost];  // of both
  HWY_ALIGN uint16_t eight[kMost];      // added to both
  HWY_ALIGN uint16_t above[kMost];      // a code in bits 4 to 10
  HWY_ALIGN uint16_t odd[kMost];        // the last bit of such a code
  HWY_ALIGN uint16_t one[kMost];
  HWY_ALIGN uint16_t rebias[kMost];  // from bf16 to such a code less 8, and half of its last bit
  HWY_ALIGN uint16_t upper[kMost];   // of two values in 32 bits
};

// How up to eight tiles become codes: found together, since a step for each by itself takes more
// instructions than its codes do.
struct TilePlans {
  static constexpr int kMost = 8;
  HWY_ALIGN uint16_t most[kMost];  // largest magnitudes, as bits of bf16
  HWY_ALIGN float scale[kMost];
  HWY_ALIGN float factor[kMost];   // a scale that is no power of two: core::factor_below()
  HWY_ALIGN uint32_t down[kMost];  // a power of two: what write_scaled() adds, twice
  uint32_t unusual = 0;            // a bit for each tile that write_unusual() writes
};

// How tiles become codes, found once for many of them.
struct TileQuantizer {
  explicit TileQuantizer(const core::Quantizer& quantizer)
      : q(quantizer), floor_exponent(exponent_bits(core::scale_of(quantizer, 0))) {}

  static int exponent_bits(float scale) {
    return static_cast<int>(std::bit_cast<uint32_t>(scale) >> 23);
  }

  // Scales that core::TwoPartInverse serves.
  static constexpr float kLeastScale = 0x1p-80f, kMostScale = 0x1p100f;

  CodeBits bits;
  core::Quantizer q;
  int floor_exponent;  // with a power of two
};

// The smallest of each eighth lane.
template <class D>
HWY_INLINE auto smallest_lanes(D /*d*/, hn::VFromD<D> v) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(D()) > 8) {
    const hn::Half<D> half;
    return smallest_lanes(half, hn::Min(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else
#endif
    return v;
}

// How far a tile's magnitudes lie below 0x7fff, as bits of bf16, which order as the values do: the
// least of it is in one of the lanes.
template <int kTile>
HWY_INLINE auto below_largest(const bf16* x) {
  const hn::CappedTag<uint16_t, kTile> dh;
  const int lanes = static_cast<int>(hn::Lanes(dh));
  const auto mask = hn::Set(dh, uint16_t{0x7fff});
  auto below = mask;
  for (int i = 0; i < kTile; i += lanes) {
    const auto bits = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i));
    below = hn::Min(below, hn::AndNot(bits, mask));
  }
  return below;
}

// A tile's largest magnitude, as bits of bf16.
template <int kTile>
HWY_INLINE uint16_t largest_magnitude(const bf16* x) {
  const hn::CappedTag<uint16_t, kTile> dh;
  const hn::CappedTag<uint16_t, 8> d8;
  const auto below = smallest_lanes(dh, below_largest<kTile>(x));
  return static_cast<uint16_t>(0x7fff - hn::GetLane(hn::MinOfLanes(d8, below)));
}

// The largest magnitudes of tiles, of which at(i) is the i-th, by a tree of minima: whole vectors
// of tiles are woven into one that has a lane for each tile in every eight.
template <int kTile, int kTiles, class F>
HWY_INLINE void largest_magnitudes(F&& at, TilePlans& plans) {
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < kTiles; ++i) plans.most[i] = largest_magnitude<kTile>(at(i));
#else
  const hn::CappedTag<uint16_t, kTile> d;
  const hn::RepartitionToWide<decltype(d)> d32;
  const hn::RepartitionToWide<decltype(d32)> d64;
  const auto tile = [&](int i) WINNOW_INLINED {
    return below_largest<kTile>(at(std::min(i, kTiles - 1)));
  };
  const auto two = [&](int i) WINNOW_INLINED {
    const auto a = tile(i);
    const auto b = tile(i + 1);
    const auto lower = hn::InterleaveLower(d, a, b);
    return hn::BitCast(d32, hn::Min(lower, hn::InterleaveUpper(d, a, b)));
  };
  const auto four = [&](int i) WINNOW_INLINED {
    const auto a = two(i);
    const auto b = two(i + 2);
    const auto lower = hn::BitCast(d, hn::InterleaveLower(d32, a, b));
    return hn::BitCast(d64, hn::Min(lower, hn::BitCast(d, hn::InterleaveUpper(d32, a, b))));
  };
  static_assert(kTiles >= 4 && kTiles <= TilePlans::kMost);
  const auto a = four(0);
  const auto b = kTiles > 4 ? four(4) : a;
  const auto lower = hn::BitCast(d, hn::InterleaveLower(d64, a, b));
  const auto below = hn::Min(lower, hn::BitCast(d, hn::InterleaveUpper(d64, a, b)));
  const hn::CappedTag<uint16_t, 8> d8;
  hn::Store(hn::Sub(hn::Set(d8, uint16_t{0x7fff}), smallest_lanes(d, below)), d8, plans.most);
#endif
}

// The rest of the plan of one tile whose largest magnitude stands there.
HWY_INLINE void plan_tile(const TileQuantizer& quantizer, TilePlans& plans) {
  const core::Quantizer& q = quantizer.q;
  const uint16_t most = plans.most[0];
  bool usual = most < 0x7f80 && HWY_TARGET != HWY_SCALAR;
  if (q.power_of_two) {
    // amax / 448 lies above a power of two where amax's mantissa is above 1.75, which 31 carries
    // into the exponent; a larger amax has no smaller scale, so the floor is that of amax = 0.
    const int exponent = std::max((most + 31) / 128 - 8, quantizer.floor_exponent);
    plans.scale[0] = std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
    // 7 less the smallest magnitude that has a normal code, which must be a normal bf16, and what
    // lies below it must set a bit above codes.
    plans.down[0] = static_cast<uint16_t>(7 - (exponent - 6) * 128) * 0x10001u;
    usual = usual && exponent > 6 && exponent < 240;
  } else {
    const float amax = core::to_float(bf16{most});
    const float scale = core::scale_of(q, amax);
    plans.scale[0] = scale;
    plans.factor[0] = core::factor_below(scale);
    usual = usual && (q.floor_amax ? amax : scale) > q.floor && core::ties_round_down(most) &&
            scale >= TileQuantizer::kLeastScale && scale <= TileQuantizer::kMostScale;
  }
  plans.unusual = usual ? 0 : 1;
}

// The same of several tiles at once.
template <int kTiles>
HWY_INLINE void plan_tiles(const TileQuantizer& quantizer, TilePlans& plans) {
  const core::Quantizer& q = quantizer.q;
  static_assert(kTiles >= 4);
  const hn::CappedTag<uint32_t, kTiles == 4 ? 4 : TilePlans::kMost> du;
  const hn::RebindToFloat<decltype(du)> df;
  const hn::Rebind<uint16_t, decltype(du)> dh;
  const int lanes = static_cast<int>(hn::Lanes(du));
  const auto put = [&](int i, auto usual) WINNOW_INLINED {
    uint8_t bits[8] = {};
    hn::StoreMaskBits(du, hn::Not(usual), bits);
    plans.unusual |= uint32_t{bits[0]} << i;
  };
  plans.unusual = 0;
  for (int i = 0; i < kTiles; i += lanes) {
    const auto most = hn::PromoteTo(du, hn::Load(dh, plans.most + i));
    const auto finite = hn::Lt(most, hn::Set(du, 0x7f80u));
    if (q.power_of_two) {
      const auto above = hn::ShiftRight<7>(hn::Add(most, hn::Set(du, 31u)));
      const auto floor = hn::Set(du, static_cast<uint32_t>(quantizer.floor_exponent + 8));
      const auto exponent = hn::Sub(hn::Max(above, floor), hn::Set(du, 8u));
      const auto down = hn::Sub(hn::Set(du, 7u + 6 * 128), hn::ShiftLeft<7>(exponent));
      const auto low = hn::And(down, hn::Set(du, 0xffffu));
      hn::Store(hn::Or(low, hn::ShiftLeft<16>(down)), du, plans.down + i);
      hn::Store(hn::BitCast(df, hn::ShiftLeft<23>(exponent)), df, plans.scale + i);
      const auto inner = hn::Lt(hn::Sub(exponent, hn::Set(du, 7u)), hn::Set(du, 233u));
      put(i, hn::And(finite, inner));
    } else {
      const auto amax = hn::BitCast(df, hn::ShiftLeft<16>(most));
      const auto floor = hn::Set(df, q.floor);
      const auto quotient =
          hn::Div(q.floor_amax ? hn::Max(amax, floor) : amax, hn::Set(df, kE4m3Max));
      const auto scale = q.floor_amax ? quotient : hn::Max(quotient, floor);
      const auto inverse = hn::BitCast(du, hn::Div(hn::Set(df, 1.0f), scale));
      hn::Store(scale, df, plans.scale + i);
      hn::Store(hn::BitCast(df, hn::Sub(inverse, hn::Set(du, 2u))), df, plans.factor + i);
      const auto above = hn::Gt(q.floor_amax ? amax : scale, floor);
      const auto least = hn::Ge(scale, hn::Set(df, TileQuantizer::kLeastScale));
      const auto greatest = hn::Le(scale, hn::Set(df, TileQuantizer::kMostScale));
      put(i, hn::And(finite, hn::RebindMask(du, hn::And(above, hn::And(least, greatest)))));
    }
  }
  if (!q.power_of_two)
    for (int i = 0; i < kTiles; ++i)
      plans.unusual |= static_cast<uint32_t>(!core::ties_round_down(plans.most[i])) << i;
  plans.unusual &= (1u << kTiles) - 1;
  if (HWY_TARGET == HWY_SCALAR) plans.unusual = (1u << kTiles) - 1;
}

// The bits of `yes` where the mask has ones, those of `no` elsewhere.
template <class V>
HWY_INLINE V choose_bits(V mask, V yes, V no) {
#if HWY_TARGET <= HWY_AVX3
  return hn::IfVecThenElse(mask, yes, no);
#else
  return hn::OrAnd(hn::AndNot(mask, no), mask, yes);
#endif
}

#if HWY_TARGET != HWY_SCALAR
// The codes below 8 of values that have such ones, less 8 and in bits 4 to 10; anything for others.
// quotient(floats) gives what is rounded.
template <class D, class F>
HWY_INLINE hn::VFromD<D> small_codes(D dh, hn::VFromD<D> bits, F&& quotient) {
  const hn::RepartitionToWide<D> du;
  const hn::RebindToFloat<decltype(du)> df;
  const auto code = [&](auto v) WINNOW_INLINED {
    // Floats in [2^14, 2^15) are 2^-9 apart, so the addition rounds to steps of 2^-9.
    return hn::BitCast(du,
                       hn::Add(hn::Abs(quotient(df, hn::BitCast(df, v))), hn::Set(df, 0x1p14f)));
  };
  const auto both = hn::BitCast(du, bits);
  const auto low = code(hn::ShiftLeft<16>(both));
  const auto high = code(hn::And(both, hn::Set(du, 0xffff0000u)));
  const auto halves = hn::Or(hn::And(low, hn::Set(du, 0xffffu)), hn::ShiftLeft<16>(high));
  return hn::ShiftLeft<4>(hn::Sub(hn::BitCast(dh, halves), hn::Set(dh, uint16_t{8})));
}

// Codes of a tile by rounded(bits), which gives, for values of 16 bits, the code less 8 in bits 4
// to 10 and zeros in bits 11 to 14, or another bit there for values below the first normal code,
// which seldom come; quotient(floats) is for those.
//
// Even and odd places apart, since two codes of 16 bits then become neighbours by a shift. On Zen 4
// shifts and additions of floats share two of the four pipes, and shuffles have two.
template <int kTile, Order kOrder, class F, class G>
HWY_INLINE void write_codes(const CodeBits& constants, const bf16* x, uint8_t* codes, F&& rounded,
                            G&& quotient) {
  const hn::CappedTag<uint16_t, kTile / 2> dh;
  const hn::Repartition<uint8_t, decltype(dh)> db;
  const int lanes = static_cast<int>(hn::Lanes(dh));
  const auto above = hn::Load(dh, constants.above);
  for (int i = 0; i < kTile; i += 2 * lanes) {
    const auto bits = load_parts<kOrder>(dh, x + i);
    auto even = rounded(bits.even);
    auto odd = rounded(bits.odd);
    const auto outside = hn::And(hn::Or(even, odd), above);
    if (HWY_UNLIKELY(!hn::AllTrue(dh, hn::Eq(outside, hn::Zero(dh))))) {
      const auto mend = [&](auto code, auto value) WINNOW_INLINED {
        const auto normal = hn::Eq(hn::And(code, above), hn::Zero(dh));
        return hn::IfThenElse(normal, code, small_codes(dh, value, quotient));
      };
      even = mend(even, bits.even);
      odd = mend(odd, bits.odd);
    }
    const auto first = hn::Load(dh, constants.first);
    const auto both = choose_bits(first, hn::ShiftRight<4>(even), hn::ShiftLeft<4>(odd));
    const auto signs = choose_bits(first, hn::ShiftRight<8>(bits.even), bits.odd);
    const auto magnitudes =
        hn::Add(hn::BitCast(db, both), hn::BitCast(db, hn::Load(dh, constants.eight)));
    const auto code =
        choose_bits(hn::Load(dh, constants.magnitude), hn::BitCast(dh, magnitudes), signs);
    hn::StoreU(code, dh, reinterpret_cast<uint16_t*>(codes + i));
  }
}

// Codes of x / 2^n: three bits of the mantissa are kept, in the 16 bits of a bf16.
template <int kTile, Order kOrder>
HWY_INLINE void write_scaled(const CodeBits& constants, const TilePlans& plans, int tile,
                             const bf16* x, uint8_t* codes) {
  const hn::CappedTag<uint16_t, kTile / 2> dh;
  const hn::RepartitionToWide<decltype(dh)> du;
  // Takes the scale and the difference of the biases from the exponent, and rounds to even.
  const auto down = hn::BitCast(dh, hn::Set(du, plans.down[tile]));
  const auto up = hn::Add(down, hn::Load(dh, constants.one));
  const auto rounded = [&](auto bits) WINNOW_INLINED {
    const auto odd = hn::TestBit(bits, hn::Load(dh, constants.odd));
    return hn::IfThenElse(odd, hn::Add(bits, up), hn::Add(bits, down));
  };
  write_codes<kTile, kOrder>(constants, x, codes, rounded, [&](auto d, auto v) WINNOW_INLINED {
    return hn::Mul(v, hn::Set(d, 1 / plans.scale[tile]));  // x / s = x * (1 / s) exactly
  });
}

// Quotients by the scale of a tile, which is no power of two. The inverse has two parts, by which
// fused products are the quotients (quantizer_test).
struct Quotients {
  explicit Quotients(float scale) : scale(scale), inverse(scale) {}
  template <class D>
  HWY_INLINE hn::VFromD<D> operator()(D d, hn::VFromD<D> v) const {
#if HWY_NATIVE_FMA
    return hn::MulAdd(v, hn::Set(d, inverse.high), hn::Mul(v, hn::Set(d, inverse.low)));
#else
    return hn::Div(v, hn::Set(d, scale));
#endif
  }
  float scale;
  core::TwoPartInverse inverse;
};

// Codes of quotients. product(floats) gives bits that are cut to 16 and then rounded, with ties up,
// to those of the quotient's code.
template <int kTile, Order kOrder, class F>
HWY_INLINE void write_products(const CodeBits& constants, float scale, const bf16* x,
                               uint8_t* codes, F&& product) {
  const hn::CappedTag<uint16_t, kTile / 2> dh;
  const hn::RepartitionToWide<decltype(dh)> du;
  const hn::RebindToFloat<decltype(du)> df;
  const auto rounded = [&](auto bits) WINNOW_INLINED {
    const auto upper = hn::BitCast(du, hn::Load(dh, constants.upper));
    const auto both = hn::BitCast(du, bits);
    const auto low = product(df, hn::BitCast(df, hn::ShiftLeft<16>(both)));
    const auto high = product(df, hn::BitCast(df, hn::And(both, upper)));
    const auto halves = choose_bits(upper, high, hn::ShiftRight<16>(low));
    return hn::Add(hn::BitCast(dh, halves), hn::Load(dh, constants.rebias));
  };
  write_codes<kTile, kOrder>(constants, x, codes, rounded,
                             [&](auto d, auto v) WINNOW_INLINED { return Quotients(scale)(d, v); });
}

// Codes of a tile whose plan is usual.
template <int kTile, Order kOrder>
HWY_INLINE void write_usual_codes(const TileQuantizer& quantizer, const TilePlans& plans, int tile,
                                  const bf16* x, uint8_t* codes) {
  if (quantizer.q.power_of_two)
    return write_scaled<kTile, kOrder>(quantizer.bits, plans, tile, x, codes);
  const float factor = plans.factor[tile];
  write_products<kTile, kOrder>(
      quantizer.bits, plans.scale[tile], x, codes, [&](auto d, auto v) WINNOW_INLINED {
        return hn::BitCast(hn::RebindToUnsigned<decltype(d)>(), hn::Mul(v, hn::Set(d, factor)));
      });
}

// Codes of a tile whose quotients tie in both directions.
template <int kTile, Order kOrder>
HWY_INLINE void write_quotients(const CodeBits& constants, float scale, const bf16* x,
                                uint8_t* codes) {
  const Quotients quotients(scale);
  write_products<kTile, kOrder>(constants, scale, x, codes, [&](auto d, auto v) WINNOW_INLINED {
    const hn::RebindToUnsigned<decltype(d)> du;
    const auto u = hn::BitCast(du, quotients(d, v));
    const auto odd = hn::And(hn::ShiftRight<20>(u), hn::Set(du, 1u));
    return hn::Add(u, hn::Sub(odd, hn::Set(du, 1u)));  // ties to even, if they go up
  });
}
#endif  // HWY_SCALAR, which has no lane for two values

// Any values in turn: NaN and infinities, too.
template <int kTile>
HWY_INLINE float write_any_values(const core::Quantizer& q, const bf16* x, uint8_t* codes) {
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

// A tile whose plan is not usual. Gives its scale.
template <int kTile, Order kOrder>
HWY_NOINLINE float write_unusual(const TileQuantizer& quantizer,
                                 [[maybe_unused]] const TilePlans& plans, [[maybe_unused]] int tile,
                                 const bf16* x, uint8_t* codes) {
#if HWY_TARGET != HWY_SCALAR
  const float scale = plans.scale[tile];
  if (!quantizer.q.power_of_two && plans.most[tile] < 0x7f80 &&
      scale >= TileQuantizer::kLeastScale && scale <= TileQuantizer::kMostScale) {
    write_quotients<kTile, kOrder>(quantizer.bits, scale, x, codes);
    return scale;
  }
  if constexpr (kOrder == Order::kParted) {
    HWY_ALIGN bf16 in_turn[kTile];
    join_parts<kTile>(x, in_turn);
    return write_any_values<kTile>(quantizer.q, in_turn, codes);
  }
#endif
  return write_any_values<kTile>(quantizer.q, x, codes);
}

// Codes of tiles that stand behind each other, by their plans from `first` on, whose scales belong
// to them then.
template <int kTile, int kTiles, Order kOrder>
HWY_INLINE void write_planned(const TileQuantizer& quantizer, TilePlans& plans, int first,
                              const bf16* x, uint8_t* codes) {
#if HWY_TARGET != HWY_SCALAR
  for (int i = 0; i < kTiles; ++i)
    write_usual_codes<kTile, kOrder>(quantizer, plans, first + i, x + i * kTile, codes + i * kTile);
#endif
  uint32_t rest = plans.unusual >> first & ((1u << kTiles) - 1);
  for (; rest != 0; rest &= rest - 1) {
    const int i = std::countr_zero(rest);
    plans.scale[first + i] =
        write_unusual<kTile, kOrder>(quantizer, plans, first + i, x + i * kTile, codes + i * kTile);
  }
}

// One tile whose largest magnitude is known. Gives its scale.
template <int kTile>
HWY_INLINE float write_tile(const TileQuantizer& quantizer, uint16_t most, const bf16* x,
                            uint8_t* codes) {
  TilePlans plans;
  plans.most[0] = most;
  plan_tile(quantizer, plans);
  write_planned<kTile, 1, Order::kInTurn>(quantizer, plans, 0, x, codes);
  return plans.scale[0];
}
template <int kTile>
HWY_INLINE float write_tile(const TileQuantizer& quantizer, const bf16* x, uint8_t* codes) {
  return write_tile<kTile>(quantizer, largest_magnitude<kTile>(x), x, codes);
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
