// score on Hopper: index keys are the A operand, the heads of a few query tokens the B operand.
//
// Who does what: one producer warp fills a ring of tiles of 64 keys with bulk copies (one per page
// that the tile touches; plain loads where pages are not aligned for the copy engine). Consumer
// warpgroups take tiles in turn: a quad of lanes reads a key's 128 bytes into A fragments and frees
// the stage, four wgmma m64nNk32 give 64 keys x N heads, then ReLU, weight and the sum over heads
// happen in the accumulators while the other warpgroup multiplies.
//
// Budget per tile of 64 keys and SM: 8,448 B, 630 cycles at 3.5 TB/s. N = 64: 128 cycles of tensor
// core, so decode is bound by memory and wants bytes in flight: 16 stages, 135 KB. N = 256
// (prefill): 512 cycles of tensor core, about 400 of issue for the sums, 64 + 64 + 256 of shared
// memory: bound by the tensor core; kRounds token groups share one read of a tile.
//
// Order of the contraction: lane c of a quad reads 16-byte chunks c and c + 4 of a key. Its word m
// (of 8) feeds step m / 2 at logical word 8 (m / 2) + 4 (m % 2) + c, where wgmma expects it; Q is
// stored in that order.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/wgmma_fp8.h"
#include "score/kernel.h"

