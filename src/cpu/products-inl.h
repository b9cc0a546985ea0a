// The two products and the softmax between them, in fp32 vectors, as attend and attend_mha share
// them. S has a row per key and a lane per column: a head in attend, a token in attend_mha. Then
// the softmax runs down the columns (no sums across lanes), and both products are the same small
// routine: broadcast a scalar of the left operand, multiply with vectors of the right one.
// Included once per Highway target, after hwy/highway.h.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/arena.h"
#include "core/arithmetic.h"
#include "cpu/vectors-inl.h"

#ifndef WINNOW_CPU_PRODUCTS_ONCE
#define WINNOW_CPU_PRODUCTS_ONCE
#define WINNOW_UNROLL _Pragma("GCC unroll 16")
namespace winnow::internal::cpu {

// C[R rows] += A B over `steps`: element (row, step) of A at a[row * a_row + step * a_step].
struct Product {
  const float *a, *b;
  float* c;
  int64_t a_row, a_step, b_step, c_row;
  int64_t steps;
  bool fresh;  // C starts from zero
};

// The softmax of a tile: one entry per column in m, l, max and alpha.
struct Columns {
  float* logits;  // [keys][width]: S, then P
  float *m, *l, *max, *alpha;
  int64_t width;  // a multiple of every vector

  Columns(Arena& arena, int64_t keys, int64_t columns) : width(round_up(columns, 32)) {
    logits = arena.take<float>(keys * width);
    for (float** row : {&m, &l, &max, &alpha}) *row = arena.take<float>(width);
  }
  void reset(int64_t keys) const {
    std::memset(logits, 0, keys * width * sizeof(float));  // columns that no panel fills stay 0
    std::fill_n(m, width, -FLT_MAX);
    std::fill_n(l, width, 0.0f);
    std::fill_n(max, width, -std::numeric_limits<float>::infinity());
  }
};

// S = K Q^T.
struct Keys {
  const float* k;        // [count][row]
  const float* queries;  // panels of columns, each [size][panel width]
  int64_t row, size;     // floats between keys; d_qk
  int32_t columns, count;
};

// O += P V.
struct Values {
  const float* v;  // [keys][v_row]
  float* o;        // [columns][o_row]
  int64_t v_row, o_row;
  int64_t size;  // of a row: a multiple of two vectors
  int32_t columns, keys;
};

}  // namespace winnow::internal::cpu
#endif

#if defined(WINNOW_CPU_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_PRODUCTS_INL_H_
#undef WINNOW_CPU_PRODUCTS_INL_H_
#else
#define WINNOW_CPU_PRODUCTS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

// Rows x 2 vectors of accumulators, two of B and a broadcast must fit the registers.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_ARCH_ARM_A64
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
using Full = hn::ScalableTag<float>;
constexpr size_t kLanes = hn::MaxLanes(Full());
using Half = hn::CappedTag<float, std::max<size_t>(kLanes / 2, 4)>;
using Quarter = hn::CappedTag<float, std::max<size_t>(kLanes / 4, 4)>;

template <int R, int V, class D>
HWY_INLINE void multiply(D d, const Product& p) {
  constexpr int kWide = hn::MaxLanes(D());
  // Unrolled by request: at -O2 the accumulators would live in memory.
  hn::Vec<D> acc[R][V];
  WINNOW_UNROLL for (int r = 0; r < R; ++r) {
    WINNOW_UNROLL for (int v = 0; v < V; ++v) {
      acc[r][v] = p.fresh ? hn::Zero(d) : hn::LoadU(d, p.c + r * p.c_row + v * kWide);
    }
  }
  const float *a = p.a, *b = p.b;
  for (int64_t k = 0; k < p.steps; ++k, a += p.a_step, b += p.b_step) {
    hn::Vec<D> right[V];
    WINNOW_UNROLL for (int v = 0; v < V; ++v) right[v] = hn::LoadU(d, b + v * kWide);
    WINNOW_UNROLL for (int r = 0; r < R; ++r) {
      const auto left = hn::Set(d, a[r * p.a_row]);
      WINNOW_UNROLL for (int v = 0; v < V; ++v) {
        acc[r][v] = hn::MulAdd(left, right[v], acc[r][v]);
      }
    }
  }
  WINNOW_UNROLL for (int r = 0; r < R; ++r) {
    WINNOW_UNROLL for (int v = 0; v < V; ++v) {
      hn::StoreU(acc[r][v], d, p.c + r * p.c_row + v * kWide);
    }
  }
}

