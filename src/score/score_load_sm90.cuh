// How score's keys and queries get into shared memory on Hopper: the block's sizes (Config) and
// shared memory, the copies of a tile of keys, and what a block requests before it knows its range.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/arithmetic.h"
#include "cuda/asked.h"
#include "cuda/hopper.h"
#include "score/kernel.h"

namespace winnow::internal::score {

template <int Heads_, int Group_, int Rounds_>
struct Config {
  static constexpr int kHeads = Heads_;    // of a token, padded
  static constexpr int kGroup = Group_;    // tokens side by side in one product, some not there
  static constexpr int kRounds = Rounds_;  // products per tile of keys, a warpgroup for each
  static constexpr int kTokens = kGroup * kRounds;
  static constexpr int kN = kHeads * kGroup;
  // Consumer warpgroups: with one round they take tiles in turn.
  static constexpr int kConsumers = kRounds > 1 ? kRounds : kN == 128 ? 3 : 2;
  // The producer warp, and one that looks up ranges; with setmaxnreg they are a warpgroup.
  static constexpr int kThreads = 128 * kConsumers + (kN == 64 ? 64 : 128);
  // Products of 64 columns leave room for a second block per multiprocessor, which hides the first
  // one's start and end. The others take registers from the producer: 384 x 168 = 256 x 232 + 128 x
  // 40, and 512 x 128 = 384 x 152 + 128 x 56.
  static constexpr int kBlocks = kN == 64 ? 2 : 1;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 152;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 56;
  static constexpr int kTile = kTileKeys;
  static constexpr int kStages = kN == 64 ? 6 : kN == 128 ? 15 : kRounds > 1 ? 12 : 20;
  // Whether a warpgroup makes a dry run of a tile's code (consume()). With more columns that lasts
  // longer than the keys take.
  static constexpr bool kDry = kN == 64;
  static constexpr int kReaders = 4 * (kRounds > 1 ? kConsumers : 1);  // warps that read a tile
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256);
  static_assert(kTokens <= 32 && kConsumers <= 3);
  // A stage always belongs to the same warpgroup. Otherwise a warpgroup that has not waited for the
  // stage's last tile could take a barrier that still waits for that tile for one that has the
  // next: the parity is the same. Copies do overtake each other, by seven tiles and more.
  static_assert(kRounds > 1 || kStages % kConsumers == 0);
};

struct Stage {
  uint8_t rows[kTileKeys * kDim];
  float scales[kTileKeys];  // -inf marks a key that is missing
};

template <class C>
struct SharedMemory {
  alignas(1024) uint32_t q[C::kRounds][C::kN * 32];  // [n][128 B], 16-byte chunks xor n % 8
  alignas(128) Stage ring[C::kStages];
  float weights[C::kRounds][C::kN];
  // Mbarriers. full: one arrival and the bytes of a tile, by the producer; the consumers wait.
  // empty: kReaders warps have read the tile; the producer waits.
  uint64_t full[C::kStages], empty[C::kStages];
  int32_t begins[C::kTokens], ends[C::kTokens], requests[C::kTokens];
  float* rows[C::kTokens];  // of each token's logits: where that of key 0 would lie
};

// Four bytes of any alignment.
__device__ __forceinline__ uint32_t load4(const uint8_t* from) {
  return from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24;
}

// Brings one tile in when the copy engine cannot, or when it spans pages: keys [first, last) of a
// request, at most 64 of them, eight lanes per key. One warp.
__device__ __forceinline__ void produce_by_loads(const Params& p, int32_t request, int32_t first,
                                                 int32_t last, Stage& stage, uint64_t* full) {
  const int lane = threadIdx.x % 32;
  for (int k = lane / 8; k < last - first; k += 4) {
    const Run run = run_of(p, request, first + k, 1);
    for (int w = lane % 8; w < 32; w += 8)
      if (run.rows) reinterpret_cast<uint32_t*>(stage.rows)[k * 32 + w] = load4(run.rows + w * 4);
    if (lane % 8 == 0) stage.scales[k] = run.rows ? *run.scales : -INFINITY;
  }
  __syncwarp();
  if (lane == 0) cuda::mb_arrive(full);
}

// One whole tile by one lane: two bulk copies, or 64 marks if its page is missing.
__device__ __forceinline__ void produce_by_copy(const Run& run, Stage& stage, uint64_t* full) {
  if (run.rows) {
    cuda::mb_expect(full, kTileKeys * (kDim + 4));
    cuda::bulk_copy(cuda::s32(stage.rows), run.rows, kTileKeys * kDim, cuda::s32(full));
    cuda::bulk_copy(cuda::s32(stage.scales), run.scales, kTileKeys * 4, cuda::s32(full));
  } else {
    for (int k = 0; k < kTileKeys; ++k) stage.scales[k] = -INFINITY;
    cuda::mb_arrive(full);
  }
}

struct Keys {
  int32_t first, last;
};

// Tokens that a block takes. One or two are known to the compiler; more may be padded, so that the
// tokens of a request stay in one block.
template <class C>
__device__ __forceinline__ int step_of(const Params& p) {
  return C::kTokens > 2 ? p.guess.step : C::kTokens;
}

