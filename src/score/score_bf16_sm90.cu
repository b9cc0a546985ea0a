// score over index keys in bf16 on the device: sums in fp32 by plain multiply-adds, a thread per
// key. There is no tensor core in it, so the error stays within the CPU's bound.
//
// A block has 128 keys of one token. Each thread keeps its key in registers; queries come to shared
// memory 32 heads at a time, and all threads read the same value of them. Budget per key and head:
// 128 multiply-adds and 32 shared loads of 16 bytes.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "core/arithmetic.h"
#include "core/formats.h"
#include "cuda/launch.h"
#include "score/kernel.h"

namespace winnow::internal::score {

namespace {

constexpr int kThreads = 128, kGroup = 32;

__device__ float dot(const float* q, const float (&key)[kDim]) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < kDim; i += 4) {
    const float4 values = *reinterpret_cast<const float4*>(q + i);
    sums[0] = fmaf(values.x, key[i], sums[0]);
    sums[1] = fmaf(values.y, key[i + 1], sums[1]);
    sums[2] = fmaf(values.z, key[i + 2], sums[2]);
    sums[3] = fmaf(values.w, key[i + 3], sums[3]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Heads [first, first + count) of a token, as floats, with their weights.
__device__ void load_heads(const Params& p, int64_t token, int32_t first, int32_t count, float* q,
                           float* weights) {
  for (int32_t i = threadIdx.x; i < count * kDim; i += kThreads) {
    const uint8_t* head = p.q + token * p.q_token_stride + (first + i / kDim) * p.q_head_stride;
    q[i] = to_float(reinterpret_cast<const bf16*>(head)[i % kDim]);
  }
  if (static_cast<int32_t>(threadIdx.x) < count)
    weights[threadIdx.x] = p.weights[token * p.weight_stride + first + threadIdx.x];
}

// The logits of one token for the keys of this block.
__device__ void score_token(const Params& p, int64_t token, float* q, float* weights) {
  const Range range = p.ranges.of(token);
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads;
  const int64_t j = block + threadIdx.x;
  float* logit = p.logits + token * p.logit_stride + j - (p.from_start ? range.first : 0);
  const bool wanted = j >= range.first && j < range.last;
  if (p.clean && !wanted && j < p.ranges.limit) *logit = -INFINITY;
  // The same answer for the whole block.
  if (block >= range.last || block + kThreads <= range.first) return;

  Run run;
  if (wanted) run = run_of<IndexKeysBf16>(p, request_of(p, token), j, 1);
  float key[kDim];
#pragma unroll
  for (int i = 0; i < kDim; ++i)
    key[i] = run.rows ? to_float(reinterpret_cast<const bf16*>(run.rows)[i]) : 0.0f;
  float sum = 0.0f;
  for (int32_t first = 0; first < p.heads; first += kGroup) {
    const int32_t count = min(kGroup, p.heads - first);
    __syncthreads();
    load_heads(p, token, first, count, q, weights);
    __syncthreads();
    for (int32_t h = 0; h < count; ++h) {
      const float product = dot(q + h * kDim, key);
      sum = fmaf(weights[h], product > 0 ? product : 0.0f, sum);
    }
  }
  if (wanted) *logit = run.rows ? sum : -INFINITY;
}

__global__ void __launch_bounds__(kThreads) score_keys(const __grid_constant__ Params p) {
  __shared__ __align__(16) float q[kGroup * kDim];
  __shared__ float weights[kGroup];
  for (int64_t token = blockIdx.y; token < p.tokens; token += gridDim.y)
    score_token(p, token, q, weights);
}

}  // namespace

void bf16_sm90(const Params& p) noexcept {
  if (p.tokens == 0 || p.ranges.limit == 0) return;
  constexpr int64_t kMostRows = 65535;  // of a grid
  const dim3 grid(static_cast<unsigned>(core::ceil_div(p.ranges.limit, kThreads)),
                  static_cast<unsigned>(std::min(p.tokens, kMostRows)));
  score_keys<<<grid, kThreads, 0, cuda::stream_of(p.device)>>>(p);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::score
