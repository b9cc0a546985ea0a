// What the bf16 engines share (VDPBF16PS and AMX): packed queries, dequantised keys, and the sum
// over heads. Include only from files compiled for AVX-512 BF16 and VBMI.
//
// Dequantised key: 128 bf16 in Bf16Codes' order. Packed query: panels of 16 heads, each [64 pairs
// of dimensions][16 heads][2] bf16 = 4 KB in the same order; heads beyond the last are zero; behind
// the panels the weights, padded likewise.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/arithmetic.h"
#include "cpu/e4m3_avx512.h"
#include "score/blocks.h"

namespace winnow::internal::score {
namespace {

constexpr int kPanelHeads = 16, kPairs = kDim / 2;
constexpr int kPanelValues = kPairs * kPanelHeads * 2;  // bf16 of a panel: 4 KB

inline int panels_of(int32_t heads) { return ceil_div(heads, kPanelHeads); }

inline int64_t bf16_query_bytes(int32_t heads) {
  return panels_of(heads) * (kPanelValues * int64_t{2} + kPanelHeads * 4);
}

inline void dequantize_bf16(const Run& run, std::byte* out) noexcept {
  const cpu::Bf16Codes codes;
  for (int64_t j = 0; j < run.count; ++j, out += kDim * 2) {
    const uint8_t* row = run.rows + j * run.row_stride;
    for (int half = 0; half < 2; ++half) {
      const auto v = codes.load(row + half * 64);
      _mm512_store_si512(out + half * 128, v.a);
      _mm512_store_si512(out + half * 128 + 64, v.b);
    }
  }
}

inline void pack_bf16(const Params& p, int64_t token, std::byte* out) noexcept {
  const int panels = panels_of(p.heads);
  float* weights = reinterpret_cast<float*>(out + panels * kPanelValues * 2);
  std::memset(out, 0, static_cast<size_t>(bf16_query_bytes(p.heads)));
  for (int h = 0; h < p.heads; ++h) {
    alignas(64) uint32_t pairs[kPairs];
    dequantize_bf16({.rows = p.q + token * p.q_token_stride + h * p.q_head_stride, .count = 1},
                    reinterpret_cast<std::byte*>(pairs));
    uint32_t* column = reinterpret_cast<uint32_t*>(out) + h / kPanelHeads * (kPanelValues / 2);
    for (int i = 0; i < kPairs; ++i) column[i * kPanelHeads + h % kPanelHeads] = pairs[i];
    weights[h] = p.weights[token * p.weight_stride + h];
  }
}

// sum + w * max(0, dot); max gives its second operand when the first is NaN.
[[gnu::always_inline]] inline __m512 add_head(__m512 sum, __m512 w, __m512 dot) {
  return _mm512_fmadd_ps(w, _mm512_max_ps(dot, _mm512_setzero_ps()), sum);
}

// Sums of the 16 lanes of each of 16 rows, in the same tree for every row. 45 instructions.
[[gnu::always_inline]] inline __m512 sum_rows(const float (*rows)[16]) {
  __m512 pairs[8], fours[4], eights[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = _mm512_load_ps(rows[2 * i]), b = _mm512_load_ps(rows[2 * i + 1]);
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                       _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

}  // namespace
}  // namespace winnow::internal::score
