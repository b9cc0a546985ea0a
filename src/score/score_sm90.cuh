// score on Hopper: index keys are the A operand, the heads of a few query tokens the B operand.
//
// Who does what: one producer warp fills a ring of tiles of 64 keys with bulk copies (one per page
// that the tile touches; plain loads where pages are not aligned for the copy engine). Consumer
// warpgroups take tiles in turn, or, when tokens are many, every tile with tokens of their own: a
// quad of lanes reads a key's 128 bytes into A fragments and frees the stage, four wgmma m64nNk32
// give 64 keys x N heads, then ReLU, weight and the sum over heads happen in the accumulators while
// another warpgroup multiplies. A lane's weights stay in its registers.
//
// Budget per tile of 64 keys and SM: 8,448 B, 630 cycles at 3.5 TB/s. N = 64: 128 cycles of tensor
// core, so decode is bound by memory and wants bytes in flight: two blocks of 10 stages, 170 KB.
// N = 256 (prefill): 512 cycles of tensor core; 400 instructions a warp, of which 128 FMNMX at half
// rate and 128 FFMA, so two warpgroups fill 800 of the 1,024 issue slots of their two products.
//
// Order of the contraction: lane c of a quad reads 16-byte chunks c and c + 4 of a key. Its word m
// (of 8) feeds step m / 2 at logical word 8 (m / 2) + 4 (m % 2) + c, where wgmma expects it; Q is
// stored in that order.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/hopper.h"
#include "cuda/wgmma_fp8.h"
#include "score/kernel.h"

namespace winnow::scoring {

inline constexpr int kTileKeys = 64;

template <int Heads_, int Group_, int Rounds_>
struct Config {
  static constexpr int kHeads = Heads_;    // of a token, padded
  static constexpr int kGroup = Group_;    // tokens side by side in one product
  static constexpr int kRounds = Rounds_;  // products per tile of keys, a warpgroup for each
  static constexpr int kTokens = kGroup * kRounds;
  static constexpr int kN = kHeads * kGroup;
  // Consumer warpgroups: with one round they take tiles in turn.
  static constexpr int kConsumers = kRounds > 1 ? kRounds : kN == 128 ? 3 : 2;
  static constexpr int kThreads = 128 * kConsumers + 128;  // the producer warp has a warpgroup
  // Products of 64 columns leave room for a second block per multiprocessor, which hides the first
  // one's start and end. The others take registers from the producer: 384 x 168 = 256 x 232 + 128 x
  // 40, and 512 x 128 = 384 x 152 + 128 x 56.
  static constexpr int kBlocks = kN == 64 ? 2 : 1;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 152;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 56;
  static constexpr int kTile = kTileKeys;
  static constexpr int kStages = kN == 256 ? 12 : kN == 128 ? 16 : 10;
  static constexpr int kReaders = 4 * (kRounds > 1 ? kConsumers : 1);  // warps that read a tile
  static_assert(kN == 64 || kN == 128 || kN == 256);
  static_assert(kTokens <= 32 && kConsumers <= 3);
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
  uint64_t full[C::kStages], empty[C::kStages];
  int32_t begins[C::kTokens], ends[C::kTokens], requests[C::kTokens];
  float* rows[C::kTokens];  // of logits: where key 0 would stand
};

// Four bytes of any alignment.
__device__ __forceinline__ uint32_t load4(const uint8_t* from) {
  return from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24;
}

// Whether whole tiles can be brought in by bulk copies: each inside a page, on 16-byte addresses.
__device__ __forceinline__ bool copyable(const Params& p) {
  if (!p.requests)
    return p.row_stride == kDim && p.scale_stride == 1 &&
           (reinterpret_cast<uintptr_t>(p.rows) | reinterpret_cast<uintptr_t>(p.scales)) % 16 == 0;
  return p.page % kTileKeys == 0 &&
         (reinterpret_cast<uintptr_t>(p.cache) | p.page_stride) % 16 == 0;
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
  if (lane == 0) gpu::mb_arrive(full);
}

// One whole tile by one lane: two bulk copies, or 64 marks if its page is missing.
__device__ __forceinline__ void produce_by_copy(const Run& run, Stage& stage, uint64_t* full) {
  if (run.rows) {
    gpu::mb_expect(full, kTileKeys * (kDim + 4));
    gpu::bulk_copy(gpu::s32(stage.rows), run.rows, kTileKeys * kDim, gpu::s32(full));
    gpu::bulk_copy(gpu::s32(stage.scales), run.scales, kTileKeys * 4, gpu::s32(full));
  } else {
    for (int k = 0; k < kTileKeys; ++k) stage.scales[k] = -INFINITY;
    gpu::mb_arrive(full);
  }
}

// A pass: the tokens of one request among the block's, and the tiles they need together.
struct Pass {
  uint32_t members;
  int32_t request, from, to;  // keys, `from` at a tile's start
};

// Takes the next pass out of `left` (a bit per token that still wants keys).
template <class C>
__device__ Pass next_pass(const SharedMemory<C>& sm, uint32_t& left, int32_t chunk0,
                          int32_t chunk1) {
  Pass pass{0, sm.requests[__ffs(left) - 1], chunk1, chunk0};
  for (int u = 0; u < C::kTokens; ++u)
    if ((left >> u & 1) && sm.requests[u] == pass.request) {
      pass.members |= 1u << u;
      pass.from = min(pass.from, sm.begins[u]), pass.to = max(pass.to, sm.ends[u]);
    }
  left &= ~pass.members;
  pass.from = pass.from / C::kTile * C::kTile;
  return pass;
}

// The 32 bytes of rows lane / 4 and lane / 4 + 8 that this lane feeds. Odd rows read their chunks
// in the other order, so that a quarter-warp touches every bank once.
struct Fragment {
  uint32_t word[2][8];
  float scale[2];
};
__device__ __forceinline__ void read(Fragment& f, const Stage& stage) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const bool odd = lane / 4 % 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4* chunks = reinterpret_cast<const uint4*>(stage.rows + (row + 8 * r) * 128);
    const uint4 a = chunks[lane % 4 + (odd ? 4 : 0)], b = chunks[lane % 4 + (odd ? 0 : 4)];
    const uint4 lo = odd ? b : a, hi = odd ? a : b;
    f.word[r][0] = lo.x, f.word[r][1] = lo.y, f.word[r][2] = lo.z, f.word[r][3] = lo.w;
    f.word[r][4] = hi.x, f.word[r][5] = hi.y, f.word[r][6] = hi.z, f.word[r][7] = hi.w;
    f.scale[r] = stage.scales[row + 8 * r];
  }
}

