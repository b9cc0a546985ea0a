// Sparse decode and prefill with VDPBF16PS, for CPUs where it runs at twice the FMA rate (Zen 4 and
// later). Everything but the products is shared: x86_decode.h, x86_vector.h, x86_pack.h.
//
// Budget, per key and 16 heads, V3.2 (one VDPBF16PS of 512 bits a cycle on Zen 4):
//   scores 288, values 256 cycles; 14 loads per 24 products in scores, 10 per 24 in values;
//   softmax 25 to 30 vector operations, fp32 scales 8. Per key: about 115 cycles to pack, 34 lines
//   written (a 512-bit store takes two cycles). Bound: 128 heads 92 %, 16 heads 78 % of the roof.
// Bytes: 656 gathered per key, fetched to L2 a block ahead. Per block of 120 keys: K 135 KB and V
// 120 KB in L2, read once per 32 heads; a score tile keeps 8 KB of Q and its 3 KB of K in L1, a
// value tile 15 KB of V.
// The fp32 scales stay out of the bf16 values: they multiply the fp32 sums of 128 dims in the
// scores and P in the values, so K and V are exact.
#include "attend/x86.h"
#include "attend/x86_decode.h"
#include "attend/x86_pack.h"
#include "attend/x86_vector.h"

namespace winnow::attention {
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
  static void pack(const KeyRef* keys, int n, const Scratch<Bf16Dot>& m) {
    pack_keys<R, Bf16Dot>(keys, n, {m.k, m.v, m.scales});
  }

  // P of two keys as a pair; one plane for each fp32 scale of the values.
  template <class R>
  WINNOW_INLINE static void store_p(const Block<Bf16Dot>& b, int hb, int key,
                                    const __m512 (&p)[2]) {
    uint32_t* to = b.m.p + (hb * (kBlock / 2) + key / 2) * 16;
    if constexpr (kFloatScales<R>) {
      const int64_t plane = int64_t{head_blocks(b.heads)} * (kBlock / 2) * 16;
      const float* s = b.m.scales + key * 4;
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t)
        _mm512_store_si512(to + t * plane, pair_bf16(_mm512_mul_ps(p[0], splat(s[t])),
                                                     _mm512_mul_ps(p[1], splat(s[t + 4]))));
    } else {
      _mm512_store_si512(to, pair_bf16(p[0], p[1]));
    }
  }
};

}  // namespace

void decode_avx512bf16(const Params& p) noexcept { run_tiles(p, kTileKernel<Bf16Dot>); }
size_t decode_avx512bf16_workspace(const Shape& s, int64_t tiles) {
  return tile_workspace(s, tiles, kTileKernel<Bf16Dot>);
}

}  // namespace winnow::attention
