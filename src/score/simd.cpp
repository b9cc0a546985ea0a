// score with portable vectors in fp32: heads in lanes, keys broadcast, so that a dequantised key
// needs no transposition and the sum over heads is vertical until the end. A tile is two vectors of
// heads by four or eight keys. Budget per key and 16 heads: 128 FMAs of 16 lanes; decoding (once
// per token block) adds about 12 instructions per 16 of the key's 128 values.
#include <algorithm>

#include "core/arithmetic.h"
#include "score/blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "score/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/formats_simd.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::score::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
namespace hs = cpu::HWY_NAMESPACE;
using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;

// Sixteen vector registers hold 2 x 4 sums with their operands, 32 hold 2 x 8.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr int kKeys = 8;
#else
constexpr int kKeys = 4;
#endif
static_assert(kGroupKeys % kKeys == 0);

// Packed query: for each pair of vectors of heads [128][2 * lanes] values, heads beyond the last
// zero; behind them the weights, padded likewise.
int64_t padded(int32_t heads) {
  const int64_t pair = 2 * static_cast<int64_t>(hn::Lanes(D()));
  return round_up(heads, pair);
}

void dequantize(const Run& run, std::byte* out) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  float* to = reinterpret_cast<float*>(out);
  for (int64_t j = 0; j < run.count; ++j, to += kDim)
    for (int64_t i = 0; i < kDim; i += lanes) {
      const uint8_t* row = run.rows + j * run.row_stride;
      const auto values = run.is_bf16 ? hs::load_bf16(d, reinterpret_cast<const bf16*>(row) + i)
                                      : hs::load_e4m3(d, row + i);
      hn::Store(values, d, to + i);
    }
}

void pack(const Params& p, int64_t token, std::byte* out) {
  const int64_t pair = 2 * static_cast<int64_t>(hn::Lanes(D())), heads = padded(p.heads);
  float* q = reinterpret_cast<float*>(out);
  float* w = q + heads * kDim;
  std::fill_n(q, heads * (kDim + 1), 0.0f);
  for (int64_t h = 0; h < p.heads; ++h) {
    alignas(64) float row[kDim];
    dequantize({.rows = p.q + token * p.q_token_stride + h * p.q_head_stride,
                .count = 1,
                .is_bf16 = p.is_bf16},
               reinterpret_cast<std::byte*>(row));
    float* column = q + h / pair * pair * kDim + h % pair;
    for (int i = 0; i < kDim; ++i) column[i * pair] = row[i];
    w[h] = p.weights[token * p.weight_stride + h];
  }
}

// w * max(0, q . k) of kVectors vectors of heads for kKeys keys, added to sums[key]. q has `pair`
// values per dimension, whatever kVectors is.
template <int kVectors>
HWY_INLINE void tile(const float* q, const float* w, const float* keys, V* sums) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), pair = 2 * lanes;
  V acc0[kKeys], acc1[kKeys];
#pragma GCC unroll 8
  for (int k = 0; k < kKeys; ++k) acc0[k] = acc1[k] = hn::Zero(d);
  for (int i = 0; i < kDim; ++i) {
    const V q0 = hn::Load(d, q + i * pair), q1 = hn::Load(d, q + i * pair + (pair - lanes));
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      const V key = hn::Set(d, keys[k * kDim + i]);
      acc0[k] = hn::MulAdd(q0, key, acc0[k]);
      if constexpr (kVectors == 2) acc1[k] = hn::MulAdd(q1, key, acc1[k]);
    }
  }
  const V w0 = hn::Load(d, w), w1 = hn::Load(d, w + lanes), zero = hn::Zero(d);
#pragma GCC unroll 8
  for (int k = 0; k < kKeys; ++k) {
    sums[k] = hn::MulAdd(hn::IfThenElseZero(hn::Gt(acc0[k], zero), acc0[k]), w0, sums[k]);
    if constexpr (kVectors == 2)
      sums[k] = hn::MulAdd(hn::IfThenElseZero(hn::Gt(acc1[k], zero), acc1[k]), w1, sums[k]);
  }
}

void block(const Block& b) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), pair = 2 * lanes;
  const float* q = reinterpret_cast<const float*>(b.query);
  const float* w = q + padded(b.heads) * kDim;
  const float* keys = reinterpret_cast<const float*>(b.keys);
  V sums[kBlockKeys];
  const int32_t count = round_up(b.count, kGroupKeys);
  for (int32_t k = 0; k < count; ++k) sums[k] = hn::Zero(d);
  // Heads outside, keys inside: 16 KB of query stay in L1 for all keys.
  for (int64_t h = 0; h < b.heads; h += pair, q += pair * kDim)
    for (int32_t k = 0; k < count; k += kKeys) {
      if (b.heads - h > lanes) tile<2>(q, w + h, keys + k * kDim, sums + k);
      else tile<1>(q, w + h, keys + k * kDim, sums + k);
    }
  for (int32_t k = 0; k < count; ++k)
    b.out[k] = hn::GetLane(hn::SumOfLanes(d, sums[k])) * b.scales[k];
}

}  // namespace
}  // namespace winnow::internal::score::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::score {

namespace {

HWY_EXPORT(pack);
HWY_EXPORT(dequantize);
HWY_EXPORT(block);

// Enough for any vector length up to 16 lanes.
int64_t query_bytes(int32_t heads) { return round_up(heads, 32) * int64_t{kDim + 1} * 4; }

}  // namespace

void simd(const Params& p) noexcept {
  static constexpr Engine engine = {4, query_bytes,
                                    [](const Params& q, int64_t token, std::byte* out) noexcept {
                                      HWY_DYNAMIC_DISPATCH(pack)(q, token, out);
                                    },
                                    [](const Run& run, std::byte* out) noexcept {
                                      HWY_DYNAMIC_DISPATCH(dequantize)
                                      (run, out);
                                    },
                                    [](const Block& b) noexcept {
                                      HWY_DYNAMIC_DISPATCH(block)
                                      (b);
                                    }};
  run_blocks(p, engine);
}

}  // namespace winnow::internal::score
#endif  // HWY_ONCE
