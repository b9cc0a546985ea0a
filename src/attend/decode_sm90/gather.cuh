// Decode on Hopper: the copies of the rows, and what is told of them.
#pragma once

#include <climits>

#include "attend/decode_sm90/exact.cuh"

namespace winnow::internal::attend::decode_sm90 {

__device__ __forceinline__ float ue8m0(uint32_t byte) {  // 2^(byte - 127), 255 is NaN
  return __uint_as_float(byte == 255 ? 0x7fc00000u : byte ? byte << 23 : 1u << 22);
}

// An fp8 record among bf16 rows (two lists of different formats): the warp makes the bf16 row.
template <class R>
__device__ __forceinline__ void convert_row(const std::byte* row, const std::byte* side,
                                            uint8_t* to) {
  using Q = typename R::Quantized;
  const int lane = thread_here() & 31;
  if (lane < Q::kNope / 16) {  // 16 values a lane
    const int tile = lane * 16 / Q::kTile;
    float scale;
    if constexpr (std::is_same_v<typename Q::Scale, float>) {
      scale = __ldg(reinterpret_cast<const float*>(side) + tile);
    } else {
      const uint32_t byte = __ldg(reinterpret_cast<const uint8_t*>(side) + tile);
      scale = ue8m0(byte);
    }
    const uint4 codes = __ldg(reinterpret_cast<const uint4*>(row) + lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t lo, hi;
      e4m3x4(i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w, lo, hi);
      *reinterpret_cast<uint2*>(to + lane * 32 + i * 8) =
          make_uint2(exact_pair(lo, scale, scale), exact_pair(hi, scale, scale));
    }
  }
  if (lane < Q::kRope / 8)
    reinterpret_cast<uint4*>(to + Q::kNope * 2)[lane] =
        __ldg(reinterpret_cast<const uint4*>(row + Q::rope(0, 1)) + lane);
}

// The index at position `pos` of the split's part of the lists, -1 where there is none, and its
// list.
__device__ __forceinline__ int index_at(const Args& p, const Span& sp, int pos, int& list) {
  list = pos >= sp.n0;
  if (pos >= sp.end) return -1;
  const ListView& L = p.lists[list];
  return __ldg(L.indices + (int64_t)sp.token * L.index_stride + (pos - (list ? sp.n0 : 0)));
}
// Which of the copying warps this is.
template <class C>
__device__ __forceinline__ int copy_warp() {
  return thread_here() / 32 & (C::kCopyWarps - 1);
}
// That of a copying warp's lane in the first two blocks: a stage a warp, or one of each, a row a
// lane.
template <class K, class C>
__device__ __forceinline__ int first_index(const Args& p, const Span& sp, int& list) {
  const int t = thread_here(), w = copy_warp<C>(),
            stage = C::kCopyWarps == 8 ? w : (t / 16 & 1) * 4 + w;
  return index_at(p, sp, sp.begin + stage * K::kRows + (t & 15), list);
}

struct Found : Place {
  int list;
};

// resolve() for slots, the common case: without a branch and with constants chosen instead of
// arguments at an index, since whatever this takes is taken from the copies.
__device__ __forceinline__ Place slot_of(const Args& p, int list, int index) {
  const ListView &first = p.lists[0], &second = p.lists[1];
  PageRows page;
  page.rows = list ? second.page.rows : first.page.rows;
  page.shift = list ? second.page.shift : first.page.shift;
  page.factor = list ? second.page.factor : first.page.factor;
  const int at = page.of(index);
  const bool there = index >= 0 && at < (list ? second.pages : first.pages);
  return {there ? at : -1, index - at * page.rows};
}
// resolve() of two entries, logical ids or slots beside them, whose pages are asked for together:
// one after the other they cost a call of 64 tokens 6 %.
struct Places {
  Place of[2];
};
__device__ __forceinline__ Places rows_of(const Args& p, int token, int list0, int index0,
                                          int list1, int index1) {
  const int list[2] = {list0, list1}, index[2] = {index0, index1};
  const int request = __ldg(p.requests + token * p.request_stride);
  int at[2], found[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const ListView& L = p.lists[list[k]];
    at[k] = found[k] = L.page.of(index[k]);
    if (L.block_table) {
      const bool there =
          index[k] >= 0 && at[k] < L.table_width && request >= 0 && request < L.table_rows;
      found[k] = there ? __ldg(L.block_table + request * L.table_stride + at[k]) : -1;
    }
  }
  Places to;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const ListView& L = p.lists[list[k]];
    const bool there = index[k] >= 0 && found[k] >= 0 && found[k] < L.pages;
    to.of[k] = {there ? found[k] : -1, index[k] - at[k] * L.page.rows};
  }
  return to;
}

