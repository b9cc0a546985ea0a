// Sparse decode and prefill with AMX bf16 tiles. Gathering, softmax and merging are shared:
// x86_decode.h, x86_pack.h.
//
// Tiles: scores are S^T[16 keys][16 heads] = K rows (A, as packed) x Q (B, packed once per token);
// values are O[16 heads][16 dims] = P (A, transposed from the scores) x V pairs (B, as packed).
// A unit of work is two accumulators: 128 dims of scores, or a block of keys of values. Tiles 0 and
// 1 serve even units, 2 and 3 odd ones, 4 to 7 the operands (three loads for two products). A
// unit's sums are stored to a stage in L1 while the next is multiplied, when they are ready: a
// store that still waits for its data holds up every load of the same page offset. Vector code adds
// them to S or O yet a unit later; scales, rescaling and the old O stay off the tiles' path.
//
// Budget, per key and 16 heads, V3.2 (one TDPBF16PS in 16 cycles): scores 18, values 16 cycles;
// adding the stages 4.5 + 4 lines read twice and written once; softmax about 40 vector operations,
// of which 4 x 5 to round P for the four scales of the values and transpose it.
// Per key: 11 lines gathered, 34 written, about 60 vector operations to pack. fp32 scales multiply
// fp32 sums (scores) and P (values), so K and V are exact.
// Bytes, block of 128 keys: K 144 KB, V 128 KB in L2; 8 KB of Q and 16 KB of S, or 16 KB of V, stay
// in L1 while K, or P and O, stream from L2 at 32 bytes a cycle of the tiles.
#include "attend/x86.h"
#include "attend/x86_decode.h"
#include "attend/x86_pack.h"
#include "cpu/amx.h"

namespace winnow::attention {
namespace {

using host::tile_dot, host::tile_load, host::tile_store, host::tile_zero;

// Two units in flight on the tiles, a third being added. Where: what add() must know of a unit.
template <class Where>
struct Pipeline {
  static constexpr int kUnit = 512;  // floats: two tiles
  float* stage;                      // two units
  int unit = 0;
  Where where[2] = {};

  template <int T>
  WINNOW_INLINE static void store(float* to) {
    tile_store<T>(to, 64), tile_store<T + 1>(to + 256, 64);
  }

  // multiply(T) leaves the sums of unit w in tiles T and T + 1.
  template <class Multiply, class Add>
  WINNOW_INLINE void step(const Where& w, Multiply&& multiply, Add&& add) {
    if (unit % 2 == 0) {
      multiply(std::integral_constant<int, 0>());
      if (unit > 0) store<2>(stage + kUnit);
    } else {
      multiply(std::integral_constant<int, 2>());
      store<0>(stage);
    }
    if (unit > 1) add(stage + unit % 2 * kUnit, where[unit % 2]);
    where[unit++ % 2] = w;
  }
  template <class Add>
  WINNOW_INLINE void finish(Add&& add) {
    if (unit == 0) return;
    if (unit % 2 == 0) store<2>(stage + kUnit);
    else store<0>(stage);
    if (unit > 1) add(stage + unit % 2 * kUnit, where[unit % 2]);
    add(stage + (unit + 1) % 2 * kUnit, where[(unit + 1) % 2]);
  }
};

struct Amx {
  static constexpr int kPer = 2, kBlock = 128, kValueStep = 32;
  static constexpr int kStage = 2 * 512;  // floats
  static constexpr bool kPairs = true, kScaleInP = true;
  static_assert(kBlock % 32 == 0, "a unit of scores has 16 or 32 keys");
  using Session = host::TileSession;
  template <int NH>
  static constexpr int kUnitKeys = 32 / NH;

  WINNOW_INLINE static void store_q(uint32_t* to, int cell, __m512i pairs) {
    _mm512_store_si512(to + cell * 16, pairs);
  }
  template <class R>
  static void pack(const KeyRef* keys, int n, const Scratch<Amx>& m) {
    pack_keys<R, Amx>(keys, n, {m.k, m.v, m.scales});
  }
  template <class R>
  static int score_steps(int blocks, int n) {
    return Panels<R, Amx>::kCount * (blocks / 2 * ((n + 15) / 16) + blocks % 2 * ((n + 31) / 32));
  }