// The page of key `first` if the block's request is the one that the order of tokens suggests: a
// read that need not wait for the token's request. -1: no guess; no such page.
struct GuessedPage {
  int32_t request = -1, page = -1, offset = 0;
  __device__ __forceinline__ Run run(const Params& p) const {
    return run_in(p, page, offset, kTileKeys);
  }
};
__device__ __forceinline__ GuessedPage guess_page(const Params& p, int64_t block, uint32_t first) {
  const int64_t request = (block >> max(p.guess.request_shift, 0)) + p.guess.first_request;
  const uint32_t page = first >> p.guess.page_shift;
  const bool guess = p.guess.request_shift >= 0 && request < p.table_rows;
  GuessedPage a;
  a.offset = static_cast<int32_t>(first - (page << p.guess.page_shift));
  if (guess) a.request = static_cast<int32_t>(request);
  if (guess && page < p.table_width)
    a.page = cuda::load_here(p.table + request * p.table_stride + page);
  return a;
}

// One warp.
template <class C>
__device__ __forceinline__ void init_barriers(SharedMemory<C>& sm) {
  if (threadIdx.x % 32 == 0) {
#pragma unroll 1
    for (int s = 0; s < C::kStages; ++s) {
      cuda::mb_init(&sm.full[s], 1);
      cuda::mb_init(&sm.empty[s], C::kReaders);
    }
    cuda::fence_barrier_init();
  }
  __syncwarp();
}

// Requests the first tiles of a block that has one token, as many as the ring holds, before the
// block's first __syncthreads(). The guess has proved right. Returns how many. By the producer
// warp.
template <class C>
__device__ __forceinline__ int begin_early(const Params& p, const GuessedPage& guess,
                                           const Range& range, SharedMemory<C>& sm, Keys chunk) {
  const int32_t from = max(static_cast<int32_t>(range.first), chunk.first);
  const int32_t to = min(static_cast<int32_t>(range.last), chunk.last);
  if (from - chunk.first >= C::kTile || from >= to || !p.guess.bulk) return 0;
  const int tiles = min(C::kStages, ceil_div(to - chunk.first, C::kTile));
  const Run run = guess.run(p);
  for (int i = 0; i < tiles; ++i)
    if (threadIdx.x % 32 == i) produce_by_copy(run, sm.ring[i], &sm.full[i]);
  __syncwarp();
  return tiles;
}

// Queries on their way into shared memory through registers: 16 bytes a consumer thread and step. A
// batch of steps is requested before the first is used. A head's weight goes with its first 16
// bytes.
template <class C>
struct Queries {
  static constexpr int kWorkers = 128 * C::kConsumers, kParts = C::kTokens * C::kHeads * 8;
  static constexpr int kEach = ceil_div(kParts, kWorkers);
  static constexpr int kBatch = C::kRounds > 1 ? 4 : kEach;
  uint4 bytes[kBatch];
  float weights[kBatch];

  __device__ __forceinline__ void load(const Params& p, int64_t token0, int from) {
    const bool aligned =
        (reinterpret_cast<uintptr_t>(p.q) | p.q_token_stride | p.q_head_stride) % 16 == 0;
    const int first = threadIdx.x / 8, part = threadIdx.x % 8;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int row = first + (from + k) * (kWorkers / 8), h = row % C::kHeads;
      const int u = row / C::kHeads;
      const int64_t t = token0 + u;
      bytes[k] = {};
      weights[k] = 0;
      if (from + k >= kEach || u >= step_of<C>(p) || h >= p.heads || t >= p.tokens) continue;
      const uint8_t* at = p.q + t * p.q_token_stride + h * p.q_head_stride + part * 16;
      if (__builtin_expect(aligned, 1)) bytes[k] = *reinterpret_cast<const uint4*>(at);
      else bytes[k] = {load4(at), load4(at + 4), load4(at + 8), load4(at + 12)};
      if (part == 0) weights[k] = p.weights[t * p.weight_stride + h];
    }
  }
  __device__ __forceinline__ void store(SharedMemory<C>& sm, int from) const {
    // Rows of a thread are a multiple of eight apart: their chunks are swizzled alike.
    static_assert(kWorkers / 8 % 8 == 0 && C::kN % 8 == 0);
    const int first = threadIdx.x / 8, part = threadIdx.x % 8;
    uint32_t to[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int m = w + part / 4 * 4, logical = 8 * (m / 2) + 4 * (m % 2) + part % 4;
      to[w] = first * 32 + ((logical / 4) ^ (first & 7)) * 4 + logical % 4;
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int rows = (from + k) * (kWorkers / 8);
      if (from + k >= kEach || first + rows >= kParts / 8) continue;
      const uint32_t word[4] = {bytes[k].x, bytes[k].y, bytes[k].z, bytes[k].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) sm.q[0][to[w] + rows * 32] = word[w];
      if (part == 0) sm.weights[0][first + rows] = weights[k];
    }
  }
};

// Prefetches the queries and weights, which the block reads once its ranges are known. (With a
// single token that gains nothing.)
template <class C>
__device__ __forceinline__ void prefetch(const Params& p, int64_t token0) {
  const int tokens = static_cast<int>(min(static_cast<int64_t>(step_of<C>(p)), p.tokens - token0));
  for (int i = threadIdx.x; i < tokens * p.heads; i += C::kThreads)
    cuda::prefetch_l2(p.q + (token0 + i / p.heads) * p.q_token_stride +
                      i % p.heads * p.q_head_stride);
  if (threadIdx.x < tokens * 4 && static_cast<int>(threadIdx.x % 4 * 32) < p.heads)
    cuda::prefetch_l2(p.weights + (token0 + threadIdx.x / 4) * p.weight_stride +
                      threadIdx.x % 4 * 32);
}

}  // namespace winnow::internal::score
