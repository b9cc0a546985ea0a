// Wide attention on Hopper: what its parts share (shared memory, barriers, work items, arguments).
//
// An item of work is one token and 64 heads. A token's rows come in blocks of 64; K lies as bf16 in
// shared memory once, for both products. Blocks go in pairs: block a (even) into buffer 0, scored
// by warpgroup 0; block b (odd) into buffer 1, scored by warpgroup 1. Warpgroup 0 weighs columns
// 0..255 of both, warpgroup 1 columns 256..511.
//
// Words: a tile is 64 rows x 64 columns. A half of a buffer is the four tiles that one warpgroup
// weighs. The tail tile is V3.2's RoPE, which only the scores need. The reference is the number
// that is subtracted from a row's logits.
#pragma once

#include "attend/device_params.h"
#include "core/arithmetic.h"
#include "cuda/hopper.h"
#include "model/v32.h"
#include "model/v4.h"

namespace winnow::internal::attend::wide_sm90 {

using namespace internal::cuda;

constexpr int kHeads = 64, kBlock = 64;
// A tile of 64 rows x 64 columns as bf16, with a 128-byte swizzle.
constexpr int kTileBytes = kBlock * 128;
constexpr int kConsumers = 256;
// The most blocks of a list and the most positions of a cache whose rows are sorted (sweep.cuh).
constexpr int kSweepBlocks = 32, kSweepRows = 131072;

// The named barriers of a CTA. 0 is __syncthreads().
enum NamedBarrier : int {
  // The 128 threads of warpgroup 0, or of warpgroup 1, before P overwrites the tail tile that other
  // warps of the warpgroup may still read.
  kTailRead = 1,
  kTailReadSecond = 2,
  // Both consumer warpgroups (kConsumers), at the end of an item, when row sums are there.
  kSumsWritten = 3,
  // All threads, when the mbarriers are initialised: the consumers before anything else, the
  // producers when their first indices are requested.
  kInitialized = 4,
};
template <int kWarpgroup>
constexpr int kTailReadOf = kWarpgroup == 0 ? kTailRead : kTailReadSecond;

// Where 16-byte chunk `chunk` (0..7) of a row lies in a tile.
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Family: V32 (9 tiles, the ninth is RoPE and no part of V) or V4 (8 tiles, all V).
template <class Family>
struct TilesOf {
  static constexpr int kTiles = Family::kDqk / 64;
  static constexpr int kValueTiles = Family::kDv / 64;
  // Whether there is a tile that only the scores need.
  static constexpr bool kTail = kTiles > kValueTiles;
};

// Half 0 of a buffer: tiles 0..3, which warpgroup 0 weighs; half 1: tiles 4..7, which warpgroup 1
// weighs. If there is a tail tile, P of the block for the other warpgroup lies over it once the
// block is scored. So that tile is copied, and given back, with the half of the warpgroup that
// reads P there: half 1 of buffer 0, half 0 of buffer 1.
__host__ __device__ constexpr bool tail_with(int buffer, int half) { return half != buffer; }

// The indices of a copying warp's rows of an item, in the order of sweep.cuh.
struct Sorted {
  // Their low 16 bits.
  uint16_t low[kSweepBlocks * 16];
  // Bits 0..9: how many come before the index crosses 65,536, up or down; 10..19: how many there
  // are; 20: whether the order is upwards. -1: nothing is sorted.
  int summary;
};

template <class Family>
struct alignas(1024) Smem {
  using Tiles = TilesOf<Family>;
  uint8_t q[Tiles::kTiles][kTileBytes];
  uint8_t k[2][Tiles::kTiles][kTileBytes];
  // See p_tile().
  uint8_t p[Tiles::kTail ? 1 : 2][Tiles::kTail ? 16 : kTileBytes];
  // A bit for each row of the buffer's block: it has a token.
  uint2 valid[2];
  // The reference of a buffer's block, in log2 units.
  float reference[2][kHeads];
  // For each copying warp: the item at hand and the next. In kernels that do not sort, V3.2's
  // consumers store pieces of the output through this memory.
  Sorted sorted[4][2];
  // [item parity][warpgroup][head]
  float row_sum[2][2][kHeads];
  float max_logit[2][2][kHeads];
  // The mbarriers; BarrierTable has their arrivals. Indices: [buffer][half],
  // [buffer][half][16 rows], [buffer].
  uint64_t full[2][2];
  uint64_t empty[2][2][4];
  uint64_t p_full[2];
  uint64_t scored[2];
  uint64_t q_full;
  uint64_t q_empty;
  // Blocks of the item at hand.
  int blocks;
};

// Which barriers a row of the table stands for: all of a field, or those of one half.
enum class Barrier { kFull0, kFull1, kEmpty, kPFull, kScored, kQFull, kQEmpty };
struct BarrierGroup {
  Barrier barrier;
  // Arrivals that complete a phase, and whose.
  int arrivals;
  const char* who_arrives;
  const char* who_waits;
};
template <class Rows>
struct BarrierTable {
  static constexpr int kGroupCount = 7;
  static constexpr BarrierGroup kGroups[kGroupCount] = {
      {Barrier::kFull0, Rows::arrivals(0),
       "every copying thread when its rows of half 0 are there, and once a warp for `valid`",
       "the warpgroup that scores the buffer; both look whether rows are late"},
      {Barrier::kFull1, Rows::arrivals(1), "every copying thread when its rows of half 1 are there",
       "the warpgroup that scores the buffer; warpgroup 0 looks whether an item's first b is late"},
      {Barrier::kEmpty, 4, "each warp of the warpgroup that weighs the half, for each 16 rows",
       "the warp that copies the 16 rows; for the tail tile all"},
      {Barrier::kPFull, 4, "each warp of the scoring warpgroup", "the other warpgroup"},
      {Barrier::kScored, 4,
       "each warp of the scoring warpgroup when its products have left the tensor core",
       "the other warpgroup"},
      {Barrier::kQFull, Rows::kThreads + 1,
       "every copying thread, and the one that says how many blocks the item has",
       "the consumers; a CTA's first time the copying warps"},
      {Barrier::kQEmpty, 8, "each consumer warp after its last scores", "the copying warps"},
  };
  // A constant, since device code must not index the table, which is in the host's memory.
  template <Barrier kBarrier>
  static constexpr int kArrivals = kGroups[static_cast<int>(kBarrier)].arrivals;
  static constexpr bool in_order() {
    for (int i = 0; i < kGroupCount; i++)
      if (kGroups[i].barrier != static_cast<Barrier>(i)) return false;
    return true;
  }
};

template <class Family>
__device__ __forceinline__ uint8_t* p_tile(Smem<Family>& smem, int buffer) {
  if constexpr (TilesOf<Family>::kTail) return smem.k[buffer][TilesOf<Family>::kValueTiles];
  else return smem.p[buffer];
}

// What the kernel asks of a producer of rows, such as Rows<Record> in rows_bf16.cuh: Family;
// kSorts, whether it uses Smem::sorted; kThreads (128 or 256) and kRegisters of its warpgroups;
// arrivals(half) on a `full` barrier; touch(args), see there; produce(smem, args), which all its
// threads run (thread = threadIdx.x - kConsumers):
// 1. It meets the consumers at kInitialized before it uses an mbarrier.
// 2. For every item it waits for q_empty, calls copy_queries() and stores how many blocks there
//    are.
// 3. For every block and half it waits for `empty` of the rows at hand (phases start at 1: the
//    first wait passes; the tail tile is free with the last rows of its half), writes rows (invalid
//    ones as zeros, without reading), and arrives on `full`. Rows that are stored, not copied
//    asynchronously, need fence_async() before.

struct Args : DeviceParams {
  // tokens * groups, of 64 heads each: 1 or 2 groups.
  int items;
};

// One item of work: a token and 64 heads. Positions from first_list_end on belong to list 1.
struct Work {
  int token;
  int head_begin;
  int first_list_end;
  int end;
  int blocks;
  // Alternates between a consumer's items.
  int parity = 0;
};

// Items of a CTA: blockIdx.x, blockIdx.x + gridDim.x, ... below args.items. Consumers and producers
// walk the same sequence: for each item Q once, then its blocks, as many as the producer says
// (trim()); block i goes to buffer i & 1, half 0 before half 1.
__device__ __forceinline__ Work work_at(const Args& args, int item) {
  Work work;
  work.token = item >> (args.groups - 1);
  work.head_begin = (item - work.token * args.groups) * kHeads;
  work.first_list_end = columns(args.lists[0], work.token);
  work.end = work.first_list_end + (args.list_count > 1 ? columns(args.lists[1], work.token) : 0);
  work.blocks = ceil_div(work.end, kBlock);
  return work;
}

// The entry at a position of a token: -1 outside, else the index as given; and its list.
__device__ __forceinline__ int index_at(const Args& args, const Work& work, int position,
                                        int& list) {
  list = position >= work.first_list_end;
  if (position >= work.end) return -1;
  const ListView& view = args.lists[list];
  return __ldg(view.indices + (int64_t)work.token * view.index_stride +
               (position - (list ? work.first_list_end : 0)));
}

// Leaves out the invalid entries at the end, where there is one list and no lengths. For a whole
// warp; `last`: the last entry.
__device__ __forceinline__ void trim(const Args& args, Work& work, int last) {
  const ListView& list = args.lists[0];
  if (__builtin_expect(last >= 0 || args.list_count > 1 || list.lengths != nullptr, 1)) return;
  work.end = length_without_padding(list.indices + work.token * list.index_stride, work.end,
                                    threadIdx.x & 31);
  work.blocks = ceil_div(work.end, kBlock);
}

__device__ __forceinline__ int request_of(const Args& args, const Work& work) {
  return args.requests ? __ldg(args.requests + (int64_t)work.token * args.request_stride) : 0;
}

// kPair: memory brings 256 bytes to the L2 at once, the other 128 being of the same row.
template <bool kPair>
__device__ __forceinline__ void copy_16(uint32_t to, const void* from) {
  if constexpr (kPair)
    asm volatile("cp.async.cg.shared.global.L2::256B [%0],[%1],16;" ::"r"(to), "l"(from)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" ::"r"(to), "l"(from)
                 : "memory");
}
// For what is read once: first to leave the L2, where rows are read again.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_16_or_zero(uint32_t to, const void* from, bool exists,
                                                uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0],[%1],16,%2,%3;" ::"r"(to),
               "l"(from), "r"(exists ? 16 : 0), "l"(policy)
               : "memory");
}

