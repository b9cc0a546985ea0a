// RoPE and Hadamard of one bf16 row in Highway vectors (core/prologue.h specifies them), and the
// norm in front of them.
// Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_PROLOGUE_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_PROLOGUE_SIMD_H
#undef WINNOW_CPU_PROLOGUE_SIMD_H
#else
#define WINNOW_CPU_PROLOGUE_SIMD_H
#endif

#include <cstdint>
#include <cstring>

#include "core/prologue.h"
#include "cpu/formats_simd.h"
#include "cpu/norm_simd.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Pairs (2i, 2i + 1) share a 32-bit lane: the even value is its low half, the odd one its high
// half.
template <Nans kNans, Rounding kRounding>
HWY_INLINE void rotate_interleaved(const float* cosines, const float* sines, const bf16* x,
                                   bf16* out) {
  const hn::CappedTag<float, 16> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const auto high = hn::Set(du, 0xffff0000u);
  for (int i = 0; i < core::kPairs; i += static_cast<int>(hn::Lanes(df))) {
    const auto both = hn::LoadU(du, reinterpret_cast<const uint32_t*>(x + 2 * i));
    const auto u = hn::BitCast(df, hn::ShiftLeft<16>(both));
    const auto v = hn::BitCast(df, hn::And(both, high));
    const auto cosine = hn::LoadU(df, cosines + i);
    const auto sine = hn::LoadU(df, sines + i);
    const auto first = hn::Sub(hn::Mul(u, cosine), hn::Mul(v, sine));
    const auto second = hn::Add(hn::Mul(v, cosine), hn::Mul(u, sine));
    store_parts<kNans, kRounding>(df, first, second, out + 2 * i);
  }
}

template <Nans kNans, Rounding kRounding>
HWY_INLINE void rotate_half(const float* cosines, const float* sines, const bf16* x, bf16* out) {
  const hn::CappedTag<float, 16> df;
  const auto lanes = static_cast<int>(hn::Lanes(df));
  const auto turned = [&](int i) WINNOW_INLINED {
    const auto u = load_bf16(df, x + i);
    const auto v = load_bf16(df, x + core::kPairs + i);
    const auto cosine = hn::LoadU(df, cosines + i);
    const auto sine = hn::LoadU(df, sines + i);
    return Two<hn::VFromD<decltype(df)>>{hn::Sub(hn::Mul(u, cosine), hn::Mul(v, sine)),
                                         hn::Add(hn::Mul(v, cosine), hn::Mul(u, sine))};
  };
  for (int i = 0; i < core::kPairs; i += 2 * lanes) {
    const auto front = turned(i);
    const auto back = turned(i + lanes);
    store_bf16_pair<kNans, kRounding>(df, front.first, back.first, out + i);
    store_bf16_pair<kNans, kRounding>(df, front.second, back.second, out + core::kPairs + i);
  }
}

// The 64 values at x by cosines and sines that stand side by side.
HWY_INLINE void rotate_row(bool half, bool any_nan, [[maybe_unused]] Rounding rounding,
                           const float* cosines, const float* sines, const bf16* x, bf16* out) {
  const auto rotate = [&]<Nans kNans, Rounding kRounding>() WINNOW_INLINED {
    if (half) rotate_half<kNans, kRounding>(cosines, sines, x, out);
    else rotate_interleaved<kNans, kRounding>(cosines, sines, x, out);
  };
  if (any_nan) rotate.template operator()<Nans::kAny, Rounding::kPlain>();
#if WINNOW_FLUSHING_ROUNDING
  else if (rounding == Rounding::kFlushing)
    rotate.template operator()<Nans::kOfBf16, Rounding::kFlushing>();
  else if (rounding == Rounding::kChecked)
    rotate.template operator()<Nans::kOfBf16, Rounding::kChecked>();
#endif
  else rotate.template operator()<Nans::kOfBf16, Rounding::kPlain>();
}

// The fastest rounding; `flush`: subnormal values may become zeros.
inline Rounding rounding_of(bool flush) {
  if (!can_round_flushing()) return Rounding::kPlain;
  return flush ? Rounding::kFlushing : Rounding::kChecked;
}

// Cosines and sines of a position; one copy where the table has them side by side.
HWY_INLINE void load_angles(const core::RopeParams& r, int64_t position, core::Angles& out) {
  if (r.pair_stride != 1 || r.inverse) return core::load_angles(r, position, out);
  const float* row = r.table + position * r.position_stride;
  std::memcpy(out.cosine, row, sizeof out.cosine);
  std::memcpy(out.sine, row + r.sine_stride, sizeof out.sine);
}

// Asks for the angles of a row of the table.
HWY_INLINE void prefetch_angles(const core::RopeParams& r, const float* row) {
  constexpr int64_t kFloats = 16;  // in a line
  for (int64_t i = 0; i < core::kPairs; i += kFloats) {
    __builtin_prefetch(row + i * r.pair_stride);
    __builtin_prefetch(row + r.sine_stride + i * r.pair_stride);
  }
}

