// The block loop that the AVX-512 and AMX kernels share; an engine says how to multiply.
//
// The keys of a tile are taken in blocks of E::kBlock: gathered, dequantised and packed once for
// all heads, then for every two blocks of 16 heads scores and softmax, then the values. A vector of
// scores holds one key for 16 heads, so the softmax needs no reduction across lanes.
//
// Engine: kPer (values in a cell of 4 bytes), kBlock, kValueStep (keys), kPairs (values packed as
// pairs of keys), kScaleInP (fp32 scales multiply P, not V), kTiled (AMX tiles: layout of
// K and V, memory in whole pages, O in tiles of its own until the end), kWaiting (keys whose P is
// kept), Session, store_q(to, cell, pairs of 16 heads), attend<R>(block, keys, fetch),
// finish(block) after the last one, score_steps<R>, output(block, head, o), narrow(params).
#pragma once

#include <cstring>

#include "attend/cpu/kernels.h"
#include "attend/cpu/x86_keys.h"
#include "attend/cpu/x86_softmax.h"
#include "core/arena.h"
#include "core/arithmetic.h"

namespace winnow::internal::attend::cpu {
namespace {

inline constexpr int kORow = sizeof(Partial) / sizeof(float);  // from a head's O to the next

inline int head_blocks(int heads) { return ceil_div(heads, 16); }

// A worker's memory: with its part of the result about 0.9 MB at 128 heads, meant to stay in L2.
template <class E>
struct Scratch {
  uint32_t *q, *k, *v, *p;
  float *s, *sums, *scales, *o;
  State* state;
  KeyRef* keys;  // two blocks

  Scratch(Arena arena, int heads) {
    const size_t rows = static_cast<size_t>(head_blocks(heads)) * 16;
    q = cells(arena, rows / 16 * Panels<V32Bf16, E>::kQuery);
    k = cells(arena, Panels<V32Bf16, E>::kTotal);
    v = cells(arena, E::kPairs ? kPairTotal<E> : 0);
    p = cells(arena, rows * (E::kWaiting / E::kPer) * (E::kScaleInP ? 4 : 1));
    s = floats(arena, size_t{E::kBlock} * 32);
    sums = floats(arena, E::kTiled ? 5 * kPageCells : 0);
    o = floats(arena, E::kTiled ? rows * kValueDim : 0);
    scales = arena.take<float>(size_t{E::kBlock} * 4);
    state = arena.take<State>(1);
    keys = arena.take<KeyRef>(size_t{2} * E::kBlock);
    bytes = arena.bytes();
  }
  size_t bytes;

