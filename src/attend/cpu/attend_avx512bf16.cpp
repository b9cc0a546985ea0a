// Sparse decode and prefill with VDPBF16PS, for CPUs where it runs at twice the FMA rate (Zen 4 and
// later). Everything but the products is shared: x86_blocks.h, x86_vector.h, x86_pack.h.
//
// Budget, per key and 16 heads, V3.2 (one VDPBF16PS of 512 bits a cycle on Zen 4):
//   scores 288, values 256 cycles; 14 loads per 24 products in scores, 10 per 24 in values;
//   softmax 25 to 30 vector operations, fp32 scales 8. Per key: about 115 cycles to pack, 34 lines
//   written (a 512-bit store takes two cycles). Bound: 128 heads 92 %, 16 heads 78 % of the roof.
// Bytes: 656 gathered per key, fetched to L2 a block ahead. Per block of 120 keys: K 135 KB and V
// 120 KB in L2, read once per 32 heads; a score tile keeps 8 KB of Q and its 3 KB of K in L1, a
// value tile 15 KB of V.
// Zen 5 multiplies twice as fast, so memory counts: records are fetched to L1, and V is not stored
// but made from the rows of K (18 lines written for each key), two of them interleaved at a time.
// The fp32 scales stay out of the bf16 values: they multiply the fp32 sums of 128 dims in the
// scores and P in the values, so K and V are exact.
#include "attend/cpu/kernels.h"
#include "attend/cpu/x86_blocks.h"
#include "attend/cpu/x86_pack.h"
#include "attend/cpu/x86_vector.h"

namespace winnow::internal::attend::cpu {
namespace {

struct Bf16Dot : VectorEngine<Bf16Dot> {
  static constexpr int kPer = 2, kBlock = 120, kWaiting = kBlock, kValueStep = 2;
  static constexpr bool kPairs = true, kScaleInP = true;
  static_assert(kBlock % 24 == 0);

  WINNOW_INLINE static __m512 dot(__m512 acc, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
  }
  WINNOW_INLINE static void store_q(uint32_t* to, int cell, __m512i pairs) {
    _mm512_store_si512(to + cell * 16, pairs);
  }
  template <class R>
  static void pack(const KeyRef* keys, const Block<Bf16Dot>& b) {
    const PackedKeys to{b.m.k, b.m.v, b.m.scales};
    if (b.key_pairs) pack_keys<R, Bf16Dot, Packing::kRowPairs>(keys, b.n, to, b.near);
    else if (b.from_rows) pack_keys<R, Bf16Dot, Packing::kRows>(keys, b.n, to, b.near);
    else pack_keys<R, Bf16Dot>(keys, b.n, to, b.near);
  }

  // The two P as they are multiplied with the values of scale t, rounded to a pair.
  template <class R>
  WINNOW_INLINE static __m512i weights(const Block<Bf16Dot>& b, int key, int t,
                                       const __m512 (&p)[2]) {
    if constexpr (!kFloatScales<R>) return pair_bf16(p[0], p[1]);
    const float* s = b.m.scales + key * 4 + t;
    return pair_bf16(_mm512_mul_ps(p[0], splat(s[0])), _mm512_mul_ps(p[1], splat(s[4])));
  }

  // P of two keys as a pair; one plane for each fp32 scale of the values.
  template <class R>
  WINNOW_INLINE static void store_p(const Block<Bf16Dot>& b, int hb, int key,
                                    const __m512 (&p)[2]) {
    uint32_t* to = b.m.p + (hb * (kBlock / 2) + key / 2) * 16;
    const int64_t plane = int64_t{head_blocks(b.heads)} * (kBlock / 2) * 16;
#pragma GCC unroll 4
    for (int t = 0; t < (kFloatScales<R> ? 4 : 1); ++t)
      _mm512_store_si512(to + t * plane, weights<R>(b, key, t, p));
  }

  // What rounding added to the sum of a block's weights, of some of 16 heads: for each scale by
  // itself, in units of P. More than rounding can add (scales without an inverse, products that
  // are infinite or subnormal) counts for nothing.
  template <class R>
  static void count_rounding(const Block<Bf16Dot>& b, int hb, const float* logits,
                             __mmask16 heads) {
    const __m512 m = _mm512_loadu_ps(b.m.state->m + hb * 16);
    for (int t = 0; t < 4; ++t) {
      float* extra = b.m.state->extra[t] + hb * 16;
      __m512 sum = _mm512_loadu_ps(extra);
      for (int key = 0; key < b.n; key += 2) {
        const bool both = key + 1 < b.n;
        const __m512 p[2] = {pow2(_mm512_sub_ps(_mm512_load_ps(logits + key * 32), m)),
                             both ? pow2(_mm512_sub_ps(_mm512_load_ps(logits + key * 32 + 32), m))
                                  : _mm512_setzero_ps()};
        const __m512i pair = weights<R>(b, key, t, p);
        for (int i = 0; i < (both ? 2 : 1); ++i) {
          const __m512 scale = splat(kFloatScales<R> ? b.m.scales[(key + i) * 4 + t] : 1.0f);
          const __m512 rounded = i ? high_half(pair) : low_half(pair);
          const __m512 share =
              _mm512_div_ps(_mm512_sub_ps(rounded, _mm512_mul_ps(p[i], scale)), scale);
          const __m512 limit = _mm512_mul_ps(p[i], splat(0x1p-8f));
          const auto counts = _mm512_cmp_ps_mask(_mm512_abs_ps(share), limit, _CMP_LE_OQ);
          sum = _mm512_mask_add_ps(sum, heads & counts, sum, share);
        }
      }
      _mm512_storeu_ps(extra, sum);
    }
  }

  // O as if its weights had not been rounded on the whole: what one that dominates lost falls out.
  static void finish(Block<Bf16Dot>& b) {
    for (int h = 0; h < b.heads && !b.first; ++h)
      for (int t = 0; t < 4; ++t) {
        const float l = b.m.state->l[h], extra = b.m.state->extra[t][h];
        if (extra == 0) continue;
        float* o = b.o + h * kORow + t * kPanel;
        for (int i = 0; i < kPanel; i += 16)
          _mm512_store_ps(o + i, _mm512_mul_ps(_mm512_load_ps(o + i), splat(l / (l + extra))));
      }
  }
};

}  // namespace

void avx512bf16(const Params& p) noexcept { run_tiles(p, kTileKernel<Bf16Dot>); }
size_t avx512bf16_workspace(const Shape& s, int64_t tiles) {
  return tile_workspace(s, tiles, kTileKernel<Bf16Dot>);
}

}  // namespace winnow::internal::attend::cpu