// Calls f(tag, vectors, first column) for panels that cover the columns with little waste.
template <class F>
HWY_INLINE void for_panels(int64_t columns, F&& f) {
  constexpr int64_t L = kLanes;
  for (int64_t h = 0; h < columns;) {
    const int64_t left = columns - h;
    if (left > L + L / 2) {
      f(Full(), std::integral_constant<int, 2>(), h);
      h += 2 * L;
    } else if (left > L / 2) {
      f(Full(), std::integral_constant<int, 1>(), h);
      h += L;
      // NOLINTNEXTLINE(bugprone-branch-clone): the tags differ where a vector has 16 lanes
    } else if (left > L / 4) {
      f(Half(), std::integral_constant<int, 1>(), h);
      h += hn::MaxLanes(Half());
    } else {
      f(Quarter(), std::integral_constant<int, 1>(), h);
      h += hn::MaxLanes(Quarter());
    }
  }
}

// S = K Q^T of `count` keys, in chunks of d that keep both operands in L1. Rows of K up to a whole
// group of kRows take part; their logits mean nothing.
HWY_INLINE void logits(const Columns& s, const Keys& x) {
  constexpr int64_t kChunk = 64;
  for (int64_t d0 = 0; d0 < x.size; d0 += kChunk) {
    const float* panel = x.queries;
    for_panels(x.columns, [&](auto tag, auto vectors, int64_t first) {
      const int64_t wide = hn::MaxLanes(decltype(tag)()) * vectors;
      for (int32_t k = 0; k < x.count; k += kRows)
        multiply<kRows, vectors>(tag, {.a = x.k + k * x.row + d0,
                                       .b = panel + d0 * wide,
                                       .c = s.logits + k * s.width + first,
                                       .a_row = x.row,
                                       .a_step = 1,
                                       .b_step = wide,
                                       .c_row = s.width,
                                       .steps = std::min(kChunk, x.size - d0),
                                       .fresh = d0 == 0});
      panel += x.size * wide;
    });
  }
}

// S -> P, and the running maximum and sum of every column. alpha is what the sums so far shrink by.
HWY_INLINE void softmax(const Columns& s, int32_t count, float scale) {
  const Full d;
  const auto factor = hn::Set(d, scale), top = hn::Set(d, FLT_MAX);
  for (int64_t h = 0; h < s.width; h += kLanes) {
    auto block = hn::Set(d, -std::numeric_limits<float>::infinity());
    for (int32_t k = 0; k < count; ++k) {
      float* at = s.logits + k * s.width + h;
      const auto v = hn::Mul(hn::LoadU(d, at), factor);
      hn::StoreU(v, d, at);
      block = hn::Max(block, v);
    }
    hn::StoreU(hn::Max(hn::LoadU(d, s.max + h), block), d, s.max + h);
    // Clamped: m starts at -FLT_MAX and never reaches +inf, so that no difference is inf - inf.
    const auto old = hn::LoadU(d, s.m + h), m = hn::Max(old, hn::Min(block, top));
    const auto alpha = exp_negative(d, hn::Sub(old, m));
    auto sum = hn::Mul(hn::LoadU(d, s.l + h), alpha);
    for (int32_t k = 0; k < count; ++k) {
      float* at = s.logits + k * s.width + h;
      const auto v = hn::LoadU(d, at);
      const auto x = hn::Sub(hn::IfThenElse(hn::Gt(v, top), top, v), m);
      const auto p = exp_negative(d, x);
      hn::StoreU(p, d, at);
      sum = hn::Add(sum, p);
    }
    hn::StoreU(m, d, s.m + h);
    hn::StoreU(sum, d, s.l + h);
    hn::StoreU(alpha, d, s.alpha + h);
  }
}

// O = O alpha + P V. A chunk of V's columns stays in L1 for all rows of O.
HWY_INLINE void add_values(const Columns& s, const Values& x) {
  const Full d;
  for (int32_t i = 0; i < x.columns; ++i) {
    if (s.alpha[i] == 1.0f) continue;  // the maximum stayed, as it mostly does
    const auto alpha = hn::Set(d, s.alpha[i]);
    float* o = x.o + i * x.o_row;
    for (int64_t j = 0; j < x.size; j += kLanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, o + j), alpha), d, o + j);
  }
  for (int64_t j = 0; j < x.size; j += 2 * kLanes) {
    Product p{.a = s.logits,
              .b = x.v + j,
              .c = x.o + j,
              .a_row = 1,
              .a_step = s.width,
              .b_step = x.v_row,
              .c_row = x.o_row,
              .steps = x.keys,
              .fresh = false};
    const auto step = [&](int32_t rows) { p.a += rows, p.c += rows * x.o_row; };
    int32_t i = 0;
    for (; i + kRows <= x.columns; i += kRows) multiply<kRows, 2>(d, p), step(kRows);
    if (x.columns - i >= 4) multiply<4, 2>(d, p), step(4), i += 4;
    if (x.columns - i >= 2) multiply<2, 2>(d, p), step(2), i += 2;
    if (x.columns - i >= 1) multiply<1, 2>(d, p);
  }
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
