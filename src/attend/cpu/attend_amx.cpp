// Sparse decode and prefill with AMX bf16 tiles. Gathering, softmax and merging are shared:
// x86_blocks.h, x86_pack.h.
//
// Tiles: scores are S^T[16 keys][16 heads] = K rows (A, as packed) x Q (B, packed once per token);
// values are O[16 heads][16 dims] = P (A, transposed from the scores) x V pairs (B, as packed). A
// unit of work is four sums (tiles 0 to 3) from four operands (4 to 7): one load for each product.
// Every tile in memory is one contiguous KB.
//
// What bounds is the way between L1 and L2: a tile stored to lines that are in L2 takes 59 cycles,
// to lines in L1 16. So a unit of scores (32 keys x 32 heads) is finished before the next begins:
// each panel of 128 dims leaves 4 KB of sums, 20 KB in all, which stay in L1 as K and Q are
// streamed past it, and which become logits with their fp32 scales, so that K is exact. The values
// wait for kSteps steps of 32 keys, as O (256 KB) is loaded and stored once for all of them; V is
// scaled and rounded to bf16 when it is packed. Up to 16 heads take V from the rows of K instead.
//
// Budget, per key and 16 heads, V3.2 (one TDPBF16PS in 16 cycles): scores 18, values 16 cycles;
// softmax about 30 vector operations. Per key: 11 lines gathered, 34 written.
// Bytes at 128 heads: Q 160 KB, K of 128 keys 160, V of 256 keys 256, P 64, O 256; sums 20, S 16.
#include "attend/cpu/kernels.h"
#include "attend/cpu/x86_blocks.h"
#include "attend/cpu/x86_pack.h"
#include "core/arithmetic.h"
#include "cpu/amx.h"

namespace winnow::internal::attend::cpu {
namespace {

using internal::cpu::tile_dot, internal::cpu::tile_load, internal::cpu::tile_store,
    internal::cpu::tile_stream, internal::cpu::tile_zero;

struct Amx {
  static constexpr int kPer = 2, kBlock = 128, kValueStep = 32;
  static constexpr int kSteps = 8, kWaiting = kSteps * 32;  // keys whose values are added at once
  static constexpr bool kPairs = true, kScaleInP = false, kTiled = true;
  using Session = internal::cpu::TileSession;
  // Keys of a unit of scores: its four sums are two blocks of heads x 2 of keys, or one x 4.
  template <int NH>
  static constexpr int kUnitKeys = 64 / NH;

  WINNOW_INLINE static void store_q(uint32_t* to, int cell, __m512i pairs) {
    _mm512_store_si512(to + cell * 16, pairs);
  }
  // Records are fetched during the softmax, which leaves L2 alone; a single block of heads has too
  // little of it, so its units take the time of so many steps as well.
  static constexpr int kUnitSteps = 16;
  template <class R>
  static int score_steps(int blocks, int n) {
    const int single = blocks % 2 * Panels<R, Amx>::kCount * ceil_div(n, 64) * kUnitSteps;
    return blocks * ceil_div(n, 32) * 16 + single;
  }

  WINNOW_INLINE static void zero_sums() {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  }

  // S: [block of heads][key][16 heads].
  static constexpr int kBlockS = kBlock * 16;

