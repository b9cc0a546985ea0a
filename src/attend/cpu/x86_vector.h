// Register-tiled products for units that multiply vectors. A cell is 4 bytes (two bf16 or one
// fp32), and E::dot(acc, a, b) multiplies 16 cells; everything else is the same for all of them.
#pragma once

#include "attend/cpu/x86_blocks.h"
#include "core/arithmetic.h"

namespace winnow::internal::attend::cpu {
namespace {

template <class E>
struct VectorEngine {
  VectorEngine() = delete;  // all of it is static
  struct Session {};
  static bool narrow(const Params&) { return false; }
  static constexpr bool kTiled = false;
  // Keys of a score tile of NH x 16 heads: 24 accumulators, 6 or more cycles of latency covered.
  static constexpr int tile_keys(int nh) { return nh == 1 ? 24 : 12; }

  // Pairs leave the dims of O in their own order.
  static void output(const Block<E>&, int, float* o) {
    if (E::kPairs) restore_order(o, 16, o);
  }

  // Scores and softmax, two blocks of heads at a time, then the values.
  template <class R>
  static void attend(Block<E>& b, const KeyRef* keys, Prefetcher<R>& fetch) {
    // Zen 4: 2 % faster with 128 heads, 1 % slower with 16, as packing is longer.
    if constexpr (kFloatScales<R> && E::kPairs)
      if (b.heads > 16 && all_powers<R>(keys, b.n)) return attend_as<Folded<R>>(b, keys, fetch);
    attend_as<R>(b, keys, fetch);
  }
  template <class R, class Fetch>
  static void attend_as(Block<E>& b, const KeyRef* keys, Fetch& fetch) {
    const int blocks = head_blocks(b.heads);
    E::template pack<R>(keys, b);
    b.rescale = 0;
    for (int hb = 0; hb < blocks; hb += 2)
      if (hb + 1 < blocks) E::template scores<R, 2>(b, hb, fetch);
      else E::template scores<R, 1>(b, hb, fetch);
    E::template values<R>(b);
    b.first = false;
  }
  static void finish(Block<E>&) {}

  // Calls of Prefetcher::step() for a block.
  template <class R>
  static int score_steps(int blocks, int n) {
    const int pairs = blocks / 2, single = blocks % 2;
    return Panels<R, E>::kCount * (pairs * ceil_div(n, 12) + single * ceil_div(n, 24));
  }

  // acc[i][key] = Q of 16-head block i . key, over one panel of `kCells` cells.
  template <int NH, int NK, int kCells>
  WINNOW_INLINE static void score_tile(const uint32_t* q, int64_t q_block, const uint32_t* k,
                                       __m512 (&acc)[NH][NK]) {
#pragma GCC unroll 2
    for (int i = 0; i < NH; ++i)
#pragma GCC unroll 24
      for (int j = 0; j < NK; ++j) acc[i][j] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int c = 0; c < kCells; ++c) {
      __m512i x[NH];
#pragma GCC unroll 2
      for (int i = 0; i < NH; ++i) x[i] = _mm512_load_si512(q + i * q_block + c * 16);
#pragma GCC unroll 24
      for (int j = 0; j < NK; ++j) {
        const __m512i y = splat(static_cast<int>(k[j * kCells + c]));
#pragma GCC unroll 2
        for (int i = 0; i < NH; ++i) acc[i][j] = E::dot(acc[i][j], x[i], y);
      }
    }
  }

  // Adds a panel to s [key][2][16]; fp32 scales multiply its sums. The last one makes them logits,
  // rounded: subtracting the maximum from unrounded products would leave its rounding error.
  template <class R, int NH, int kPanelIndex, class Fetch>
  static void score_panel(const Block<E>& b, int hb, Fetch& fetch) {
    using P = Panels<R, E>;
    constexpr int c = kPanelIndex, kCells = P::cells(c), NK = tile_keys(NH);
    constexpr bool kScaled = E::kScaleInP && kFloatScales<R> && c < 4;
    constexpr int64_t kQBlock = R::kDqk / E::kPer * 16;
    const uint32_t* q = b.m.q + hb * kQBlock + c * (kPanel / E::kPer) * 16;
    for (int key = 0; key < b.n; key += NK) {
      __m512 acc[NH][NK];
      score_tile<NH, NK, kCells>(q, kQBlock, b.m.k + P::start(c) + key * kCells, acc);
      float* s = b.m.s + key * 32;
      [[maybe_unused]] const float* scale = b.m.scales + key * 4 + c;
#pragma GCC unroll 24
      for (int j = 0; j < NK; ++j)
#pragma GCC unroll 2
        for (int i = 0; i < NH; ++i) {
          float* at = s + j * 32 + i * 16;
          __m512 x = acc[i][j];
          if constexpr (kScaled) x = _mm512_mul_ps(x, splat(scale[j * 4]));
          if constexpr (c > 0) x = _mm512_add_ps(x, _mm512_load_ps(at));
          if constexpr (c == P::kCount - 1) x = _mm512_mul_ps(x, splat(b.scale2));
          _mm512_store_ps(at, x);
        }
      fetch.step();
    }
  }