// Rows of zeros, which entries without a token are copied from: nothing stale is multiplied, and a
// hole takes no longer than a row. One for two or three multiprocessors: they would wait for each
// other at the lines of a single one.
constexpr int kZeroRows = 64;
static __device__ uint4 zero_rows[kZeroRows][V32Bf16::kRowBytes / 16];
__device__ __forceinline__ const std::byte* zero_row() {
  unsigned here;
  asm("mov.u32 %0,%%smid;" : "=r"(here));
  return reinterpret_cast<const std::byte*>(zero_rows[here % kZeroRows]);
}

// The rows of a stage once it is free where some are missing (`src`, a lane's row, is null), far
// from each other, or not `copied`: these are bf16 rows of fp8 records, whose scales are at `side`.
// Called, so that it lies behind the code of every launch, and the address of the zeros, which is
// in no cache, is waited for here alone.
template <class R, int N>
__device__ __noinline__ void fill_apart(Smem<R, N>& sm, int slot, int ph, const std::byte* src,
                                        const std::byte* side, uint32_t copied) {
  const auto of = [](const std::byte* x, int r) {
    return __shfl_sync(~0u, reinterpret_cast<uint64_t>(x), r);
  };
  if (!src) src = zero_row();
  mb_wait(&sm.empty[slot], ph);
#pragma unroll 4
  for (int r = 0; r < 16; r++) {
    uint8_t* const to = sm.ring[slot] + r * Config<R, N>::kPitch;
    const uint64_t row = of(src, r);
    if (R::kFp8 || copied >> r & 1) {
      bulk_copy_one(s32(to), row, R::kRowBytes, s32(&sm.full[slot]));
    } else if constexpr (!R::kFp8) {
      convert_row<R>(reinterpret_cast<const std::byte*>(row),
                     reinterpret_cast<const std::byte*>(of(side, r)), to);
    }
  }
  if constexpr (!R::kFp8) fence_async();
}

// The copies of a stage once it is free, a row for each of the warp's lower lanes.
template <class R, int N>
__device__ __forceinline__ void fill(Smem<R, N>& sm, const Args& p, int slot, int ph, Found at) {
  using K = Config<R, N>;
  const int lane = thread_here() & 31;
  // The record's address, null when there is none; `side`: its scales', where the copy needs them.
  const std::byte *src = nullptr, *side = nullptr;
  if (at.page >= 0) {
    const ListView& L = p.lists[at.list];
    const std::byte* base = L.data + at.page * L.page_stride;
    src = base + R::Stored::row(at.offset, L.page);
    if constexpr (R::kSideBytes > 0) side = base + R::Stored::scales(at.offset, L.page);
    if constexpr (!R::kFp8) {
      using Q = typename R::Quantized;
      if (L.format == Q::kFormat) {
        side = base + Q::scales(at.offset, L.page);
        src = base + Q::row(at.offset, L.page);
      }
    }
  }
  const uint32_t valid = __ballot_sync(~0u, src != nullptr),
                 copied = R::kFp8 ? 0xffff : __ballot_sync(~0u, !side) & 0xffff;
  const uint32_t bar = s32(&sm.full[slot]);
  // each row's address is made the warp's: a lane that copies with its own takes 80 cycles a row.
  // Rows are told by their distance from the first one, in one word, where that is near enough.
  const uint64_t base = __shfl_sync(~0u, reinterpret_cast<uint64_t>(src), 0);
  const int64_t far = static_cast<int64_t>(reinterpret_cast<uint64_t>(src) - base) >> 4;
  const int off = static_cast<int>(far);
  const uint32_t near = __ballot_sync(~0u, src && far == off);
  if ((near & copied) == 0xffff) {
    uint64_t from[16];  // in uniform registers before the stage is free
    from[0] = base;
#pragma unroll
    for (int r = 1; r < 16; r++) from[r] = base + (int64_t)__shfl_sync(~0u, off, r) * 16;
    mb_wait(&sm.empty[slot], ph);
#pragma unroll
    for (int r = 0; r < 16; r++)
      bulk_copy_one(s32(sm.ring[slot]) + r * K::kPitch, from[r], R::kRowBytes, bar);
  } else {
    fill_apart<R, N>(sm, slot, ph, src, side, copied);
  }
  if constexpr (R::kSideBytes > 0) {
    if (src)
      asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(s32(sm.side[slot]) +
                                                                   (lane & 15) * R::kSideBytes),
                   "l"(side), "n"(R::kSideBytes)
                   : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
  }
  // each lane arrives after what it wrote itself, lane 0 for all where nobody wrote
  const bool apart = !R::kFp8 && copied != 0xffff;
  if (lane == 0) {
    sm.valid[slot] = valid;
    mb_expect(&sm.full[slot], __popc(copied) * R::kRowBytes);
    if (R::kSideBytes == 0 && !apart) mb_arrive(&sm.full[slot], 31);
  } else if (apart) {
    mb_arrive(&sm.full[slot]);
  }
}