  // Logits of up to 16 keys and NH blocks of heads, from the sums of the panels and their fp32
  // scales, which are loaded once for all blocks: it is loads that take the time here. Logits are
  // rounded, so that nothing is left when the maximum is subtracted from itself.
  template <class R, int NH>
  WINNOW_INLINE static void logits(const Block<Amx>& b, const float* sums, int key,
                                   __m512 (&top)[NH]) {
    const int end = std::clamp(b.n - key, 0, 16);
    const float* f = b.m.scales + key * 4;
    float* to = b.m.s + key * 16;
    for (int i = 0; i < end; ++i, sums += 16, to += 16, f += 4) {
      const __m512 f0 = splat(f[0]), f1 = splat(f[1]), f2 = splat(f[2]), f3 = splat(f[3]);
#pragma GCC unroll 2
      for (int h = 0; h < NH; ++h) {
        const float* from = sums + h * kTileCells;
        __m512 x = _mm512_load_ps(from);
        if constexpr (kFloatScales<R>) {
          x = _mm512_fmadd_ps(x, f0, _mm512_load_ps(from + 4 * kPageCells));
          x = _mm512_fmadd_ps(f1, _mm512_load_ps(from + kPageCells), x);
          x = _mm512_fmadd_ps(f2, _mm512_load_ps(from + 2 * kPageCells), x);
          x = _mm512_fmadd_ps(f3, _mm512_load_ps(from + 3 * kPageCells), x);
        }
        x = _mm512_mul_ps(x, splat(b.scale2));
        top[h] = _mm512_max_ps(top[h], x);
        _mm512_store_ps(to + h * kBlockS, x);
      }
    }
    for (int i = end; i < 16; ++i, to += 16)
      for (int h = 0; h < NH; ++h) _mm512_store_ps(to + h * kBlockS, splat(-kInf));
  }

  // A step of 32 dims of a unit of scores.
  struct ScoreStep {
    const uint32_t *k, *next_k, *next_q;
    bool begins;  // sums; those of the last panel go to `done`, if there is one
    float* done;
  };
  template <int T, int A, int B>
  WINNOW_INLINE static void score_dot(const ScoreStep& s) {
    if (s.begins && s.done) tile_store<T>(s.done + T * kTileCells, 64);
    if (s.begins) tile_zero<T>();
    tile_dot<T, A, B>();
  }
  // Multiplies what tiles 4 to 7 hold and loads each for the next step right after its last use:
  // tile operations hardly overtake each other, and what is behind a store waits with it.
  template <class R, int NH>
  WINNOW_INLINE static void score_step(const ScoreStep& s) {
    constexpr int64_t kKeys = Panels<R, Amx>::kSixteen;
    if constexpr (NH == 2) {
      score_dot<0, 4, 6>(s), score_dot<1, 4, 7>(s), tile_stream<4>(s.next_k, 64);
      score_dot<2, 5, 6>(s), tile_stream<6>(s.next_q, 64), score_dot<3, 5, 7>(s);
      tile_stream<7>(s.next_q + Panels<R, Amx>::kQuery, 64);
      tile_stream<5>(s.next_k + kKeys, 64);
    } else {
      score_dot<0, 4, 7>(s), tile_stream<4>(s.k + 3 * kKeys, 64);
      score_dot<1, 5, 7>(s), tile_stream<5>(s.next_k + kKeys, 64);
      score_dot<2, 6, 7>(s), tile_stream<6>(s.next_k + 2 * kKeys, 64);
      score_dot<3, 4, 7>(s), tile_stream<4>(s.next_k, 64), tile_load<7>(s.next_q, 64);
    }
  }
  template <class R, int NH>
  WINNOW_INLINE static void first_operands(const uint32_t* k, const uint32_t* q) {
    constexpr int64_t kKeys = Panels<R, Amx>::kSixteen;
    tile_stream<4>(k, 64), tile_stream<5>(k + kKeys, 64);
    if constexpr (NH == 2) tile_stream<6>(q, 64), tile_stream<7>(q + Panels<R, Amx>::kQuery, 64);
    else tile_stream<6>(k + 2 * kKeys, 64), tile_load<7>(q, 64);
  }

