// Transposition in registers. Include only from files compiled for AVX-512: what is here has
// internal linkage, so that no two of them share code.
#pragma once

#include <immintrin.h>

namespace winnow::internal::cpu {
namespace {

// 16 x 16 cells of 4 bytes: pairs of rows, then of pairs, then the 128-bit lanes.
[[gnu::always_inline]] inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
    // r[4a + c], lane b: rows 4a to 4a + 3 of column 4b + c.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even0 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i even1 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i odd1 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace
}  // namespace winnow::internal::cpu