HWY_INLINE bool has_nan(const float* cosines, const float* sines) {
  const hn::CappedTag<float, 16> df;
  auto sum = hn::Zero(df);
  for (int i = 0; i < core::kPairs; i += static_cast<int>(hn::Lanes(df)))
    sum = hn::Add(sum, hn::Add(hn::LoadU(df, cosines + i), hn::LoadU(df, sines + i)));
  return !hn::AllFalse(df, hn::IsNaN(sum));
}

// Where the angles of a position stand: by value, since GCC otherwise goes by way of memory.
struct AnglesAt {
  const float* cosines;
  const float* sines;
};

// Those of a row of the table, in place where they can be, else in `copy`.
HWY_INLINE AnglesAt angles_at(const core::RopeParams& r, const float* row, core::Angles& copy) {
  if (HWY_UNLIKELY(r.pair_stride != 1 || r.inverse)) {
    core::load_angles(r, row, copy);
    return {copy.cosine, copy.sine};
  }
  return {row, row + r.sine_stride};
}

// The 64 values at x by a row of the table.
HWY_INLINE void rotate_at(const core::RopeParams& r, const float* row, Rounding rounding,
                          const bf16* x, bf16* out) {
  core::Angles copy;
  const AnglesAt angles = angles_at(r, row, copy);
  const bool any_nan = has_nan(angles.cosines, angles.sines);
  rotate_row(r.half, any_nan, rounding, angles.cosines, angles.sines, x, out);
}

// The angles of one token at a time, for loops over the heads of several.
class TokenAngles {
 public:
  TokenAngles(const core::RopeParams& rope, const int32_t* positions, int64_t stride)
      : rope_(rope), positions_(positions), stride_(stride) {}

  // False if the token's position is outside the table.
  bool load(int64_t token) {
    if (token == loaded_) return inside_;
    loaded_ = token;
    const int32_t position = positions_[token * stride_];
    inside_ = core::in_table(rope_, position);
    if (inside_) {
      HWY_NAMESPACE::load_angles(rope_, position, angles_);
      any_nan_ = has_nan(angles_.cosine, angles_.sine);
    }
    return inside_;
  }

  // The 64 values at x, by the loaded token's angles.
  HWY_INLINE void rotate(const bf16* x, bf16* out, Rounding rounding) const {
    rotate_row(rope_.half, any_nan_, rounding, angles_.cosine, angles_.sine, x, out);
  }

 private:
  const core::RopeParams& rope_;
  const int32_t* positions_;
  int64_t stride_;
  int64_t loaded_ = -1;
  bool inside_ = false;
  bool any_nan_ = false;
  core::Angles angles_;
};

#if WINNOW_FLUSHING_ROUNDING
// Rounds floats to bf16 that stay floats; NaNs have a low half of zeros. Made once for many: its
// constants stay in registers, where GCC would make them anew for every row.
struct FloatRounding {
  hn::Vec512<uint32_t> odd, half, below, upper;
  HWY_INLINE FloatRounding() {
    const hn::Full512<uint32_t> du;
    odd = hn::Set(du, 0x10000u);
    half = hn::Set(du, 0x8000u);
    below = hn::Set(du, 0x7fffu);
    upper = hn::Set(du, 0xffff0000u);
    asm("" : "+v"(odd.raw), "+v"(half.raw), "+v"(below.raw), "+v"(upper.raw));
  }
  HWY_INLINE hn::Vec512<float> operator()(hn::Vec512<float> v) const {
    const auto u = hn::BitCast(hn::Full512<uint32_t>(), v);
    const auto rounded = hn::IfThenElse(hn::TestBit(u, odd), hn::Add(u, half), hn::Add(u, below));
    return hn::BitCast(hn::Full512<float>(), hn::And(rounded, upper));
  }
};