// Blocks of a CTA's first token whose rows the copying warps look up themselves.
__device__ __forceinline__ int own_blocks(const Span& sp) { return min(sp.blocks, 2); }
// The first block of which the copying warps are told anything.
template <class C>
__device__ __forceinline__ int first_told(int own) {
  return C::kCopyWarps == 8 ? own : min(own, 1);
}
constexpr int kNoMore = -2;  // instead of a page: the CTA's last block lies before

// The copies of the rows, a stage of 16 rows a warp. Four warps share the first block, whose rows
// they look up themselves, with those of the second (`index`, `list`: a lane's). The fourth one
// tells the others of its part of the second and describes the first as soon as it is there, for
// which all wait; they go on where it has found the rows, with kMany from token to token. Looking
// all of them up here took half of the time of the copying warps, and with 128 heads everything
// waited for them. Eight warps share the first two blocks; then six go on.
template <class R, int N, Way W>
__device__ __forceinline__ void copy(Smem<R, N>& sm, const Args& p, const Span& sp, int index,
                                     int list) {
  using K = Config<R, N>;
  using C = Crew<R, N, W>;
  constexpr bool kMany = W == Way::kMany;
  const int tid = thread_here(), lane = tid & 31;
  constexpr bool kEight = C::kCopyWarps == 8;
  const int w = __shfl_sync(~0u, copy_warp<C>(), 0);  // uniform, and so is what comes of it
  const bool copier = w < C::kCopiers;
  const int own = kMany ? __shfl_sync(~0u, own_blocks(sp), 0) : 2;
  const Place first = C::kTables && by_table(p.lists)
                          ? rows_of(p, sp.token, list, index, 0, -1).of[0]
                          : slot_of(p, list, index);
  int slot = w, ph = 1, stage = w & 3, block = w / 4, turn = 0;
  int told = max(block - first_told<C>(own), 0);  // block - first_told(own) mod kAhead
  if (kMany && !copier && block >= own) return;
  if (!kEight && w == 3 && own == 2) {
    Place second = first;
    if (kMany) second.offset |= list << 31;
    if (lane >= 16) sm.place[0][3 * K::kRows + (lane & 15)] = second;
    mb_arrive(&sm.placed[0]);
  }
#pragma unroll 1
  while (kMany || block < sp.blocks) {
    const int row = stage * K::kRows + (lane & 15);
    const int here = (kEight ? 0 : block * 16) + (lane & 15);
    Place at;
    const bool mine = block < own && (kEight || block + stage < 4);
    if (mine) {
      at = {__shfl_sync(~0u, first.page, here), __shfl_sync(~0u, first.offset, here)};
    } else {
      mb_wait(&sm.placed[told], turn);
      at = sm.place[told][row];
      if (kMany && __all_sync(~0u, at.page == kNoMore)) return;
    }
    if (lane >= 16) at.page = -1;
    int of = sp.begin + block * K::kBlock + row >= sp.n0;
    if (kMany && !mine) {
      of = at.offset < 0;
      at.offset &= INT_MAX;
    }
    fill<R, N>(sm, p, slot, ph, {at, of});
    if (!copier) break;
    // the same stage of the second block, then every third stage; or from the third block on every
    // sixth
    const bool leap = kEight ? own == 2 && mine : mine && block == 0;
    const int step = leap ? C::kCopyWarps : C::kCopiers;
    slot += step;
    if (slot >= K::kStages) {
      slot -= K::kStages;
      ph ^= 1;
    }
    stage += step;
#pragma unroll
    for (int k = 0; k < C::kCopyWarps / 4; k++)
      if (stage >= 4) {
        stage -= 4;
        block++;
        if (block > first_told<C>(own) && ++told == K::kAhead) {
          told = 0;
          turn ^= 1;
        }
      }
  }
}