  // At most eight heads: lanes 2h and 2h + 1 hold head h with the first and the second key of a
  // pair, whose cells k has in turn. acc[pair], over one panel of `kCells` cells; the sums are
  // added up in the order of score_tile(), so the bits are the same.
  template <int NK, int kCells>
  WINNOW_INLINE static void pair_tile(const uint32_t* q, const uint32_t* k, __m512 (&acc)[NK]) {
#pragma GCC unroll 24
    for (int j = 0; j < NK; ++j) acc[j] = _mm512_setzero_ps();
    for (int c = 0; c < kCells; c += 4) {
      const uint32_t* cells = k + c / 16 * 32 + c % 16;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i x = _mm512_load_si512(q + (c + i) * 16);
        const uint32_t* at = cells + (i / 2 * 16 + i % 2 * 2);
#pragma GCC unroll 24
        for (int j = 0; j < NK; ++j) {
          int64_t both;
          std::memcpy(&both, at + j * 2 * kCells, 8);
          acc[j] = E::dot(acc[j], x, _mm512_set1_epi64(both));
        }
      }
    }
  }

  // score_panel() of pairs of keys. Logits go to s [key][2][16] as there; sums of the panels before
  // to the rows of the first keys.
  template <class R, int kPanelIndex, class Fetch>
  static void pair_panel(const Block<E>& b, Fetch& fetch) {
    using P = Panels<R, E>;
    constexpr int c = kPanelIndex, kCells = P::cells(c), NK = tile_keys(1) / 2;
    constexpr bool kScaled = E::kScaleInP && kFloatScales<R> && c < 4;
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i odd = _mm512_add_epi32(even, splat(1));
    for (int key = 0; key < b.n; key += 2 * NK) {
      __m512 acc[NK];
      pair_tile<NK, kCells>(b.m.q + c * (kPanel / E::kPer) * 16, b.m.k + P::start(c) + key * kCells,
                            acc);
      float* s = b.m.s + key * 32;
      [[maybe_unused]] const float* scale = b.m.scales + key * 4 + c;
#pragma GCC unroll 24
      for (int j = 0; j < NK; ++j) {
        float* at = s + j * 64;
        __m512 x = acc[j];
        if constexpr (kScaled) {
          const __m128 two = _mm_setr_ps(scale[j * 8], scale[j * 8 + 4], 0, 0);
          x = _mm512_mul_ps(x, _mm512_castpd_ps(_mm512_broadcastsd_pd(_mm_castps_pd(two))));
        }
        if constexpr (c > 0) x = _mm512_add_ps(x, _mm512_load_ps(at));
        if constexpr (c < P::kCount - 1) {
          _mm512_store_ps(at, x);
        } else {
          x = _mm512_mul_ps(x, splat(b.scale2));
          _mm512_store_ps(at, _mm512_maskz_permutexvar_ps(0xff, even, x));
          _mm512_store_ps(at + 32, _mm512_maskz_permutexvar_ps(0xff, odd, x));
        }
      }
      fetch.step();
    }
  }

  // Scores and softmax of NH blocks of heads; P goes to b.m.p.
  template <class R, int NH, class Fetch>
  static void scores(Block<E>& b, int hb, Fetch& fetch) {
    [&]<int... c>(std::integer_sequence<int, c...>) {
      if constexpr (NH == 1 && E::kPairs)
        if (b.key_pairs) return (pair_panel<R, c>(b, fetch), ...);
      (score_panel<R, NH, c>(b, hb, fetch), ...);
    }
    (std::make_integer_sequence<int, Panels<R, E>::kCount>());
    for (int i = 0; i < NH; ++i, ++hb) {
      const float* s = b.m.s + i * 16;
      __m512 top = splat(-kInf);
      for (int key = 0; key < b.n; ++key) top = _mm512_max_ps(top, _mm512_load_ps(s + key * 32));
      State& st = *b.m.state;
      b.rescale |= unsigned{raise_maximum(st, hb * 16, top, b.first)} << hb;
      const __m512 m = _mm512_loadu_ps(st.m + hb * 16);
      __m512 sum = _mm512_setzero_ps(), sum1 = sum;
      for (int key = 0; key < b.n; key += 2) {
        const __m512 x = pow2(_mm512_sub_ps(_mm512_load_ps(s + key * 32), m));
        __m512 y = _mm512_setzero_ps();
        if (key + 1 < b.n) y = pow2(_mm512_sub_ps(_mm512_load_ps(s + key * 32 + 32), m));
        sum = _mm512_add_ps(sum, x);
        sum1 = _mm512_add_ps(sum1, y);
        E::template store_p<R>(b, hb, key, {x, y});
      }
      sum = _mm512_add_ps(_mm512_loadu_ps(st.l + hb * 16), _mm512_add_ps(sum, sum1));
      _mm512_storeu_ps(st.l + hb * 16, sum);
      // A weight above a quarter of the sum so far: its rounding would show in the output.
      if constexpr (E::kPairs) {
        const __m512 largest = pow2(_mm512_sub_ps(top, m));
        const __mmask16 heavy =
            _mm512_cmp_ps_mask(largest, _mm512_mul_ps(sum, splat(0.25f)), _CMP_GT_OQ);
        if (heavy) E::template count_rounding<R>(b, hb, s, heavy);
      }
    }
  }

