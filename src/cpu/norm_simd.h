// The norm of bf16 or fp32 rows in Highway vectors (core/prologue.h specifies it).
// Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_NORM_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_NORM_SIMD_H
#undef WINNOW_CPU_NORM_SIMD_H
#else
#define WINNOW_CPU_NORM_SIMD_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

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
  auto both = hn::LoadU(du, reinterpret_cast<const uint32_t*>(x));
#if WINNOW_FLUSHING_ROUNDING
  if constexpr (hn::MaxLanes(DF()) == 16)
    asm("" : "+v"(both.raw));  // loaded once: a load of 64 bytes takes a cycle
#endif
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

#if WINNOW_FLUSHING_ROUNDING
// The sum of each fourth lane.
template <class D>
HWY_INLINE auto sum_lanes(D /*d*/, hn::VFromD<D> v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return sum_lanes(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// The sums of the squares of a row's 128 n values and, if they are wanted, of the values: a vector
// each.
template <bool kValues>
HWY_INLINE Two<hn::Vec512<float>> sum_products(const bf16* x, int64_t width) {
  const hn::Full512<float> df;
  const hn::Full512<uint16_t> dh;
  const auto ones = hn::Set(dh, uint16_t{0x3f80});
  hn::Vec512<float> square[4] = {hn::Zero(df), hn::Zero(df), hn::Zero(df), hn::Zero(df)};
  hn::Vec512<float> value[4] = {hn::Zero(df), hn::Zero(df), hn::Zero(df), hn::Zero(df)};
  for (int64_t i = 0; i < width; i += 128)
    for (int64_t j = 0; j < 4; ++j) {
      const auto v = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(x + i + 32 * j));
      square[j] = add_products(square[j], v, v);
      if constexpr (kValues) value[j] = add_products(value[j], v, ones);
    }
  const auto sum = [&](const hn::Vec512<float>* sums) WINNOW_INLINED {
    return hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]));
  };
  return {sum(square), sum(value)};
}

// The sums of a row, spread over four lanes each: squares, then values.
template <bool kValues>
HWY_INLINE void store_sums(const Two<hn::Vec512<float>>& sums, float* to) {
  const hn::Full512<float> df;
  const hn::Full128<float> d;
  hn::Store(sum_lanes(df, sums.first), d, to);
  if constexpr (kValues) hn::Store(sum_lanes(df, sums.second), d, to + 4);
}

// The same of two rows whose values are wanted, with half of the shuffles: the same sums.
HWY_INLINE void store_sums(const Two<hn::Vec512<float>>& first,
                           const Two<hn::Vec512<float>>& second, float* to) {
  const hn::Full512<float> df;
  const auto halves = [&](const Two<hn::Vec512<float>>& row) WINNOW_INLINED {
    return hn::Add(hn::ConcatLowerLower(df, row.second, row.first),
                   hn::ConcatUpperUpper(df, row.second, row.first));
  };
  const auto a = halves(first).raw;
  const auto b = halves(second).raw;
  const hn::Vec512<float> even{_mm512_shuffle_f32x4(a, b, 0x88)};
  const hn::Vec512<float> odd{_mm512_shuffle_f32x4(a, b, 0xdd)};
  hn::Store(hn::Add(even, odd), df, to);
}

// The sums of the lanes of every second one of eight vectors that stand behind each other.
HWY_INLINE hn::Vec128<float> sum_fours(const float* lanes) {
  const hn::Full128<float> d;
  const hn::Full128<uint64_t> dw;
  const auto two = [&](const float* from) WINNOW_INLINED {
    const auto a = hn::Load(d, from);
    const auto b = hn::Load(d, from + 8);
    const auto sums = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
    return hn::BitCast(dw, sums);
  };
  const auto a = two(lanes);
  const auto b = two(lanes + 16);
  return hn::Add(hn::BitCast(d, hn::InterleaveLower(dw, a, b)),
                 hn::BitCast(d, hn::InterleaveUpper(dw, a, b)));
}
#endif