template <class C>
__device__ __forceinline__ void multiply(float (&acc)[C::kN / 2], const Fragment& f,
                                         uint64_t q_desc) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const uint32_t a[4] = {f.word[0][2 * s], f.word[1][2 * s], f.word[0][2 * s + 1],
                           f.word[1][2 * s + 1]};
    gpu::wgmma_e4m3(acc, a, q_desc + 2 * s, s > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < C::kN / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// ReLU, weight, sum over the heads: totals[2 u + r] is token u's for row lane / 4 + 8 r, over the
// columns of this lane. Always the same order: even and odd columns apart, columns ascending.
template <class C>
__device__ __forceinline__ void add_heads(float (&totals)[2 * C::kGroup],
                                          const float (&acc)[C::kN / 2],
                                          const float (&weights)[C::kN / 4]) {
#pragma unroll
  for (int u = 0; u < C::kGroup; ++u) {
    float x0 = 0, x1 = 0, y0 = 0, y1 = 0;
#pragma unroll
    for (int i = 0; i < C::kHeads / 8; ++i) {
      const int b = u * (C::kHeads / 8) + i;
      const float even = weights[2 * b], odd = weights[2 * b + 1];
      x0 = fmaf(even, fmaxf(acc[4 * b], 0.0f), x0), x1 = fmaf(odd, fmaxf(acc[4 * b + 1], 0.0f), x1);
      y0 = fmaf(even, fmaxf(acc[4 * b + 2], 0.0f), y0);
      y1 = fmaf(odd, fmaxf(acc[4 * b + 3], 0.0f), y1);
    }
    totals[2 * u] = x0 + x1, totals[2 * u + 1] = y0 + y1;
  }
}

// Gives the neighbour at distance `d` what it keeps of a pair and adds what it gives.
__device__ __forceinline__ float trade(float low, float high, bool keep_high, int d) {
  return (keep_high ? high : low) + __shfl_xor_sync(~0u, keep_high ? low : high, d);
}

// Adds the totals over the quad, each sum in one lane c: (0 + 1) + (2 + 3). With four tokens or
// more the lane has tokens c, c + 4, ..., both rows each; with two, token c % 2 and row c / 2; with
// one, row c % 2.
template <int kGroup>
__device__ __forceinline__ void add_quad(float (&totals)[2 * kGroup], int c) {
  const bool odd = c & 1, upper = c & 2;
  if constexpr (kGroup == 1) {
    totals[0] = trade(totals[0], totals[1], odd, 1);
    totals[0] += __shfl_xor_sync(~0u, totals[0], 2);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      totals[i] = trade(totals[i / 2 * 4 + i % 2], totals[i / 2 * 4 + 2 + i % 2], odd, 1);
    if constexpr (kGroup == 2) totals[0] = trade(totals[0], totals[1], upper, 2);
    else {
#pragma unroll
      for (int i = 0; i < kGroup / 2; ++i)
        totals[i] = trade(totals[i / 2 * 4 + i % 2], totals[i / 2 * 4 + 2 + i % 2], upper, 2);
    }
  }
}

// Where a token's logits go: keys [begin, begin + count).
struct Slot {
  int32_t begin;
  uint32_t count;
  float* row;
};
__device__ __forceinline__ void put(const Slot& slot, int32_t j, float value, float scale) {
  if (static_cast<uint32_t>(j - slot.begin) < slot.count)
    asm volatile("st.global.f32 [%0],%1;" ::"l"(slot.row + j),
                 "f"(scale == -INFINITY ? -INFINITY : scale * value)
                 : "memory");
}

// Many queries on their way into shared memory: four times 16 bytes a consumer thread, all asked
// for before the first is used; a head's weight goes with its first 16.
template <class C>
struct Queries {
  static constexpr int kWorkers = 128 * C::kConsumers, kParts = C::kTokens * C::kHeads * 8;
  static constexpr int kEach = (kParts + kWorkers - 1) / kWorkers;
  uint4 bytes[4];
  float weights[4];

  __device__ __forceinline__ void load(const Params& p, int64_t token0, int from) {
    const bool aligned =
        (reinterpret_cast<uintptr_t>(p.q) | p.q_token_stride | p.q_head_stride) % 16 == 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = threadIdx.x + (from + k) * kWorkers, row = i / 8, h = row % C::kHeads;
      const int64_t t = token0 + row / C::kHeads;
      bytes[k] = {}, weights[k] = 0;
      if (from + k >= kEach || i >= kParts || h >= p.heads || t >= p.tokens) continue;
      const uint8_t* at = p.q + t * p.q_token_stride + h * p.q_head_stride + i % 8 * 16;
      if (aligned) bytes[k] = *reinterpret_cast<const uint4*>(at);
      else bytes[k] = {load4(at), load4(at + 4), load4(at + 8), load4(at + 12)};
      if (i % 8 == 0) weights[k] = p.weights[t * p.weight_stride + h];
    }
  }
  __device__ __forceinline__ void store(SharedMemory<C>& sm, int from) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = threadIdx.x + (from + k) * kWorkers;
      const int row = i / 8, part = i % 8, n = row % C::kN;
      if (from + k >= kEach || i >= kParts) continue;
      const uint32_t word[4] = {bytes[k].x, bytes[k].y, bytes[k].z, bytes[k].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int m = w + part / 4 * 4, logical = 8 * (m / 2) + 4 * (m % 2) + part % 4;
        sm.q[row / C::kN][n * 32 + ((logical / 4) ^ (n & 7)) * 4 + logical % 4] = word[w];
      }
      if (part == 0) sm.weights[row / C::kN][n] = weights[k];
    }
  }
};