// An item's Q, by all producer threads (`thread` of kThreads). Each arrives once on q_full. A warp
// copies four heads' rows of a tile at once; heads past the last become zeros.
template <class Family>
__device__ __forceinline__ void copy_queries(Smem<Family>& smem, const Args& args, const Work& work,
                                             int thread, int threads) {
  constexpr int kTiles = TilesOf<Family>::kTiles;
  constexpr int kNopeTiles = Family::kNope / 64;
  const int chunk = thread & 7;
  const uint64_t policy = read_once();
  // Rolled: this code is the first that a launch waits for.
#pragma unroll 1
  for (int h = thread / 8; h < kHeads; h += threads / 8) {
    const bool exists = work.head_begin + h < args.heads;
    const int64_t head = exists ? work.head_begin + h : 0;
    const bf16* nope =
        args.q + work.token * args.q_token_stride + head * args.q_head_stride + chunk * 8;
    const bf16* rope = args.q_rope + work.token * args.rope_token_stride +
                       head * args.rope_head_stride + chunk * 8;
    const uint32_t to = s32(smem.q) + chunk_offset(h, chunk);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++)
      copy_16_or_zero(to + tile * kTileBytes,
                      tile < kNopeTiles ? nope + tile * 64 : rope + (tile - kNopeTiles) * 64,
                      exists, policy);
  }
  copies_arrive(&smem.q_full);
}

}  // namespace winnow::internal::attend::wide_sm90
