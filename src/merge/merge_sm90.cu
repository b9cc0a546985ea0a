// merge on the device: a warp takes up to four (token, head) rows. Eight lanes weigh the parts of a
// row, all rows at once; then all lanes take a row after the other and add up their columns part by
// part in order, so results do not depend on timing. Memory-bound: every partial row is read once,
// 16 bytes a lane and load where addresses allow it, 512 columns of two parts under way at a time.
// A row of two bf16 parts takes about 280 instructions.
#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>

#include "core/arithmetic.h"
#include "core/formats.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "merge/kernel.h"

namespace winnow::internal::merge {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kRows = 4, kLanes = 32 / kRows;  // rows of a warp at most, lanes that weigh one

// Columns of a lane in one pass: 512 a warp where it loads 16 bytes at once, else 256.
template <int kTogether>
constexpr int kEach = kTogether > 1 ? 16 : 8;

// N neighbours, loaded or stored together, in whole registers until they are needed.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Several {
  uint32_t words[sizeof(T) * N / 4];
};
template <class T>
struct Several<T, 1> {
  T one;
};

template <class T, int N>
__device__ __forceinline__ float value(const Several<T, N>& x, int i) {
  if constexpr (N == 1) return to_float(x.one);
  else if constexpr (sizeof(T) == 4) return __uint_as_float(x.words[i]);
  else return __uint_as_float(i % 2 ? x.words[i / 2] & 0xffff0000 : x.words[i / 2] << 16);
}

template <class T, int N>
__device__ __forceinline__ Several<T, N> rounded(const float (&x)[N]) {
  if constexpr (sizeof(T) == 4) return reinterpret_cast<const Several<T, N>&>(x);
  else if constexpr (N == 1) return {to_bf16(x[0])};
  else {
    Several<T, N> y;
    for (int i = 0; i < N / 2; ++i) y.words[i] = cuda::pack<true>(x[2 * i], x[2 * i + 1]);
    return y;
  }
}