// Asks for the queries and weights, which the block reads once its ranges are known. (Of a single
// token it gains nothing.)
template <class C>
__device__ __forceinline__ void prefetch(const Params& p, int64_t token0) {
  const auto ask = [](const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); };
  const int tokens = static_cast<int>(min(static_cast<int64_t>(C::kTokens), p.tokens - token0));
  for (int i = threadIdx.x; i < tokens * p.heads; i += C::kThreads)
    ask(p.q + (token0 + i / p.heads) * p.q_token_stride + i % p.heads * p.q_head_stride);
  if (threadIdx.x < tokens * 4 && static_cast<int>(threadIdx.x % 4 * 32) < p.heads)
    ask(p.weights + (token0 + threadIdx.x / 4) * p.weight_stride + threadIdx.x % 4 * 32);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    score_kernel(const __grid_constant__ Params p, int32_t chunk) {
  extern __shared__ __align__(1024) unsigned char raw[];
  SharedMemory<C>& sm = *reinterpret_cast<SharedMemory<C>*>(raw);
  const int32_t limit = static_cast<int32_t>(p.ranges.limit);
  const unsigned chunks = (limit - 1) / chunk + 1;
  const int64_t token0 = static_cast<int64_t>(blockIdx.x / chunks) * C::kTokens;
  const int32_t chunk0 = static_cast<int32_t>(blockIdx.x % chunks) * chunk;
  const int32_t chunk1 = chunk0 + min(chunk, limit - chunk0);
  gpu::let_next_start();
  if constexpr (C::kRounds > 1) prefetch<C>(p, token0);

  // Find the tokens' valid keys inside the chunk, and fill what lies outside when asked.
  if (threadIdx.x < C::kTokens) {
    const int64_t t = token0 + threadIdx.x;
    Range r;
    if (t < p.tokens) r = p.ranges.of(t);
    sm.begins[threadIdx.x] = max(static_cast<int32_t>(r.first), chunk0);
    sm.ends[threadIdx.x] = min(static_cast<int32_t>(r.last), chunk1);
    sm.requests[threadIdx.x] = t < p.tokens ? request_of(p, t) : 0;
    sm.rows[threadIdx.x] = p.logits + t * p.logit_stride - (p.from_start ? r.first : 0);
  }
  if (threadIdx.x == 0)
    for (int s = 0; s < C::kStages; ++s)
      gpu::mb_init(&sm.full[s], 1), gpu::mb_init(&sm.empty[s], C::kReaders);
  __syncthreads();
  uint32_t wanted = 0;
  for (int u = 0; u < C::kTokens; ++u)
    if (sm.begins[u] < sm.ends[u]) wanted |= 1u << u;
  if (p.clean)
    for (int u = 0; u < C::kTokens && token0 + u < p.tokens; ++u)
      for (int32_t j = chunk0 + threadIdx.x; j < chunk1; j += C::kThreads)
        if (j < sm.begins[u] || j >= sm.ends[u])
          p.logits[(token0 + u) * p.logit_stride + j] = -INFINITY;
  if (!wanted) return gpu::wait_for_previous();

  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= 4 * C::kConsumers) {
    if constexpr (C::kBlocks == 1)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::kProducerRegisters));
    if (warp > 4 * C::kConsumers) return;
    // Producer: tiles of every pass, into the ring. Lanes look up 32 tiles at a time, then each
    // issues its own.
    const bool bulk = copyable(p);
    const int64_t rows =
        p.requests ? INT64_MAX : p.ranges.limit;  // of contiguous keys: no copy past them
    const int lane = threadIdx.x % 32;
    int stage = 0, lap = 0;
    for (uint32_t left = wanted; left;) {
      const Pass pass = next_pass(sm, left, chunk0, chunk1);
      for (int32_t base = pass.from; base < pass.to; base += 32 * C::kTile) {
        const int32_t mine = base + lane * C::kTile;
        Run run;
        if (bulk && mine < pass.to) run = run_of(p, pass.request, mine, C::kTile);
        const int tiles = min(32, (pass.to - base + C::kTile - 1) / C::kTile);
        for (int i = 0; i < tiles; ++i) {
          const int32_t at = base + i * C::kTile;
          if (lap > 0) gpu::mb_wait(&sm.empty[stage], (lap - 1) & 1);
          if (!bulk || at + C::kTile > rows)
            produce_by_loads(p, pass.request, at, min(at + C::kTile, pass.to), sm.ring[stage],
                             &sm.full[stage]);
          else if (lane == i) produce_by_copy(run, sm.ring[stage], &sm.full[stage]);
          __syncwarp();
          if (++stage == C::kStages) stage = 0, ++lap;
        }
      }
    }
    return;
  }

  if constexpr (C::kBlocks == 1)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::kConsumerRegisters));
  // Consumers bring in Q, 16 bytes at a time, in the order of the fragments, and the weights.
  if constexpr (C::kRounds > 1) {
    for (int from = 0; from < Queries<C>::kEach; from += 4) {
      Queries<C> queries;
      queries.load(p, token0, from);
      queries.store(sm, from);
    }
  } else {
    const bool aligned =
        (reinterpret_cast<uintptr_t>(p.q) | p.q_token_stride | p.q_head_stride) % 16 == 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < C::kTokens * C::kHeads * 8; i += 128 * C::kConsumers) {
      const int row = i / 8, part = i % 8, h = row % C::kHeads, n = row % C::kN;
      const int64_t t = token0 + row / C::kHeads;
      const bool real = h < p.heads && t < p.tokens;
      const uint8_t* from = p.q + t * p.q_token_stride + h * p.q_head_stride + part * 16;
      uint4 v{};
      if (real && aligned) v = *reinterpret_cast<const uint4*>(from);
      else if (real) v = {load4(from), load4(from + 4), load4(from + 8), load4(from + 12)};
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int m = k + part / 4 * 4, logical = 8 * (m / 2) + 4 * (m % 2) + part % 4;
        sm.q[row / C::kN][n * 32 + ((logical / 4) ^ (n & 7)) * 4 + logical % 4] = word[k];
      }
      if (part == 0) sm.weights[row / C::kN][n] = real ? p.weights[t * p.weight_stride + h] : 0.0f;
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 1,%0;" ::"n"(128 * C::kConsumers) : "memory");

  // Descriptor of Q: 8 rows of 128 B are 1,024 B apart, 128-byte swizzle.
  const uint64_t q_desc = static_cast<uint64_t>((gpu::s32(sm.q) & 0x3ffff) >> 4) |
                          uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
  const int warpgroup = warp / 4, lane = threadIdx.x % 32, c = lane % 4;
  const int round = C::kRounds > 1 ? warpgroup : 0;
  const uint64_t desc = q_desc + round * (C::kN * 128 >> 4);
  float weights[C::kN / 4];  // of this lane's columns
