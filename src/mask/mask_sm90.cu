// topk_mask on the device: a block per stretch of a row. The stretch's bits are set in shared
// memory and then stored, so that nothing is read back. Ids are read and bits are stored 16 bytes
// at a time whatever the alignment of a row, and one by one where it begins and ends. A stretch of
// 32 KB covers 262,144 keys; longer rows read their ids once per stretch. Short rows are bound by
// instructions, 250 a warp that sets 256 bits.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/arithmetic.h"
#include "cuda/launch.h"
#include "mask/kernel.h"

namespace winnow::internal::mask {

namespace {

constexpr int kThreads = 256, kBlocks = 8;  // of a multiprocessor
constexpr int kStretch = 32768;             // bytes
constexpr int kTurns = 2;                   // groups of four ids that a thread has under way

// How many bytes p is past a multiple of 16.
__device__ __forceinline__ int past(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; }

__global__ void __launch_bounds__(kThreads, kBlocks)
    mask_rows(const __grid_constant__ Params p, const unsigned stretches) {
  extern __shared__ uint4 bits[];
  const int64_t t = blockIdx.x / stretches, base = blockIdx.x % stretches * int64_t{kStretch};
  // The row's ids: `head` of them, then fours from a multiple of 16 bytes on, then the rest.
  const int32_t* ids = p.ids + t * p.id_stride;
  const int64_t head = min(int64_t{-past(ids) / 4 & 3}, p.topk), fours = (p.topk - head) / 4;
  const auto four = [&](int64_t i) {
    return i < fours ? __ldg(reinterpret_cast<const int4*>(ids + head) + i) : int4{-1, -1, -1, -1};
  };
  int4 next[kTurns];  // on their way while the bits are cleared
#pragma unroll
  for (int j = 0; j < kTurns; ++j) next[j] = four(threadIdx.x + j * kThreads);
  int64_t limit = 8 * p.bytes;
  if (p.lengths) limit = min(limit, static_cast<int64_t>(p.lengths[t * p.length_stride]));

  // Shared memory begins with the multiple of 16 bytes before the stretch.
  uint8_t* mask = p.mask + t * p.mask_stride + base;
  const int bytes = static_cast<int>(min(p.bytes - base, int64_t{kStretch})), skew = past(mask);
#pragma unroll 1
  for (int i = threadIdx.x; i < ceil_div(skew + bytes, 16); i += kThreads) bits[i] = {0, 0, 0, 0};
  __syncthreads();

  // Ids of this stretch: those `keys` from `from` on. Read as unsigned, negative ids are past every
  // stretch; one that begins past all ids has none.
  const int64_t left = base < (int64_t{1} << 28) ? limit - 8 * base : 0;
  const auto keys = static_cast<uint32_t>(max(min(left, int64_t{8} * bytes), int64_t{0}));
  const auto from = static_cast<uint32_t>(8 * base);
  auto* words = reinterpret_cast<uint32_t*>(bits);
  const auto set = [&](int32_t id) {
    const uint32_t key = static_cast<uint32_t>(id) - from, bit = key + 8 * skew;
    if (key < keys) atomicOr(words + bit / 32, 1u << bit % 32);
  };
  if (threadIdx.x < 3) {
    if (threadIdx.x < head) set(ids[threadIdx.x]);
    const int64_t k = head + 4 * fours + threadIdx.x;
    if (k < p.topk) set(ids[k]);
  }
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < fours; i += kTurns * kThreads) {
#pragma unroll
    for (int j = 0; j < kTurns; ++j) {
      set(next[j].x);
      set(next[j].y);
      set(next[j].z);
      set(next[j].w);
      next[j] = four(i + (kTurns + j) * kThreads);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < ceil_div(skew + bytes, 16); i += kThreads) {
    const int at = 16 * i - skew;
    if (at >= 0 && at + 16 <= bytes) {
      *reinterpret_cast<uint4*>(mask + at) = bits[i];
    } else {
#pragma unroll 1
      for (int b = max(at, 0); b < min(at + 16, bytes); ++b)
        mask[b] = reinterpret_cast<const uint8_t*>(bits)[b + skew];
    }
  }
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens == 0 || p.bytes == 0) return;
  const int64_t stretches = ceil_div(p.bytes, kStretch);
  const auto blocks = static_cast<unsigned>(p.tokens * stretches);
  const size_t shared = std::min(p.bytes, int64_t{kStretch}) / 16 * 16 + 32;
  mask_rows<<<blocks, kThreads, shared, cuda::stream_of(p.device)>>>(
      p, static_cast<unsigned>(stretches));
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::mask
