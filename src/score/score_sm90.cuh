// score on Hopper: index keys are the A operand, the heads of a few query tokens the B operand.
//
// Who does what: one producer warp fills a ring of tiles of 64 keys by bulk copies, one for the
// keys and one for their scales; where tiles do not lie whole and aligned in pages, by plain loads.
// Consumer warpgroups take tiles in turn, or, when tokens are many, every tile with tokens of their
// own: a quad of lanes reads a key's 128 bytes into A fragments and frees the stage, four wgmma
// m64nNk32 give 64 keys x N heads, then ReLU, weight and the sum over heads happen in the
// accumulators while another warpgroup multiplies. A lane's weights stay in its registers. A warp
// beside the producer looks up the ranges and requests of the block's tokens, then ends.
//
// Budget per tile of 64 keys and SM: 8,448 B, 630 cycles at 3.5 TB/s. N = 64: 128 cycles of tensor
// core, so decode is bound by memory and wants bytes in flight, but not more than two blocks of 6
// stages, 101 KB: with 10 eight tokens of 128k keys take 3 % longer.
// N = 256 (prefill, and four tokens of a request): 512 cycles of tensor core; 400 instructions a
// warp, of which 128 FMNMX at half rate and 128 FFMA, so two warpgroups fill 800 of the 1,024 issue
// slots of their two products.
//
// Order of the contraction: lane c of a quad reads 16-byte chunks c and c + 4 of a key. Its word m
// (of 8) feeds step m / 2 at logical word 8 (m / 2) + 4 (m % 2) + c, where wgmma expects it; Q is
// stored in that order.
#pragma once

#include "core/arithmetic.h"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/wgmma_fp8.h"
#include "score/score_load_sm90.cuh"

namespace winnow::internal::score {

enum NamedBarrier : int {
  // The consumers: all of the queries and weights are in shared memory. (0 is __syncthreads.)
  kQueriesStored = 1,
};

// A pass over the keys of one request: the block's tokens of that request, and the keys that they
// need together.
struct Pass {
  uint32_t members;           // a bit for each token
  int32_t request, from, to;  // keys [from, to), `from` at a tile's start
};

// Takes the next pass out of `left`, which has a bit for each token that still needs keys.
template <class C>
__device__ Pass next_pass(const SharedMemory<C>& sm, uint32_t& left, Keys chunk) {
  Pass pass{0, sm.requests[__ffs(left) - 1], chunk.last, chunk.first};
  for (int u = 0; u < C::kTokens; ++u)
    if ((left >> u & 1) && sm.requests[u] == pass.request) {
      pass.members |= 1u << u;
      pass.from = min(pass.from, sm.begins[u]);
      pass.to = max(pass.to, sm.ends[u]);
    }
  left = C::kTokens == 1 ? 0 : left & ~pass.members;  // a single token: the compiler sees one pass
  pass.from = pass.from / C::kTile * C::kTile;
  return pass;
}

// The 32 bytes of rows lane / 4 and lane / 4 + 8 that this lane feeds. Odd rows read their chunks
// in the other order, so that a quarter-warp touches every bank once.
struct Fragment {
  uint32_t word[2][8];
  float scale[2];
};
__device__ __forceinline__ void read(Fragment& f, const uint8_t* rows, const float* scales) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const bool odd = lane / 4 % 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4* chunks = reinterpret_cast<const uint4*>(rows + (row + 8 * r) * 128);
    const uint4 a = chunks[lane % 4 + (odd ? 4 : 0)], b = chunks[lane % 4 + (odd ? 0 : 4)];
    const uint4 lo = odd ? b : a, hi = odd ? a : b;
    f.word[r][0] = lo.x;
    f.word[r][1] = lo.y;
    f.word[r][2] = lo.z;
    f.word[r][3] = lo.w;
    f.word[r][4] = hi.x;
    f.word[r][5] = hi.y;
    f.word[r][6] = hi.z;
    f.word[r][7] = hi.w;
    f.scale[r] = scales[row + 8 * r];
  }
}

