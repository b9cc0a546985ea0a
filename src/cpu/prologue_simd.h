// Norm, RoPE and Hadamard of one bf16 row in Highway vectors (core/prologue.h specifies them).
// Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_PROLOGUE_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_PROLOGUE_SIMD_H
#undef WINNOW_CPU_PROLOGUE_SIMD_H
#else
#define WINNOW_CPU_PROLOGUE_SIMD_H
#endif

#include <algorithm>
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

// Two vectors of a row, for sums: of bf16 the values at even places and those at odd ones, which
// share lanes of 32 bits.
template <class V>
struct Two {
  V first, second;
};
template <class DF>
HWY_INLINE Two<hn::VFromD<DF>> load_two(DF df, const bf16* x) {
  const hn::RebindToUnsigned<DF> du;
  const auto both = hn::LoadU(du, reinterpret_cast<const uint32_t*>(x));
  return {hn::BitCast(df, hn::ShiftLeft<16>(both)),
          hn::BitCast(df, hn::And(both, hn::Set(du, 0xffff0000u)))};
}
template <class DF>
HWY_INLINE Two<hn::VFromD<DF>> load_two(DF df, const float* x) {
  return {hn::LoadU(df, x), hn::LoadU(df, x + hn::Lanes(df))};
}

// A row's sum by add(vector tag, sum so far, vector): four chains of vectors, then the ragged end
// by itself. The order depends on the width alone.
template <class T, class F>
HWY_INLINE float sum_row(const T* x, int64_t width, F&& add) {
  const hn::CappedTag<float, 16> df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  auto sum0 = hn::Zero(df);
  auto sum1 = hn::Zero(df);
  auto sum2 = hn::Zero(df);
  auto sum3 = hn::Zero(df);
  int64_t i = 0;
  for (; i + 4 * lanes <= width; i += 4 * lanes) {
    const auto front = load_two(df, x + i);
    const auto back = load_two(df, x + i + 2 * lanes);
    sum0 = add(df, sum0, front.first);
    sum1 = add(df, sum1, front.second);
    sum2 = add(df, sum2, back.first);
    sum3 = add(df, sum3, back.second);
  }
  for (; i + lanes <= width; i += lanes) sum0 = add(df, sum0, load_floats(df, x + i));
  const hn::CappedTag<float, 1> one;
  auto rest = hn::Zero(one);
  for (; i < width; ++i) rest = add(one, rest, load_floats(one, x + i));
  const auto sums = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  return hn::GetLane(rest) + hn::GetLane(hn::SumOfLanes(df, sums));
}

// Values of a row that become codes and nothing else, so that subnormal ones may become zeros of
// their sign. Those that are rotated do not count: the sign of their sum could be another.
struct Flushed {
  int64_t begin = 0, end = 0;
};
template <class R>
Flushed flushed_of(const core::RopeParams& rope) {
  if (!R::kQuantized) return {};
  if (rope.table == nullptr) return {0, R::kNope};
  const int64_t rotated = core::rope_begin(rope, R::kDim);
  if (rotated == 0) return {kRopeDim, R::kNope};
  return {0, std::min<int64_t>(R::kNope, rotated)};
}

// The norm of many rows of one width. Of several rows the factors are found first, since each waits
// for the sums of its row, and the rows are finished behind them.
class RowNorm {
 public:
  struct Factors {
    float mean, inverse;  // a row less the mean, times the inverse
  };

  RowNorm(const core::NormParams& norm, int64_t width)
      : norm_(norm), width_(width), weights_have_nan_(has_nan(norm.weight) || has_nan(norm.bias)) {
    parted_ = width <= kMostParted && width % 32 == 0;
    if (!parted_) return;
    if (norm.weight) part(norm.weight, weight_parts_);
    else std::fill_n(weight_parts_, width, 1.0f);
    if (norm.bias) part(norm.bias, bias_parts_);
  }

  static constexpr int64_t kGroup = 8;  // rows whose factors are found together