  // Scores of a unit in tiles T and T + 1: 16 keys x two blocks of heads, or 32 keys x one.
  template <int T, int NH>
  WINNOW_INLINE static void score_unit(const uint32_t* q, int64_t q_block, const uint32_t* k,
                                       int cells) {
    tile_zero<T>(), tile_zero<T + 1>();
    for (int c = 0; c < cells; c += 16, q += 256, k += 16) {
      if constexpr (NH == 2) {
        tile_load<4>(k, cells * 4), tile_load<6>(q, 64), tile_dot<T, 4, 6>();
        tile_load<7>(q + q_block, 64), tile_dot<T + 1, 4, 7>();
      } else {
        tile_load<6>(q, 64), tile_load<4>(k, cells * 4), tile_dot<T, 4, 6>();
        tile_load<5>(k + 16 * cells, cells * 4), tile_dot<T + 1, 5, 6>();
      }
    }
  }

  // s [key][2][16] (+)= stage, times the fp32 scale of the panel; the last panel makes it logits,
  // rounded, so that nothing is left when the maximum is subtracted from itself.
  template <class R, int NH>
  WINNOW_INLINE static void add_scores(const Block<Amx>& b, const float* stage, int panel,
                                       int key) {
    const bool scaled = kFloatScales<R> && panel < 4, last = panel == Panels<R, Amx>::kCount - 1;
    const __m512 logits = splat(last ? b.scale2 : 1.0f);
    for (int j = 0; j < kUnitKeys<NH>; ++j) {
      const __m512 f = splat(scaled ? b.m.scales[(key + j) * 4 + panel] : 1.0f);
#pragma GCC unroll 2
      for (int i = 0; i < NH; ++i) {
        float* at = b.m.s + (key + j) * 32 + i * 16;
        const __m512 old = panel == 0 ? _mm512_setzero_ps() : _mm512_load_ps(at);
        const __m512 x = _mm512_load_ps(stage + (j / 16 * NH + i) * 256 + j % 16 * 16);
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_fmadd_ps(x, f, old), logits));
      }
    }
  }

  // Scores and softmax of NH blocks of heads; P goes to b.m.p as A tiles [head][32 keys].
  template <class R, int NH>
  static void scores(Block<Amx>& b, int hb, Prefetcher<R>& fetch) {
    using P = Panels<R, Amx>;
    constexpr int64_t kQBlock = R::kDqk / 2 * 16;
    struct Where {
      int panel, key;
    };
    Pipeline<Where> pipeline{b.m.stage};
    const auto add = [&](const float* stage, const Where& w) {
      add_scores<R, NH>(b, stage, w.panel, w.key);
    };
    for (int panel = 0; panel < P::kCount; ++panel) {
      const uint32_t* q = b.m.q + hb * kQBlock + panel * (kPanel / 2) * 16;
      const uint32_t* k = b.m.k + P::start(panel);
      const int cells = P::cells(panel);
      for (int key = 0; key < b.n; key += kUnitKeys<NH>) {
        const auto multiply = [&](auto t) {
          score_unit<t, NH>(q, kQBlock, k + key * cells, cells);
        };
        pipeline.step({panel, key}, multiply, add);
        fetch.step();
      }
    }
    pipeline.finish(add);
    for (int i = 0; i < NH; ++i) softmax<R>(b, hb + i, b.m.s + i * 16);
  }

  // Planes of P: one for each fp32 scale of the values.
  template <class R>
  static constexpr int kPlanes = kScaleInP&& kFloatScales<R> ? 4 : 1;
  static int64_t plane_cells(int heads) { return int64_t{head_blocks(heads)} * (kBlock / 2) * 16; }