// Tells of the rows of a block that has arrived what the others need: lambda and the scales as
// fp16. A lane has two neighbouring rows of stage lane / 8, which lies at `slot`.
template <class R, int N>
__device__ __forceinline__ void describe(Smem<R, N>& sm, int slot) {
  using K = Config<R, N>;
  const int lane = thread_here() & 31, stage = lane >> 3, r = 2 * (lane & 7);
  const uint32_t valid = sm.valid[slot] >> r;
  int lam[2] = {0, 0};
  if constexpr (R::kFp8) {
    uint16_t* sc = &sm.sc[slot][0][scale_at(r)];
    auto put = [&](int k, uint32_t two) { *reinterpret_cast<uint32_t*>(sc + k * K::kRows) = two; };
    bool strange = false;
    if constexpr (R::kSideBytes == 0) {
      static_assert(R::kScales == 4);
      float x[2][4];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float4 a =
            *reinterpret_cast<const float4*>(sm.ring[slot] + (r + k) * K::kPitch + R::kScaleOffset);
        const float most = fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w))),
                    least = fminf(fminf(fabsf(a.x), fabsf(a.y)), fminf(fabsf(a.z), fabsf(a.w)));
        lam[k] = min(max((int)(__float_as_uint(most) >> 23) - 127 - 6, -60), 60);
        const float f = pow2i(-lam[k]);
        x[k][0] = a.x * f, x[k][1] = a.y * f, x[k][2] = a.z * f, x[k][3] = a.w * f;
        // none of them is, where neither end is
        if (!(least * f >= 0x1p-16f && most * f < 128.f))
          strange |= strange_scale(a.x, x[k][0]) | strange_scale(a.y, x[k][1]) |
                     strange_scale(a.z, x[k][2]) | strange_scale(a.w, x[k][3]);
      }
#pragma unroll
      for (int k = 0; k < 4; k++) put(k, pack<false>(x[0][k], x[1][k]));
    } else {
      static_assert(R::kSideBytes == 8 && R::kScales == 7);
      uint4 a = *reinterpret_cast<const uint4*>(sm.side[slot] + r * 8);
      __syncwarp();  // the fourth scales are written over them
      if (!(valid & 1)) a.x = a.y = 0;
      if (!(valid & 2)) a.z = a.w = 0;
      auto lambda = [](uint32_t lo, uint32_t hi) {
        uint32_t most = __vmaxu4(lo, hi & 0x00ffffff);
        most = __vmaxu4(most, most >> 16);
        return min(max((int)max(most & 0xff, (most >> 8) & 0xff) - 127 - 7, -60), 60);
      };
      lam[0] = lambda(a.x, a.y);
      lam[1] = lambda(a.z, a.w);
      auto scale = [](uint32_t word, int k, int lam) {
        const int byte = (word >> (8 * (k & 3))) & 0xff;
        return byte == 255 ? NAN : pow2i(max(byte - 127 - lam, -126));
      };
#pragma unroll
      for (int k = 0; k < 7; k++) {
        const float x = scale(k < 4 ? a.x : a.y, k, lam[0]),
                    y = scale(k < 4 ? a.z : a.w, k, lam[1]);
        put(k, pack<false>(x, y));
        // the fourth tile's again, for e4m3_b2, over the bytes that no one needs any more
        if (k == 3)
          *reinterpret_cast<uint32_t*>(sm.side[slot] + scale_at(r) * 2) =
              pack<true>(x * 0x1p120f, y * 0x1p120f);
      }
    }
    // the RoPE columns are bf16, and so is their factor
    put(R::kScales, (uint32_t)(127 - lam[0]) << 7 | (uint32_t)(127 - lam[1]) << 23);
    if constexpr (K::kExactly) {
      const uint32_t odd = __ballot_sync(~0u, strange);
      if (r == 0) sm.odd[slot] = (odd >> (8 * stage) & 0xff ? kOddRows : 0) | (odd ? kOddBlock : 0);
    }
  }
  *reinterpret_cast<float4*>(&sm.row[slot][r]) =
      make_float4(pow2i(lam[0]), valid & 1 ? (float)lam[0] : -INFINITY, pow2i(lam[1]),
                  valid & 2 ? (float)lam[1] : -INFINITY);
}

