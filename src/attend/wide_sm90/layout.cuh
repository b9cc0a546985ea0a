// Wide attention on Hopper: what its parts share (shared memory, barriers, work items, arguments).
//
// A CTA takes one token and 64 heads; a token's rows come in blocks of 64, K as bf16 in shared
// memory once, for both products. Blocks go in pairs: block a (even) into buffer 0, scored by
// warpgroup 0; block b (odd) into buffer 1, scored by warpgroup 1. Warpgroup 0 weighs columns
// 0..255 of both, warpgroup 1 columns 256..511.
#pragma once

#include "attend/device_params.h"
#include "cuda/hopper.h"
#include "model/v32.h"
#include "model/v4.h"

namespace winnow::internal::attend::wide_sm90 {

using namespace internal::cuda;

constexpr int kHeads = 64, kBlock = 64;
constexpr int kTileBytes = kBlock * 128;  // [64 rows x 64 columns] bf16, 128-byte swizzle
constexpr int kConsumers = 256;
constexpr int kSweepBlocks = 32, kSweepRows = 131072;  // see sweep.cuh

// Where 16-byte chunk c (0..7) of row r lies in a tile.
__device__ __forceinline__ uint32_t chunk(int r, int c) { return r * 128 + ((c ^ (r & 7)) << 4); }

// Family: V32 (9 tiles, the ninth is RoPE and no part of V) or V4 (8 tiles, all V).
template <class Family>
struct Shape {
  static constexpr int kTiles = Family::kDqk / 64, kValueTiles = Family::kDv / 64;
  static constexpr bool kTail = kTiles > kValueTiles;  // a tile that only the scores need
};

// Half 0 of a buffer: tiles 0..3, which warpgroup 0 weighs; half 1: tiles 4..7, which warpgroup 1
// weighs. P of a block for the other warpgroup lies over the tail tile when there is one, so that
// tile goes with the half of the warpgroup that reads P there: half 1 of buffer 0, half 0 of
// buffer 1.
__host__ __device__ constexpr bool tail_with(int buffer, int half) { return half != buffer; }

// Indices of a copying warp's rows of an item, in the order of sweep.cuh.
struct Sorted {
  uint16_t low[kSweepBlocks * 16];  // their low halves
  // Bits 0..9: ranks before positions cross 65,536; 10..19: ranks in all; 20: upwards. -1: nothing
  // is sorted.
  int about;
};

template <class Family>
struct alignas(1024) Smem {
  using S = Shape<Family>;
  uint8_t q[S::kTiles][kTileBytes];
  uint8_t k[2][S::kTiles][kTileBytes];
  uint8_t p[S::kTail ? 1 : 2][S::kTail ? 16 : kTileBytes];  // see p_tile()
  uint2 valid[2];       // a bit for each row of the buffer's block: it takes part
  float m[2][kHeads];   // reference of a buffer's block, log2 units
  Sorted sorted[4][2];  // of each copying warp: the item at hand and the next
  float sum[2][2][kHeads], top[2][2][kHeads];  // [item parity][warpgroup][head]
  // full: rows of a half (and, with half 0, `valid`) are there; arrivals as the producer says.
  // empty, for each 16 rows of a half: 4 arrivals, a warp each of the warpgroup that weighs it.
  // p_full and scored (its products have left the tensor core): 4 arrivals of the scoring
  // warpgroup. q_empty: 8, every consumer warp.
  // q_full: every copying thread, and the one that says how many blocks the item has.
  uint64_t full[2][2], empty[2][2][4], p_full[2], scored[2], q_full, q_empty;
  int blocks;
};

template <class Family>
__device__ __forceinline__ uint8_t* p_tile(Smem<Family>& sm, int buffer) {
  if constexpr (Shape<Family>::kTail) return sm.k[buffer][Shape<Family>::kValueTiles];
  else return sm.p[buffer];
}

// What a producer is (Rows<Record>; rows_*.cuh): Family; kThreads (128 or 256) and kRegs
// of its warpgroups; arrivals(half) on a `full` barrier; produce(sm, args), run by all its threads
// (t = threadIdx.x - kConsumers): for every item wait for q_empty, begin(), then for every block
// and half: wait for `empty` of the rows at hand (phases start at 1: the first wait passes; a tail
// tile goes with the last rows), write rows (invalid ones as zeros, without reading), arrive on
// `full`. Rows that are stored, not copied asynchronously, need fence_async() before.

struct Args : Call {  // groups of 64 heads: 1 or 2
  int items;          // tokens * groups
};

// One item of work: a token and 64 heads; positions n0.. belong to list 1.
struct Work {
  int token, head0, n0, end, blocks;
  int turn = 0;  // alternates between a consumer's items
};

// Items of a CTA: blockIdx.x, blockIdx.x + gridDim.x, ... below p.items. Consumers and producers
// walk the same sequence: per item Q once, then its blocks, as many as the producer says (trim());
// block i goes to buffer i & 1, half 0 before half 1.
__device__ __forceinline__ Work work_at(const Args& p, int item) {
  Work w;
  w.token = item >> (p.groups - 1);
  w.head0 = (item - w.token * p.groups) * kHeads;
  w.n0 = columns(p.lists[0], w.token);
  w.end = w.n0 + (p.list_count > 1 ? columns(p.lists[1], w.token) : 0);
  w.blocks = (w.end + kBlock - 1) / kBlock;
  return w;
}

// The entry of position `pos` of a token: -1 outside, else the index as given.
__device__ __forceinline__ int index_at(const Args& p, const Work& w, int pos, int& list) {
  list = pos >= w.n0;
  if (pos >= w.end) return -1;
  const ListView& l = p.lists[list];
  return __ldg(l.indices + (int64_t)w.token * l.index_stride + (pos - (list ? w.n0 : 0)));
}

// Leaves out what stands behind the last index that is one, where there is one list and no lengths.
// For a whole warp; `last`: the last.
__device__ __forceinline__ void trim(const Args& p, Work& w, int last) {
  const ListView& list = p.lists[0];
  if (__builtin_expect(last >= 0 || p.list_count > 1 || list.lengths != nullptr, 1)) return;
  w.end = up_to_last(list.indices + w.token * list.index_stride, w.end, threadIdx.x & 31);
  w.blocks = (w.end + kBlock - 1) / kBlock;
}

__device__ __forceinline__ int request_of(const Args& p, const Work& w) {
  return p.requests ? __ldg(p.requests + (int64_t)w.token * p.request_stride) : 0;
}

// `pair`: memory brings 256 bytes to the L2 at once, the other 128 being of the same row.
template <bool kPair>
__device__ __forceinline__ void copy16(uint32_t dst, const void* src) {
  if constexpr (kPair)
    asm volatile("cp.async.cg.shared.global.L2::256B [%0],[%1],16;" ::"r"(dst), "l"(src)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" ::"r"(dst), "l"(src)
                 : "memory");
}
// For what is read once: first to leave the L2, where rows are read again.
__device__ __forceinline__ void copy16_or_zero(uint32_t dst, const void* src, bool there) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0],[%1],16,%2,%3;" ::"r"(dst),
               "l"(src), "r"(there ? 16 : 0), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void copies_arrive(
    uint64_t* b) {  // once this thread's copies have landed
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(s32(b)) : "memory");
}