  // O of NH heads and 64 dims += P . V; o points to the first head, rows kORow apart.
  struct ValueTile {
    const uint32_t *p, *v;
    float* o;
    const float* factor;  // null: O is not rescaled
    int steps;
    bool first;
  };
  // What v has: pairs of keys; rows of keys, of which each two are interleaved here; or rows of two
  // keys whose cells stand in turn.
  enum class Values { kPairs, kRows, kRowPairs };
  template <int NH, int kVStep, Values kFrom>
  WINNOW_INLINE static void value_tile(const ValueTile& t) {
    __m512 acc[NH][4];
#pragma GCC unroll 6
    for (int h = 0; h < NH; ++h)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        acc[h][j] = t.first ? _mm512_setzero_ps() : _mm512_load_ps(t.o + h * kORow + j * 16);
    if (t.factor)
#pragma GCC unroll 6
      for (int h = 0; h < NH; ++h)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[h][j] = _mm512_mul_ps(acc[h][j], splat(t.factor[h]));
#pragma GCC unroll 2
    for (int c = 0; c < t.steps; ++c) {
      __m512i x[4];
      const uint32_t* v = t.v + c * kVStep;
      if constexpr (kFrom == Values::kRowPairs) {
        const __m512i order = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
          x[j] = _mm512_shuffle_epi8(_mm512_load_si512(v + j * 16), order);
      } else if constexpr (kFrom == Values::kRows) {
        const __m512i first[2] = {_mm512_load_si512(v), _mm512_load_si512(v + 16)};
        v += kVStep / 2;
        const __m512i second[2] = {_mm512_load_si512(v), _mm512_load_si512(v + 16)};
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          x[2 * j] = _mm512_unpacklo_epi16(first[j], second[j]);
          x[2 * j + 1] = _mm512_unpackhi_epi16(first[j], second[j]);
        }
      } else {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) x[j] = _mm512_load_si512(v + j * 16);
      }
#pragma GCC unroll 6
      for (int h = 0; h < NH; ++h) {
        const __m512i y = splat(static_cast<int>(t.p[c * 16 + h]));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[h][j] = E::dot(acc[h][j], y, x[j]);
      }
    }
#pragma GCC unroll 6
    for (int h = 0; h < NH; ++h)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) _mm512_store_ps(t.o + h * kORow + j * 16, acc[h][j]);
  }

  // Up to 16 heads in tiles of at most 6, as even as possible: 16 = 6 + 5 + 5.
  template <int kVStep, Values kFrom>
  static void value_heads(ValueTile t, int heads) {
    for (int left = heads, take; left > 0; left -= take) {
      const int tiles = ceil_div(left, 6);
      switch (take = ceil_div(left, tiles)) {
        case 6: value_tile<6, kVStep, kFrom>(t); break;
        case 5: value_tile<5, kVStep, kFrom>(t); break;
        case 4: value_tile<4, kVStep, kFrom>(t); break;
        case 3: value_tile<3, kVStep, kFrom>(t); break;
        case 2: value_tile<2, kVStep, kFrom>(t); break;
        default: value_tile<1, kVStep, kFrom>(t); break;
      }
      t.p += take;
      t.o += take * kORow;
      if (t.factor) t.factor += take;
    }
  }

  template <class R>
  static void values(const Block<E>& b) {
    if constexpr (E::kPairs) {
      if (b.key_pairs) return values_as<R, Values::kRowPairs>(b);
      if (b.from_rows) return values_as<R, Values::kRows>(b);
    }
    values_as<R, Values::kPairs>(b);
  }
  template <class R, Values kFrom>
  static void values_as(const Block<E>& b) {
    const int blocks = head_blocks(b.heads);
    constexpr int kVStep = E::kPairs && kFrom == Values::kPairs ? 64 : kPanel;
    constexpr bool kScaled = E::kScaleInP && kFloatScales<R>;
    for (int g = 0; g < kValueDim / 64; ++g) {
      const uint32_t* v = kFrom == Values::kRowPairs ? b.m.k + Panels<R, E>::pair(0, g)
                          : E::kPairs && kFrom == Values::kPairs
                              ? b.m.v + g * kPairGroup<E>
                              : b.m.k + Panels<R, E>::group(0, g);
      for (int hb = 0; hb < blocks; ++hb) {
        const int64_t plane = (kScaled ? g / 2 : 0) * blocks + hb;
        value_heads<kVStep, kFrom>(
            {b.m.p + plane * (E::kBlock / E::kPer) * 16, v, b.o + hb * 16 * kORow + g * 64,
             b.rescale >> hb & 1 ? b.m.state->factor + hb * 16 : nullptr, ceil_div(b.n, E::kPer),
             b.first},
            std::min(16, b.heads - hb * 16));
      }
    }
  }
};

}  // namespace
}  // namespace winnow::internal::attend::cpu