// 64 values, of which two(i) gives those from i on: 16 at even places and 16 at odd ones.
template <Order kOrder, Rounding kRounding, class F>
HWY_INLINE void rotate_parts(bool half, const AnglesAt& angles, F&& two, bf16* out) {
  using V = hn::Vec512<float>;
  const hn::Full512<float> df;
  const Two<V> front = two(0);
  const Two<V> back = two(32);
  const auto cosine0 = hn::LoadU(df, angles.cosines);
  const auto cosine1 = hn::LoadU(df, angles.cosines + 16);
  const auto sine0 = hn::LoadU(df, angles.sines);
  const auto sine1 = hn::LoadU(df, angles.sines + 16);
  const auto turned = [&](V u, V v, V cosine, V sine) WINNOW_INLINED {
    return Two<V>{hn::Sub(hn::Mul(u, cosine), hn::Mul(v, sine)),
                  hn::Add(hn::Mul(v, cosine), hn::Mul(u, sine))};
  };
  const auto store = [&](V even0, V odd0, V even1, V odd1) WINNOW_INLINED {
    if constexpr (kOrder == Order::kParted) {
      store_bf16_pair<Nans::kAny, kRounding>(df, even0, even1, out);
      store_bf16_pair<Nans::kAny, kRounding>(df, odd0, odd1, out + 32);
    } else {
      store_parts<Nans::kAny, kRounding>(df, even0, odd0, out);
      store_parts<Nans::kAny, kRounding>(df, even1, odd1, out + 32);
    }
  };
  if (half) {
    const auto even = turned(front.first, back.first, hn::ConcatEven(df, cosine1, cosine0),
                             hn::ConcatEven(df, sine1, sine0));
    const auto odd = turned(front.second, back.second, hn::ConcatOdd(df, cosine1, cosine0),
                            hn::ConcatOdd(df, sine1, sine0));
    store(even.first, odd.first, even.second, odd.second);
  } else {
    const auto low = turned(front.first, front.second, cosine0, sine0);
    const auto high = turned(back.first, back.second, cosine1, sine1);
    store(low.first, low.second, high.first, high.second);
  }
}
#endif

// 64 values in whole vectors: what is copied in smaller pieces cannot be loaded in larger ones
// until it has left the store buffer.
HWY_INLINE void copy_64(const bf16* from, bf16* to) {
  const hn::CappedTag<uint16_t, 32> dh;
  for (int i = 0; i < 64; i += static_cast<int>(hn::Lanes(dh)))
    hn::StoreU(hn::LoadU(dh, reinterpret_cast<const uint16_t*>(from + i)), dh,
               reinterpret_cast<uint16_t*>(to + i));
}

#if HWY_TARGET != HWY_SCALAR
// Sums and differences of lanes that are kStep apart, in the places of the first and the second.
template <int kStep, class D>
HWY_INLINE hn::VFromD<D> fold_lanes(D d, hn::VFromD<D> v) {
  if constexpr (kStep == 1) {
    const auto low = hn::DupEven(v);
    const auto high = hn::DupOdd(v);
    return hn::OddEven(hn::Sub(low, high), hn::Add(low, high));
  } else if constexpr (kStep == 2) {
    const hn::Repartition<uint64_t, D> dw;
    const auto both = hn::BitCast(dw, v);
    const auto low = hn::BitCast(d, hn::InterleaveLower(dw, both, both));
    const auto high = hn::BitCast(d, hn::InterleaveUpper(dw, both, both));
    const auto difference = hn::BitCast(dw, hn::Sub(low, high));
    return hn::BitCast(d, hn::OddEven(difference, hn::BitCast(dw, hn::Add(low, high))));
  } else if constexpr (kStep == 4) {
    const auto other = hn::SwapAdjacentBlocks(v);
    const auto low = hn::OddEvenBlocks(other, v);
    const auto high = hn::OddEvenBlocks(v, other);
    return hn::OddEvenBlocks(hn::Sub(low, high), hn::Add(low, high));
  } else {
    const auto low = hn::ConcatLowerLower(d, v, v);
    const auto high = hn::ConcatUpperUpper(d, v, v);
    return hn::ConcatUpperLower(d, hn::Sub(low, high), hn::Add(low, high));
  }
}
#endif

// A vector's share of the sums: those between its lanes.
template <class D>
HWY_INLINE hn::VFromD<D> fold_vector([[maybe_unused]] D d, hn::VFromD<D> v) {
#if HWY_TARGET != HWY_SCALAR
  constexpr size_t kLanes = hn::MaxLanes(D());
  v = fold_lanes<2>(d, fold_lanes<1>(d, v));
  if constexpr (kLanes > 4) v = fold_lanes<4>(d, v);
  if constexpr (kLanes > 8) v = fold_lanes<8>(d, v);
#endif
  return v;
}

// Seven steps of sums and differences over 128 floats, inside vectors and then between them.
HWY_INLINE void hadamard_row(const bf16* x, bf16* out) {
  const hn::CappedTag<float, 16> df;
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(df));
  constexpr int kVectors = 128 / kLanes;
  hn::VFromD<decltype(df)> y[kVectors];
  for (int i = 0; i < kVectors; ++i) y[i] = fold_vector(df, load_bf16(df, x + i * kLanes));
  for (int step = 1; step < kVectors; step *= 2)
    for (int i = 0; i < kVectors; ++i) {
      if (i & step) continue;
      const auto low = y[i];
      const auto high = y[i + step];
      y[i] = hn::Add(low, high);
      y[i + step] = hn::Sub(low, high);
    }
  const auto scale = hn::Set(df, 0.08838834764831845f);  // 128^-1/2
  for (int i = 0; i < kVectors; i += 2)
    store_bf16_pair<Nans::kOfBf16>(df, hn::Mul(y[i], scale), hn::Mul(y[i + 1], scale),
                                   out + i * kLanes);
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