  // The factors of rows [0, count) of a group, which row(r) gives. Square roots and divisions of
  // all of them at once.
  template <class RowOf>
  HWY_INLINE void factors(int64_t count, RowOf&& row, Factors* out) const {
    const hn::CappedTag<float, kGroup> d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    HWY_ALIGN float mean[kGroup] = {};
    HWY_ALIGN float inverse[kGroup] = {};
    const auto width = hn::Set(d, static_cast<float>(width_));
    if (norm_.kind == NormKind::kLayer) {
      for (int64_t r = 0; r < count; ++r) mean[r] = sum_of(row(r));
      for (int64_t r = 0; r < kGroup; r += lanes)
        hn::Store(hn::Div(hn::Load(d, mean + r), width), d, mean + r);
      for (int64_t r = 0; r < count; ++r) inverse[r] = squares_of(row(r), mean[r]);
    } else {
      for (int64_t r = 0; r < count; ++r) inverse[r] = squares_of(row(r));
    }
    for (int64_t r = 0; r < kGroup; r += lanes) {
      const auto squares = hn::Div(hn::Load(d, inverse + r), width);
      const auto root = hn::Sqrt(hn::Add(squares, hn::Set(d, norm_.eps)));
      hn::Store(hn::Div(hn::Set(d, 1.0f), root), d, inverse + r);
    }
    const bool none = norm_.kind == NormKind::kNone;
    for (int64_t r = 0; r < count; ++r) out[r] = {mean[r], none ? 1.0f : inverse[r]};
  }

  template <class T>
  HWY_INLINE Factors factors(const T* x) const {
    if (norm_.kind == NormKind::kNone) return {0, 1};
    const auto count = static_cast<float>(width_);
    const bool centred = norm_.kind == NormKind::kLayer;
    const float mean = centred ? sum_of(x) / count : 0.0f;
    const float squares = centred ? squares_of(x, mean) : squares_of(x);
    return {mean, 1 / std::sqrt(squares / count + norm_.eps)};
  }

  // Out may be x.
  template <class T>
  HWY_INLINE void finish(const Factors& factors, const T* x, bf16* out,
                         Flushed flushed = {}) const {
    // A NaN of an fp32 row is in its sum of squares.
    const bool any_nan = weights_have_nan_ || std::isnan(factors.inverse) ||
                         (norm_.kind == NormKind::kNone && sizeof(T) == 4);
    const bool centred = norm_.kind == NormKind::kLayer;
    const bool plain = norm_.weight && !norm_.bias && !centred;  // most are
    if (!can_flush_) flushed = {};
    if (any_nan) finish_whole<Nans::kAny, false>(factors, x, out);
    else if (parted_ && sizeof(T) == 2) finish_parted(factors, x, out, flushed);
    else if (plain) finish_whole<Nans::kOfBf16, true>(factors, x, out, flushed);
    else finish_whole<Nans::kOfBf16, false>(factors, x, out);
  }

  template <class T>
  HWY_INLINE void operator()(const T* x, bf16* out) const {
    finish(factors(x), x, out);
  }

 private:
  template <class T>
  HWY_INLINE float sum_of(const T* x) const {
    return sum_row(x, width_, [](auto, auto sum, auto v) HWY_ATTR { return hn::Add(sum, v); });
  }
  template <class T>
  HWY_INLINE float squares_of(const T* x) const {
    return sum_row(x, width_,
                   [](auto, auto sum, auto v) HWY_ATTR { return hn::MulAdd(v, v, sum); });
  }
  template <class T>
  HWY_INLINE float squares_of(const T* x, float mean) const {
    return sum_row(x, width_, [mean](auto d, auto sum, auto v) HWY_ATTR {
      const auto centred = hn::Sub(v, hn::Set(d, mean));
      return hn::MulAdd(centred, centred, sum);
    });
  }

  HWY_INLINE bool has_nan(const float* weights) const {
    if (!weights) return false;
    const int64_t whole = width_ / 16 * 16;
    bool found = HWY_NAMESPACE::has_nan(weights, whole);
    for (int64_t i = whole; i < width_; ++i) found = found || std::isnan(weights[i]);
    return found;
  }

  // Vectors of the weights at even places and of those at odd ones in turn.
  HWY_INLINE void part(const float* weights, float* parts) const {
    const hn::CappedTag<float, 16> df;
    const auto lanes = static_cast<int64_t>(hn::Lanes(df));
    for (int64_t i = 0; i < width_; i += 2 * lanes) {
      const auto front = hn::LoadU(df, weights + i);
      const auto back = hn::LoadU(df, weights + i + lanes);
#if HWY_TARGET == HWY_SCALAR
      hn::Store(front, df, parts + i);
      hn::Store(back, df, parts + i + 1);
#else
      hn::Store(hn::ConcatEven(df, back, front), df, parts + i);
      hn::Store(hn::ConcatOdd(df, back, front), df, parts + i + lanes);
#endif
    }
  }