// `rows` of a warp; kTogether columns are loaded and stored together: 16 bytes of In, or 1 column
// at any address.
template <class In, class Out, int kTogether>
__global__ void __launch_bounds__(kThreads)
    merge_rows(const __grid_constant__ Params p, const int rows) {
  const int lane = threadIdx.x % 32, group = lane / kLanes;
  const int64_t row = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * rows + group;
  const bool here = group < rows && row < p.tokens * p.heads;
  const int64_t t = here ? row / p.heads : 0, h = here ? row - t * p.heads : 0;
  const float* lses = p.partial_lse + t * p.lse_token_stride + h * p.lse_head_stride +
                      lane % kLanes * p.lse_part_stride;
  const auto lse_of = [&](int64_t first) {
    if (!here || first + lane % kLanes >= p.parts) return -INFINITY;
    return __ldg(lses + first * p.lse_part_stride);
  };

  // Find the largest lse and the sum of weights; a NaN makes the sum NaN, and with it all results.
  float max = -INFINITY, sum = 0;
#pragma unroll 1
  for (int64_t first = 0; first < p.parts; first += kLanes) {
    const float lse = lse_of(first);
    if (!isinf(lse)) max = fmaxf(max, lse);
  }
  for (int d = 1; d < kLanes; d *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
#pragma unroll 1
  for (int64_t first = 0; first < p.parts; first += kLanes) {
    const float lse = lse_of(first), weight = isinf(lse) ? 0.0f : expf(lse - max);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sum += __shfl_sync(~0u, weight, i, kLanes);
  }
  const float whole = sum + (p.sink ? expf(p.sink[h] - max) : 0.0f);
  if (p.lse && here && lane % kLanes == 0)
    p.lse[t * p.out_lse_token_stride + h * p.out_lse_head_stride] =
        sum == 0 ? -INFINITY : max + logf(sum);

  // Add up the columns; the rows of empty parts are not read.
  const int64_t in_at = t * p.token_stride + h * p.head_stride;
  const int64_t out_at = t * p.out_token_stride + h * p.out_head_stride;
  float lse = lse_of(0), weight = expf(lse - max) / whole;
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    if (!__shfl_sync(~0u, here, r * kLanes)) break;
    const In* in = static_cast<const In*>(p.partial_out) + __shfl_sync(~0u, in_at, r * kLanes);
    Out* out = static_cast<Out*>(p.out) + __shfl_sync(~0u, out_at, r * kLanes);
#pragma unroll 1
    for (int64_t base = 0; base < p.d_v; base += 32 * kEach<kTogether>) {
      constexpr int kSteps = kEach<kTogether> / kTogether;
      using Loaded = Several<In, kTogether>;
      const int left = static_cast<int>(min(p.d_v - base, int64_t{32 * kEach<kTogether>}));
      float total[kSteps][kTogether] = {};
      const auto load = [&](Loaded(&x)[kSteps], int64_t part) {
#pragma unroll
        for (int c = 0; c < kSteps; ++c)
          if (const int d = (c * 32 + lane) * kTogether; d < left)
            x[c] = *reinterpret_cast<const Loaded*>(in + part * p.part_stride + base + d);
      };
      const auto add = [&](const Loaded(&x)[kSteps], float w) {
#pragma unroll
        for (int c = 0; c < kSteps; ++c)
          for (int k = 0; k < kTogether; ++k) total[c][k] = fmaf(w, value(x[c], k), total[c][k]);
      };
#pragma unroll 1
      for (int64_t first = 0; first < p.parts; first += kLanes) {
        if (p.parts > kLanes) {
          lse = lse_of(first);
          weight = expf(lse - max) / whole;
        }
        unsigned live = __ballot_sync(~0u, !isinf(lse)) >> r * kLanes & ((1u << kLanes) - 1);
        while (live) {
          const int i = __ffs(live) - 1, rest = live & (live - 1), j = rest ? __ffs(rest) - 1 : i;
          Loaded x[kSteps] = {}, y[kSteps] = {};
          load(x, first + i);
          if (rest) load(y, first + j);
          add(x, __shfl_sync(~0u, weight, r * kLanes + i));
          if (rest) add(y, __shfl_sync(~0u, weight, r * kLanes + j));
          live = rest & (rest - 1);
        }
      }
#pragma unroll
      for (int c = 0; c < kSteps; ++c)
        if (const int d = (c * 32 + lane) * kTogether; d < left)
          *reinterpret_cast<Several<Out, kTogether>*>(out + base + d) = rounded<Out>(total[c]);
    }
  }
}

template <class In, class Out>
void launch(const Params& p) {
  // Several rows a warp once every multiprocessor has a thousand threads.
  const int64_t all = p.tokens * p.heads, threads = 32 * all;
  const int64_t fill = int64_t{1024} * cuda::multiprocessors(p.device.index);
  const int rows = static_cast<int>(std::clamp<int64_t>(threads / fill, 1, kRows));
  const auto blocks = static_cast<unsigned>(ceil_div(all, kWarps * rows));
  const cudaStream_t stream = cuda::stream_of(p.device);
  constexpr int kTogether = 16 / sizeof(In);
  const auto aligned = [](const void* data, size_t size, std::initializer_list<int64_t> strides) {
    bool all = reinterpret_cast<uintptr_t>(data) % size == 0;
    for (const int64_t stride : strides) all = all && stride % kTogether == 0;
    return all;
  };
  if (p.d_v % kTogether == 0 &&
      aligned(p.partial_out, 16, {p.part_stride, p.token_stride, p.head_stride}) &&
      aligned(p.out, alignof(Several<Out, kTogether>), {p.out_token_stride, p.out_head_stride}))
    merge_rows<In, Out, kTogether><<<blocks, kThreads, 0, stream>>>(p, rows);
  else merge_rows<In, Out, 1><<<blocks, kThreads, 0, stream>>>(p, rows);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens * p.heads == 0) return;
  if (p.partial_bf16 && p.out_bf16) launch<bf16, bf16>(p);
  else if (p.partial_bf16) launch<bf16, float>(p);
  else if (p.out_bf16) launch<float, bf16>(p);
  else launch<float, float>(p);
}

}  // namespace winnow::internal::merge
