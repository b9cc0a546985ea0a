// score on Hopper: index keys are the A operand, read from device memory straight into registers;
// the heads of a group of query tokens are the B operand, in shared memory.
//
// Who does what: every warpgroup takes every kWarpgroups-th tile of 64 keys of the block's range. A
// quad of lanes reads a key's 128 bytes (32 each), kDepth tiles ahead; four wgmma m64nNk32 give 64
// keys x N heads; ReLU, weight and the sum over heads happen in the accumulators, a quad shuffle
// ends it.
//
// Budget per tile of 64 keys: 8,448 B of keys: 630 cycles of an SM at 3.5 TB/s. N = 64: 128 cycles
// of tensor core, so decode is bound by memory; 48-64 KB in flight per SM keep it busy. N = 256
// (prefill): 512 cycles of tensor core, 256 of max and FMA issue, 64 B of shared memory per cycle:
// bound by the tensor core.
//
// A fragment order: lane c of a quad supplies, in step s, logical bytes 32s + 4c and 32s + 16 + 4c
// of the contraction. It reads bytes 32c .. 32c + 31 of the key, so byte 32c + 8s + 4h + i of
// memory stands at logical 32s + 16h + 4c + i; Q is stored in that order once.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/wgmma_fp8.h"
#include "score/kernel.h"

namespace winnow::scoring {

template <int Heads_, int Group_>
struct Config {
  static constexpr int kHeads = Heads_;  // of a token, padded
  static constexpr int kGroup = Group_;  // tokens that share a pass over the keys
  static constexpr int kN = kHeads * kGroup;
  static constexpr int kWarpgroups = kN > 128 ? 2 : kN > 64 ? 3 : 4;  // what the registers allow
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kDepth = kN > 128 ? 2 : 3;  // tiles in registers per warpgroup
  static constexpr int kTile = 64;
  static_assert(kN == 64 || kN == 128 || kN == 256);
  static_assert(kGroup <= 16);
};

template <class C>
struct SharedMemory {
  alignas(1024) uint32_t q[C::kN * 32];  // [n][128 B], 16-byte chunks xor n % 8
  float weights[C::kN];
};

// One tile of keys as a thread holds it: rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Fragment {
  uint32_t word[2][8];
  float scale[2];  // -inf marks a key whose page is missing
};

// Volatile, or ptxas sinks the loads to their first use and nothing is in flight.
__device__ __forceinline__ void load16(uint32_t* to, const uint8_t* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}

// Contiguous rows may have any stride.
__device__ __forceinline__ uint32_t load4(const uint8_t* from) {
  return from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24;
}

