// A block of keys as bf16, packed once for all heads: rows for the scores, interleaved pairs of
// keys for the values. Needs AVX-512 VBMI.
//
// Order of the dims, per group of 64 (it follows from the byte unpacking and costs nothing): a row
// holds dims 16i..16i+7 of i = 0..3, then 16i+8..16i+15. Vector j = 0..3 of a group of pairs has in
// its 128-bit lane i the dims 16i+4j..16i+4j+3 of both keys. Q is packed in the same order, and the
// output is put back in place by a 4 x 4 exchange of lanes.
//
// With at most eight heads (Zen 5) a vector of scores holds two keys, so the rows of two keys are
// stored cell by cell in turn: vectors of a group have in lane i cells 4i and 4i + 1 (second: 4i +
// 2 and 4i + 3) of the first half of both, then of the second half.
//
// Budget per fp8 key: 11 lines read, 34 lines written (18 of rows, 16 of pairs), about 50 shuffles
// and 10 other vector operations.
#pragma once

#include <cstring>

#include "attend/cpu/x86_codes.h"
#include "attend/cpu/x86_keys.h"

namespace winnow::internal::attend::cpu {
namespace {

using internal::cpu::Bf16Codes;

// 64 bf16 in memory order, brought into the order of a decoded group.
WINNOW_INLINE Group load_bf16(const void* from) {
  const __m512i x = _mm512_loadu_si512(from);
  const __m512i y = _mm512_loadu_si512(static_cast<const char*>(from) + 64);
  return {_mm512_shuffle_i64x2(x, y, 0x88), _mm512_shuffle_i64x2(x, y, 0xdd)};
}

// Zeros stay, and so do NaN, whose exponent moved would be a number's.
WINNOW_INLINE __m512i add_exponent(__m512i x, __m512i shift) {
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
  const __mmask32 numbers = _mm512_mask_cmplt_epi16_mask(
      _mm512_test_epi16_mask(magnitude, magnitude), magnitude, _mm512_set1_epi16(0x7fc0));
  return _mm512_mask_add_epi16(x, numbers, x, shift);
}

// Multiplies by a power of two given as ue8m0, exactly; clamped so that the result stays normal.
WINNOW_INLINE Group scale_exponents(Group x, int byte) {
  if (byte == 255) return {_mm512_set1_epi16(0x7fc0), _mm512_set1_epi16(0x7fc0)};
  const __m512i shift =
      _mm512_set1_epi16(static_cast<short>(std::clamp(byte - 127, -117, 118) * 128));
  return {add_exponent(x.a, shift), add_exponent(x.b, shift)};
}

// Dims [64 g, 64 g + 64) of a key, behind those that are quantised.
template <class R>
WINNOW_INLINE Group load_rope(const KeyRef& key, int g) {
  return load_bf16(key.row + R::rope(0, 1) - R::row(0, 1) + (g * 64 - R::kNope) * 2);
}

// Dims [64 g, 64 g + 64) of a key. fp32 scales are left out.
template <class R>
WINNOW_INLINE Group load_group(const Bf16Codes& codes, const KeyRef& key, int g) {
  if constexpr (R::kQuantized) {
    if (g * 64 >= R::kNope) return load_rope<R>(key, g);
    const Group x = codes.load(key.row + g * 64);
    if constexpr (kFloatScales<R>) return x;
    else return scale_exponents(x, exponent_of<R>(key, g));
  } else {
    return load_bf16(key.row + g * 128);
  }
}

// Cells of a pair of keys (first key low) times their scales, rounded to bf16.
WINNOW_INLINE __m512i scale_pair(__m512i cells, __m512 x, __m512 y) {
  return pair_bf16(_mm512_mul_ps(low_half(cells), x), _mm512_mul_ps(high_half(cells), y));
}

// k: panels of rows. v: groups of pairs. scales: [key][4], fp32 scales.
struct PackedKeys {
  uint32_t* k;
  uint32_t* v;
  float* scales;
};
// Group g of keys i and i + 1, of which so many are there.
struct Part {
  int i, g, present;
};

// Where groups of dims go: rows of keys, and pairs of keys i and i + 1.
template <class R, class E>
WINNOW_INLINE void store_row(const PackedKeys& to, int key, int g, const Group& x) {
  uint32_t* row = to.k + Panels<R, E>::group(key, g);
  _mm512_store_si512(row, x.a);
  _mm512_store_si512(row + Panels<R, E>::kHalf, x.b);
}
template <class R, class E>
WINNOW_INLINE void store_row_pair(const PackedKeys& to, int i, int g, const Group& x,
                                  const Group& y) {
  uint32_t* pair = to.k + Panels<R, E>::pair(i, g);
  _mm512_store_si512(pair, _mm512_unpacklo_epi32(x.a, y.a));
  _mm512_store_si512(pair + 16, _mm512_unpackhi_epi32(x.a, y.a));
  _mm512_store_si512(pair + 32, _mm512_unpacklo_epi32(x.b, y.b));
  _mm512_store_si512(pair + 48, _mm512_unpackhi_epi32(x.b, y.b));
}
WINNOW_INLINE void interleave(const Group& x, const Group& y, __m512i (&pairs)[4]) {
  pairs[0] = _mm512_unpacklo_epi16(x.a, y.a);
  pairs[1] = _mm512_unpackhi_epi16(x.a, y.a);
  pairs[2] = _mm512_unpacklo_epi16(x.b, y.b);
  pairs[3] = _mm512_unpackhi_epi16(x.b, y.b);
}
template <class E>
WINNOW_INLINE void store_pairs(const PackedKeys& to, int i, int g, const __m512i (&pairs)[4]) {
  uint32_t* v = to.v + g * kPairGroup<E> + pair_offset<E>(i / 2);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) _mm512_store_si512(v + j * kPairVector<E>, pairs[j]);
}

// What is written: rows of keys and, from them, pairs for the values; rows alone; or rows of two
// keys in turn.
enum class Packing { kRowsAndPairs, kRows, kRowPairs };

// Packs a group of keys i and i + 1; the second, or both, may be missing: zeros in v, nothing else.
// Without pairs for the values only k is written, with zeros for keys that are missing.
template <class R, class E, Packing kPacking>
WINNOW_INLINE void pack_group(const Bf16Codes& codes, const KeyRef* keys, const Part& part,
                              const PackedKeys& to) {
  const auto [i, g, present] = part;
  constexpr bool kValues = kPacking == Packing::kRowsAndPairs;
  const __m512i zero = _mm512_setzero_si512();
  Group x{zero, zero}, y{zero, zero};
  if (present > 0) x = load_group<R>(codes, keys[i], g);
  if constexpr (kPacking == Packing::kRowPairs) {
    if (present > 1) y = load_group<R>(codes, keys[i + 1], g);
    store_row_pair<R, E>(to, i, g, x, y);
    return;
  }
  if (!kValues || present > 0) store_row<R, E>(to, i, g, x);
  if (present > 1) y = load_group<R>(codes, keys[i + 1], g);
  if (!kValues || present > 1) store_row<R, E>(to, i + 1, g, y);
  if (!kValues || g >= kValueDim / 64) return;
  __m512i pairs[4];
  interleave(x, y, pairs);
  if constexpr (kFloatScales<R> && !E::kScaleInP) {
    const float* scale = to.scales + i * 4 + g / 2;
#pragma GCC unroll 4
    for (__m512i& cells : pairs) cells = scale_pair(cells, splat(scale[0]), splat(scale[4]));
  }
  store_pairs<E>(to, i, g, pairs);
}
template <class R, class E, Packing kPacking>
[[gnu::noinline, gnu::cold]] void pack_any_codes(const KeyRef* keys, int i, int g,
                                                 const PackedKeys& to) {
  pack_group<R, E, kPacking>(Bf16Codes(), keys, {i, g, 2}, to);
}

template <class R>
WINNOW_INLINE void copy_scales(const KeyRef* keys, int i, int present, const PackedKeys& to) {
  if constexpr (kFloatScales<R>) {
    std::memset(to.scales + i * 4, 0, 32);
    for (int key = 0; key < present; ++key)
      std::memcpy(to.scales + (i + key) * 4, keys[i + key].scales, 16);
  }
}

// All groups of such a pair.
template <class R, class E, Packing kPacking>
WINNOW_INLINE void pack_pair(const Bf16Codes& codes, const KeyRef* keys, int i, int present,
                             const PackedKeys& to) {
  copy_scales<R>(keys, i, present, to);
#pragma GCC unroll 9
  for (int g = 0; g < R::kDqk / 64; ++g)
    pack_group<R, E, kPacking>(codes, keys, {i, g, present}, to);
}

// The same by arithmetic (x86_codes.h), for two keys that are there, with V scaled.
template <class R, class E, Packing kPacking>
WINNOW_INLINE void pack_codes(const CodeWords& words, const KeyRef* keys, int i,
                              const PackedKeys& to) {
  copy_scales<R>(keys, i, 2, to);
  const ScaleWords<R> scales_x(keys[i]), scales_y(keys[i + 1]);
#pragma GCC unroll 9
  for (int g = 0; g < R::kDqk / 64; ++g) {
    if (g * 64 >= R::kNope) {  // no codes
      pack_group<R, E, kPacking>(Bf16Codes(), keys, {i, g, 2}, to);
      continue;
    }
    const __m512i cx = _mm512_loadu_si512(keys[i].row + g * 64);
    const __m512i cy = _mm512_loadu_si512(keys[i + 1].row + g * 64);
    if (!scales_x.serves(g) || !scales_y.serves(g) || !words.ordinary(cx, cy)) [[unlikely]] {
      pack_any_codes<R, E, kPacking>(keys, i, g, to);
      continue;
    }
    const Group wx = twice(cx), wy = twice(cy), x = words.moved(wx), y = words.moved(wy);
    if constexpr (kPacking == Packing::kRowPairs) {
      store_row_pair<R, E>(to, i, g, scales_x.row(words, x, g), scales_y.row(words, y, g));
      continue;
    }
    store_row<R, E>(to, i, g, scales_x.row(words, x, g));
    store_row<R, E>(to, i + 1, g, scales_y.row(words, y, g));
    if constexpr (kPacking != Packing::kRowsAndPairs) continue;
    __m512i pairs[4];
    interleave(scales_x.value(x, wx, g), scales_y.value(y, wy, g), pairs);
    store_pairs<E>(to, i, g, pairs);
  }
}

// Packs n keys and pads the values with zeros to a multiple of E::kValueStep keys. Zen 4 gains 2 %
// when records are asked for once more, eight keys early; Emerald Rapids loses 1 to 4 %, and a
// fifth where a thread has one block.
template <class R, class E, Packing kPacking = Packing::kRowsAndPairs>
void pack_keys(const KeyRef* keys, int n, const PackedKeys& to, bool near = false) {
  constexpr int kAhead = 8;
  int i = 0;
  const auto pairs = [&](auto pack) {
    for (; i + 2 <= n; i += 2) {
      for (int a = i + kAhead; !E::kTiled && a < std::min(n, i + kAhead + 2); ++a)
        prefetch<R>(keys[a], near);
      pack();
    }
  };
  if constexpr (R::kQuantized &&
                ((E::kTiled && kPacking == Packing::kRowsAndPairs) || !kFloatScales<R>))
    pairs([&, words = CodeWords()] { pack_codes<R, E, kPacking>(words, keys, i, to); });
  const Bf16Codes codes;
  pairs([&] { pack_pair<R, E, kPacking>(codes, keys, i, 2, to); });
  for (; i % E::kValueStep != 0 || i < n; i += 2)
    pack_pair<R, E, kPacking>(codes, keys, i, std::max(n - i, 0), to);
}

}  // namespace
}  // namespace winnow::internal::attend::cpu