#pragma unroll
  for (int b = 0; b < C::kN / 8; ++b) {
    const float2 two = *reinterpret_cast<const float2*>(&sm.weights[round][8 * b + 2 * c]);
    weights[2 * b] = two.x, weights[2 * b + 1] = two.y;
  }
  gpu::wait_for_previous();  // it may still read the logits
  int n = 0;                 // tiles so far
  for (uint32_t left = wanted; left;) {
    const Pass pass = next_pass(sm, left, chunk0, chunk1);
    constexpr int kMine = C::kGroup >= 4 ? C::kGroup / 4 : 1;  // tokens whose sums this lane gets
    Slot slots[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int u = round * C::kGroup + (C::kGroup >= 4 ? c + 4 * i : c % C::kGroup);
      slots[i] = {sm.begins[u], 0, sm.rows[u]};
      if (pass.members >> u & 1) slots[i].count = sm.ends[u] - sm.begins[u];
    }
    if (C::kGroup == 1 && c > 1) slots[0].count = 0;
    for (int32_t at = pass.from; at < pass.to; at += C::kTile, ++n) {
      if (C::kRounds == 1 && n % C::kConsumers != warpgroup) continue;
      const int stage = n % C::kStages;
      gpu::mb_wait(&sm.full[stage], (n / C::kStages) & 1);
      Fragment f;
      read(f, sm.ring[stage]);
      __syncwarp();
      if (lane == 0) gpu::mb_arrive(&sm.empty[stage]);

      float acc[C::kN / 2], totals[2 * C::kGroup];
      multiply<C>(acc, f, desc);
      add_heads<C>(totals, acc, weights);
      add_quad<C::kGroup>(totals, c);
      const int32_t j = at + warp % 4 * 16 + lane / 4;
      if constexpr (C::kGroup >= 4) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
          put(slots[i], j, totals[2 * i], f.scale[0]);
          put(slots[i], j + 8, totals[2 * i + 1], f.scale[1]);
        }
      } else {
        const bool second = C::kGroup == 2 ? c / 2 : c % 2;
        put(slots[0], second ? j + 8 : j, totals[0], second ? f.scale[1] : f.scale[0]);
      }
    }
  }
}

template <class C>
void launch(const Params& p, int32_t chunk) noexcept {
  const int64_t groups = (p.tokens + C::kTokens - 1) / C::kTokens;
  const int64_t chunks = (p.ranges.limit + chunk - 1) / chunk;
  const int bytes = sizeof(SharedMemory<C>);
  cudaFuncSetAttribute(score_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = p.overlap;
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(groups * chunks), 1, 1};
  config.blockDim = {C::kThreads, 1, 1};
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(p.device.stream);
  config.attrs = &overlap;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, score_kernel<C>, p, chunk);
}

}  // namespace winnow::scoring
