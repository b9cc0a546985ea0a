// The rows that tokens attend to, as bits in shared memory: what attend_mha's kernels on Hopper
// know of ids, mask and bits. A warp builds those of its tokens.
#pragma once

#include <cuda_runtime.h>

#include "mha/kernel.h"

namespace winnow::internal::mha::sm90 {

struct Window {
  int64_t base;  // the first row, 0 or more
  int words;     // of 32 rows each
};

// Ids whose rows lie in a window. An id is compared as an unsigned number, which a negative one
// has above all of them.
struct Ids {
  uint32_t first, count;
  int32_t row;  // of the first one, from the window's base on
};
__device__ inline Ids ids_in(const Params& p, int64_t t, const Window& window) {
  const int64_t start = start_of(p, t);
  const int64_t first = max(window.base - start, int64_t{0});
  int64_t last = min(window.base + 32 * window.words, p.rows) - start;
  if (p.lengths) last = min(last, int64_t{p.lengths[t * p.length_stride]});
  last = min(last, int64_t{1} << 31);
  if (first >= last) return {0, 0, 0};
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(last - first),
          static_cast<int32_t>(start + first - window.base)};
}

// 1 << n, and 0 where n is 32 or more.
__device__ __forceinline__ uint32_t bit(uint32_t n) {
  uint32_t x;
  asm("shl.b32 %0,1,%1;" : "=r"(x) : "r"(n));
  return x;
}

// Sets the bits of four ids. Lists often ascend: four then mostly lie within two words, which are
// changed once. About 14 instructions an id.
__device__ __forceinline__ void set_four(const Ids& in, const int4& ids, uint32_t* words) {
  const int32_t id[4] = {ids.x, ids.y, ids.z, ids.w};
  int32_t row[4];  // -1: not here, which is above all others as an unsigned number
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t n = static_cast<uint32_t>(id[i]) - in.first;
    row[i] = n < in.count ? static_cast<int32_t>(n + in.row) : -1;
  }
  const auto low = [](int32_t a, int32_t b) {
    return min(static_cast<uint32_t>(a), static_cast<uint32_t>(b));
  };
  const uint32_t least = min(low(row[0], row[1]), low(row[2], row[3])), base = least & ~31u;
  const int32_t most = max(max(row[0], row[1]), max(row[2], row[3]));
  if (most < 0) return;
  uint32_t* at = words + base / 32;
  if (most - base < 64) {
    uint32_t first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      first |= bit(row[i] - base);
      second |= bit(row[i] - base - 32);
    }
    atomicOr(at, first);
    if (second != 0) atomicOr(at + 1, second);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t r = row[i] < 0 ? least : row[i];
      atomicOr(words + r / 32, bit(r % 32));
    }
  }
}

// A warp's tokens, 32 at most, and where their bits are.
struct Tokens {
  int64_t first;
  int count;
  uint32_t* words;
  int pitch;  // words from one token's to the next one's
};

__device__ __forceinline__ Ids ids_of(const Ids& mine, int token) {  // that lane's
  return {__shfl_sync(~0u, mine.first, token), __shfl_sync(~0u, mine.count, token),
          __shfl_sync(~0u, mine.row, token)};
}

// The listed ids of a warp's tokens, by fours where they lie so. 1,024 are on their way while those
// before them are set: a warp that waited for each token's would take a microsecond for each.
__device__ inline void set_listed(const Params& p, const Tokens& tokens, const Ids& mine) {
  constexpr int kAhead = 8;
  const int lane = threadIdx.x % 32;
  const bool fours = reinterpret_cast<uintptr_t>(p.ids) % 16 == 0 && p.id_stride % 4 == 0;
  const int vectors = fours ? static_cast<int>(min(p.topk / 4, int64_t{1} << 28)) : 0;
  // Tokens after the last have no ids to load.
  const int count = static_cast<int>(min(p.tokens - tokens.first, int64_t{tokens.count}));
  const int32_t* ids = p.ids + tokens.first * p.id_stride;
  if (vectors > 0) {
    const auto* from = reinterpret_cast<const int4*>(ids) + lane;
    int4 x[kAhead], next[kAhead];
    const auto load = [&](int4(&to)[kAhead], int left) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        to[i] = 32 * i < left ? __ldg(from + 32 * i) : int4{-1, -1, -1, -1};
    };
    load(x, count > 0 ? vectors - lane : 0);
    int left = vectors - lane;  // of this token, from this lane's first on
    uint32_t* words = tokens.words;
#pragma unroll 1
    for (int token = 0; token < count;) {
      const Ids in = ids_of(mine, token);
      uint32_t* const at = words;
      left -= 32 * kAhead;
      from += 32 * kAhead;
      if (left + lane <= 0) {  // the next token's
        from += p.id_stride / 4 - (vectors - lane - left);
        left = vectors - lane;
        ++token;
        words += tokens.pitch;
      }
      load(next, token < count ? left : 0);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        set_four(in, x[i], at);
        x[i] = next[i];
      }
    }
  }
