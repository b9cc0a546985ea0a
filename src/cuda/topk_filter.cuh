// Top-k of a row in one pass over it, by one block: a sample of the row gives a logit that a little
// more than K others exceed; those are collected in shared memory and selected from exactly. Rows
// where the sample misleads (ties, spikes) go through select_exactly(). The form for many rows: one
// block each.
//
// Who does what: 2,048 spread logits (4,096 for a large K), two rounds of digits give the bar.
// All threads stream the row, 16 logits each at a time; a warp appends what reaches the bar to the
// list. Digits of the list's keys, then of its columns where ties must be cut, give the K; they set
// their bit in a bitmap of the row, and the bitmap is written out in ascending order. So the order
// in which warps append does not show.
//
// Budget for 64k logits and K = 2,048: 5 instructions a logit are 10,200 cycles for each of four
// schedulers, shared by the blocks of a multiprocessor; 256 KB at 64 B a cycle are 4,096; sample,
// list and bitmap are latency, which the other blocks hide.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/arithmetic.h"
#include "cuda/topk_exact.cuh"

namespace winnow::internal::cuda::ranking {

constexpr uint32_t kLeastRoom = 6144;     // logits the list holds at least
constexpr int64_t kMapColumns = 1 << 19;  // columns the bitmap may have: 64 KB

// Logits that reached the bar, in shared memory: bits and column of each.
struct List {
  uint2* entries;
  uint32_t room;
  uint32_t* count;
};

struct FilterMemory {
  uint32_t bins[kBins];
  Scan scan;
  uint32_t count;
  alignas(16) uint2 entries[2];  // of the list, as many as it has room for; the bitmap follows
};

static_assert(kAloneBytes <= kLeastRoom * sizeof(uint2));

inline size_t filter_bytes(int64_t columns, uint32_t room) {
  return offsetof(FilterMemory, entries) + room * sizeof(uint2) +
         static_cast<size_t>(columns + 3) / 32 * 4 + 16;
}
// Four standard deviations of a sample's count between K and the bar, and as many between the bar
// and the list's end: one of 16,000 rows misses.
inline uint32_t room_for(int64_t width, int64_t columns, int sample) {
  const double share =
      static_cast<double>(sample) / static_cast<double>(std::max<int64_t>(columns, 1));
  const double root = std::sqrt(static_cast<double>(width) * share) + 4;
  return static_cast<uint32_t>(std::min(root * root / share, 1e8) / 16 + 1) * 16;
}
inline uint32_t filter_room(int64_t width, int64_t columns, int sample) {
  return std::max(kLeastRoom, room_for(width, columns, sample));
}

// Logits that stand for a row: kEach keys of every thread.
template <int kEach>
struct Sample {
  static constexpr int kLog2 = kEach == 4 ? 11 : 12;
  static_assert(kEach * kThreads == 1 << kLog2);
  uint32_t keys[kEach];
  float share;  // of the row

  __device__ __forceinline__ explicit Sample(const Row& row)
      : share(static_cast<float>(1 << kLog2) / static_cast<float>(row.last - row.first)) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      keys[i] = key_of(*sampled(row, i * kThreads + threadIdx.x, kLog2));
  }
};

// A logit that, going by the sample, somewhat more than `wanted` reach: six standard deviations of
// the sample's count above it, or half of the way to `room`, where that is less (four at 128k
// columns and K = 2,048); cut to 22 bits. NaN if there is none.
template <int kEach>
__device__ __forceinline__ float bar_of(const Sample<kEach>& sample, uint32_t wanted, uint32_t room,
                                        uint32_t (&counts)[kBins], Scan& scan) {
  // a count's standard deviation is 1/2 in its square root
  const float least = sqrtf(static_cast<float>(wanted) * sample.share),
              most = sqrtf(static_cast<float>(room) * sample.share),
              root = fminf(least + 3.f, (least + most) / 2);
  uint32_t rank = static_cast<uint32_t>(root * root) + 1;
  if (rank > kEach * kThreads) return __uint_as_float(0x7fffffffu);
  uint32_t prefix = 0, mask = 0;
  const uint32_t bins = fresh(s32(counts));
  for (int round = 0; round < 2; ++round) {
    const int shift = shift_of(round);
    clear(counts, sizeof counts);
    __syncthreads();
#pragma unroll
    for (const uint32_t key : sample.keys)
      if ((key & mask) == prefix) count(bins, key >> shift & 0x7ff);
    __syncthreads();
    const Found found = find(counts, rank, scan);
    prefix |= found.digit << shift;
    mask |= 0x7ffu << shift;
    rank -= found.above;
  }
  return value_of(prefix);
}

