// Sparse decode and prefill with fp32 FMA, for CPUs with AVX-512 but without a fast bf16 product.
// Everything but the products is shared: x86_blocks.h, x86_vector.h.
//
// Budget, per key and 16 heads, V3.2: scores 576, values 512 FMAs (two a cycle on Intel servers,
// one on Zen 4); softmax about 20 vector operations. Per key: 36 conversions and 36 lines written.
// Bytes: a block of 96 keys is 216 KB of fp32 in L2 and serves scores and values alike: no second
// copy. K, V and P are fp32, so this is also the most precise of the fast kernels.
#include <cmath>
#include <cstring>

#include "attend/cpu/kernels.h"
#include "attend/cpu/x86_blocks.h"
#include "attend/cpu/x86_vector.h"
#include "core/formats.h"

namespace winnow::internal::attend::cpu {
namespace {

// 64 e4m3 values times scale. A code in the middle of fp16 (exponent and mantissa at bits 7 to 13)
// is its value / 256, subnormals included; only NaN must be put in afterwards.
WINNOW_INLINE void expand_fp8(const std::byte* from, float scale, float* to) {
  const __m512i x = _mm512_loadu_si512(from), nan = _mm512_set1_epi8(0x7f);
  const __mmask64 is_nan = _mm512_cmpeq_epi8_mask(_mm512_and_si512(x, nan), nan);
  const __m512 f = splat(scale), up = splat(256.0f);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256i bytes = i ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x);
    __m512i h = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
    h = _mm512_and_si512(_mm512_srai_epi16(h, 1), _mm512_set1_epi16(static_cast<short>(0xbfff)));
    const __m512 a = _mm512_cvtph_ps(_mm512_castsi512_si256(h));
    const __m512 b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1));
    _mm512_store_ps(to + i * 32, _mm512_mul_ps(_mm512_mul_ps(a, up), f));
    _mm512_store_ps(to + i * 32 + 16, _mm512_mul_ps(_mm512_mul_ps(b, up), f));
  }
  if (is_nan) [[unlikely]]
    for (int i = 0; i < 4; ++i)
      _mm512_mask_store_ps(to + i * 16, static_cast<__mmask16>(is_nan >> (16 * i)), splat(NAN));
}

WINNOW_INLINE void expand_bf16(const std::byte* from, float* to) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
    _mm512_store_si512(to + i * 16, _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
}

template <class R>
WINNOW_INLINE float scale_of(const KeyRef& key, int g) {
  if constexpr (kFloatScales<R>) {
    float s;
    std::memcpy(&s, key.scales + g / 2 * 4, 4);
    return s;
  } else {
    const uint32_t byte = static_cast<uint8_t>(key.scales[g]);
    return std::bit_cast<float>(byte == 255 ? 0x7fc00000u : byte ? byte << 23 : 0x00400000u);
  }
}

struct Fma : VectorEngine<Fma> {
  static constexpr int kPer = 1, kBlock = 96, kWaiting = kBlock;
  static constexpr bool kPairs = false, kScaleInP = false;
  static_assert(kBlock % 24 == 0);

  WINNOW_INLINE static __m512 dot(__m512 acc, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
  }
  WINNOW_INLINE static void store_q(uint32_t* to, int cell, __m512i pairs) {
    _mm512_store_si512(to + cell * 32, _mm512_slli_epi32(pairs, 16));
    _mm512_store_si512(to + cell * 32 + 16, _mm512_and_si512(pairs, splat(int(0xffff0000))));
  }

  template <class R>
  static void pack(const KeyRef* keys, const Block<Fma>& b) {
    for (int i = 0; i < b.n; ++i) {
      if (i + 8 < b.n) prefetch<R>(keys[i + 8], b.near);
      for (int g = 0; g < R::kDqk / 64; ++g) {
        float* to = reinterpret_cast<float*>(b.m.k) + Panels<R, Fma>::group(i, g);
        if constexpr (R::kQuantized) {
          if (g * 64 < R::kNope) expand_fp8(keys[i].row + g * 64, scale_of<R>(keys[i], g), to);
          else
            expand_bf16(keys[i].row + R::rope(0, 1) - R::row(0, 1) + (g * 64 - R::kNope) * 2, to);
        } else {
          expand_bf16(keys[i].row + g * 128, to);
        }
      }
    }
  }

  template <class R>
  WINNOW_INLINE static void store_p(const Block<Fma>& b, int hb, int key, const __m512 (&p)[2]) {
    uint32_t* to = b.m.p + (hb * kBlock + key) * 16;
    _mm512_store_ps(to, p[0]);
    _mm512_store_ps(to + 16, p[1]);
  }
};

}  // namespace

void avx512(const Params& p) noexcept { run_tiles(p, kTileKernel<Fma>); }
size_t avx512_workspace(const Shape& s, int64_t tiles) {
  return tile_workspace(s, tiles, kTileKernel<Fma>);
}

}  // namespace winnow::internal::attend::cpu