// Values of a row that become codes and nothing else. They may stand in parts, and subnormal ones
// may become zeros of their sign (`flush`). Those that are rotated do not count: the sign of their
// sum could be another.
struct Coded {
  int64_t begin = 0, end = 0;
  bool flush = false;
};
template <class R>
Coded coded_of(const core::RopeParams& rope, bool flush) {
  if (!R::kQuantized) return {};
  if (rope.table == nullptr) return {0, R::kNope, flush};
  const int64_t rotated = core::rope_begin(rope, R::kDim);
  if (rotated == 0) return {kRopeDim, R::kNope, flush};
  return {0, std::min<int64_t>(R::kNope, rotated), flush};
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
    parted_ = width <= kMostParted && width % 64 == 0;
    by_products_ = can_flush_ && width % 128 == 0;
    if (!parted_) return;
    if (norm.weight) part(norm.weight, weight_parts_);
    else std::fill_n(weight_parts_, width, 1.0f);
    if (norm.bias) part(norm.bias, bias_parts_);
  }

  static constexpr int64_t kGroup = 8;  // rows whose factors are found together
  static constexpr int64_t kMostParted = 512;

  // The factors of rows [0, count) of a group, which row(r) gives. Square roots and divisions of
  // all of them at once. kWidth: the width, where the caller knows it.
  template <int64_t kWidth = 0, class RowOf>
  HWY_INLINE void factors(int64_t count, RowOf&& row, Factors* out) const {
#if WINNOW_FLUSHING_ROUNDING
    if constexpr (sizeof(*row(0)) == sizeof(bf16))
      if (by_products_ && norm_.kind != NormKind::kNone)
        return factors_by_products<kWidth>(count, row, out);
#endif
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
#if WINNOW_FLUSHING_ROUNDING
    if constexpr (sizeof(T) == sizeof(bf16)) {
      Factors out;
      if (by_products_) {
        factors_by_products<0>(
            1, [&](int64_t) WINNOW_INLINED { return x; }, &out);
        return out;
      }
    }
#endif
    return factors_by_sums(x);
  }

  // Out may be x. kOrder: of the coded values.
  template <Order kOrder = Order::kInTurn, class T>
  HWY_INLINE void finish(const Factors& factors, const T* x, bf16* out, Coded coded = {}) const {
    // A NaN of an fp32 row is in its sum of squares.
    const bool any_nan = weights_have_nan_ || std::isnan(factors.inverse) ||
                         (norm_.kind == NormKind::kNone && sizeof(T) == 4);
    const bool centred = norm_.kind == NormKind::kLayer;
    const bool plain = norm_.weight && !norm_.bias && !centred;  // most are
    coded.flush = coded.flush && can_flush_;
    if (!any_nan && parted_ && sizeof(T) == 2) return finish_parted<kOrder>(factors, x, out, coded);
    if (any_nan) finish_whole<Nans::kAny, false>(factors, x, out);
    else if (plain) finish_whole<Nans::kOfBf16, true>(factors, x, out, coded);
    else finish_whole<Nans::kOfBf16, false>(factors, x, out);
    if constexpr (kOrder == Order::kParted)
      for (int64_t i = coded.begin; i < coded.end; i += 64) part_values<64>(out + i, out + i);
  }

  template <class T>
  HWY_INLINE void operator()(const T* x, bf16* out) const {
    finish(factors(x), x, out);
  }

  // Whether normed_two() and finish_parts() serve rows of bf16 with these factors.
  bool in_parts(const Factors* factors, int64_t count) const {
    float sum = 0;  // of what is not below 0: NaN where one of them is
    for (int64_t r = 0; r < count; ++r) sum += factors[r].inverse;
    return parted_ && can_flush_ && !weights_have_nan_ && !std::isnan(sum);
  }

  // Two vectors of a row from value i on, not yet rounded: values at even places, and at odd ones.
  template <bool kCentred, bool kBiased>
  HWY_INLINE auto normed_two(const Factors& factors, const bf16* x, int64_t i) const {
    const hn::CappedTag<float, 16> df;
    const auto lanes = static_cast<int64_t>(hn::Lanes(df));
    const auto value = [&](auto y, int64_t at) WINNOW_INLINED {
      if constexpr (kCentred) y = hn::Sub(y, hn::Set(df, factors.mean));
      y = hn::Mul(hn::Mul(y, hn::Set(df, factors.inverse)), hn::Load(df, weight_parts_ + at));
      if constexpr (kBiased) y = hn::Add(y, hn::Load(df, bias_parts_ + at));
      return y;
    };
    const auto both = load_two(df, x + i);
    return Two<hn::VFromD<decltype(df)>>{value(both.first, i), value(both.second, i + lanes)};
  }

  // Values [begin, end) of a row. Those at even and at odd places, which share lanes of 32 bits,
  // are never brought into order.
  template <bool kCentred, bool kBiased, Rounding kRounding, Order kOrder>
  HWY_INLINE void finish_parts(const Factors& factors, const bf16* x, int64_t begin, int64_t end,
                               bf16* out) const {
    const hn::CappedTag<float, 16> df;
    const auto lanes = static_cast<int64_t>(hn::Lanes(df));
    for (int64_t i = begin; i < end; i += 4 * lanes) {
      const auto front = normed_two<kCentred, kBiased>(factors, x, i);
      const auto back = normed_two<kCentred, kBiased>(factors, x, i + 2 * lanes);
      if constexpr (kOrder == Order::kParted) {
        store_bf16_pair<Nans::kOfBf16, kRounding>(df, front.first, back.first, out + i);
        store_bf16_pair<Nans::kOfBf16, kRounding>(df, front.second, back.second,
                                                  out + i + 2 * lanes);
      } else {
        store_parts<Nans::kOfBf16, kRounding>(df, front.first, front.second, out + i);
        store_parts<Nans::kOfBf16, kRounding>(df, back.first, back.second, out + i + 2 * lanes);
      }
    }
  }

  // f() with the first two arguments of those templates.
  template <class F>
  HWY_INLINE void with_kind(F&& f) const {
    const bool centred = norm_.kind == NormKind::kLayer;
    if (norm_.bias) {
      if (centred) f.template operator()<true, true>();
      else f.template operator()<false, true>();
    } else {
      if (centred) f.template operator()<true, false>();
      else f.template operator()<false, false>();
    }
  }

 private:
  template <class T>
  HWY_INLINE Factors factors_by_sums(const T* x) const {
    const auto count = static_cast<float>(width_);
    const bool centred = norm_.kind == NormKind::kLayer;
    const float mean = centred ? sum_of(x) / count : 0.0f;
    const float squares = centred ? squares_of(x, mean) : squares_of(x);
    return {mean, 1 / std::sqrt(squares / count + norm_.eps)};
  }