  // Logits of NH blocks of heads and their maxima, unit by unit; sums are [tile of keys][block of
  // heads]. What is loaded after the last step, from memory behind the last unit, is not used.
  template <class R, int NH, class Fetch>
  WINNOW_INLINE static void score(const Block<Amx>& b, int hb, __m512 (&top)[NH], Fetch& fetch) {
    using P = Panels<R, Amx>;
    constexpr int kKeys = kUnitKeys<NH>;
    constexpr int64_t kUnit = kKeys / 16 * P::kSixteen;
    const uint32_t *q = b.m.q + hb * P::kQuery, *k = b.m.k;
    float* done = nullptr;
    const auto unit_logits = [&](int unit) {
      for (int i = 0; i < kKeys / 16; ++i)
        logits<R>(b, b.m.sums + i * NH * kTileCells, unit * kKeys + i * 16, top);
    };
    first_operands<R, NH>(k, q);
    const int units = ceil_div(b.n, kKeys);
    for (int unit = 0; unit < units; ++unit, k += kUnit) {
      for (int panel = 0; panel < P::kCount; ++panel) {
        const bool begins = kFloatScales<R> || panel == 0, last = panel + 1 == P::kCount;
        const uint32_t *pk = k + P::start(panel), *pq = q + panel * kPageCells;
        const int steps = P::cells(panel) / 16;
        for (int step = 0; step < steps; ++step) {
          const bool more = step + 1 < steps;
          const uint32_t* next_k = more   ? pk + (step + 1) * kTilePitch
                                   : last ? k + kUnit
                                          : k + P::start(panel + 1);
          const uint32_t* next_q = more ? pq + (step + 1) * kTileCells : last ? q : pq + kPageCells;
          score_step<R, NH>({pk + step * kTilePitch, next_k, next_q, begins && step == 0, done});
          // The last unit's logits, behind products of this one: its last sums have been stored
          // by then. (Behind the first four products: 1.3 % slower where a core is shared.)
          if (step == 1 && panel == 0 && unit > 0) unit_logits(unit - 1);
        }
        done = b.m.sums + (kFloatScales<R> ? panel * kPageCells : 0);
        for (int i = 0; NH == 1 && i < kUnitSteps; ++i) fetch.step();
      }
    }
    tile_store<0>(done, 64), tile_store<1>(done + kTileCells, 64);
    tile_store<2>(done + 2 * kTileCells, 64), tile_store<3>(done + 3 * kTileCells, 64);
    unit_logits(units - 1);
  }

  // Scores and softmax of NH blocks of heads.
  template <class R, int NH, class Fetch>
  static void scores(Block<Amx>& b, int hb, Fetch& fetch) {
    __m512 top[NH];
    for (__m512& t : top) t = splat(-kInf);
    score<R>(b, hb, top, fetch);
    for (int i = 0; i < NH; ++i) softmax(b, hb + i, b.m.s + i * kBlockS, top[i], fetch);
  }

  static constexpr int kBlockP = kSteps * kTileCells;

  // Softmax of a block of keys and 16 heads; P goes to b.m.p as A tiles [head][32 keys].
  template <class Fetch>
  static void softmax(Block<Amx>& b, int hb, const float* s, __m512 top, Fetch& fetch) {
    State& st = *b.m.state;
    const bool fresh = b.first && b.begin == b.end;
    // What waits has weights of the old maximum.
    if (!fresh && outgrown(st, hb * 16, top)) values(b);
    b.rescale |= unsigned{raise_maximum(st, hb * 16, top, fresh)} << hb;
    const __m512 m = _mm512_loadu_ps(st.m + hb * 16);
    __m512 even = _mm512_loadu_ps(st.l + hb * 16), odd = _mm512_setzero_ps();
    // The weights as rounded: what O is divided by in the end, so that the rounding of one that
    // dominates falls out. lse has the exact sum.
    __m512 rounded = _mm512_loadu_ps(st.w + hb * 16);
    uint32_t* to = b.m.p + hb * kBlockP + b.end * kTileCells;
    for (int key = 0; key < b.n; key += 32, to += kTileCells, s += 32 * 16) {
      __m512i pairs[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        fetch.step();
        const __m512 x = pow2(_mm512_sub_ps(_mm512_load_ps(s + j * 32), m));
        const __m512 y = pow2(_mm512_sub_ps(_mm512_load_ps(s + j * 32 + 16), m));
        even = _mm512_add_ps(even, x);
        odd = _mm512_add_ps(odd, y);
        const __m512i cells = pairs[j] = pair_bf16(x, y);
        rounded = _mm512_add_ps(rounded, _mm512_add_ps(low_half(cells), high_half(cells)));
      }
      transpose(pairs);
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) _mm512_store_si512(to + j * 16, pairs[j]);
    }
    _mm512_storeu_ps(st.l + hb * 16, _mm512_add_ps(even, odd));
    _mm512_storeu_ps(st.w + hb * 16, rounded);
  }

