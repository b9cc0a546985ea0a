// What the top-k kernels share: keys in the order of the floats, rows as aligned groups of four
// columns, and the search for a rank in a histogram.
//
// Words: a column is given if it is among the K largest, so that its id is written; ids are written
// in ascending order. `wanted` is how many are still to be found. The middle bin is the bin of a
// histogram that the K-th largest falls into: what lies above it is given, and of the bin itself
// the best, or all of it (`whole`) if it holds just as many as are wanted.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/asked.h"
#include "cuda/hopper.h"
#include "cuda/topk.h"

namespace winnow::internal::cuda::ranking {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBins = 2048;

// Digits of a word from the top: 11, 11 and 10 bits.
__device__ __forceinline__ int shift_of(int round) { return round == 0 ? 21 : round == 1 ? 10 : 0; }
__device__ __forceinline__ uint32_t digits_of(int round) { return round == 2 ? 0x3ff : 0x7ff; }

// Ascending integers in the order of the floats: 1 for NaN, then -inf ... +inf; -0 equals +0. 0 is
// left for what is no logit.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t u = __float_as_uint(x + 0.0f);
  const uint32_t key = u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u);
  return x == x ? key : 1;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The valid columns [first, last) of a row, counted from a 16-byte boundary below its first logit.
struct Row {
  const float* origin;
  uint32_t first, last;
};
struct Job {
  Row row;
  int32_t* ids;
  int32_t base;   // id of column row.first
  float* values;  // null: ids alone are requested

  // Gives a column.
  __device__ __forceinline__ void put(uint32_t place, uint32_t column) const {
    ids[place] = base + static_cast<int32_t>(column - row.first);
    if (values) values[place] = row.origin[column];
  }
};

__device__ __forceinline__ Job job_of(const TopkParams& p, int64_t token, const Range& range) {
  const float* logits = p.logits + token * p.logit_stride + (p.from_start ? 0 : range.first);
  const uint32_t lead = reinterpret_cast<uintptr_t>(logits) / sizeof(float) % 4;
  const uint32_t length = static_cast<uint32_t>(range.last - range.first);
  return {{logits - lead, lead, lead + length},
          p.ids + token * p.id_stride,
          static_cast<int32_t>(p.relative ? 0 : range.first),
          p.values ? p.values + token * p.value_stride : nullptr};
}
__device__ __forceinline__ Job job_of(const TopkParams& p, int64_t token) {
  return job_of(p, token, p.ranges.of(token));
}

// Columns v ... v + 3 of a row, v a multiple of 4; NaN where there is none. Nothing outside is
// read.
__device__ __forceinline__ float4 load_near_edge(const Row& row, uint32_t v) {
  const float nan = __uint_as_float(0x7fffffffu);
  float4 x{nan, nan, nan, nan};
  if (v >= row.first && v < row.last) x.x = row.origin[v];
  if (v + 1 >= row.first && v + 1 < row.last) x.y = row.origin[v + 1];
  if (v + 2 >= row.first && v + 2 < row.last) x.z = row.origin[v + 2];
  if (v + 3 >= row.first && v + 3 < row.last) x.w = row.origin[v + 3];
  return x;
}
__device__ __forceinline__ float4 load_inside(const Row& row, uint32_t v) {
  return *reinterpret_cast<const float4*>(row.origin + v);
}
// The keys of these columns, 0 where there is none.
__device__ __forceinline__ uint4 keys_near_edge(const Row& row, uint32_t v) {
  const float4 x = load_near_edge(row, v);
  const auto key = [&](float y, uint32_t column) {
    return column >= row.first && column < row.last ? key_of(y) : 0;
  };
  return {key(x.x, v), key(x.y, v + 1), key(x.z, v + 2), key(x.w, v + 3)};
}
__device__ __forceinline__ uint4 keys_of(const float4& x) {
  return {key_of(x.x), key_of(x.y), key_of(x.z), key_of(x.w)};
}

// The k-th of 2^log2 places spread over a row: one in each even part, and not at the same distance
// from its start, so that a row which repeats itself is not seen at the same columns every time.
__device__ __forceinline__ const float* sampled(const Row& row, uint32_t k, int log2) {
  const uint32_t place = k << 16 | (k * 40503 & 0xffff);  // steps of the golden section
  const uint64_t column = static_cast<uint64_t>(place) * (row.last - row.first) >> (16 + log2);
  return row.origin + row.first + static_cast<uint32_t>(column);
}

// A counter in shared memory grows. `bins` is an address that the compiler keeps in a register
// (fresh()); from a pointer it would compute the block's window anew for every increment.
__device__ __forceinline__ void count(uint32_t bins, uint32_t bin) {
  asm volatile("red.shared.add.u32 [%0],1;" ::"r"(bins + bin * 4) : "memory");
}
__device__ __forceinline__ void clear(void* memory, size_t bytes) {
  for (size_t i = threadIdx.x; i < bytes / 16; i += kThreads)
    static_cast<uint4*>(memory)[i] = uint4{};
}

struct Found {
  uint32_t digit, above, count;  // the bin, entries in higher bins, entries in it
};
struct Scan {
  uint32_t warps[kWarps];
  Found found;
};

__device__ __forceinline__ uint32_t scan_warp(uint32_t x) {  // inclusive
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
    asm volatile(
        "{\n.reg .pred p;\n.reg .b32 y;\nshfl.sync.up.b32 y|p,%0,%1,0,-1;\n@p add.u32 %0,%0,y;\n}"
        : "+r"(x)
        : "r"(d));
  return x;
}

// Exclusive sum over the block. A barrier must pass before `scan` is used again.
__device__ __forceinline__ uint32_t scan_block(uint32_t x, Scan& scan) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, inclusive = scan_warp(x);
  if (lane == 31) scan.warps[warp] = inclusive;
  __syncthreads();
  return __reduce_add_sync(~0u, lane < warp ? scan.warps[lane] : 0) + inclusive - x;
}

// The bin, from the top, in which the wanted-th entry falls. Ends with a barrier.
__device__ __forceinline__ Found find(const uint32_t* bins, uint32_t wanted, Scan& scan) {
  const uint4 four = reinterpret_cast<const uint4*>(bins)[kBins / 4 - 1 - threadIdx.x];
  const uint32_t sum = four.x + four.y + four.z + four.w;
  uint32_t above = scan_block(sum, scan);
  if (above < wanted && wanted <= above + sum) {
    const uint32_t bin[4] = {four.w, four.z, four.y, four.x};
    uint32_t digit = kBins - 1 - 4 * threadIdx.x, count = bin[0];
#pragma unroll
    for (int i = 1; i < 4; ++i)
      if (wanted > above + count) {
        above += count;
        --digit;
        count = bin[i];
      }
    scan.found = {digit, above, count};
  }
  __syncthreads();
  return scan.found;
}

// A range no longer than K is given whole.
__device__ __forceinline__ void give_all(const TopkParams& p, const Job& job, unsigned rank,
                                         unsigned blocks) {
  const int64_t length = job.row.last - job.row.first;
  for (int64_t k = rank * kThreads + threadIdx.x; k < p.width; k += blocks * kThreads) {
    job.ids[k] = k < length ? static_cast<int32_t>(job.base + k) : -1;
    if (job.values) job.values[k] = k < length ? job.row.origin[job.row.first + k] : -INFINITY;
  }
}

}  // namespace winnow::internal::cuda::ranking