namespace winnow::scoring {

inline constexpr int kTileKeys = 64;

template <int Heads_, int Group_, int Rounds_>
struct Config {
  static constexpr int kHeads = Heads_;    // of a token, padded
  static constexpr int kGroup = Group_;    // tokens side by side in one product
  static constexpr int kRounds = Rounds_;  // products per tile of keys
  static constexpr int kTokens = kGroup * kRounds;
  static constexpr int kN = kHeads * kGroup;
  static constexpr int kConsumers = 2;                     // warpgroups
  static constexpr int kThreads = 128 * kConsumers + 128;  // the producer warp has a warpgroup
  // Products of 64 columns leave room for a second block per multiprocessor, which hides the first
  // one's start and end. The others take registers from the producer: 384 x 168 = 256 x 224 + 128 x
  // 56.
  static constexpr int kBlocks = kN == 64 ? 2 : 1;
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static constexpr int kTile = kTileKeys;
  static constexpr int kStages = kN == 256 ? 8 : kN == 128 ? 16 : 10;
  static_assert(kN == 64 || kN == 128 || kN == 256);
  static_assert(kTokens <= 32);
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

namespace ring {

__device__ __forceinline__ uint32_t at(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(at(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(at(barrier)) : "memory");
}
__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(at(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p,[%0],%1;\n@p bra D;\nbra "
      "W;\nD:\n}" ::"r"(at(barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
          at(to)),
      "l"(from), "r"(bytes), "r"(at(barrier))
      : "memory");
}

}  // namespace ring

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
  if (lane == 0) ring::arrive(full);
}

// One whole tile by one lane: two bulk copies, or 64 marks if its page is missing.
__device__ __forceinline__ void produce_by_copy(const Run& run, Stage& stage, uint64_t* full) {
  if (run.rows) {
    ring::expect(full, kTileKeys * (kDim + 4));
    ring::copy(stage.rows, run.rows, kTileKeys * kDim, full);
    ring::copy(stage.scales, run.scales, kTileKeys * 4, full);
  } else {
    for (int k = 0; k < kTileKeys; ++k) stage.scales[k] = -INFINITY;
    ring::arrive(full);
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

// ReLU, weight, sum over the heads of token u: the totals of rows lane / 4 and lane / 4 + 8, in
// every lane of the quad. Always the same order: even and odd columns apart, columns ascending,
// then the quad.
template <class C>
__device__ __forceinline__ float2 total(const float (&acc)[C::kN / 2], const float* weights,
                                        int u) {
  const int c = threadIdx.x % 4;
  float x0 = 0, x1 = 0, y0 = 0, y1 = 0;
#pragma unroll
  for (int b = 0; b < C::kHeads / 8; ++b) {
    const float2 w = *reinterpret_cast<const float2*>(weights + u * C::kHeads + 8 * b + 2 * c);
    const float* v = &acc[4 * (u * C::kHeads / 8 + b)];
    x0 = fmaf(w.x, fmaxf(v[0], 0.0f), x0), x1 = fmaf(w.y, fmaxf(v[1], 0.0f), x1);
    y0 = fmaf(w.x, fmaxf(v[2], 0.0f), y0), y1 = fmaf(w.y, fmaxf(v[3], 0.0f), y1);
  }
  float2 sum{x0 + x1, y0 + y1};
  sum.x += __shfl_xor_sync(~0u, sum.x, 1), sum.y += __shfl_xor_sync(~0u, sum.y, 1);
  sum.x += __shfl_xor_sync(~0u, sum.x, 2), sum.y += __shfl_xor_sync(~0u, sum.y, 2);
  return sum;
}

__device__ __forceinline__ void put(float* row, int32_t j, int32_t begin, int32_t end, float value,
                                    float scale) {
  if (j >= begin && j < end) row[j] = scale == -INFINITY ? -INFINITY : scale * value;
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
    for (int s = 0; s < C::kStages; ++s) ring::init(&sm.full[s], 1), ring::init(&sm.empty[s], 4);
  __syncthreads();
  uint32_t wanted = 0;
  for (int u = 0; u < C::kTokens; ++u)
    if (sm.begins[u] < sm.ends[u]) wanted |= 1u << u;
  if (p.clean)
    for (int u = 0; u < C::kTokens && token0 + u < p.tokens; ++u)
      for (int32_t j = chunk0 + threadIdx.x; j < chunk1; j += C::kThreads)
        if (j < sm.begins[u] || j >= sm.ends[u])
          p.logits[(token0 + u) * p.logit_stride + j] = -INFINITY;
  if (!wanted) return;

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
          if (lap > 0) ring::wait(&sm.empty[stage], (lap - 1) & 1);
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
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 1,%0;" ::"n"(128 * C::kConsumers) : "memory");

  // Descriptor of Q: 8 rows of 128 B are 1,024 B apart, 128-byte swizzle.
  const uint64_t q_desc = static_cast<uint64_t>((ring::at(sm.q) & 0x3ffff) >> 4) |
                          uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
  const int mine = warp / 4, lane = threadIdx.x % 32, c = lane % 4;
  int n = 0;  // tiles so far
  for (uint32_t left = wanted; left;) {
    const Pass pass = next_pass(sm, left, chunk0, chunk1);
    for (int32_t at = pass.from; at < pass.to; at += C::kTile, ++n) {
      if (n % C::kConsumers != mine) continue;
      const int stage = n % C::kStages;
      ring::wait(&sm.full[stage], (n / C::kStages) & 1);
      Fragment f;
      read(f, sm.ring[stage]);
      __syncwarp();
      if (lane == 0) ring::arrive(&sm.empty[stage]);

      const int32_t j = at + warp % 4 * 16 + lane / 4;
#pragma unroll
      for (int round = 0; round < C::kRounds; ++round) {
        float acc[C::kN / 2];
        multiply<C>(acc, f, q_desc + round * (C::kN * 128 >> 4));
#pragma unroll
        for (int u = 0; u < C::kGroup; ++u) {
          const float2 sum = total<C>(acc, sm.weights[round], u);
          // Four tokens or more: a lane of the quad for each, both rows. Fewer: a lane for each
          // row.
          const int token = round * C::kGroup + u;
          if (c % C::kGroup != u % 4 || !(pass.members >> token & 1)) continue;
          const int32_t begin = sm.begins[token], end = sm.ends[token];
          float* row = sm.rows[token];
          const int which = C::kGroup >= 4 ? -1 : c / C::kGroup;
          if (which <= 0) put(row, j, begin, end, sum.x, f.scale[0]);
          if (which == -1 || which == 1) put(row, j + 8, begin, end, sum.y, f.scale[1]);
        }
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
  score_kernel<C><<<static_cast<unsigned>(groups * chunks), C::kThreads, bytes,
                    static_cast<cudaStream_t>(p.device.stream)>>>(p, chunk);
}

}  // namespace winnow::scoring