  // A block of keys. It may wait for its values until the next, or until finish().
  template <class R>
  static void attend(Block<Amx>& b, const KeyRef* keys, Prefetcher<R>& fetch) {
    if constexpr (kFloatScales<R>) {
      const bool powers = all_powers<R>(keys, b.n);
      if (b.narrow && powers) return attend_narrow<Folded<R>>(b, keys, fetch);
      if (b.narrow) return attend_narrow<R>(b, keys, fetch);
      if (powers) return attend_wide<Folded<R>>(b, keys, fetch);
    }
    attend_wide<R>(b, keys, fetch);
  }
  template <class R, class Fetch>
  static void attend_wide(Block<Amx>& b, const KeyRef* keys, Fetch& fetch) {
    const int steps = ceil_div(b.n, 32), blocks = head_blocks(b.heads);
    if (b.end + steps > kSteps) values(b);
    if (b.begin == b.end) b.begin = b.end = 0;
    pack_keys<R, Amx>(keys, b.n, {b.m.k, b.m.v + b.end * kValueTiles, b.m.scales});
    for (int hb = 0; hb < blocks; hb += 2)
      if (hb + 1 < blocks) scores<R, 2>(b, hb, fetch);
      else scores<R, 1>(b, hb, fetch);
    b.end += steps;
  }
  static void finish(Block<Amx>& b) { values(b); }

  // O is kept as C tiles: [16-head block][vector of 16 dims][head][16].
  static constexpr int kBlockO = 16 * kValueDim;

  // O += P V for two blocks of heads: the even tiles of 16 dims are summed in tiles 0 and 2, the
  // odd ones in 1 and 3. Both need the same P at a step, and begin half of the steps apart: one
  // pair of sums is multiplied for while the other is stored and the next of its kind loaded.
  template <int X>
  WINNOW_INLINE static void load_sums(const Block<Amx>& b, const float* o) {
    if (b.first) tile_zero<X>(), tile_zero<X + 2>();
    else tile_load<X>(o, 64), tile_load<X + 2>(o + kBlockO, 64);
  }
  template <int X>
  WINNOW_INLINE static void store_sums(float* o) {
    tile_store<X>(o, 64), tile_store<X + 2>(o + kBlockO, 64);
  }
  // Steps of one of the two alone: the first half of the first one, of the last one.
  template <int X>
  WINNOW_INLINE static void value_steps(const uint32_t* p, const uint32_t* v, int begin, int end) {
    for (int step = begin; step < end; ++step) {
      tile_load<4>(p + step * kTileCells, 64), tile_load<6>(v + step * kValueTiles, 64);
      tile_dot<X, 4, 6>();
      tile_load<5>(p + kBlockP + step * kTileCells, 64), tile_dot<X + 2, 5, 6>();
    }
  }
  struct ValueStep {
    const uint32_t *next_p, *next_even, *next_odd;
    float *done, *o;  // where sums go, if they were there before, and come from; o null: no change
  };
  template <int T>
  WINNOW_INLINE static void change_sum(const Block<Amx>& b, const ValueStep& s) {
    if (!s.o) return;
    constexpr int kAt = T / 2 * kBlockO;
    if (s.done) tile_store<T>(s.done + kAt, 64);
    if (b.first) tile_zero<T>();
    else tile_load<T>(s.o + kAt, 64);
  }
  // A step: sums X and X + 2 go on, the others may change. As in score_step, tiles are loaded for
  // the next step right after their last use.
  template <int X>
  WINNOW_INLINE static void value_step(const Block<Amx>& b, const ValueStep& s) {
    constexpr int kV = 6 + X, kOther = 7 - X;
    tile_dot<X, 4, kV>(), tile_dot<X + 2, 5, kV>(), tile_load<kV>(X ? s.next_odd : s.next_even, 64);
    change_sum<1 - X>(b, s), tile_dot<1 - X, 4, kOther>(), tile_load<4>(s.next_p, 64);
    change_sum<3 - X>(b, s), tile_dot<3 - X, 5, kOther>(), tile_load<5>(s.next_p + kBlockP, 64);
    tile_load<kOther>(X ? s.next_even : s.next_odd, 64);
  }
  static void value_pair(const Block<Amx>& b, int hb) {
    constexpr int kTiles = kValueDim / 16;
    const int half = b.begin + (b.end - b.begin) / 2;
    const uint32_t* p = b.m.p + hb * kBlockP;
    const auto v = [&](int tile) {  // what would be loaded behind the last one is not used
      return b.m.v + tile % kTiles * kTilePitch;
    };
    float* o = b.m.o + hb * kBlockO;
    load_sums<0>(b, o);
    value_steps<0>(p, v(0), b.begin, half);
    tile_load<4>(p + half * kTileCells, 64), tile_load<5>(p + kBlockP + half * kTileCells, 64);
    tile_load<6>(v(0) + half * kValueTiles, 64), tile_load<7>(v(1) + half * kValueTiles, 64);
    for (int tile = 0; tile < kTiles; tile += 2, o += 2 * kTileCells) {
      const auto step = [&](int next, bool turned) {  // the operands of step `next`
        const uint32_t* odd = v(next == half ? tile + 3 : tile + 1);
        return ValueStep{p + next * kTileCells, v(turned ? tile + 2 : tile) + next * kValueTiles,
                         odd + next * kValueTiles, nullptr, nullptr};
      };
      for (int i = half; i < b.end; ++i) {
        ValueStep s = step(i + 1 < b.end ? i + 1 : b.begin, i + 1 == b.end);
        if (i == half) s.done = tile > 0 ? o - kTileCells : nullptr, s.o = o + kTileCells;
        value_step<0>(b, s);
      }
      if (tile + 2 == kTiles) break;
      if (half == b.begin) store_sums<0>(o), load_sums<0>(b, o + 2 * kTileCells);
      for (int i = b.begin; i < half; ++i) {
        ValueStep s = step(i + 1, true);
        if (i == b.begin) s.done = o, s.o = o + 2 * kTileCells;
        value_step<1>(b, s);
      }
    }
    store_sums<0>(o);
    value_steps<1>(p, v(kTiles - 1), b.begin, half);
    store_sums<1>(o + kTileCells);
  }

