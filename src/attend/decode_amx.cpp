// Sparse decode and prefill with AMX bf16 tiles. Gathering, softmax and merging are shared:
// x86_decode.h, x86_pack.h.
//
// Tiles: scores are S^T[16 keys][16 heads] = K rows (A, as packed) x Q (B, packed once per token);
// values are O[16 heads][16 dims] = P (A, transposed from the scores) x V pairs (B, as packed). A
// unit of work is four sums (tiles 0 to 3) from four operands (4 to 7): one load for each product.
// Every tile in memory is one contiguous KB.
//
// Scores: a panel of 128 dims at a time, so that its 8 KB of Q stay in L1 while K streams from L2;
// each panel leaves a plane of sums, and the softmax adds them up with their fp32 scales, so K is
// exact. Values: V is scaled and rounded to bf16 when it is packed (that costs nothing: packing
// waits for its 34 lines a key); O stays in tiles, loaded and stored once a block of keys.
//
// Budget, per key and 16 heads, V3.2 (one TDPBF16PS in 16 cycles): scores 18, values 16 cycles;
// softmax about 30 vector operations. Per key: 11 lines gathered, 34 written.
// Bytes at 128 heads, block of 128 keys: Q 160 KB, K 160, V 128, sums of scores 80, P 32, O 256.
#include "attend/x86.h"
#include "attend/x86_decode.h"
#include "attend/x86_pack.h"
#include "cpu/amx.h"

namespace winnow::attention {
namespace {

using host::tile_dot, host::tile_load, host::tile_store, host::tile_zero;

struct Amx {
  static constexpr int kPer = 2, kBlock = 128, kValueStep = 32, kScorePlanes = 5;
  static constexpr bool kPairs = true, kScaleInP = false, kTiled = true;
  using Session = host::TileSession;
  // Keys of a unit of scores: its four sums are two blocks of heads x 2 of keys, or one x 4.
  template <int NH>
  static constexpr int kUnitKeys = 64 / NH;
  static_assert(kBlock == 128, "four units of 32 keys fill the pages of a panel's scores");

  WINNOW_INLINE static void store_q(uint32_t* to, int cell, __m512i pairs) {
    _mm512_store_si512(to + cell * 16, pairs);
  }
  template <class R>
  static void pack(const KeyRef* keys, int n, const Scratch<Amx>& m) {
    pack_keys<R, Amx>(keys, n, {m.k, m.v, m.scales});
  }
  template <class R>
  static int score_steps(int blocks, int n) {
    return Panels<R, Amx>::kCount * (blocks / 2 * ((n + 31) / 32) + blocks % 2 * ((n + 63) / 64));
  }

  WINNOW_INLINE static void zero_sums() {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  }

  // Scores: [panel][tile of a unit][unit][16 keys][16 heads].
  template <int NH>
  static float* scores_of(float* s, int key, int head_block) {
    return s + (key % kUnitKeys<NH> / 16 * NH + head_block) * kPageCells +
           key / kUnitKeys<NH> * kTileCells;
  }

  // Sums of one unit and one panel.
  template <class R, int NH>
  WINNOW_INLINE static void score_unit(const Block<Amx>& b, int hb, int panel, int unit) {
    using P = Panels<R, Amx>;
    const uint32_t* q = b.m.q + hb * P::kQuery + panel * kPageCells;
    const uint32_t* k = b.m.k + P::start(panel) + unit * (kUnitKeys<NH> / 16) * kPageCells;
    float* s = b.m.s + (kFloatScales<R> ? panel * 4 * kPageCells : 0) + unit * kTileCells;
    if (kFloatScales<R> || panel == 0) zero_sums();
    else
      tile_load<0>(s, 64), tile_load<1>(s + kPageCells, 64), tile_load<2>(s + 2 * kPageCells, 64),
          tile_load<3>(s + 3 * kPageCells, 64);
    for (int at = 0; at < P::cells(panel) * 16; at += kTileCells) {
      if constexpr (NH == 2) {
        tile_load<4>(k + at, 64), tile_load<6>(q + at, 64), tile_dot<0, 4, 6>();
        tile_load<7>(q + P::kQuery + at, 64), tile_dot<1, 4, 7>();
        tile_load<5>(k + kPageCells + at, 64), tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>();
      } else {
        tile_load<7>(q + at, 64), tile_load<4>(k + at, 64), tile_dot<0, 4, 7>();
        tile_load<5>(k + kPageCells + at, 64), tile_dot<1, 5, 7>();
        tile_load<6>(k + 2 * kPageCells + at, 64), tile_dot<2, 6, 7>();
        tile_load<4>(k + 3 * kPageCells + at, 64), tile_dot<3, 4, 7>();
      }
    }
    tile_store<0>(s, 64), tile_store<1>(s + kPageCells, 64), tile_store<2>(s + 2 * kPageCells, 64),
        tile_store<3>(s + 3 * kPageCells, 64);
  }