#pragma unroll 1
  for (int token = 0; token < count && int64_t{4} * vectors < p.topk; ++token) {
    const Ids in = ids_of(mine, token);
#pragma unroll 4
    for (int64_t i = int64_t{4} * vectors + lane; i < p.topk; i += 32) {
      const uint32_t n = static_cast<uint32_t>(__ldg(ids + token * p.id_stride + i)) - in.first;
      const uint32_t row = n + in.row;
      if (n < in.count) atomicOr(tokens.words + token * tokens.pitch + row / 32, bit(row % 32));
    }
  }
}

// A token's bits of the 64 ids from `id` on, byte by byte; any value for ids below 0.
__device__ inline uint64_t bits_of(const Params& p, int64_t t, int64_t id) {
  const uint8_t* bits = p.bits + t * p.bits_stride;
  const int64_t first = id >> 3, bytes = p.bits_width;  // rounded down, also below 0
  uint64_t low = 0;
  for (int i = 0; i < 8; i++)
    if (first + i >= 0 && first + i < bytes) low |= uint64_t{bits[first + i]} << 8 * i;
  const int shift = static_cast<int>(id & 7);
  if (shift == 0) return low;
  const uint64_t high = first + 8 >= 0 && first + 8 < bytes ? bits[first + 8] : 0;
  return low >> shift | high << (64 - shift);
}

// Bytes of a word that are not 0, as four bits.
__device__ __forceinline__ uint32_t not_zero(uint32_t x) {
  const uint32_t ones = (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) >> 7 & 0x01010101u;
  return ones * 0x10204080u >> 28;
}

// Of the 32 ids from `id` on, those in `set`, all of them 0 or more, that the mask lets count.
__device__ inline uint32_t masked(const Params& p, int64_t t, int64_t id, uint32_t set) {
  const uint8_t* mask = p.mask + t * p.mask_stride + id;
  uint32_t bits = 0;
  if (reinterpret_cast<uintptr_t>(mask) % 16 == 0 && id >= 0 && id + 32 <= p.mask_width) {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(mask));
    const uint4 b = __ldg(reinterpret_cast<const uint4*>(mask) + 1);
    const uint32_t x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= not_zero(x[i]) << 4 * i;
  } else {
    const int64_t end = p.mask_width - id;
#pragma unroll 8
    for (int i = 0; i < 32; ++i)
      if (set >> i & 1 && i < end && __ldg(mask + i) != 0) bits |= 1u << i;
  }
  return set & bits;
}

// The rows of a window that tokens attend to; none for those after the last. A warp calls it, and
// sees all of the bits when it returns.
__device__ inline void set_bits(const Params& p, const Tokens& tokens, const Window& window) {
  const int lane = threadIdx.x % 32;
  const int64_t own = tokens.first + lane;  // a lane looks up a token's range
  const Ids mine = lane < tokens.count && own < p.tokens ? ids_in(p, own, window) : Ids{0, 0, 0};
  const auto each = [&](auto change) {
#pragma unroll 1
    for (int token = 0; token < tokens.count; ++token) {
      const Ids in = ids_of(mine, token);
      for (int w = lane; w < window.words; w += 32)
        change(in, tokens.first + token, w, tokens.words[token * tokens.pitch + w]);
    }
    __syncwarp();
  };
  each([&](const Ids& in, int64_t, int w, uint32_t& word) {
    const int64_t end = p.ids ? 0 : int64_t{in.row} + in.count;
    const int64_t from = max(in.row - 32 * w, 0), to = min(end - 32 * w, int64_t{32});
    word = from >= to ? 0 : ~0u >> (32 - (to - from)) << from;
  });
  if (p.ids && __any_sync(~0u, mine.count > 0)) {
    set_listed(p, tokens, mine);
    __syncwarp();
  }
  if (!p.mask && !p.bits && !p.bias) return;
  each([&](const Ids& in, int64_t t, int w, uint32_t& word) {
    uint32_t set = word;
    const int64_t id = int64_t{in.first} + 32 * w - in.row;
    if (set != 0 && p.mask) set = masked(p, t, id, set);
    if (set != 0 && p.bits) set &= static_cast<uint32_t>(bits_of(p, t, id));
    for (uint32_t rest = p.bias ? set : 0; rest != 0; rest &= rest - 1) {
      const int i = __ffs(rest) - 1;
      if (row_of(p, t, id + i) < 0) set &= ~(1u << i);
    }
    word = set;
  });
}

}  // namespace winnow::internal::mha::sm90