 private:
  // Whole pages for tiles: none of them lies in two.
  static uint32_t* cells(Arena& arena, size_t count) {
    if (!E::kTiled) return arena.take<uint32_t>(count);
    uint32_t* p = arena.take<uint32_t>(count + kPageCells);
    const size_t behind = reinterpret_cast<uintptr_t>(p) / sizeof(uint32_t) % kPageCells;
    return behind == 0 ? p : p + (kPageCells - behind);
  }
  static float* floats(Arena& arena, size_t count) {
    return reinterpret_cast<float*>(cells(arena, count));
  }
};

// What the engine sees of a block.
template <class E>
struct Block {
  const Scratch<E>& m;
  float* o;
  int heads, n;
  float scale2;            // softmax scale * log2(e)
  bool first;              // O holds nothing yet
  unsigned rescale;        // bit per 16 heads: O must be multiplied by state->factor first
  int begin = 0, end = 0;  // tiled: steps of 32 keys packed in v and p whose values are not added
  bool narrow = false;     // tiled: values straight from the rows of k
  bool near = false;       // vectors: records are fetched to L1
  bool from_rows = false;  // vectors: pairs of keys are not stored but made from the rows of k
  bool key_pairs = false;  // vectors, at most 8 heads: two keys share a vector of scores
};

// Q as [16-head block][dim cells][16 heads], dims in the engine's order, missing heads 0. `first`:
// the first block's records, fetched meanwhile: 3 % of a token on sixteen threads. `twice`: every
// head of eight in two lanes.
template <class E, class R>
void pack_q(const Params& p, int64_t token, uint32_t* block, std::span<const KeyRef> first,
            bool twice) {
  const bf16* nope = p.q + token * p.q_token_stride;
  const bf16* rope = p.q_rope + token * p.rope_token_stride;
  const int blocks = head_blocks(p.heads);
  const bool near = !E::kTiled && fetch_near();
  Prefetcher<R> fetch(first, blocks * (R::kDqk / 64), near);
  // Before the records, which would be in front of it for all the time that they take.
  const auto fetch_query = [&](int hb) {
    for (int h = hb * 16; h < std::min(hb * 16 + 16, p.heads); ++h)
      for (int i = 0; i < R::kDqk; i += 32)
        _mm_prefetch(i < R::kNope ? nope + h * p.q_head_stride + i
                                  : rope + h * p.rope_head_stride + i - R::kNope,
                     _MM_HINT_T0);
  };
  if (near) fetch_query(0);
  for (int hb = 0; hb < blocks; ++hb, block += Panels<R, E>::kQuery) {
    uint32_t* to = block;
    if (near) fetch_query(hb + 1);
    for (int g = 0; g < R::kDqk / 64; ++g, to += 64 / E::kPer * 16) {
      fetch.step();
      __m512i a[16], b[16];
      for (int i = 0; i < 16; ++i) {
        a[i] = b[i] = _mm512_setzero_si512();
        const int h = hb * 16 + (!E::kTiled && twice ? i / 2 : i);
        if (h >= p.heads) continue;
        const bf16* from = g * 64 < R::kNope ? nope + h * p.q_head_stride + g * 64
                                             : rope + h * p.rope_head_stride + g * 64 - R::kNope;
        const __m512i x = _mm512_loadu_si512(from), y = _mm512_loadu_si512(from + 32);
        a[i] = E::kPairs ? _mm512_shuffle_i64x2(x, y, 0x88) : x;
        b[i] = E::kPairs ? _mm512_shuffle_i64x2(x, y, 0xdd) : y;
      }
      transpose(a);
      transpose(b);
      for (int i = 0; i < 16; ++i) {
        E::store_q(to, i, a[i]);
        E::store_q(to, 16 + i, b[i]);
      }
    }
  }
}

// One block of n keys of one format. `ahead`: the records of the next block, to be fetched
// meanwhile.
template <class E, class R>
void attend_block(Block<E>& b, const KeyRef* keys, std::span<const KeyRef> ahead) {
  const int blocks = head_blocks(b.heads);
  Prefetcher<R> fetch(ahead, E::template score_steps<R>(blocks, b.n), b.near);
  E::template attend<R>(b, keys, fetch);
}

// Addresses of the first block of a tile; how many there are.
template <class E>
size_t first_keys(const Params& p, const TileJob& job, const Tile& tile, KeyRef* to) {
  Cursor cursor(p, {tile.token, tile.begin, tile.end, false, nullptr, job.ready});
  return static_cast<size_t>(next_keys(p, cursor, {to, E::kBlock}).count);
}

// All keys of a tile.
template <class E>
void attend_keys(const Params& p, const TileJob& job, Block<E>& b) {
  Cursor cursor(p, job);
  KeyRef *keys = b.m.keys, *ahead = keys + E::kBlock;
  KeyBlock block = next_keys(p, cursor, {keys, E::kBlock});
  if (job.new_query)
    with_latent(p.lists[0].format, [&]<class R>(R) {
      pack_q<E, R>(p, job.token, b.m.q, {keys, static_cast<size_t>(block.count)}, b.key_pairs);
    });
  const bool mixed = p.list_count > 1 && p.lists[0].format != p.lists[1].format;
  while (block.count > 0) {
    const int count = block.count, cut = mixed ? block.cut : count;
    block = next_keys(p, cursor, {ahead, E::kBlock});
    // During the last block, the first records of what comes next: 1 % of a token.
    const size_t fetched = block.count == 0 && job.next ? first_keys<E>(p, job, *job.next, ahead)
                                                        : static_cast<size_t>(block.count);
    const auto run = [&](int list, int begin, int end) {
      if (begin == end) return;
      b.n = end - begin;
      with_latent(p.lists[list].format, [&]<class R>(R) {
        attend_block<E, R>(b, keys + begin, {ahead, fetched});
      });
    };
    run(0, 0, cut);
    run(1, cut, count);
    std::swap(keys, ahead);
  }
  E::finish(b);
}

// O of one head in memory order: lane i of vector j <-> lane j of vector i, per 64 dims. `from` has
// its vectors `step` floats apart; it may be `to` itself.
inline void restore_order(const float* from, int step, float* to) {
  for (int g = 0; g < kValueDim; g += 64, from += 4 * step, to += 64) {
    const __m512 x0 = _mm512_load_ps(from), x1 = _mm512_load_ps(from + step);
    const __m512 x2 = _mm512_load_ps(from + 2 * step), x3 = _mm512_load_ps(from + 3 * step);
    const __m512 a = _mm512_shuffle_f32x4(x0, x1, 0x88), b = _mm512_shuffle_f32x4(x0, x1, 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(x2, x3, 0x88), d = _mm512_shuffle_f32x4(x2, x3, 0xdd);
    _mm512_store_ps(to, _mm512_shuffle_f32x4(a, c, 0x88));
    _mm512_store_ps(to + 16, _mm512_shuffle_f32x4(b, d, 0x88));
    _mm512_store_ps(to + 32, _mm512_shuffle_f32x4(a, c, 0xdd));
    _mm512_store_ps(to + 48, _mm512_shuffle_f32x4(b, d, 0xdd));
  }
}

template <class E>
void attend_tile(const Params& p, const TileJob& job, std::byte* memory) noexcept {
  const Scratch<E> m(Arena({memory, SIZE_MAX / 2}), p.heads);
  [[maybe_unused]] const typename E::Session session;
  Block<E> b{m, job.parts->o, p.heads, 0, p.scale * kLog2e, true, 0};
  b.narrow = E::narrow(p);
  b.near = !E::kTiled && fetch_near();
  // Zen 5: 4 to 5 % of a token with 8 or 16 heads, a tenth with cold caches; 0 and 5 % with 128.
  b.from_rows = E::kPairs && b.near;
  b.key_pairs = b.from_rows && p.heads <= 8;
  attend_keys<E>(p, job, b);
  Partial one;  // tiles of O are put in order where they stay in L1
  for (int h = 0; h < p.heads; ++h) {
    Partial& part = E::kTiled ? one : job.parts[h];
    if (b.first) {  // no valid key
      std::memset(part.o, 0, sizeof(part.o));
      part.m = kFloor;
      part.l = part.w = 0;
      part.max = -kInf;
    } else {
      E::output(b, h, part.o);
      part.m = m.state->m[h] * kLn2;
      part.max = m.state->top[h] * kLn2;
      part.l = m.state->l[h];
      part.w = (E::kTiled ? m.state->w : m.state->l)[h];
    }
    job.ready(h, part);
  }
}

template <class E>
size_t scratch_bytes(int32_t heads) {
  return Scratch<E>(Arena(), heads).bytes;
}

template <class E>
constexpr TileKernel kTileKernel = {scratch_bytes<E>, attend_tile<E>, E::kPer == 2};

}  // namespace
}  // namespace winnow::internal::attend::cpu
