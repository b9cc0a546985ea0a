// Norm, RoPE and Hadamard of one bf16 row in Highway vectors (core/prologue.h specifies them).
// Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_PROLOGUE_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_PROLOGUE_SIMD_H
#undef WINNOW_CPU_PROLOGUE_SIMD_H
#else
#define WINNOW_CPU_PROLOGUE_SIMD_H
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/prologue.h"
#include "cpu/formats_simd.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class DF>
HWY_INLINE hn::VFromD<DF> load_floats(DF df, const bf16* x) {
  return load_bf16(df, x);
}
template <class DF>
HWY_INLINE hn::VFromD<DF> load_floats(DF df, const float* x) {
  return hn::LoadU(df, x);
}

// Sum of f(vector of x) over a row: four chains of vectors, then the ragged end by itself. The
// order depends on the width alone.
template <class T, class F>
HWY_INLINE float sum_row(const T* x, int64_t width, F&& f) {
  const hn::CappedTag<float, 16> df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  auto sum0 = hn::Zero(df);
  auto sum1 = hn::Zero(df);
  auto sum2 = hn::Zero(df);
  auto sum3 = hn::Zero(df);
  int64_t i = 0;
  for (; i + 4 * lanes <= width; i += 4 * lanes) {
    sum0 = hn::Add(sum0, f(df, load_floats(df, x + i)));
    sum1 = hn::Add(sum1, f(df, load_floats(df, x + i + lanes)));
    sum2 = hn::Add(sum2, f(df, load_floats(df, x + i + 2 * lanes)));
    sum3 = hn::Add(sum3, f(df, load_floats(df, x + i + 3 * lanes)));
  }
  for (; i + lanes <= width; i += lanes) sum0 = hn::Add(sum0, f(df, load_floats(df, x + i)));
  const hn::CappedTag<float, 1> one;
  float rest = 0;
  for (; i < width; ++i) rest += hn::GetLane(f(one, load_floats(one, x + i)));
  const auto sums = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  return rest + hn::GetLane(hn::SumOfLanes(df, sums));
}

// What a norm takes from a row and multiplies the rest by. Of several rows these are found first,
// since each waits for the sums of its row, and the rows are finished behind them.
struct NormFactors {
  float mean, inverse;
};
template <class T>
HWY_INLINE NormFactors norm_factors(const core::NormParams& n, const T* x, int64_t width) {
  const auto count = static_cast<float>(width);
  float mean = 0;
  float squares;
  if (n.kind == NormKind::kLayer) {
    mean = sum_row(x, width, [](auto, auto v) HWY_ATTR { return v; }) / count;
    squares = sum_row(x, width, [mean](auto d, auto v) HWY_ATTR {
      const auto centred = hn::Sub(v, hn::Set(d, mean));
      return hn::Mul(centred, centred);
    });
  } else {
    squares = sum_row(x, width, [](auto, auto v) HWY_ATTR { return hn::Mul(v, v); });
  }
  return {mean, 1 / std::sqrt(squares / count + n.eps)};
}

template <class T>
HWY_INLINE void finish_norm(const core::NormParams& n, const NormFactors& factors, const T* x,
                            int64_t width, bf16* out) {
  const bool centred = n.kind == NormKind::kLayer;
  const auto value = [&](auto d, int64_t i) HWY_ATTR {
    auto y = load_floats(d, x + i);
    if (centred) y = hn::Sub(y, hn::Set(d, factors.mean));
    y = hn::Mul(y, hn::Set(d, factors.inverse));
    if (n.weight) y = hn::Mul(y, hn::LoadU(d, n.weight + i));
    if (n.bias) y = hn::Add(y, hn::LoadU(d, n.bias + i));
    return y;
  };
  const hn::CappedTag<float, 16> df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + 2 * lanes <= width; i += 2 * lanes) {
    const auto first = value(df, i);  // before the store: out may be x
    store_bf16_pair(df, first, value(df, i + lanes), out + i);
  }
  const hn::CappedTag<float, 1> one;
  for (; i < width; ++i) store_bf16(one, value(one, i), out + i);
}

template <class T>
HWY_INLINE void norm_row(const core::NormParams& n, const T* x, int64_t width, bf16* out) {
  if (n.kind == NormKind::kNone) return core::norm_row(n, x, width, out);
  finish_norm(n, norm_factors(n, x, width), x, width, out);
}