template <class C>
__device__ __forceinline__ void multiply(float (&acc)[C::kN / 2], const Fragment& f,
                                         uint64_t q_desc) {
  cuda::wg_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const uint32_t a[4] = {f.word[0][2 * s], f.word[1][2 * s], f.word[0][2 * s + 1],
                           f.word[1][2 * s + 1]};
    cuda::wgmma_e4m3(acc, a, q_desc + 2 * s, s > 0);
  }
  cuda::wg_commit();
  cuda::wg_wait<0>();
  cuda::hold(acc);
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
      x0 = fmaf(even, fmaxf(acc[4 * b], 0.0f), x0);
      x1 = fmaf(odd, fmaxf(acc[4 * b + 1], 0.0f), x1);
      y0 = fmaf(even, fmaxf(acc[4 * b + 2], 0.0f), y0);
      y1 = fmaf(odd, fmaxf(acc[4 * b + 3], 0.0f), y1);
    }
    totals[2 * u] = x0 + x1;
    totals[2 * u + 1] = y0 + y1;
  }
}

// A lane and the one at distance `d` exchange one value each of their pairs and add what they get
// to the value that they keep.
__device__ __forceinline__ float trade(float low, float high, bool keep_high, int d) {
  return (keep_high ? high : low) + __shfl_xor_sync(~0u, keep_high ? low : high, d);
}