// What is listed. again() is the same with a bar that the compiler takes for another: it would keep
// the first answers for the second question, bit by bit in a register (25 instructions a step).
struct Reaches {
  float bar, copy;
  __device__ __forceinline__ bool operator()(float y) const { return y >= bar; }
  __device__ __forceinline__ bool again(float y) const { return y >= copy; }
};
__device__ __forceinline__ Reaches reaching(float bar) {
  return {bar, __uint_as_float(fresh(__float_as_uint(bar)))};
}

// Lists the row's logits that reach the bar; the list's count says how many there were, listed or
// not. kLoads: loads of four logits that a thread has in flight; kAhead: while it looks at the step
// before, which is for blocks that have a multiprocessor to themselves.
template <int kLoads, bool kAhead, class Wanted>
__device__ __forceinline__ void collect(const Row& row, const Wanted& reaches, const List& list) {
  const unsigned lane = threadIdx.x % 32;
  constexpr uint32_t kStep = kLoads * 4 * kThreads;
  const uint32_t entries = fresh(s32(list.entries));
  const auto load = [&](float4(&x)[kLoads], uint32_t at) {
    const uint32_t v = at + threadIdx.x * 4;
    if (at >= row.first && at + kStep <= row.last) {
#pragma unroll
      for (int g = 0; g < kLoads; ++g) x[g] = load_inside(row, v + g * 4 * kThreads);
    } else {
#pragma unroll
      for (int g = 0; g < kLoads; ++g) x[g] = load_near_edge(row, v + g * 4 * kThreads);
    }
  };
  const auto look = [&](const float4(&x)[kLoads], uint32_t at) {
    uint32_t n = 0;
#pragma unroll
    for (int g = 0; g < kLoads; ++g)
      n += reaches(x[g].x) + reaches(x[g].y) + reaches(x[g].z) + reaches(x[g].w);
    const uint32_t inclusive = scan_warp(n), total = __shfl_sync(~0u, inclusive, 31);
    if (total == 0) return;
    uint32_t first = 0;
    if (lane == 0) first = atomicAdd(list.count, total);
    first = __shfl_sync(~0u, first, 0);
    if (first + total > list.room) return;
    uint32_t place = entries + (first + inclusive - n) * sizeof(uint2);
#pragma unroll
    for (int g = 0; g < kLoads; ++g) {
      const auto append = [&](float y, uint32_t column) {
        if (!reaches.again(y)) return;
        asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(place), "r"(__float_as_uint(y)),
                     "r"(column)
                     : "memory");
        place += sizeof(uint2);
      };
      const uint32_t column = at + (threadIdx.x + g * kThreads) * 4;
      append(x[g].x, column);
      append(x[g].y, column + 1);
      append(x[g].z, column + 2);
      append(x[g].w, column + 3);
    }
  };
  float4 x[kLoads], next[kLoads];
  const uint32_t begin = row.first / 4 * 4;
  if (kAhead && begin < row.last) load(next, begin);
  for (uint32_t at = begin; at < row.last; at += kStep) {
    if (kAhead) {
#pragma unroll
      for (int g = 0; g < kLoads; ++g) x[g] = next[g];
      if (at + kStep < row.last) load(next, at + kStep);
    } else {
      load(x, at);
    }
    look(x, at);
  }
}