  // Values [begin, end) of a row. Those at even and at odd places, which share lanes of 32 bits,
  // are never brought into order.
  template <bool kCentred, bool kBiased, bool kFlush>
  HWY_INLINE void finish_parts(const Factors& factors, const bf16* x, int64_t begin, int64_t end,
                               bf16* out) const {
    const hn::CappedTag<float, 16> df;
    const auto lanes = static_cast<int64_t>(hn::Lanes(df));
    const auto value = [&](auto y, int64_t i) HWY_ATTR {
      if constexpr (kCentred) y = hn::Sub(y, hn::Set(df, factors.mean));
      y = hn::Mul(hn::Mul(y, hn::Set(df, factors.inverse)), hn::Load(df, weight_parts_ + i));
      if constexpr (kBiased) y = hn::Add(y, hn::Load(df, bias_parts_ + i));
      return y;
    };
    for (int64_t i = begin; i < end; i += 2 * lanes) {
      const auto both = load_two(df, x + i);
      const auto even = value(both.first, i);
      const auto odd = value(both.second, i + lanes);
      store_parts<Nans::kOfBf16, kFlush>(df, even, odd, out + i);
    }
  }

  template <bool kCentred, bool kBiased>
  HWY_INLINE void finish_parted(const Factors& factors, const bf16* x, bf16* out,
                                Flushed flushed) const {
    constexpr bool kFlush = WINNOW_FLUSHING_ROUNDING;
    finish_parts<kCentred, kBiased, kFlush>(factors, x, flushed.begin, flushed.end, out);
    for (const auto& [begin, end] : {Flushed{0, flushed.begin}, Flushed{flushed.end, width_}})
      finish_parts<kCentred, kBiased, false>(factors, x, begin, end, out);
  }

  HWY_INLINE void finish_parted(const Factors& factors, const bf16* x, bf16* out,
                                Flushed flushed) const {
    const bool centred = norm_.kind == NormKind::kLayer;
    if (norm_.bias) {
      if (centred) finish_parted<true, true>(factors, x, out, flushed);
      else finish_parted<false, true>(factors, x, out, flushed);
    } else {
      if (centred) finish_parted<true, false>(factors, x, out, flushed);
      else finish_parted<false, false>(factors, x, out, flushed);
    }
  }
  HWY_INLINE void finish_parted(const Factors& /*factors*/, const float* /*x*/, bf16* /*out*/,
                                Flushed /*flushed*/) const {}

  // kPlain: weights, and nothing else.
  template <Nans kNans, bool kPlain, class T>
  HWY_INLINE void finish_whole(const Factors& factors, const T* x, bf16* out,
                               Flushed flushed = {}) const {
    const bool centred = !kPlain && norm_.kind == NormKind::kLayer;
    const float* weight = norm_.weight;
    const float* bias = kPlain ? nullptr : norm_.bias;
    const auto value = [&](auto d, int64_t i) HWY_ATTR {
      auto y = load_floats(d, x + i);
      if (centred) y = hn::Sub(y, hn::Set(d, factors.mean));
      y = hn::Mul(y, hn::Set(d, factors.inverse));
      if (kPlain || weight) y = hn::Mul(y, hn::LoadU(d, weight + i));
      if (bias) y = hn::Add(y, hn::LoadU(d, bias + i));
      return y;
    };
    const hn::CappedTag<float, 16> df;
    const auto lanes = static_cast<int64_t>(hn::Lanes(df));
    int64_t i = 0;
    constexpr bool kFlush = WINNOW_FLUSHING_ROUNDING;
    for (; kFlush && i < flushed.end && flushed.begin == 0; i += 2 * lanes) {
      const auto first = value(df, i);
      store_bf16_pair<kNans, kFlush>(df, first, value(df, i + lanes), out + i);
    }
    for (; i + 2 * lanes <= width_; i += 2 * lanes) {
      const auto first = value(df, i);  // before the store: out may be x
      store_bf16_pair<kNans>(df, first, value(df, i + lanes), out + i);
    }
    const hn::CappedTag<float, 1> one;
    for (; i < width_; ++i) store_bf16<kNans>(one, value(one, i), out + i);
  }