// Adds the totals over the quad, always as (0 + 1) + (2 + 3); each sum ends in one lane c. With
// four tokens or more that lane has tokens c, c + 4, ..., both rows each; with three tokens lane 3
// has none; with two it has token c % 2 and row c / 2; with one, row c % 2.
template <int kGroup>
__device__ __forceinline__ void add_quad(float (&totals)[2 * kGroup], int c) {
  const bool odd = c & 1, upper = c & 2;
  if constexpr (kGroup == 1) {
    totals[0] = trade(totals[0], totals[1], odd, 1);
    totals[0] += __shfl_xor_sync(~0u, totals[0], 2);
  } else if constexpr (kGroup == 3) {
    float four[8] = {totals[0], totals[1], totals[2], totals[3], totals[4], totals[5]};
    add_quad<4>(four, c);
    totals[0] = four[0];
    totals[1] = four[1];
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

// What the producer warp knows and has begun before the block's first __syncthreads().
struct EarlyStart {
  GuessedPage guess;
  int tiles = 0;  // of the first pass, in the ring or on their way there
};

// The producer warp: tiles of every pass, into the ring. Lanes look up 32 tiles at a time, then
// each issues its own.
template <class C>
__device__ __forceinline__ void produce(const Params& p, SharedMemory<C>& sm, Keys chunk,
                                        uint32_t wanted, const EarlyStart& early) {
  const int lane = threadIdx.x % 32;
  const bool bulk = p.guess.bulk;
  // Contiguous keys end there, and no copy may go past them.
  const int64_t rows = p.requests ? INT64_MAX : p.ranges.limit;
  int begun = early.tiles;
  int stage = 0;
  int lap = 0;
  for (uint32_t left = wanted; left;) {
    const Pass pass = next_pass(sm, left, chunk);
    for (int32_t base = pass.from; base < pass.to; base += 32 * C::kTile) {
      const int32_t mine = base + lane * C::kTile;
      Run run;
      if (bulk && mine < pass.to) {
        if (base == chunk.first && pass.request == early.guess.request) run = early.guess.run(p);
        else run = run_of(p, pass.request, mine, C::kTile);
      }
      const int tiles = min(32, ceil_div(pass.to - base, C::kTile));
      for (int i = 0; i < tiles; ++i) {
        const int32_t at = base + i * C::kTile;
        if (begun > 0) {
          --begun;
          ++stage;
          continue;
        }
        if (stage == C::kStages) {
          stage = 0;
          ++lap;
        }
        if (lap > 0) cuda::mb_wait(&sm.empty[stage], (lap - 1) & 1);
        if (!bulk || at + C::kTile > rows)
          produce_by_loads(p, pass.request, at, min(at + C::kTile, pass.to), sm.ring[stage],
                           &sm.full[stage]);
        else if (lane == i) produce_by_copy(run, sm.ring[stage], &sm.full[stage]);
        __syncwarp();
        ++stage;
      }
    }
  }
}

// The consumers bring in Q, 16 bytes at a time, in the order of the fragments, and the weights.
template <class C>
__device__ __forceinline__ void store_queries(const Params& p, SharedMemory<C>& sm, int64_t token0,
                                              Queries<C>& queries) {
  if constexpr (C::kRounds > 1) {
    for (int from = 0; from < Queries<C>::kEach; from += Queries<C>::kBatch) {
      queries.load(p, token0, from);
      queries.store(sm, from);
    }
  } else {
    queries.store(sm, 0);
  }
  cuda::fence_async();
  asm volatile("bar.sync %0,%1;" ::"n"(int{kQueriesStored}), "n"(128 * C::kConsumers) : "memory");
}

// A consumer warpgroup: takes tiles in turn with the others, or all of them. Before its first tile
// it may make a dry run: the code of a tile with the queries in place of keys, which stores
// nothing. That fetches the code while the keys are on their way (180 instructions for one token,
// about 14 cycles each the first time).
template <class C>
__device__ __forceinline__ void consume(SharedMemory<C>& sm, int warp, Keys chunk,
                                        uint32_t wanted) {
  const int lane = threadIdx.x % 32;
  // Descriptor of Q: 8 rows of 128 B are 1,024 B apart, 128-byte swizzle.
  const uint64_t q_desc = static_cast<uint64_t>((cuda::s32(sm.q) & 0x3ffff) >> 4) |
                          uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
  const int warpgroup = warp / 4, c = lane % 4;
  const int round = C::kRounds > 1 ? warpgroup : 0;
  const uint64_t desc = q_desc + round * (C::kN * 128 >> 4);
  float weights[C::kN / 4];  // of this lane's columns
#pragma unroll
  for (int b = 0; b < C::kN / 8; ++b) {
    const float2 two = *reinterpret_cast<const float2*>(&sm.weights[round][8 * b + 2 * c]);
    weights[2 * b] = two.x;
    weights[2 * b + 1] = two.y;
  }
  cuda::wait_for_previous();  // the kernel before may still read the logits
  constexpr int kTurn = C::kRounds == 1 ? C::kConsumers : 1;
  int n = 0;  // the number of a tile among all of the block's; negative: a dry run
  for (uint32_t left = wanted; left;) {
    const Pass pass = next_pass(sm, left, chunk);
    constexpr int kMine = C::kGroup >= 4 ? C::kGroup / 4 : 1;  // tokens whose sums this lane gets
    Slot slots[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int u = round * C::kGroup + (C::kGroup >= 4 ? c + 4 * i : c % C::kGroup);
      slots[i] = {sm.begins[u], 0, sm.rows[u]};
      if (pass.members >> u & 1) slots[i].count = sm.ends[u] - sm.begins[u];
    }
    if (C::kGroup % 2 == 1 && c >= (C::kGroup == 1 ? 2 : 3)) slots[0].count = 0;  // has no sum
    const bool second = C::kGroup == 2 ? c / 2 : c % 2;  // row, with one or two tokens
    const int32_t row = warp % 4 * 16 + lane / 4 + (C::kGroup < 3 && second ? 8 : 0);
    int i = 0;  // the first tile
    if (kTurn > 1)
      i = n == 0 && C::kDry ? warpgroup - kTurn : (warpgroup + n * (kTurn - 1)) % kTurn;
    const int last = n + ceil_div(pass.to - pass.from, C::kTile);
    n += i;
    for (int32_t at = pass.from + i * C::kTile; at < pass.to; at += kTurn * C::kTile, n += kTurn) {
      const bool dry = C::kDry && n < 0;
      const int stage = dry ? 0 : n % C::kStages;
      if (!dry) cuda::mb_wait(&sm.full[stage], (n / C::kStages) & 1);
      Fragment f;
      read(f, dry ? reinterpret_cast<const uint8_t*>(sm.q) : sm.ring[stage].rows,
           dry ? sm.weights[0] : sm.ring[stage].scales);
      __syncwarp();
      // Where registers are short the thread's index is read anew.
      if ((C::kN == 64 ? cuda::thread_here() % 32 : lane) == 0 && !dry)
        cuda::mb_arrive(&sm.empty[stage]);

      float acc[C::kN / 2], totals[2 * C::kGroup];
      multiply<C>(acc, f, desc);
      add_heads<C>(totals, acc, weights);
      add_quad<C::kGroup>(totals, C::kN == 64 ? cuda::thread_here() % 4 : c);
      const int32_t j = at + row;  // below the range where it is dry
      if constexpr (C::kGroup >= 3) {
#pragma unroll
        for (int k = 0; k < kMine; ++k) {
          put(slots[k], j, totals[2 * k], f.scale[0]);
          put(slots[k], j + 8, totals[2 * k + 1], f.scale[1]);
        }
      } else {
        put(slots[0], j, totals[0], second ? f.scale[1] : f.scale[0]);
      }
    }
    if (kTurn > 1) n = last;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    score_kernel(const __grid_constant__ Params p, int32_t chunk) {
  extern __shared__ __align__(1024) unsigned char raw[];
  SharedMemory<C>& sm = *reinterpret_cast<SharedMemory<C>*>(raw);
  const int32_t limit = static_cast<int32_t>(p.ranges.limit);
  const int64_t index = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int64_t token0 = index * step_of<C>(p);
  if (token0 >= p.tokens) return cuda::wait_for_previous();
  const int32_t chunk0 = static_cast<int32_t>(blockIdx.x) * chunk;
  const int32_t chunk1 = chunk0 + min(chunk, limit - chunk0);
  cuda::let_next_start();
  if constexpr (C::kRounds > 1) prefetch<C>(p, token0);

  // Request all that the block needs before its keys at once, each by warps of its own: the tokens'
  // ranges and requests, the pages that a guess at the request gives, the queries. One after the
  // other they would take 0.7 to 1 us each out of a cold L2.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  Queries<C> queries;
  EarlyStart early;
  if (warp < 4 * C::kConsumers) {
    if constexpr (C::kRounds == 1) queries.load(p, token0, 0);
  } else if (warp == 4 * C::kConsumers) {
    early.guess = guess_page(p, index, static_cast<uint32_t>(chunk0) + lane * C::kTile);
    if constexpr (C::kTokens == 1) {
      cuda::Asked request(0);
      if (p.requests) request = cuda::Asked(p.requests + token0 * p.request_stride);
      cuda::AskedRange range(p.ranges, token0);
      init_barriers(sm);  // while they are on their way
      if (request.get() == early.guess.request)
        early.tiles = begin_early<C>(p, early.guess, range.get(p.ranges), sm, {chunk0, chunk1});
    } else {
      init_barriers(sm);
    }
  } else if (warp == 4 * C::kConsumers + 1 && lane < C::kTokens) {
    const int64_t t = token0 + lane;
    Range r;
    int32_t request = 0;
    if (lane < step_of<C>(p) && t < p.tokens) {
      request = request_of(p, t);
      r = p.ranges.of(t);
    }
    sm.begins[lane] = max(static_cast<int32_t>(r.first), chunk0);
    sm.ends[lane] = min(static_cast<int32_t>(r.last), chunk1);
    sm.requests[lane] = request;
    sm.rows[lane] = p.logits + t * p.logit_stride - (p.from_start ? r.first : 0);
  }
  __syncthreads();
  // Find the tokens that need keys of the chunk, a bit each.
  uint32_t wanted = 0;
  for (int u = 0; u < C::kTokens; ++u)
    if (sm.begins[u] < sm.ends[u]) wanted |= 1u << u;
  // Clear the logits of the chunk outside each token's range.
  if (p.clean)
    for (int u = 0; u < step_of<C>(p) && token0 + u < p.tokens; ++u)
      for (int32_t j = chunk0 + threadIdx.x; j < chunk1; j += C::kThreads)
        if (j < sm.begins[u] || j >= sm.ends[u])
          p.logits[(token0 + u) * p.logit_stride + j] = -INFINITY;
  if (!wanted) return cuda::wait_for_previous();

  // Split into the producer warp and the consumers; the other warps of the producer's warpgroup
  // end.
  if (warp >= 4 * C::kConsumers) {
    if constexpr (C::kBlocks == 1) cuda::give_registers<C::kProducerRegisters>();
    if (warp > 4 * C::kConsumers) return;
    return produce(p, sm, {chunk0, chunk1}, wanted, early);
  }
  if constexpr (C::kBlocks == 1) cuda::take_registers<C::kConsumerRegisters>();
  store_queries(p, sm, token0, queries);
  consume(sm, warp, {chunk0, chunk1}, wanted);
}

template <class C>
void launch(const Params& p, int32_t chunk) noexcept {
  const int64_t groups = ceil_div(p.tokens, p.guess.step);
  const int64_t chunks = ceil_div(p.ranges.limit, chunk);
  const int bytes = sizeof(SharedMemory<C>);
  cuda::keep_error(cuda::allow_shared(score_kernel<C>, bytes));
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = p.overlap;
  // Groups of tokens lie along y, and along z where they are too many: no block divides.
  const int64_t high = ceil_div(groups, 65535);
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(ceil_div(groups, high)),
                  static_cast<unsigned>(high));
  cudaLaunchConfig_t config =
      cuda::launch_config(grid, C::kThreads, bytes, cuda::stream_of(p.device));
  config.attrs = &overlap;
  config.numAttrs = 1;
  cuda::keep_error(cudaLaunchKernelEx(&config, score_kernel<C>, p, chunk));
}

}  // namespace winnow::internal::score