// Keys first .. first + 63 of a request, those at or behind `last` as zeros.
__device__ __forceinline__ void load(Fragment& f, const Params& p, int32_t request, int64_t first,
                                     int64_t last) {
  const bool aligned = (reinterpret_cast<uintptr_t>(p.requests ? (const void*)p.cache : p.rows) |
                        (p.requests ? p.page_stride : p.row_stride)) %
                           16 ==
                       0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t j = first + warp * 16 + lane / 4 + 8 * r;
    Run key;
    if (j < last) key = run_of(p, request, j, 1);
    if (key.rows) {
      const uint8_t* mine = key.rows + lane % 4 * 32;
      if (aligned) {
        load16(&f.word[r][0], mine);
        load16(&f.word[r][4], mine + 16);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) f.word[r][i] = load4(mine + 4 * i);
      }
      f.scale[r] = __ldg(key.scales);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) f.word[r][i] = 0;
      f.scale[r] = -INFINITY;
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    score_kernel(const __grid_constant__ Params p, int64_t chunk) {
  extern __shared__ __align__(1024) unsigned char raw[];
  SharedMemory<C>& sm = *reinterpret_cast<SharedMemory<C>*>(raw);
  __shared__ int64_t begins[C::kGroup], ends[C::kGroup];
  __shared__ int32_t requests[C::kGroup];

  const int64_t chunks = (p.ranges.limit + chunk - 1) / chunk;
  const int64_t token0 = blockIdx.x / chunks * C::kGroup;
  const int64_t chunk0 = blockIdx.x % chunks * chunk;
  const int64_t chunk1 = min(chunk0 + chunk, p.ranges.limit);

  // Find the tokens' valid keys; nothing is scored for tokens behind the last.
  if (threadIdx.x < C::kGroup) {
    const int64_t t = token0 + threadIdx.x;
    Range r;
    if (t < p.tokens) r = p.ranges.of(t);
    begins[threadIdx.x] = r.first, ends[threadIdx.x] = r.last;
    requests[threadIdx.x] = t < p.tokens ? request_of(p, t) : 0;
  }
  __syncthreads();
  int64_t first = chunk1, last = chunk0;
#pragma unroll
  for (int u = 0; u < C::kGroup; ++u)
    if (begins[u] < ends[u]) first = min(first, begins[u]), last = max(last, ends[u]);
  first = max(first, chunk0), last = min(last, chunk1);

  // Fill what lies outside the valid range, when asked.
  if (p.clean) {
    for (int u = 0; u < C::kGroup; ++u) {
      if (token0 + u >= p.tokens) break;
      float* row = p.logits + (token0 + u) * p.logit_stride;
      for (int64_t j = chunk0 + threadIdx.x; j < chunk1; j += C::kThreads)
        if (j < begins[u] || j >= ends[u]) row[j] = -INFINITY;
    }
  }
  if (first >= last) return;

  // Bring in Q, in the order of the fragments, and the weights.
  for (int i = threadIdx.x; i < C::kN * 32; i += C::kThreads) {
    const int n = i / 32, word = i % 32, h = n % C::kHeads;
    const int64_t t = token0 + n / C::kHeads;
    uint32_t v = 0;
    if (h < p.heads && t < p.tokens)
      v = *reinterpret_cast<const uint32_t*>(p.q + t * p.q_token_stride + h * p.q_head_stride +
                                             word * 4);
    const int c = word / 8, s = word % 8 / 2, half = word % 2;
    const int logical = 8 * s + 4 * half + c;
    sm.q[n * 32 + ((logical / 4) ^ (n & 7)) * 4 + logical % 4] = v;
  }
  for (int n = threadIdx.x; n < C::kN; n += C::kThreads) {
    const int h = n % C::kHeads;
    const int64_t t = token0 + n / C::kHeads;
    sm.weights[n] = h < p.heads && t < p.tokens ? p.weights[t * p.weight_stride + h] : 0.0f;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  // Descriptor of Q: start, 8 rows of 128 B apart, 128-byte swizzle.
  const uint32_t q_at = static_cast<uint32_t>(__cvta_generic_to_shared(sm.q));
  const uint64_t q_desc = (uint64_t)((q_at & 0x3ffff) >> 4) | (uint64_t)1 << 16 |
                          (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;

  const int wg = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;

  // Tokens of one request share a pass; a group of mixed requests takes one pass for each.
  uint32_t left = 0;
#pragma unroll
  for (int u = 0; u < C::kGroup; ++u)
    if (begins[u] < ends[u]) left |= 1u << u;
  while (left) {
    const int32_t request = requests[__ffs(left) - 1];
    uint32_t members = 0;
    int64_t from = chunk1, to = chunk0;
    for (int u = 0; u < C::kGroup; ++u)
      if ((left >> u & 1) && requests[u] == request) {
        members |= 1u << u;
        from = min(from, begins[u]), to = max(to, ends[u]);
      }
    left &= ~members;
    from = max(from, chunk0) / C::kTile *
           C::kTile;  // whole tiles; rows outside are masked when written
    to = min(to, chunk1);

    Fragment f[C::kDepth];
    const int64_t step = C::kWarpgroups * C::kTile;
    int64_t at = from + wg * C::kTile;
#pragma unroll
    for (int d = 0; d < C::kDepth - 1; ++d) load(f[d], p, request, at + d * step, to);
    while (at < to) {
#pragma unroll
      for (int d = 0; d < C::kDepth; ++d) {
        if (at < to) {
          // Ask for the tile kDepth - 1 ahead.
          load(f[(d + C::kDepth - 1) % C::kDepth], p, request, at + (C::kDepth - 1) * step, to);

          // Multiply: 64 keys x N heads x 128.
          float acc[C::kN / 2];
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            const uint32_t a[4] = {f[d].word[0][2 * s], f[d].word[1][2 * s],
                                   f[d].word[0][2 * s + 1], f[d].word[1][2 * s + 1]};
            gpu::wgmma_e4m3(acc, a, q_desc + 2 * s, s > 0);
          }
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
          for (int i = 0; i < C::kN / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");

            // ReLU, weight, sum over the heads of each token; write the keys that are the token's
            // own.
#pragma unroll
          for (int u = 0; u < C::kGroup; ++u) {
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int b = 0; b < C::kHeads / 8; ++b) {
              const float2 w = *reinterpret_cast<const float2*>(
                  &sm.weights[u * C::kHeads + 8 * b + 2 * (lane % 4)]);
              const float* v = &acc[4 * (u * C::kHeads / 8 + b)];
              sum[0] = fmaf(w.x, fmaxf(v[0], 0.0f), sum[0]);
              sum[0] = fmaf(w.y, fmaxf(v[1], 0.0f), sum[0]);
              sum[1] = fmaf(w.x, fmaxf(v[2], 0.0f), sum[1]);
              sum[1] = fmaf(w.y, fmaxf(v[3], 0.0f), sum[1]);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
              sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            }
            const int r = lane % 4;
            const int64_t j = at + warp * 16 + lane / 4 + 8 * r;
            if (r < 2 && (members >> u & 1) && j >= max(begins[u], chunk0) &&
                j < min(ends[u], chunk1)) {
              const float scale = r == 0 ? f[d].scale[0] : f[d].scale[1];
              const float total = r == 0 ? sum[0] : sum[1];
              p.logits[(token0 + u) * p.logit_stride + j - (p.from_start ? begins[u] : 0)] =
                  scale == -INFINITY ? -INFINITY : scale * total;
            }
          }
          at += step;
        }
      }
    }
  }
}

template <class C>
void launch(const Params& p, int64_t chunk) noexcept {
  const int64_t groups = (p.tokens + C::kGroup - 1) / C::kGroup;
  const int64_t chunks = (p.ranges.limit + chunk - 1) / chunk;
  const int bytes = sizeof(SharedMemory<C>);
  cudaFuncSetAttribute(score_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  score_kernel<C><<<static_cast<unsigned>(groups * chunks), C::kThreads, bytes,
                    static_cast<cudaStream_t>(p.device.stream)>>>(p, chunk);
}

}  // namespace winnow::scoring