  static constexpr int64_t kMostParted = 512;

  core::NormParams norm_;
  int64_t width_;
  bool weights_have_nan_;
  bool can_flush_ = can_round_flushing();
  bool parted_;  // else the two behind it are not used
  HWY_ALIGN float weight_parts_[kMostParted];
  HWY_ALIGN float bias_parts_[kMostParted];
};

// Pairs (2i, 2i + 1) share a 32-bit lane: the even value is its low half, the odd one its high
// half.
template <Nans kNans, bool kFlush>
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
    store_parts<kNans, kFlush>(df, first, second, out + 2 * i);
  }
}

template <Nans kNans, bool kFlush>
HWY_INLINE void rotate_half(const float* cosines, const float* sines, const bf16* x, bf16* out) {
  const hn::CappedTag<float, 16> df;
  const auto lanes = static_cast<int>(hn::Lanes(df));
  const auto turned = [&](int i) HWY_ATTR {
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
    store_bf16_pair<kNans, kFlush>(df, front.first, back.first, out + i);
    store_bf16_pair<kNans, kFlush>(df, front.second, back.second, out + core::kPairs + i);
  }
}

// The 64 values at x by cosines and sines that stand side by side. `flush`: subnormal values may
// become zeros, and can (can_round_flushing()).
HWY_INLINE void rotate_row(bool half, bool any_nan, bool flush, const float* cosines,
                           const float* sines, const bf16* x, bf16* out) {
  constexpr bool kFlush = WINNOW_FLUSHING_ROUNDING;
  if (any_nan) {
    if (half) rotate_half<Nans::kAny, false>(cosines, sines, x, out);
    else rotate_interleaved<Nans::kAny, false>(cosines, sines, x, out);
  } else if (kFlush && flush) {
    if (half) rotate_half<Nans::kOfBf16, kFlush>(cosines, sines, x, out);
    else rotate_interleaved<Nans::kOfBf16, kFlush>(cosines, sines, x, out);
  } else {
    if (half) rotate_half<Nans::kOfBf16, false>(cosines, sines, x, out);
    else rotate_interleaved<Nans::kOfBf16, false>(cosines, sines, x, out);
  }
}

// Cosines and sines of a position; one copy where the table has them side by side.
HWY_INLINE void load_angles(const core::RopeParams& r, int64_t position, core::Angles& out) {
  if (r.pair_stride != 1 || r.inverse) return core::load_angles(r, position, out);
  const float* row = r.table + position * r.position_stride;
  std::memcpy(out.cosine, row, sizeof out.cosine);
  std::memcpy(out.sine, row + r.sine_stride, sizeof out.sine);
}

// Asks for the angles of a position inside the table.
HWY_INLINE void prefetch_angles(const core::RopeParams& r, int64_t position) {
  constexpr int64_t kFloats = 16;  // in a line
  const float* row = r.table + position * r.position_stride;
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

// The 64 values at x by a position inside the table; its row is read in place where it can be.
HWY_INLINE void rotate_at(const core::RopeParams& r, int64_t position, const bf16* x, bf16* out,
                          bool flush = false) {
  core::Angles angles;
  const float* cosines = angles.cosine;
  const float* sines = angles.sine;
  if (r.pair_stride != 1 || r.inverse) {
    core::load_angles(r, position, angles);
  } else {
    cosines = r.table + position * r.position_stride;
    sines = cosines + r.sine_stride;
  }
  rotate_row(r.half, has_nan(cosines, sines), flush, cosines, sines, x, out);
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
  HWY_INLINE void rotate(const bf16* x, bf16* out, bool flush = false) const {
    rotate_row(rope_.half, any_nan_, flush, angles_.cosine, angles_.sine, x, out);
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

// 64 values in whole vectors: what is copied in smaller pieces cannot be loaded in larger ones
// until it has left the store buffer.
HWY_INLINE void copy_64(const bf16* from, bf16* to) {
  const hn::CappedTag<uint16_t, 32> dh;
  for (int i = 0; i < 64; i += static_cast<int>(hn::Lanes(dh)))
    hn::StoreU(hn::LoadU(dh, reinterpret_cast<const uint16_t*>(from + i)), dh,
               reinterpret_cast<uint16_t*>(to + i));
}

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
