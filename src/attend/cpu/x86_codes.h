// e4m3 codes to bf16, and times an fp32 scale to rounded bf16, by arithmetic on 16-bit words. For
// packing on machines whose look-ups of 128 bytes (VPERMI2B) take three operations: 64 dims of two
// keys, decoded, scaled and paired, are 33 operations instead of 54.
//
// A code s.EEEE.mmm moved to bf16's places is s<<15 | E<<7 | m<<4, and 120<<7 more is its value's
// bf16: one addition. The product with a scale has the bits of (1 + m/8) * scale, rounded, plus
// (E - 7)<<7: one addition as well, of one of eight words that depend on the scale, found by the
// code's low bits. A power of two is an addition of one word. All are exactly what multiplying and
// rounding gives as long as nothing is subnormal, zero, infinite or NaN; groups of dims that have
// such a code are ruled out first.
#pragma once

#include "attend/cpu/x86_keys.h"
#include "attend/cpu/x86_softmax.h"
#include "cpu/e4m3_avx512.h"

namespace winnow::internal::attend::cpu {
namespace {

using Group = internal::cpu::Bf16Codes::Values;  // 64 dims of one key

// What arithmetic on codes needs in registers.
class CodeWords {
 public:
  CodeWords() {
    // Not to be made again from immediates for every use: that takes a shuffle each.
    asm("" : "+v"(one_), "+v"(high_), "+v"(fields_), "+v"(bias_));
  }

  // Whether a group of two keys has ordinary codes alone. NaN (0x7f), zeros and subnormals (below
  // 0x08) are not; nor, as one test of bits serves for all of them, are codes below 0x0f: numbers
  // under 2^-5 where the largest of their panel is 448, some 2 % of the groups of normal values.
  WINNOW_INLINE bool ordinary(__m512i x, __m512i y) const {
    return _kortestz_mask64_u8(_mm512_testn_epi8_mask(_mm512_add_epi8(x, one_), high_),
                               _mm512_testn_epi8_mask(_mm512_add_epi8(y, one_), high_));
  }
  // Sign, exponent and mantissa of codes, each twice in its word, in bf16's places.
  WINNOW_INLINE Group moved(const Group& twice) const { return {moved(twice.a), moved(twice.b)}; }
  WINNOW_INLINE Group values(const Group& moved) const { return sum(moved, bias_); }

  WINNOW_INLINE static Group sum(const Group& x, __m512i y) {
    return {_mm512_add_epi16(x.a, y), _mm512_add_epi16(x.b, y)};
  }

 private:
  WINNOW_INLINE __m512i moved(__m512i twice) const {
    return _mm512_and_si512(_mm512_srai_epi16(twice, 4), fields_);
  }
  __m512i one_ = _mm512_set1_epi8(1), high_ = _mm512_set1_epi8(0x70);
  __m512i fields_ = _mm512_set1_epi16(static_cast<short>(0x87f0));
  __m512i bias_ = _mm512_set1_epi16(120 << 7);
};

// Codes twice in each word, in the order of Bf16Codes.
WINNOW_INLINE Group twice(__m512i codes) {
  return {_mm512_unpacklo_epi8(codes, codes), _mm512_unpackhi_epi8(codes, codes)};
}

// How a key's groups of dims are scaled by addition. serves(g): whether the products of ordinary
// codes are normal numbers. row(), value(): what K and V get of moved codes. Here fp32 scales,
// which K leaves to the sums: the eight words of each of the four.
template <class R>
class ScaleWords {
 public:
  WINNOW_INLINE explicit ScaleWords(const KeyRef& key) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m128 scales = _mm_loadu_ps(reinterpret_cast<const float*>(key.scales));
    const __m512 s = _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(scales));
    const __m512 low = _mm512_broadcast_f32x4(_mm_setr_ps(1.0f, 1.125f, 1.25f, 1.375f));
    const __m512 high = _mm512_broadcast_f32x4(_mm_setr_ps(1.5f, 1.625f, 1.75f, 1.875f));
    const __m512i bits =
        _mm512_packus_epi32(rounded(_mm512_mul_ps(s, low)), rounded(_mm512_mul_ps(s, high)));
    const __m512i places = _mm512_broadcast_i32x4(
        _mm_setr_epi16(0x380, 0x390, 0x3a0, 0x3b0, 0x3c0, 0x3d0, 0x3e0, 0x3f0));
    _mm512_store_si512(words_, _mm512_sub_epi16(bits, places));
    // 2^-111 to 2^111.
    const __m128i magnitude = _mm_and_si128(_mm_castps_si128(scales), _mm_set1_epi32(0x7fffffff));
    const __m128i above = _mm_sub_epi32(magnitude, _mm_set1_epi32(16 << 23));
    serves_ = _mm_cmplt_epu32_mask(above, _mm_set1_epi32(222 << 23)) == 0xf;
  }
  WINNOW_INLINE bool serves(int) const { return serves_; }
  WINNOW_INLINE Group row(const CodeWords& words, const Group& moved, int) const {
    return words.values(moved);
  }
  WINNOW_INLINE Group value(const Group& moved, const Group& twice, int g) const {
    return {_mm512_add_epi16(moved.a, words(g / 2, twice.a)),
            _mm512_add_epi16(moved.b, words(g / 2, twice.b))};
  }

 private:
  // What is added to moved words to scale them: the look-up takes five bits, so every eight words
  // stand there four times.
  WINNOW_INLINE __m512i words(int panel, __m512i twice) const {
    const auto* eight = reinterpret_cast<const __m128i*>(words_ + panel * 8);
    return _mm512_permutexvar_epi16(twice, _mm512_broadcast_i32x4(_mm_load_si128(eight)));
  }

  WINNOW_INLINE static __m512i rounded(__m512 x) {
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(x), splat(0x8000)), 16);
  }
  alignas(64) uint16_t words_[32];
  bool serves_;
};

// Powers of two: one word, the same for K and V.
template <class R>
requires(!kFloatScales<R>) class ScaleWords<R> {
 public:
  WINNOW_INLINE explicit ScaleWords(const KeyRef& key) : key_(key) {}
  WINNOW_INLINE bool serves(int g) const {
    return static_cast<unsigned>(exponent_of<R>(key_, g) - 10) <= 235;
  }
  WINNOW_INLINE Group row(const CodeWords&, const Group& moved, int g) const {
    return value(moved, moved, g);
  }
  WINNOW_INLINE Group value(const Group& moved, const Group&, int g) const {
    const int word = (exponent_of<R>(key_, g) - 7) << 7;  // 120 - 127: e4m3's bias and ue8m0's
    return CodeWords::sum(moved, _mm512_set1_epi16(static_cast<short>(word)));
  }

 private:
  const KeyRef& key_;
};

}  // namespace
}  // namespace winnow::internal::attend::cpu