#if WINNOW_FLUSHING_ROUNDING
  // The factors of rows of 128 n values. The sum of squares in one pass, and what the mean has of
  // it taken off, where that is less than a quarter. Rows of tiny values, whose squares would count
  // as zeros, and others go by sums.
  template <int64_t kWidth, class RowOf>
  HWY_INLINE void factors_by_products(int64_t count, RowOf&& row, Factors* out) const {
    const hn::Full128<float> d;
    HWY_ALIGN float sums[8 * kGroup] = {};  // four of a row's squares, then four of its values
    const int64_t length = kWidth > 0 ? kWidth : width_;
    int64_t done = 0;
    if (norm_.kind == NormKind::kLayer) {
      for (; done + 2 <= count; done += 2)
        store_sums(sum_products<true>(row(done), length), sum_products<true>(row(done + 1), length),
                   sums + 8 * done);
      if (done < count) store_sums<true>(sum_products<true>(row(done), length), sums + 8 * done);
    } else {
      for (; done < count; ++done)
        store_sums<false>(sum_products<false>(row(done), length), sums + 8 * done);
    }
    const auto width = hn::Set(d, static_cast<float>(length));
    for (int64_t r = 0; r < count; r += 4) {
      const auto sum = sum_fours(sums + 8 * r);
      const auto mean = hn::Div(sum_fours(sums + 8 * r + 4), width);
      const auto square = hn::Div(sum, width);
      const auto off = hn::Mul(mean, mean);
      const auto root = hn::Sqrt(hn::Add(hn::Sub(square, off), hn::Set(d, norm_.eps)));
      HWY_ALIGN float means[4];
      HWY_ALIGN float inverses[4];
      hn::Store(mean, d, means);
      hn::Store(hn::Div(hn::Set(d, 1.0f), root), d, inverses);
      const auto tiny = hn::Lt(sum, hn::Set(d, 0x1p-100f));
      const auto far = hn::Gt(off, hn::Mul(square, hn::Set(d, 0.25f)));
      const int64_t rows = std::min<int64_t>(count - r, 4);
      for (int64_t i = 0; i < rows; ++i) out[r + i] = {means[i], inverses[i]};
      uint8_t doubtful[8] = {};
      hn::StoreMaskBits(d, hn::Or(tiny, far), doubtful);
      for (int64_t i = 0; i < rows && doubtful[0] != 0; ++i)
        if (doubtful[0] >> i & 1) out[r + i] = factors_by_sums(row(r + i));
    }
  }
