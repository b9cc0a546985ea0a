// gather on the device: a pass over memory. A warp takes four rows of a request at a time, a lane
// eight values (16 bytes of the output) at a time: all loads of the four rows first, then the
// conversions and stores. Bytes are the budget: 656 in and 1,152 out per token of V3.2; with 24
// warps a multiprocessor has 63 KB under way. About 130 instructions a row, a third of them the
// conversion, take less time than memory.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "core/arithmetic.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "model/records.h"
#include "write/kernel.h"

namespace winnow::internal::write::sm90 {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kBlocks = 3;  // of a multiprocessor
constexpr int kRows = 4;                                            // of a warp at a time

// Where the RoPE part of a record begins in its page.
template <class R>
__device__ __forceinline__ int64_t rope_of(int64_t off, int64_t tokens) {
  if constexpr (R::kQuantized) return R::rope(off, tokens);
  else return R::row(off, tokens) + 2 * R::kNope;
}

// Eight values as a record stores them: codes and their scale, or bf16.
template <class R, bool = R::kQuantized>
struct Eight {
  uint2 codes;
  typename R::Scale scale;
};
template <class R>
struct Eight<R, false> {
  uint4 values;
};

// The values from column d of the record's first part on; nothing without a page.
template <class R>
__device__ __forceinline__ Eight<R> load_eight(const std::byte* page, int64_t off, int64_t tokens,
                                               int d) {
  Eight<R> x{};
  const std::byte* row = page + R::row(off, tokens);
  if constexpr (R::kQuantized) {
    const std::byte* scales = page + R::scales(off, tokens);
    if (page) x.codes = __ldg(reinterpret_cast<const uint2*>(row + d));
    if (page) x.scale = __ldg(reinterpret_cast<const typename R::Scale*>(scales) + d / R::kTile);
  } else {
    if (page) x.values = __ldg(reinterpret_cast<const uint4*>(row + 2 * d));
  }
  return x;
}

__device__ __forceinline__ uint32_t scaled_pair(uint32_t halves, float s) {
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return cuda::pack<true>(x.x * s, x.y * s);
}

template <class R>
__device__ __forceinline__ uint4 dequantized(const Eight<R>& x) {
  if constexpr (R::kQuantized) {
    const float s = get_scale(&x.scale);
    uint32_t h[4];
    cuda::e4m3x4(x.codes.x, h[0], h[1]);
    cuda::e4m3x4(x.codes.y, h[2], h[3]);
    return {scaled_pair(h[0], s), scaled_pair(h[1], s), scaled_pair(h[2], s), scaled_pair(h[3], s)};
  } else {
    return x.values;
  }
}

// Stores the first n of 256 values that a warp holds, eight in a lane; value i goes to at(i). Where
// 16 bytes cannot be stored at once, they pass through shared memory, so that lanes still store
// next to each other (a lane's eight one by one take five times as long as 16 bytes at once).
template <bool kAligned, class At>
__device__ __forceinline__ void store(uint4 x, int n, uint4* staged, const At& at) {
  const int lane = threadIdx.x % 32;
  if constexpr (kAligned) {
    if (8 * lane < n) *reinterpret_cast<uint4*>(at(8 * lane)) = x;
  } else {
    staged[lane] = x;
    __syncwarp();
    for (int i = lane; i < n; i += 32) *at(i) = reinterpret_cast<const bf16*>(staged)[i];
    __syncwarp();
  }
}

// Up to kRows rows of one request. Lane i finds the record of row i % kRows. Then all lanes take
// the first part of every row in turn, and eight lanes each the RoPE part of a row.
template <class R, bool kAligned>
__device__ __forceinline__ void gather_rows(const GatherParams& p, int64_t request,
                                            const Run& run) {
  static_assert(R::kRope == 8 * 32 / kRows);
  constexpr int kSteps = (R::kNope + 255) / 256;
  const int lane = threadIdx.x % 32, tokens = p.cache.page;
  const int64_t token = run.token + lane % kRows;
  const std::byte* mine = lane % kRows < run.count ? page_of(p, request, token) : nullptr;
  const int off = mine ? static_cast<int>(token % tokens) : 0;
  const auto page_at = [&](int row) {
    return reinterpret_cast<const std::byte*>(
        __shfl_sync(~0u, reinterpret_cast<uint64_t>(mine), row));
  };

  Eight<R> x[kRows][kSteps];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const std::byte* page = page_at(row);
    const int at = __shfl_sync(~0u, off, row);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int d = 256 * k + 8 * lane;
      x[row][k] = load_eight<R>(d < R::kNope ? page : nullptr, at, tokens, d);
    }
  }
  const std::byte* page = page_at(lane / 8);
  const int64_t at = rope_of<R>(__shfl_sync(~0u, off, lane / 8), tokens) + lane % 8 * 16;
  uint4 rope{};
  if (page) rope = __ldg(reinterpret_cast<const uint4*>(page + at));

  __shared__ uint4 memory[kWarps][32];  // unused if aligned
  uint4* staged = memory[threadIdx.x / 32];
  bf16* out = p.out + run.row * p.out_stride;