  // Scores and softmax of NH blocks of heads; P goes to b.m.p as A tiles [head][32 keys].
  template <class R, int NH>
  static void scores(Block<Amx>& b, int hb, Prefetcher<R>& fetch) {
    const int units = (b.n + kUnitKeys<NH> - 1) / kUnitKeys<NH>;
    for (int panel = 0; panel < Panels<R, Amx>::kCount; ++panel)
      for (int unit = 0; unit < units; ++unit) {
        score_unit<R, NH>(b, hb, panel, unit);
        fetch.step();
      }
    for (int i = 0; i < NH; ++i) softmax<R, NH>(b, hb, i);
  }

  // Logits of up to 16 keys in place, from the sums of the panels and their fp32 scales; they are
  // rounded, so that nothing is left when the maximum is subtracted from itself.
  template <class R>
  WINNOW_INLINE static __m512 logits(const Block<Amx>& b, float* s, int key, __m512 top) {
    constexpr int kPlane = 4 * kPageCells;
    const int end = std::clamp(b.n - key, 0, 16);
    const float* f = b.m.scales + key * 4;
    for (int i = 0; i < end; ++i, s += 16, f += 4) {
      __m512 x = _mm512_load_ps(s);
      if constexpr (kFloatScales<R>) {
        __m512 y = _mm512_load_ps(s + 4 * kPlane);
        x = _mm512_mul_ps(x, splat(f[0]));
        y = _mm512_fmadd_ps(_mm512_load_ps(s + kPlane), splat(f[1]), y);
        x = _mm512_fmadd_ps(_mm512_load_ps(s + 2 * kPlane), splat(f[2]), x);
        y = _mm512_fmadd_ps(_mm512_load_ps(s + 3 * kPlane), splat(f[3]), y);
        x = _mm512_add_ps(x, y);
      }
      x = _mm512_mul_ps(x, splat(b.scale2));
      top = _mm512_max_ps(top, x);
      _mm512_store_ps(s, x);
    }
    for (int i = end; i < 16; ++i, s += 16) _mm512_store_ps(s, splat(-kInf));
    return top;
  }

  static constexpr int kBlockP = kBlock / 32 * kTileCells;