// Marks the `wanted` best of the list in the bitmap: by key, then by lowest column.
__device__ __forceinline__ void mark(uint32_t listed, uint32_t wanted, uint32_t* bitmap,
                                     FilterMemory& sm) {
  uint32_t prefix = 0, mask = 0, tie = 0;
  const uint32_t bins = fresh(s32(sm.bins));
  bool tied = false, whole = false;  // whether columns decide; whether the rest is wanted whole
  for (int round = 0; !whole; ++round) {
    if (round == 3) {
      tie = prefix;
      tied = true;
      prefix = mask = 0;
    }
    const int shift = shift_of(round % 3);
    const uint32_t digits = digits_of(round % 3);
    clear(sm.bins, sizeof sm.bins);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < listed; i += kThreads) {
      const uint32_t key = key_of(__uint_as_float(sm.entries[i].x));
      const uint32_t word = tied ? ~sm.entries[i].y : key;
      if ((!tied || key == tie) && (word & mask) == prefix) count(bins, word >> shift & digits);
    }
    __syncthreads();
    const Found found = find(sm.bins, wanted, sm.scan);
    prefix |= found.digit << shift;
    mask |= digits << shift;
    wanted -= found.above;
    whole = found.count == wanted;  // at the latest when a single column is left
  }
  for (uint32_t i = threadIdx.x; i < listed; i += kThreads) {
    const uint2 entry = sm.entries[i];
    const uint32_t key = key_of(__uint_as_float(entry.x));
    const bool taken = tied ? key > tie || (key == tie && ~entry.y >= prefix) : key >= prefix;
    if (taken) atomicOr(&bitmap[entry.y / 32], 1u << entry.y % 32);
  }
}

// Gives the columns that a bitmap of `words` holds, from place `place` on; `first` is its first
// column.
__device__ __forceinline__ void write_marked(const uint32_t* bitmap, uint32_t words, const Job& job,
                                             uint32_t place, uint32_t first, Scan& scan) {
  const uint32_t share = ceil_div(words, kThreads);
  const uint32_t from = min(threadIdx.x * share, words), to = min(from + share, words);
  uint32_t n = 0;
  for (uint32_t w = from; w < to; ++w) n += __popc(bitmap[w]);
  place += scan_block(n, scan);
  for (uint32_t w = from; w < to; ++w)
    for (uint32_t bits = bitmap[w]; bits; bits &= bits - 1)
      job.put(place++, first + w * 32 + __ffs(bits) - 1);
}

// kEach: of the sample, a thread's.
template <int kEach>
__global__ void __launch_bounds__(kThreads, 2)
    filter_kernel(const __grid_constant__ TopkParams p, uint32_t room) {
  extern __shared__ __align__(16) unsigned char raw[];
  FilterMemory& sm = *reinterpret_cast<FilterMemory*>(raw);
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(sm.entries + room);
  let_next_start();
  const Job job = job_of(p, blockIdx.x);
  const Row row = job.row;
  if (row.last - row.first <= p.width) {
    wait_for_previous();
    return give_all(p, job, 0, 1);
  }
  const uint32_t wanted = static_cast<uint32_t>(p.width);
  clear(bitmap, ceil_div(row.last, 128) * 16);
  if (threadIdx.x == 0) sm.count = 0;
  wait_for_previous();
  // its barriers cover the clearing
  const float bar = bar_of(Sample<kEach>(row), wanted, room, sm.bins, sm.scan);
  collect<4, false>(row, reaching(bar), {sm.entries, room, &sm.count});
  __syncthreads();
  const uint32_t listed = sm.count;
  if (listed >= wanted && listed <= room) {
    mark(listed, wanted, bitmap, sm);
    __syncthreads();
    return write_marked(bitmap, ceil_div(row.last, 32), job, 0, 0, sm.scan);
  }
  ExactMemory& exact = *reinterpret_cast<ExactMemory*>(sm.entries);
  clear(&exact, kAloneBytes);
  __syncthreads();
  select_exactly<0, false>(job, wanted, exact, 0, 1);
}

}  // namespace winnow::internal::cuda::ranking