#pragma unroll
  for (int row = 0; row < kRows; ++row)
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      if (row < run.count)
        store<kAligned>(dequantized<R>(x[row][k]), min(R::kNope - 256 * k, 256), staged,
                        [&](int i) { return out + row * p.out_stride + 256 * k + i; });
  store<kAligned>(
      rope, R::kRope * static_cast<int>(min(run.count, int64_t{kRows})), staged,
      [&](int i) { return out + i / R::kRope * p.out_stride + R::kNope + i % R::kRope; });
}

// The sum of x over this lane and those below.
__device__ __forceinline__ int64_t sum_to_here(int64_t x) {
  for (int n = 1; n < 32; n *= 2) {
    const int64_t below = __shfl_up_sync(~0u, x, n);
    if (static_cast<int>(threadIdx.x % 32) >= n) x += below;
  }
  return x;
}

// Every warp walks the requests, 32 at once with one in each lane, and takes every n-th piece of
// kRows rows, counted over all requests. Neighbouring pieces go to different multiprocessors, so
// that short calls use them all.
template <class R, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gather_records(const __grid_constant__ GatherParams p) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t piece = static_cast<int64_t>(threadIdx.x / 32) * gridDim.x + blockIdx.x, before = 0;
  for (int64_t base = 0; base < p.requests; base += 32) {
    const int64_t request = base + threadIdx.x % 32;
    const bool here = request < p.requests;
    const int64_t length = here ? max(p.lengths[request * p.length_stride], 0) : 0;
    const int64_t through = before + sum_to_here(length);
    int64_t start = through - length;
    const Run run = here ? run_of(p, request, start) : Run{};
    const int64_t pieces = ceil_div(run.count, kRows);
    const int64_t end = sum_to_here(pieces);
    const int64_t all = __shfl_sync(~0u, end, 31);
    for (; piece < all; piece += warps) {
      const int r = __popc(__ballot_sync(~0u, end <= piece));
      const int64_t first = (piece - __shfl_sync(~0u, end - pieces, r)) * kRows;
      const Run part{__shfl_sync(~0u, run.token, r) + first, __shfl_sync(~0u, run.row, r) + first,
                     __shfl_sync(~0u, run.count, r) - first};
      gather_rows<R, kAligned>(p, base + r, part);
    }
    piece -= all;
    before = __shfl_sync(~0u, through, 31);
  }
}

}  // namespace

void gather(const GatherParams& p) noexcept {
  if (p.requests == 0 || p.rows == 0) return;
  const int64_t most = kBlocks * cuda::multiprocessors(p.device.index);
  const auto blocks = static_cast<unsigned>(std::min(most, ceil_div(p.rows, kRows)));
  const auto stream = cuda::stream_of(p.device);
  const bool aligned = reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.out_stride % 8 == 0;
  with_latent(p.cache.format, [&](auto record) {
    using R = decltype(record);
    if (aligned) gather_records<R, true><<<blocks, kThreads, 0, stream>>>(p);
    else gather_records<R, false><<<blocks, kThreads, 0, stream>>>(p);
    cuda::keep_error(cudaGetLastError());
  });
}

}  // namespace winnow::internal::write::sm90