  // O += P V for the last block of heads: four sums of 64 dims.
  WINNOW_INLINE static void value_unit(const Block<Amx>& b, int hb, int g) {
    const uint32_t *p = b.m.p + hb * kBlockP, *v = b.m.v + g * kPairGroup<Amx>;
    float* o = b.m.o + hb * kBlockO + g * 4 * kTileCells;
    float *o1 = o + kTileCells, *o2 = o + 2 * kTileCells, *o3 = o + 3 * kTileCells;
    if (b.first) zero_sums();
    else tile_load<0>(o, 64), tile_load<1>(o1, 64), tile_load<2>(o2, 64), tile_load<3>(o3, 64);
    for (int step = b.begin; step < b.end; ++step) {
      const uint32_t *a = p + step * kTileCells, *c = v + step * kValueTiles;
      tile_load<4>(a, 64), tile_load<5>(c, 64), tile_dot<0, 4, 5>();
      tile_load<6>(c + kTilePitch, 64), tile_dot<1, 4, 6>();
      tile_load<7>(c + 2 * kTilePitch, 64), tile_dot<2, 4, 7>();
      tile_load<5>(c + 3 * kTilePitch, 64), tile_dot<3, 4, 5>();
    }
    tile_store<0>(o, 64), tile_store<1>(o1, 64), tile_store<2>(o2, 64), tile_store<3>(o3, 64);
  }

  static void rescale_sums(const Block<Amx>& b, int hb) {
    const float* factor = b.m.state->factor + hb * 16;
    float* o = b.m.o + hb * kBlockO;
    for (int i = 0; i < kBlockO; i += 16)
      _mm512_store_ps(o + i, _mm512_mul_ps(_mm512_load_ps(o + i), splat(factor[i / 16 % 16])));
  }

  // Adds the values of the steps that wait.
  static void values(Block<Amx>& b) {
    if (b.begin == b.end) return;
    const int blocks = head_blocks(b.heads);
    for (int hb = 0; b.rescale >> hb != 0; ++hb)
      if (b.rescale >> hb & 1) rescale_sums(b, hb);
    for (int hb = 0; hb < blocks; hb += 2) {
      if (hb + 1 < blocks) value_pair(b, hb);
      for (int g = 0; hb + 1 == blocks && g < kValueDim / 64; ++g) value_unit(b, hb, g);
    }
    b.begin = b.end;
    b.rescale = 0;
    b.first = false;
  }