  template <class R>
  static void softmax(Block<Amx>& b, int hb, float* s) {
    __m512 top = splat(-kInf);
    for (int key = 0; key < b.n; ++key) top = _mm512_max_ps(top, _mm512_load_ps(s + key * 32));
    State& st = *b.m.state;
    b.rescale |= unsigned{raise_maximum(st, hb * 16, top, b.first)} << hb;
    const __m512 m = _mm512_loadu_ps(st.m + hb * 16);
    __m512 sum = _mm512_loadu_ps(st.l + hb * 16);
    for (int key = 0; key < b.n; ++key) {
      const __m512 p = pow2(_mm512_sub_ps(_mm512_load_ps(s + key * 32), m));
      sum = _mm512_add_ps(sum, p);
      _mm512_store_ps(s + key * 32, p);
    }
    _mm512_storeu_ps(st.l + hb * 16, sum);
    for (int key = b.n; key % 32 != 0; ++key) _mm512_store_ps(s + key * 32, _mm512_setzero_ps());
    // Round, transpose to [head][32 keys].
    for (int t = 0; t < kPlanes<R>; ++t) {
      uint32_t* to = b.m.p + t * plane_cells(b.heads) + hb * (kBlock / 2) * 16;
      for (int key = 0; key < b.n; key += 32, to += 256) {
        __m512i pairs[16];
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          const int at = key + 2 * j;
          __m512 x = _mm512_load_ps(s + at * 32), y = _mm512_load_ps(s + at * 32 + 32);
          if constexpr (kPlanes < R >> 1) {
            x = _mm512_mul_ps(x, splat(b.m.scales[at * 4 + t]));
            y = _mm512_mul_ps(y, splat(b.m.scales[at * 4 + 4 + t]));
          }
          pairs[j] = pair_bf16(x, y);
        }
        transpose(pairs);
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) _mm512_store_si512(to + j * 16, pairs[j]);
      }
    }
  }

  // Values of a unit in tiles T and T + 1: two blocks of heads x 16 dims, or one x 32.
  template <int T, int NH>
  WINNOW_INLINE static void value_unit(const uint32_t* p, const uint32_t* v, int n) {
    constexpr int kPBlock = kBlock / 2 * 16;
    tile_zero<T>(), tile_zero<T + 1>();
    for (int key = 0; key < n; key += 32, p += 256, v += 16 * 64) {
      if constexpr (NH == 2) {
        tile_load<6>(v, 256), tile_load<4>(p, 64), tile_dot<T, 4, 6>();
        tile_load<5>(p + kPBlock, 64), tile_dot<T + 1, 5, 6>();
      } else {
        tile_load<4>(p, 64), tile_load<6>(v, 256), tile_dot<T, 4, 6>();
        tile_load<7>(v + 16, 256), tile_dot<T + 1, 4, 7>();
      }
    }
  }

  // O = O * factor + stage, for a unit that begins at `dims`.
  template <int NH>
  WINNOW_INLINE static void add_values(const Block<Amx>& b, const float* stage, int hb, int dims) {
    for (int tile = 0; tile < 2; ++tile, stage += 256) {
      const int block = NH == 2 ? hb + tile : hb;
      const int heads = std::min(16, b.heads - block * 16);
      const float* factor = b.rescale >> block & 1 ? b.m.state->factor + block * 16 : nullptr;
      float* o = b.o + block * 16 * kORow + dims + (NH == 2 ? 0 : tile * 16);
      if (b.first) {
        for (int h = 0; h < heads; ++h)
          _mm512_store_ps(o + h * kORow, _mm512_load_ps(stage + h * 16));
      } else {
        for (int h = 0; h < heads; ++h) {
          const __m512 f = splat(factor ? factor[h] : 1.0f);
          const __m512 old = _mm512_load_ps(o + h * kORow);
          _mm512_store_ps(o + h * kORow, _mm512_fmadd_ps(old, f, _mm512_load_ps(stage + h * 16)));
        }
      }
    }
  }

  // Groups of 64 dims for NH blocks of heads at a time, from block `begin` to `end`.
  template <class R, int NH>
  static void value_blocks(const Block<Amx>& b, int begin, int end) {
    struct Where {
      int hb, dims;
    };
    Pipeline<Where> pipeline{b.m.stage};
    const auto add = [&](const float* stage, const Where& w) {
      add_values<NH>(b, stage, w.hb, w.dims);
    };
    for (int g = 0; g < kValueDim; g += 64) {
      const uint32_t* planes = b.m.p + (kPlanes<R> > 1 ? g / 128 * plane_cells(b.heads) : 0);
      for (int hb = begin; hb < end; hb += NH)
        for (int dims = g; dims < g + 64; dims += 32 / NH) {
          const uint32_t* v = b.m.v + g / 64 * kPairGroup<Amx> + dims % 64;
          const auto multiply = [&](auto t) {
            value_unit<t, NH>(planes + hb * (kBlock / 2) * 16, v, b.n);
          };
          pipeline.step({hb, dims}, multiply, add);
        }
    }
    pipeline.finish(add);
  }

  template <class R>
  static void values(const Block<Amx>& b) {
    const int blocks = head_blocks(b.heads), paired = blocks / 2 * 2;
    value_blocks<R, 2>(b, 0, paired);
    value_blocks<R, 1>(b, paired, blocks);
  }
};

}  // namespace

void decode_amx(const Params& p) noexcept { run_tiles(p, kTileKernel<Amx>); }
size_t decode_amx_workspace(const Shape& s, int64_t tiles) {
  return tile_workspace(s, tiles, kTileKernel<Amx>);
}

}  // namespace winnow::attention