// An item's block count and Q, by all producer threads (thread t of n); every one arrives once on
// q_full, the first twice. A warp copies four heads' rows of a tile at once; heads past the last
// become zeros.
template <class Family>
__device__ __forceinline__ void begin(Smem<Family>& sm, const Args& p, const Work& w, int t,
                                      int n) {
  constexpr int kTiles = Shape<Family>::kTiles, kNope = Family::kNope / 64;
  const int c = t & 7;
  if (t == 0) {
    sm.blocks = w.blocks;
    mb_arrive(&sm.q_full);
  }
#pragma unroll
  for (int h = t / 8; h < kHeads; h += n / 8) {
    const bool there = w.head0 + h < p.heads;
    const int64_t head = there ? w.head0 + h : 0;
    const bf16* nope = p.q + w.token * p.q_token + head * p.q_head + c * 8;
    const bf16* rope = p.q_rope + w.token * p.qr_token + head * p.qr_head + c * 8;
    const uint32_t to = s32(sm.q) + chunk(h, c);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++)
      copy16_or_zero(to + tile * kTileBytes,
                     tile < kNope ? nope + tile * 64 : rope + (tile - kNope) * 64, there);
  }
  copies_arrive(&sm.q_full);
}

}  // namespace winnow::internal::attend::wide_sm90