#endif

  template <class T>
  HWY_INLINE float sum_of(const T* x) const {
    return sum_row(x, width_,
                   [](auto, auto sum, auto v) WINNOW_INLINED { return hn::Add(sum, v); });
  }
  template <class T>
  HWY_INLINE float squares_of(const T* x) const {
    return sum_row(x, width_,
                   [](auto, auto sum, auto v) WINNOW_INLINED { return hn::MulAdd(v, v, sum); });
  }
  template <class T>
  HWY_INLINE float squares_of(const T* x, float mean) const {
    return sum_row(x, width_, [mean](auto d, auto sum, auto v) WINNOW_INLINED {
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

  // Coded values, and the others in front of them and behind.
  template <bool kCentred, bool kBiased, Order kOrder>
  HWY_INLINE void finish_parted(const Factors& factors, const bf16* x, bf16* out,
                                Coded coded) const {
    using enum Rounding;
    constexpr Rounding kOfCodes = WINNOW_FLUSHING_ROUNDING ? kFlushing : kPlain;
    constexpr Rounding kOther = WINNOW_FLUSHING_ROUNDING ? kChecked : kPlain;
    const auto& [begin, end, flush] = coded;
    if (flush) finish_parts<kCentred, kBiased, kOfCodes, kOrder>(factors, x, begin, end, out);
    else finish_parts<kCentred, kBiased, kPlain, kOrder>(factors, x, begin, end, out);
    for (const auto& [first, last] : {std::pair(int64_t{0}, begin), std::pair(end, width_)}) {
      if (can_flush_)
        finish_parts<kCentred, kBiased, kOther, Order::kInTurn>(factors, x, first, last, out);
      else finish_parts<kCentred, kBiased, kPlain, Order::kInTurn>(factors, x, first, last, out);
    }
  }

  template <Order kOrder>
  HWY_INLINE void finish_parted(const Factors& factors, const bf16* x, bf16* out,
                                Coded coded) const {
    with_kind([&]<bool kCentred, bool kBiased>() WINNOW_INLINED {
      finish_parted<kCentred, kBiased, kOrder>(factors, x, out, coded);
    });
  }
  template <Order>
  HWY_INLINE void finish_parted(const Factors& /*factors*/, const float* /*x*/, bf16* /*out*/,
                                Coded /*coded*/) const {}

  // kPlain: weights, and nothing else.
  template <Nans kNans, bool kPlain, class T>
  HWY_INLINE void finish_whole(const Factors& factors, const T* x, bf16* out,
                               Coded coded = {}) const {
    const bool centred = !kPlain && norm_.kind == NormKind::kLayer;
    const float* weight = norm_.weight;
    const float* bias = kPlain ? nullptr : norm_.bias;
    const auto value = [&](auto d, int64_t i) WINNOW_INLINED {
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
    const auto pair = [&](auto rounding, int64_t at) WINNOW_INLINED {
      const auto first = value(df, at);  // before the store: out may be x
      store_bf16_pair<kNans, rounding()>(df, first, value(df, at + lanes), out + at);
    };
    constexpr bool kFlush = WINNOW_FLUSHING_ROUNDING && kNans == Nans::kOfBf16;
    using Flushing = std::integral_constant<Rounding, Rounding::kFlushing>;
    using Checked = std::integral_constant<Rounding, Rounding::kChecked>;
    using Plain = std::integral_constant<Rounding, Rounding::kPlain>;
    if (kFlush && can_flush_) {
      if (coded.flush && coded.begin == 0)
        for (; i < coded.end; i += 2 * lanes) pair(Flushing(), i);
      for (; i + 2 * lanes <= width_; i += 2 * lanes) pair(Checked(), i);
    }
    for (; i + 2 * lanes <= width_; i += 2 * lanes) pair(Plain(), i);
    const hn::CappedTag<float, 1> one;
    for (; i < width_; ++i) store_bf16<kNans>(one, value(one, i), out + i);
  }

  core::NormParams norm_;
  int64_t width_;
  bool weights_have_nan_;
  bool can_flush_ = can_round_flushing();
  bool by_products_;  // sums of bf16 rows
  bool parted_;       // else the two behind it are not used
  HWY_ALIGN float weight_parts_[kMostParted];
  HWY_ALIGN float bias_parts_[kMostParted];
};

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