  template <class R, int NH>
  static void softmax(Block<Amx>& b, int hb, int i) {
    __m512 top = splat(-kInf);
    for (int key = 0; key < (b.n + 31) / 32 * 32; key += 16)
      top = logits<R>(b, scores_of<NH>(b.m.s, key, i), key, top);
    hb += i;
    State& st = *b.m.state;
    b.rescale |= unsigned{raise_maximum(st, hb * 16, top, b.first)} << hb;
    const __m512 m = _mm512_loadu_ps(st.m + hb * 16);
    __m512 even = _mm512_loadu_ps(st.l + hb * 16), odd = _mm512_setzero_ps();
    // The weights as rounded: what O is divided by in the end, so that the rounding of one that
    // dominates falls out. lse has the exact sum.
    __m512 rounded = _mm512_loadu_ps(st.w + hb * 16);
    uint32_t* to = b.m.p + hb * kBlockP;
    for (int key = 0; key < b.n; key += 32, to += kTileCells) {
      __m512i pairs[16];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const float* s = scores_of<NH>(b.m.s, key + half * 16, i);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          const __m512 x = pow2(_mm512_sub_ps(_mm512_load_ps(s + j * 32), m));
          const __m512 y = pow2(_mm512_sub_ps(_mm512_load_ps(s + j * 32 + 16), m));
          even = _mm512_add_ps(even, x), odd = _mm512_add_ps(odd, y);
          const __m512i cells = pairs[half * 8 + j] = pair_bf16(x, y);
          rounded = _mm512_add_ps(rounded, _mm512_add_ps(low_half(cells), high_half(cells)));
        }
      }
      transpose(pairs);
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) _mm512_store_si512(to + j * 16, pairs[j]);
    }
    _mm512_storeu_ps(st.l + hb * 16, _mm512_add_ps(even, odd));
    _mm512_storeu_ps(st.w + hb * 16, rounded);
  }

  // O is kept as C tiles: [16-head block][vector of 16 dims][head][16].
  static constexpr int kBlockO = 16 * kValueDim;

  // O += P V: four sums of two blocks of heads x 32 dims (the lower or upper `half` of 64), or of
  // one block x 64.
  template <int NH>
  WINNOW_INLINE static void value_unit(const Block<Amx>& b, const uint32_t* p, const uint32_t* v,
                                       float* o, int half) {
    v += half * 2 * kTileCells, o += half * 2 * kTileCells;
    float *o1 = o + kTileCells, *o2 = o + (NH == 2 ? kBlockO : 2 * kTileCells);
    float* o3 = o2 + kTileCells;
    if (b.first) zero_sums();
    else tile_load<0>(o, 64), tile_load<1>(o1, 64), tile_load<2>(o2, 64), tile_load<3>(o3, 64);
    for (int step = 0; step < (b.n + 31) / 32; ++step) {
      const uint32_t *a = p + step * kTileCells, *c = v + step * kPageCells;
      if constexpr (NH == 2) {
        tile_load<4>(a, 64), tile_load<6>(c, 64), tile_dot<0, 4, 6>();
        tile_load<7>(c + kTileCells, 64), tile_dot<1, 4, 7>();
        tile_load<5>(a + kBlockP, 64), tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>();
      } else {
        tile_load<4>(a, 64), tile_load<5>(c, 64), tile_dot<0, 4, 5>();
        tile_load<6>(c + kTileCells, 64), tile_dot<1, 4, 6>();
        tile_load<7>(c + 2 * kTileCells, 64), tile_dot<2, 4, 7>();
        tile_load<5>(c + 3 * kTileCells, 64), tile_dot<3, 4, 5>();
      }
    }
    tile_store<0>(o, 64), tile_store<1>(o1, 64), tile_store<2>(o2, 64), tile_store<3>(o3, 64);
  }

  static void rescale_sums(const Block<Amx>& b, int hb) {
    const float* factor = b.m.state->factor + hb * 16;
    float* o = b.m.o + hb * kBlockO;
    for (int i = 0; i < kBlockO; i += 16)
      _mm512_store_ps(o + i, _mm512_mul_ps(_mm512_load_ps(o + i), splat(factor[i / 16 % 16])));
  }

  template <class R>
  static void values(const Block<Amx>& b) {
    const int blocks = head_blocks(b.heads), paired = blocks / 2 * 2;
    for (int hb = 0; b.rescale >> hb != 0; ++hb)
      if (b.rescale >> hb & 1) rescale_sums(b, hb);
    for (int g = 0; g < kValueDim / 64; ++g) {
      const uint32_t* v = b.m.v + g * kPairGroup<Amx>;
      float* o = b.m.o + g * 4 * kTileCells;
      for (int hb = 0; hb < paired; hb += 2)
        for (int half = 0; half < 2; ++half)
          value_unit<2>(b, b.m.p + hb * kBlockP, v, o + hb * kBlockO, half);
      if (paired < blocks) value_unit<1>(b, b.m.p + paired * kBlockP, v, o + paired * kBlockO, 0);
    }
  }

  static void output(const Scratch<Amx>& m, int head, float* o) {
    restore_order(m.o + head / 16 * kBlockO + head % 16 * 16, kTileCells, o);
  }
};

}  // namespace

void decode_amx(const Params& p) noexcept { run_tiles(p, kTileKernel<Amx>); }
size_t decode_amx_workspace(const Shape& s, int64_t tiles) {
  return tile_workspace(s, tiles, kTileKernel<Amx>);
}

}  // namespace winnow::attention