// What the last copying warp does then: describes block after block as they arrive, and finds the
// rows of the kAhead-th one behind it, with kMany of later tokens too. Of eight warps the last but
// one finds them, kAhead blocks at once.
template <class R, int N, Way W>
__device__ __forceinline__ void look_ahead(Smem<R, N>& sm, const Args& p, Span sp) {
  using K = Config<R, N>;
  using C = Crew<R, N, W>;
  constexpr bool kMany = W == Way::kMany;
  constexpr bool kApart = C::kCopyWarps == 8;
  const int lane = thread_here() & 31, own = kMany ? own_blocks(sp) : 2;
  int before = 0, total = sp.blocks;             // blocks of the tokens before sp's, and with it
  const auto position = [&](int block, int k) {  // of several tokens a CTA has all rows
    return (kMany ? 0 : sp.begin) + (block - before) * K::kBlock + lane + 32 * k;
  };
  const int32_t *first, *second;  // the token's lists, both by position
  const auto aim = [&] {
    first = p.lists[0].indices + sp.token * p.lists[0].index_stride;
    second = p.lists[1].indices + (sp.token * p.lists[1].index_stride - sp.n0);
  };
  aim();
  const auto load = [&](int block) {  // a lane's two indices
    if constexpr (kMany)
      while (block >= total && next_token<K>(p, sp)) before = total, total += sp.blocks, aim();
    const auto index = [&](int pos) {
      return pos < sp.end ? __ldg((pos < sp.n0 ? first : second) + pos) : -1;
    };
    return make_int2(index(position(block, 0)), index(position(block, 1)));
  };
  const auto tell = [&](int block, int2 x) {  // over what was known of the block that has arrived
    // of the end all copying warps are told, though one in six skips a block
    if (kMany ? block > total + kApart : block >= total) return;
    const unsigned at = (block - first_told<C>(own)) % unsigned{K::kAhead};
    const auto list = [&](int k) { return static_cast<int>(position(block, k) >= sp.n0); };
    const bool slots = !C::kTables || !by_table(p.lists);
    Places found;
    if (!slots) found = rows_of(p, sp.token, list(0), x.x, list(1), x.y);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      Place place = slots ? slot_of(p, list(k), k ? x.y : x.x) : found.of[k];
      if constexpr (kMany) {
        if (block >= total) place.page = kNoMore;
        place.offset |= list(k) << 31;
      }
      sm.place[at][lane + 32 * k] = place;
    }
    mb_arrive(&sm.placed[at]);
  };
  int slot = lane >> 3, ph = 0, found = own;
  const auto describe_next = [&](int i) {
    mb_wait_all(&sm.full[slot], ph);
    describe<R, N>(sm, slot);
    mb_arrive(&sm.ready[i % kReady]);
    slot += 4;
    if (slot >= K::kStages) {
      slot -= K::kStages;
      ph ^= 1;
    }
  };
  if (kApart && copy_warp<C>() == C::kCopyWarps - 1) {
#pragma unroll 1
    for (int i = 0;; i++) {
      if constexpr (kMany)
        while (i >= total && next_token<K>(p, sp)) total += sp.blocks;
      if (i >= total) return;
      describe_next(i);
    }
  }
  int2 next = load(own);
  if constexpr (kApart) {
#pragma unroll 1
    for (; found <= total + 1; next = load(++found)) {
      const int gone = found - K::kAhead;  // its places are free where its rows are there
      if (gone >= own) mb_wait(&sm.ready[gone % kReady], (gone / kReady) & 1);
      tell(found, next);
    }
  } else {
#pragma unroll 1
    for (int i = own > 0 ? 0 : -1; i < total; i++) {
      if (i >= 0) describe_next(i);
#pragma unroll 1
      do {
        tell(found, next);
        next = load(++found);
      } while (found <= i + K::kAhead);
    }
  }
}

}  // namespace winnow::internal::attend::decode_sm90