  static void output(const Block<Amx>& b, int head, float* o) {
    const float* from = b.m.o + head / 16 * kBlockO + head % 16 * 16;
    if (!b.narrow) return restore_order(from, kTileCells, o);
    for (int i = 0; i < kValueDim; i += 32, from += 2 * kTileCells) {
      const __m512 even = _mm512_load_ps(from), odd = _mm512_load_ps(from + kTileCells);
      _mm512_store_ps(o + i, _mm512_unpacklo_ps(even, odd));
      _mm512_store_ps(o + i + 16, _mm512_unpackhi_ps(even, odd));
    }
    restore_order(o, 16, o);
    // As if the weights had not been rounded on the whole: what one that dominates lost falls out.
    for (int panel = 0; panel < kValueDim / kPanel; ++panel) {
      const float l = b.m.state->l[head], extra = b.m.state->extra[panel][head];
      for (int i = 0; extra != 0 && i < kPanel; i += 16) {
        float* at = o + panel * kPanel + i;
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), splat(l / (l + extra))));
      }
    }
  }

  // Up to 16 heads: packing takes longer than everything else, and half of it is the pairs of V.
  // The rows of K serve as V instead, as B tiles [16 keys][32 dims]: what a product takes for two
  // keys of a pair are two dims of one key, so P is spread over even or odd cells, zeros between:
  // one tile makes the even dims of O, the other the odd ones. Twice the products of the values;
  // 16 lines a key less to write. The fp32 scales are in P, a plane for each panel. Only for
  // e4m3: a zero times an infinity would spread it to the dim beside it.
  static bool narrow(const Params& p) {
    bool all = p.heads <= 16;
    for (int i = 0; i < p.list_count; ++i)
      with_latent(p.lists[i].format, [&]<class R>(R) { all = all && kFloatScales<R>; });
    return all;
  }

  template <class R, class Fetch>
  static void attend_narrow(Block<Amx>& b, const KeyRef* keys, Fetch& fetch) {
    pack_keys<R, Amx, Packing::kRows>(keys, b.n, {b.m.k, nullptr, b.m.scales});
    __m512 largest[1] = {splat(-kInf)};
    score<R>(b, 0, largest, fetch);
    const __m512 top = largest[0];
    if (raise_maximum(*b.m.state, 0, top, b.first)) rescale_sums(b, 0);
    weights(b, fetch);
    // Heads with a weight above a quarter of the sum: its rounding would show in the output.
    const __m512 weight = pow2(_mm512_sub_ps(top, _mm512_loadu_ps(b.m.state->m)));
    const __m512 quarter = _mm512_mul_ps(_mm512_loadu_ps(b.m.state->l), splat(0.25f));
    const __mmask16 heavy = _mm512_cmp_ps_mask(weight, quarter, _CMP_GT_OQ);
    for (int panel = 0; panel < kValueDim / kPanel; ++panel) {
      if (kFloatScales<R> || panel == 0) spread<R>(b, panel, heavy);
      for (int half = 0; half < 2; ++half) narrow_unit<R>(b, panel, half);
    }
    b.first = false;
  }

  // Weights in fp32 as [16 keys][head][key], and their sum.
  template <class Fetch>
  static void weights(const Block<Amx>& b, Fetch& fetch) {
    State& st = *b.m.state;
    const __m512 m = _mm512_loadu_ps(st.m);
    __m512 even = _mm512_loadu_ps(st.l), odd = _mm512_setzero_ps();
    for (int key = 0; key < b.n; key += 16) {
      __m512i rows[16];
#pragma GCC unroll 8
      for (int j = 0; j < 16; j += 2) {
        fetch.step();
        const float* s = b.m.s + (key + j) * 16;
        const __m512 x = pow2(_mm512_sub_ps(_mm512_load_ps(s), m));
        const __m512 y = pow2(_mm512_sub_ps(_mm512_load_ps(s + 16), m));
        even = _mm512_add_ps(even, x);
        odd = _mm512_add_ps(odd, y);
        rows[j] = _mm512_castps_si512(x), rows[j + 1] = _mm512_castps_si512(y);
      }
      transpose(rows);
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) _mm512_store_si512(b.m.p + (key + j) * 16, rows[j]);
    }
    _mm512_storeu_ps(st.l, _mm512_add_ps(even, odd));
    _mm512_storeu_ps(st.w, _mm512_add_ps(even, odd));
  }

  // P of a panel, or of all where no scales go into it, as A tiles: [16 keys][even, odd]. For
  // `heavy` heads, what rounding added to the sum of weights is counted.
  template <class R>
  static void spread(const Block<Amx>& b, int panel, unsigned heavy) {
    const __m512i lanes = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), splat(4));
    for (int key = 0; key < b.n; key += 16) {
      __m512 scale = splat(1.0f);
      if constexpr (kFloatScales<R>)
        scale = _mm512_i32gather_ps(lanes, b.m.scales + key * 4 + panel, 4);
      const float* from = reinterpret_cast<const float*>(b.m.p) + key * 16;
      uint32_t* to = b.m.v + key * 32;
#pragma GCC unroll 4
      for (int h = 0; h < 16; ++h) {
        const __m512 x = _mm512_mul_ps(_mm512_load_ps(from + h * 16), scale);
        const __m512i r = _mm512_add_epi32(_mm512_castps_si512(x), splat(0x8000));
        _mm512_store_si512(to + h * 16, _mm512_srli_epi32(r, 16));
        const __m512i high = _mm512_and_si512(r, splat(int(0xffff0000)));
        _mm512_store_si512(to + kTileCells + h * 16, high);
        if (heavy >> h & 1) [[unlikely]] {
          const __m512 gain = _mm512_div_ps(_mm512_sub_ps(_mm512_castsi512_ps(high), x), scale);
          // More than rounding can add (scales without an inverse, products that are infinite or
          // subnormal) counts for nothing.
          const __m512 limit = _mm512_mul_ps(_mm512_load_ps(from + h * 16), splat(0x1p-8f));
          const auto counts = _mm512_cmp_ps_mask(_mm512_abs_ps(gain), limit, _CMP_LE_OQ);
          for (int i = panel; i < (kFloatScales<R> ? panel + 1 : 4); ++i)
            b.m.state->extra[i][h] += _mm512_mask_reduce_add_ps(counts, gain);
        }
      }
    }
  }

  // O of 64 dims: [32 dims][even, odd][head][16].
  template <class R>
  WINNOW_INLINE static void narrow_unit(const Block<Amx>& b, int panel, int half) {
    const uint32_t *p = b.m.v, *k = b.m.k + Panels<R, Amx>::start(panel) + half * 2 * kTilePitch;
    float* o = b.m.o + (panel * 2 + half) * 4 * kTileCells;
    float *o1 = o + kTileCells, *o2 = o + 2 * kTileCells, *o3 = o + 3 * kTileCells;
    if (b.first) zero_sums();
    else tile_load<0>(o, 64), tile_load<1>(o1, 64), tile_load<2>(o2, 64), tile_load<3>(o3, 64);
    for (int key = 0; key < b.n; key += 16, p += 2 * kTileCells, k += Panels<R, Amx>::kSixteen) {
      tile_load<4>(p, 64), tile_stream<6>(k, 64), tile_dot<0, 4, 6>();
      tile_load<5>(p + kTileCells, 64), tile_dot<1, 5, 6>();
      tile_stream<7>(k + kTilePitch, 64), tile_dot<2, 4, 7>(), tile_dot<3, 5, 7>();
    }
    tile_store<0>(o, 64), tile_store<1>(o1, 64), tile_store<2>(o2, 64), tile_store<3>(o3, 64);
  }
};

}  // namespace

void amx(const Params& p) noexcept { run_tiles(p, kTileKernel<Amx>); }
size_t amx_workspace(const Shape& s, int64_t tiles) {
  return tile_workspace(s, tiles, kTileKernel<Amx>);
}

}  // namespace winnow::internal::attend::cpu
