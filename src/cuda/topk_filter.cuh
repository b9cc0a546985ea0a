// Top-k of a row in one pass over it, by one block: a sample of the row gives a logit that a little
// more than K others exceed; those are collected in shared memory and selected from exactly. Rows
// where the sample misleads (ties, spikes) go through select_exactly(). The form for many rows: one
// block each.
//
// Who does what: 2,048 evenly spread logits, two rounds of digits give the bar. All threads stream
// the row, 16 logits each at a time; a warp appends what reaches the bar to the list. Digits of the
// list's keys, then of its columns where ties must be cut, give the K; they set their bit in a
// bitmap of the row, and the bitmap is written out in ascending order. So the order in which warps
// append does not show.
//
// Budget for 64k logits and K = 2,048: 5 instructions a logit are 10,200 cycles for each of four
// schedulers, shared by the blocks of a multiprocessor; 256 KB at 64 B a cycle are 4,096; sample,
// list and bitmap are latency, which the other blocks hide.
#pragma once

#include "cuda/topk_exact.cuh"

namespace winnow::gpu::ranking {

constexpr int kSample = 4 * kThreads;     // logits that stand for a row
constexpr uint32_t kListed = 6144;        // logits the list holds
constexpr int64_t kMapColumns = 1 << 19;  // columns the bitmap may have: 64 KB

struct FilterMemory {
  uint32_t bins[kBins];
  Scan scan;
  uint32_t count;
  alignas(16) uint2 list[kListed];  // a logit's bits and its column
  alignas(16) uint32_t bitmap[4];   // as many words as the row has 32 columns
};
static_assert(kAloneBytes <= sizeof(FilterMemory::list));

inline size_t filter_bytes(int64_t columns) {
  return sizeof(FilterMemory) + static_cast<size_t>(columns + 3) / 32 * 4 + 16;
}

// A logit that, going by the sample, somewhat more than `wanted` reach: six standard deviations of
// the sample's count above it, or as many as remain to what the list holds (four at 128k columns
// and K = 2,048); cut to 22 bits. NaN if there is none. A row that has each logit twice, as
// repeated text does, has four of its own.
__device__ __forceinline__ float bar_of(const Row& row, uint32_t wanted, FilterMemory& sm) {
  const uint32_t length = row.last - row.first;
  uint32_t keys[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint64_t k = i * kThreads + threadIdx.x;
    keys[i] = key_of(row.origin[row.first + static_cast<uint32_t>(k * length / kSample)]);
  }
  // a count's standard deviation is 1/2 in its square root
  const float each = static_cast<float>(kSample) / static_cast<float>(length),
              least = sqrtf(static_cast<float>(wanted) * each), most = sqrtf(kListed * each),
              root = fminf(least + 3.f, (least + most) / 2);
  uint32_t rank = static_cast<uint32_t>(root * root) + 1;
  if (rank > kSample) return __uint_as_float(0x7fffffffu);
  uint32_t prefix = 0, mask = 0;
  const uint32_t bins = fresh(s32(sm.bins));
  for (int round = 0; round < 2; ++round) {
    const int shift = shift_of(round);
    clear(sm.bins, sizeof sm.bins);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if ((keys[i] & mask) == prefix) count(bins, keys[i] >> shift & 0x7ff);
    __syncthreads();
    const Found found = find(sm.bins, rank, sm.scan);
    prefix |= found.digit << shift, mask |= 0x7ffu << shift;
    rank -= found.above;
  }
  return value_of(prefix);
}

// Lists the row's logits that reach the bar; sm.count says how many there were, listed or not.
__device__ __forceinline__ void collect(const Row& row, float bar, FilterMemory& sm) {
  const unsigned lane = threadIdx.x % 32;
  constexpr uint32_t kStep = 16 * kThreads;
  const uint32_t list = fresh(s32(sm.list));
  for (uint32_t at = 0; at < row.last; at += kStep) {
    const uint32_t v = at + threadIdx.x * 4;
    float4 x[4];
    if (at >= row.first && at + kStep <= row.last) {
#pragma unroll
      for (int g = 0; g < 4; ++g) x[g] = load_inside(row, v + g * 4 * kThreads);
    } else {
#pragma unroll
      for (int g = 0; g < 4; ++g) x[g] = load_near_edge(row, v + g * 4 * kThreads);
    }
    uint32_t n = 0;
#pragma unroll
    for (int g = 0; g < 4; ++g)
      n += (x[g].x >= bar) + (x[g].y >= bar) + (x[g].z >= bar) + (x[g].w >= bar);
    const uint32_t inclusive = scan_warp(n), total = __shfl_sync(~0u, inclusive, 31);
    if (total == 0) continue;
    uint32_t first = 0;
    if (lane == 0) first = atomicAdd(&sm.count, total);
    first = __shfl_sync(~0u, first, 0);
    if (first + total > kListed) continue;
    uint32_t place = list + (first + inclusive - n) * sizeof(uint2);
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const auto append = [&](float y, uint32_t column) {
        if (!(y >= bar)) return;
        asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(place), "r"(__float_as_uint(y)),
                     "r"(column)
                     : "memory");
        place += sizeof(uint2);
      };
      const uint32_t column = v + g * 4 * kThreads;
      append(x[g].x, column), append(x[g].y, column + 1);
      append(x[g].z, column + 2), append(x[g].w, column + 3);
    }
  }
}

