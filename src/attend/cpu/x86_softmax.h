// Vector pieces that the AVX-512 kernels share: e^x, bf16 rounding, online softmax.
// A vector holds one value for each of 16 heads.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <limits>

#include "attend/kernel.h"
#include "core/arithmetic.h"
#include "cpu/transpose_avx512.h"

namespace winnow::internal::attend::cpu {
namespace {

#define WINNOW_INLINE [[gnu::always_inline]] inline

using internal::cpu::transpose;

inline constexpr float kInf = std::numeric_limits<float>::infinity();
// The running maximum may lag by this many powers of two: e^(s - m) up to 2^8 loses nothing in
// bf16 or fp32, and the sums are almost never rescaled.
inline constexpr float kLag = 8.0f;

// Softmax state of every head, logits in log2 units.
struct State {
  float m[128];  // subtracted from the logits
  float l[128];  // sum of 2^(s - m)
  float w[128];  // the same of the weights as rounded, if the engine keeps it
  // What rounding added to l; one for each 128 dims, whose fp32 scales are rounded with P.
  float extra[4][128];
  float top[128];     // true maximum
  float factor[128];  // what O must be multiplied by when m grew
};

WINNOW_INLINE __m512 splat(float x) { return _mm512_set1_ps(x); }
WINNOW_INLINE __m512i splat(int x) { return _mm512_set1_epi32(x); }

// 2^x for x <= kLag, relative error below 2e-7: degree 5, minimax on the fraction, scaled by the
// floor. -inf gives 0, NaN stays NaN (min takes its second operand then).
WINNOW_INLINE __m512 pow2(__m512 x) {
  x = _mm512_min_ps(splat(kLag), x);
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = splat(1.8775767e-3f);
  p = _mm512_fmadd_ps(p, f, splat(8.98933969e-3f));
  p = _mm512_fmadd_ps(p, f, splat(5.582631752e-2f));
  p = _mm512_fmadd_ps(p, f, splat(0.2401536107f));
  p = _mm512_fmadd_ps(p, f, splat(0.6931530833f));
  p = _mm512_fmadd_ps(p, f, splat(0.9999999404f));
  return _mm512_scalef_ps(p, x);
}

// (bf16(hi) << 16) | bf16(lo), rounded to nearest.
WINNOW_INLINE __m512i pair_bf16(__m512 lo, __m512 hi) {
  const __m512i half = splat(0x8000);
  const __m512i l = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(lo), half), 16);
  const __m512i h = _mm512_add_epi32(_mm512_castps_si512(hi), half);
  return _mm512_ternarylogic_epi32(h, splat(int(0xffff0000)), l, 0xea);  // (h & mask) | l
}

// The two bf16 of every cell.
WINNOW_INLINE __m512 low_half(__m512i cells) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(cells, 16));
}
WINNOW_INLINE __m512 high_half(__m512i cells) {
  return _mm512_castsi512_ps(_mm512_and_si512(cells, splat(int(0xffff0000))));
}

// Rounded to nearest even; infinities and quiet NaN stay what they are.
WINNOW_INLINE __m256i to_bf16(__m512 x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), splat(1));
  const __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, splat(0x7fff)), odd);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}

// Whether logits as large as `top` raise the maximum of any of 16 heads.
inline bool outgrown(const State& st, int head, __m512 top) {
  const __m512 limit = _mm512_add_ps(_mm512_loadu_ps(st.m + head), splat(kLag));
  return _mm512_cmp_ps_mask(top, limit, _CMP_GT_OQ) != 0;
}

// Brings the state of 16 heads up to a block whose largest logits are `top`. True if O of these
// heads must be multiplied by st.factor before the block is added.
inline bool raise_maximum(State& st, int head, __m512 top, bool first) {
  // Infinite logits: m stays finite, so that no infinity is subtracted from another.
  const __m512 limit = splat(FLT_MAX),
               finite = _mm512_min_ps(
                   limit, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit), top));
  if (first) {
    _mm512_storeu_ps(st.top + head, top);
    _mm512_storeu_ps(st.m + head, finite);
    _mm512_storeu_ps(st.l + head, _mm512_setzero_ps());
    _mm512_storeu_ps(st.w + head, _mm512_setzero_ps());
    for (float* e : {st.extra[0], st.extra[1], st.extra[2], st.extra[3]})
      _mm512_storeu_ps(e + head, _mm512_setzero_ps());
    return false;
  }
  const __m512 m = _mm512_loadu_ps(st.m + head);
  _mm512_storeu_ps(st.top + head, _mm512_max_ps(top, _mm512_loadu_ps(st.top + head)));
  const __mmask16 grew = _mm512_cmp_ps_mask(finite, _mm512_add_ps(m, splat(kLag)), _CMP_GT_OQ);
  if (!grew) return false;
  const __m512 raised = _mm512_mask_mov_ps(m, grew, finite);
  const __m512 f = pow2(_mm512_sub_ps(m, raised));
  _mm512_storeu_ps(st.factor + head, f);
  _mm512_storeu_ps(st.l + head, _mm512_mul_ps(_mm512_loadu_ps(st.l + head), f));
  _mm512_storeu_ps(st.w + head, _mm512_mul_ps(_mm512_loadu_ps(st.w + head), f));
  for (float* e : {st.extra[0], st.extra[1], st.extra[2], st.extra[3]})
    _mm512_storeu_ps(e + head, _mm512_mul_ps(_mm512_loadu_ps(e + head), f));
  _mm512_storeu_ps(st.m + head, raised);
  return true;
}

}  // namespace
}  // namespace winnow::internal::attend::cpu
