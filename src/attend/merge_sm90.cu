// merge on the device: a block per (token, head) row. Every thread finds the row's largest lse and
// total weight for itself (a few broadcast loads), then adds up its columns part by part in order,
// so results do not depend on timing. Memory-bound: every partial row is read once.
#include <cuda_runtime.h>

#include "attend/merge_kernel.h"
#include "core/formats.h"

namespace winnow::merging {

namespace {

constexpr int kThreads = 128;
constexpr int kEach = 4;  // columns of a thread in one pass: 512 a block

__device__ __forceinline__ void store(float* out, float x) { *out = x; }
__device__ __forceinline__ void store(bf16* out, float x) { *out = to_bf16(x); }

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) merge_rows(const __grid_constant__ Params p) {
  const int64_t t = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
  const float* lses = p.partial_lse + t * p.lse_token_stride + h * p.lse_head_stride;

  // Find the largest lse and the sum of weights; a NaN makes both NaN.
  float max = -INFINITY, sum = 0;
  for (int64_t i = 0; i < p.parts; ++i) {
    const float lse = lses[i * p.lse_part_stride];
    if (!isinf(lse) && !(lse <= max)) max = lse;
  }
  for (int64_t i = 0; i < p.parts; ++i) {
    const float lse = lses[i * p.lse_part_stride];
    if (!isinf(lse)) sum += expf(lse - max);
  }
  const float whole = sum + (p.sink ? expf(p.sink[h] - max) : 0.0f);

  // Add up the columns; the rows of empty parts are not read.
  const In* in = static_cast<const In*>(p.partial_out) + t * p.token_stride + h * p.head_stride;
  Out* out = static_cast<Out*>(p.out) + t * p.out_token_stride + h * p.out_head_stride;
  for (int64_t base = 0; base < p.d_v; base += kThreads * kEach) {
    float total[kEach] = {};
    for (int64_t i = 0; i < p.parts; ++i) {
      const float lse = lses[i * p.lse_part_stride];
      if (isinf(lse)) continue;
      const float weight = expf(lse - max) / whole;
      for (int c = 0; c < kEach; ++c) {
        const int64_t d = base + c * kThreads + threadIdx.x;
        if (d < p.d_v) total[c] = fmaf(weight, to_float(in[i * p.part_stride + d]), total[c]);
      }
    }
    for (int c = 0; c < kEach; ++c) {
      const int64_t d = base + c * kThreads + threadIdx.x;
      if (d < p.d_v) store(out + d, total[c]);
    }
  }
  if (p.lse && threadIdx.x == 0)
    p.lse[t * p.out_lse_token_stride + h * p.out_lse_head_stride] =
        sum == 0 ? -INFINITY : max + logf(sum);
}

}  // namespace

void sm90(const Params& p) noexcept {
  const int64_t rows = p.tokens * p.heads;
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>(rows);
  const auto stream = static_cast<cudaStream_t>(p.device.stream);
  if (p.partial_bf16 && p.out_bf16) merge_rows<bf16, bf16><<<blocks, kThreads, 0, stream>>>(p);
  else if (p.partial_bf16) merge_rows<bf16, float><<<blocks, kThreads, 0, stream>>>(p);
  else if (p.out_bf16) merge_rows<float, bf16><<<blocks, kThreads, 0, stream>>>(p);
  else merge_rows<float, float><<<blocks, kThreads, 0, stream>>>(p);
}

}  // namespace winnow::merging