// Marks the `wanted` best of the list in the bitmap: by key, then by lowest column.
__device__ __forceinline__ void mark(uint32_t listed, uint32_t wanted, FilterMemory& sm) {
  uint32_t prefix = 0, mask = 0, tie = 0;
  const uint32_t bins = fresh(s32(sm.bins));
  bool tied = false, whole = false;  // whether columns decide; whether the rest is wanted whole
  for (int round = 0; !whole; ++round) {
    if (round == 3) tie = prefix, tied = true, prefix = mask = 0;
    const int shift = shift_of(round % 3);
    const uint32_t digits = digits_of(round % 3);
    clear(sm.bins, sizeof sm.bins);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < listed; i += kThreads) {
      const uint32_t key = key_of(__uint_as_float(sm.list[i].x));
      const uint32_t word = tied ? ~sm.list[i].y : key;
      if ((!tied || key == tie) && (word & mask) == prefix) count(bins, word >> shift & digits);
    }
    __syncthreads();
    const Found found = find(sm.bins, wanted, sm.scan);
    prefix |= found.digit << shift, mask |= digits << shift;
    wanted -= found.above;
    whole = found.count == wanted;  // at the latest when a single column is left
  }
  for (uint32_t i = threadIdx.x; i < listed; i += kThreads) {
    const uint2 entry = sm.list[i];
    const uint32_t key = key_of(__uint_as_float(entry.x));
    const bool taken = tied ? key > tie || (key == tie && ~entry.y >= prefix) : key >= prefix;
    if (taken) atomicOr(&sm.bitmap[entry.y / 32], 1u << entry.y % 32);
  }
}

// Writes the columns that the bitmap holds.
__device__ __forceinline__ void write_marked(const Job& job, FilterMemory& sm) {
  const uint32_t words = (job.row.last + 31) / 32, share = (words + kThreads - 1) / kThreads;
  const uint32_t from = min(threadIdx.x * share, words), to = min(from + share, words);
  uint32_t n = 0;
  for (uint32_t w = from; w < to; ++w) n += __popc(sm.bitmap[w]);
  int32_t* ids = job.ids + scan_block(n, sm.scan);
  for (uint32_t w = from; w < to; ++w)
    for (uint32_t bits = sm.bitmap[w]; bits; bits &= bits - 1)
      *ids++ = job.base + static_cast<int32_t>(w * 32 + __ffs(bits) - 1 - job.row.first);
}

__global__ void __launch_bounds__(kThreads, 2) filter_kernel(const __grid_constant__ TopkParams p) {
  extern __shared__ __align__(16) unsigned char raw[];
  FilterMemory& sm = *reinterpret_cast<FilterMemory*>(raw);
  let_next_start();
  const Job job = job_of(p, blockIdx.x);
  if (job.row.last - job.row.first <= p.width) {
    wait_for_previous();
    return give_all(p, job, 0, 1);
  }
  const uint32_t wanted = static_cast<uint32_t>(p.width);
  clear(sm.bitmap, (job.row.last + 127) / 128 * 16);
  if (threadIdx.x == 0) sm.count = 0;
  wait_for_previous();
  const float bar = bar_of(job.row, wanted, sm);  // its barriers cover the clearing
  collect(job.row, bar, sm);
  __syncthreads();
  const uint32_t listed = sm.count;
  if (listed >= wanted && listed <= kListed) {
    mark(listed, wanted, sm);
    __syncthreads();
    return write_marked(job, sm);
  }
  ExactMemory& exact = *reinterpret_cast<ExactMemory*>(sm.list);
  clear(&exact, kAloneBytes);
  __syncthreads();
  select_exactly<0, false>(job, wanted, exact, 0, 1);
}

}  // namespace winnow::gpu::ranking