// Pairs (2i, 2i + 1) share a 32-bit lane: the even value is its low half, the odd one its high
// half.
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
    const auto first = round_to_bf16(df, hn::Sub(hn::Mul(u, cosine), hn::Mul(v, sine)));
    const auto second = round_to_bf16(df, hn::Add(hn::Mul(v, cosine), hn::Mul(u, sine)));
    const auto packed = hn::Or(hn::ShiftRight<16>(first), hn::And(second, high));
    hn::StoreU(packed, du, reinterpret_cast<uint32_t*>(out + 2 * i));
  }
}

HWY_INLINE void rotate_half(const float* cosines, const float* sines, const bf16* x, bf16* out) {
  const hn::CappedTag<float, 16> df;
  for (int i = 0; i < core::kPairs; i += static_cast<int>(hn::Lanes(df))) {
    const auto u = load_bf16(df, x + i);
    const auto v = load_bf16(df, x + core::kPairs + i);
    const auto cosine = hn::LoadU(df, cosines + i);
    const auto sine = hn::LoadU(df, sines + i);
    store_bf16(df, hn::Sub(hn::Mul(u, cosine), hn::Mul(v, sine)), out + i);
    store_bf16(df, hn::Add(hn::Mul(v, cosine), hn::Mul(u, sine)), out + core::kPairs + i);
  }
}

HWY_INLINE void rotate_row(const core::RopeParams& r, const core::Angles& a, const bf16* x,
                           bf16* out) {
  if (r.half) rotate_half(a.cosine, a.sine, x, out);
  else rotate_interleaved(a.cosine, a.sine, x, out);
}

// Cosines and sines of a position; one copy where the table has them side by side.
HWY_INLINE void load_angles(const core::RopeParams& r, int64_t position, core::Angles& out) {
  if (r.pair_stride != 1 || r.inverse) return core::load_angles(r, position, out);
  const float* row = r.table + position * r.position_stride;
  std::memcpy(out.cosine, row, sizeof out.cosine);
  std::memcpy(out.sine, row + r.sine_stride, sizeof out.sine);
}

// The 64 values at x by a position inside the table; its row is read in place where it can be.
HWY_INLINE void rotate_at(const core::RopeParams& r, int64_t position, const bf16* x, bf16* out) {
  if (r.pair_stride != 1 || r.inverse) {
    core::Angles angles;
    core::load_angles(r, position, angles);
    return HWY_NAMESPACE::rotate_row(r, angles, x, out);
  }
  const float* row = r.table + position * r.position_stride;
  if (r.half) rotate_half(row, row + r.sine_stride, x, out);
  else rotate_interleaved(row, row + r.sine_stride, x, out);
}

// The angles of one token at a time, for loops over the heads of several.
struct TokenAngles {
  TokenAngles(const core::RopeParams& rope_, const int32_t* positions_, int64_t stride_)
      : rope(rope_), positions(positions_), stride(stride_) {}

  // False if the token's position is outside the table.
  bool load(int64_t token) {
    if (token == loaded) return inside;
    loaded = token;
    const int32_t position = positions[token * stride];
    inside = core::in_table(rope, position);
    if (inside) HWY_NAMESPACE::load_angles(rope, position, values);
    return inside;
  }

  const core::RopeParams& rope;
  const int32_t* positions;
  int64_t stride;
  int64_t loaded = -1;
  bool inside = false;
  core::Angles values;
};

// Seven steps of sums and differences over 128 floats, the first ones inside vectors of four by
// plain loops that the compiler vectorises; everything stays in L1.
HWY_INLINE void hadamard_row(const bf16* x, bf16* out) {
  constexpr int kSize = 128;
  const hn::CappedTag<float, 16> df;
  const int lanes = static_cast<int>(hn::Lanes(df));
  HWY_ALIGN float y[kSize];
  for (int i = 0; i < kSize; i += lanes) hn::Store(load_bf16(df, x + i), df, y + i);
  int step = 1;
  for (; step < lanes; step *= 2)
    for (int i = 0; i < kSize; i += 2 * step)
      for (int j = i; j < i + step; ++j) {
        const float low = y[j];
        const float high = y[j + step];
        y[j] = low + high;
        y[j + step] = low - high;
      }
  for (; step < kSize; step *= 2)
    for (int i = 0; i < kSize; i += 2 * step)
      for (int j = i; j < i + step; j += lanes) {
        const auto low = hn::Load(df, y + j);
        const auto high = hn::Load(df, y + j + step);
        hn::Store(hn::Add(low, high), df, y + j);
        hn::Store(hn::Sub(low, high), df, y + j + step);
      }
  const auto scale = hn::Set(df, 0.08838834764831845f);  // 128^-1/2
  for (int i = 0; i < kSize; i += lanes)
    store_bf16(df, hn::Mul(hn::Load(df, y + i), scale), out + i);
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
