// Top-k of a row by a cluster of blocks that hold it in registers: the form for few rows, where
// latency is all there is.
//
// Who does what: each warp owns a contiguous stretch of the row. Every block takes the same 512
// evenly spread logits, whose range gives 1,024 even bins; counts its own logits in them; and after
// one cluster barrier adds up all blocks' counts: so all know the bin of the K-th largest and how
// many of each block lie above it. The few entries of that bin go to every block (second barrier),
// which ranks them, and each warp writes its own stretch. Rows that do not fit the scheme (no
// range, more than kRanked entries in the bin) go through select_exactly().
//
// Budget for 32k logits on 8 blocks, cycles: loads and range of the sample 1,800; counts 700;
// barriers 900 each; the others' counts 1,200; search 800; entries and ranks 800; ids 1,200. Code
// that runs once is fetched once: what is unrolled over the logits is a few instructions each.
#pragma once

#include "cuda/topk_exact.cuh"

namespace winnow::gpu::ranking {

constexpr uint32_t kEven = 2 * kThreads;  // bins
constexpr uint32_t kRanked = 128;         // entries of one bin

struct alignas(16) SharedRowMemory {
  uint32_t own[kEven];
  uint32_t packed[kEven / 2];  // the same in 16 bits each: what the other blocks read
  Scan scan;
  Found found;               // the middle bin: the one of the K-th
  uint32_t least, greatest;  // keys of the sample; the complement of the least: both grow from 0
  uint32_t lower_entries;    // entries of the middle bin in lower blocks
  uint32_t before;           // ids that lower blocks give
  uint32_t entries;          // of the middle bin in this block
  uint32_t warps[kWarps];    // ids that each warp gives
  uint2 cut;                 // key and column of the last that is given of the middle bin
  uint2 rank[kRanked];       // key and column
};

// Even bins over a range: position() does not decrease in x, whatever the rounding, and is NaN for
// NaN alone. A bin is its integer part, from 0 to kEven - 1 at the ends.
struct EvenBins {
  float scale, offset;
  __device__ float position(float x) const { return __fmaf_rn(x, scale, offset); }
  __device__ bool good() const { return scale > 0 && scale < INFINITY && isfinite(offset); }
};

// Bins over the range of the sample, of which a thread has one logit.
__device__ __forceinline__ EvenBins bins_of(float x, SharedRowMemory& sm) {
  const uint32_t key = key_of(x);
  const uint32_t least = __reduce_max_sync(~0u, isfinite(x) ? ~key : 0);
  const uint32_t greatest = __reduce_max_sync(~0u, isfinite(x) ? key : 0);
  if (threadIdx.x % 32 == 0) atomicMax(&sm.least, least), atomicMax(&sm.greatest, greatest);
  __syncthreads();
  const float low = value_of(~sm.least), scale = (kEven - 1) / (value_of(sm.greatest) - low);
  return {scale, -low * scale};
}

// The middle bin, from all blocks' counts; sm.lower_entries and sm.before say what lower blocks
// have in it and above it. Its count is 0 if the counts do not reach `wanted`.
__device__ __forceinline__ Found find_shared(uint32_t wanted, SharedRowMemory& sm, unsigned rank,
                                             unsigned blocks) {
  const uint32_t mine = s32(&sm.packed[kThreads - 1 - threadIdx.x]);
  uint32_t other[kMaxBlocks];
#pragma unroll
  for (unsigned r = 0; r < kMaxBlocks; ++r)
    if (r < blocks)
      asm volatile("ld.shared::cluster.u32 %0,[%1];"
                   : "=r"(other[r])
                   : "r"(peer(mine, r))
                   : "memory");
  uint32_t high = 0, low = 0, lower_high = 0, lower_low = 0;  // the thread's two bins
#pragma unroll
  for (unsigned r = 0; r < kMaxBlocks; ++r)
    if (r < blocks) {
      const uint32_t h = other[r] >> 16, l = other[r] & 0xffff;
      high += h, low += l;
      if (r < rank) lower_high += h, lower_low += l;
    }
  const uint32_t above = scan_block(high + low, sm.scan);
  uint32_t before = 0;  // of lower blocks, above the middle bin
  if (above + high + low < wanted) before = lower_high + lower_low;
  else if (above < wanted) {
    const uint32_t digit = kEven - 1 - 2 * threadIdx.x;
    if (wanted <= above + high) sm.found = {digit, above, high}, sm.lower_entries = lower_high;
    else {
      before = lower_high;
      sm.found = {digit - 1, above + high, low}, sm.lower_entries = lower_low;
    }
  }
  before = __reduce_add_sync(~0u, before);
  if (threadIdx.x % 32 == 0 && before > 0) atomicAdd(&sm.before, before);
  __syncthreads();
  return sm.found;
}

// Ranks the entries of the middle bin, a warp for each: sm.cut is the last of the first `wanted`;
// adds those of lower blocks, below column `start`, to sm.before.
__device__ __forceinline__ void rank_entries(uint32_t entries, uint32_t wanted, uint32_t start,
                                             SharedRowMemory& sm) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t lower = 0;
  for (uint32_t e = threadIdx.x / 32; e < entries; e += kWarps) {
    const uint2 mine = sm.rank[e];
    uint32_t better = 0;
#pragma unroll
    for (uint32_t i = 0; i < kRanked; i += 32) {  // key 0, where there is no entry, is never better
      const uint2 other = sm.rank[i + lane];
      const bool wins = other.x > mine.x || (other.x == mine.x && other.y < mine.y);
      better += __popc(__ballot_sync(~0u, wins));
    }
    if (lane == 0 && better == wanted - 1) sm.cut = mine;
    lower += better < wanted && mine.y < start;
  }
  if (lane == 0 && lower > 0) atomicAdd(&sm.before, lower);
  __syncthreads();
}

// kGroups: groups of four logits that a thread holds.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, 1)
    shared_row_kernel(const __grid_constant__ TopkParams p, unsigned blocks) {
  extern __shared__ __align__(16) unsigned char raw[];
  SharedRowMemory& sm = *reinterpret_cast<SharedRowMemory*>(raw);
  const unsigned rank = blockIdx.x % blocks, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  let_next_start();
  const Job job = job_of(p, blockIdx.x / blocks);
  const Row row = job.row;
  const uint32_t width = static_cast<uint32_t>(p.width);
  if (row.last - row.first <= width) {  // for the whole cluster
    wait_for_previous();
    return give_all(p, job, rank, blocks);
  }
  clear(raw, sizeof sm);
  __syncthreads();
  wait_for_previous();

  const uint32_t groups = ((row.last + 127) / 128 + blocks * kWarps - 1) / (blocks * kWarps);
  const uint32_t block_start = rank * kWarps * groups * 128;
  const uint32_t start = block_start + warp * groups * 128, from = start + lane * 4;
  // The sample first, so that its range is known when the rest arrives.
  const uint64_t place = static_cast<uint64_t>(row.last - row.first) * threadIdx.x / kThreads;
  const float sample = row.origin[row.first + static_cast<uint32_t>(place)];
  float4 x[kGroups];  // NaN where there is none
  if (start >= row.first && start + kGroups * 128 <= row.last) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) x[g] = load_inside(row, from + g * 128);
  } else {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) x[g] = load_near_edge(row, from + g * 128);
  }
  if (groups < kGroups) {  // the rest belongs to the next warp
    const float nan = __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      if (g >= groups) x[g] = {nan, nan, nan, nan};
  }
  const auto each = [&](auto&& visit) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      visit(4 * g, x[g].x), visit(4 * g + 1, x[g].y), visit(4 * g + 2, x[g].z),
          visit(4 * g + 3, x[g].w);
  };

  // Count, tell the cluster, find the middle bin.
  const EvenBins even = bins_of(sample, sm);
  const uint32_t bins = fresh(s32(sm.own));
  each([&](int, float y) {
    const float position = even.position(y);
    if (position >= 0) count(bins, min(__float2uint_rz(position), kEven - 1));
  });
  __syncthreads();
  const uint2 two = reinterpret_cast<const uint2*>(sm.own)[threadIdx.x];
  sm.packed[threadIdx.x] = two.x | two.y << 16;
  cluster_sync();
  const Found found = find_shared(width, sm, rank, blocks);
  const uint32_t wanted = width - found.above;
  const bool whole = found.count == wanted;  // the middle bin is given whole
  if (!even.good() || found.count == 0 || (!whole && found.count > kRanked)) {
    cluster_sync();  // all have read the counts; it is the same for all
    clear(raw, sizeof(ExactMemory));
    cluster_sync();
    return select_exactly<0, true>(job, width, *reinterpret_cast<ExactMemory*>(raw), rank, blocks);
  }

  // Bits of this lane's logits above the middle bin and from it up. The highest bin has no end.
  const float bottom = static_cast<float>(found.digit);
  const float top = found.digit == kEven - 1 ? __uint_as_float(0x7fffffffu) : bottom + 1;
  uint64_t given = 0, reached = 0;
  float entry = 0;  // the one in the middle bin, where there is one
  each([&](int i, float y) {
    const float position = even.position(y);
    if (position >= bottom) {
      reached |= uint64_t{1} << i;
      if (position >= top) given |= uint64_t{1} << i;
      else entry = y;
    }
  });
  const auto column_of = [&](int i) { return from + i / 4 * 128 + i % 4; };
  const uint64_t middle = reached & ~given;
  const auto key_at = [&](uint32_t column) {
    return key_of(middle & (middle - 1) ? row.origin[column] : entry);
  };
  if (whole) {
    cluster_arrive();  // this block has read the others' counts, which stay until all have
    given = reached;
    if (threadIdx.x == 0) sm.before += sm.lower_entries;
  } else {
    // Its entries go to every block; all find the last that is given.
    for (uint64_t left = middle; left; left &= left - 1) {
      const uint32_t column = column_of(__ffsll(left) - 1), key = key_at(column);
      const uint32_t place = s32(&sm.rank[sm.lower_entries + atomicAdd(&sm.entries, 1u)]);
#pragma unroll 1
      for (unsigned r = 0; r < blocks; ++r)
        asm volatile("st.shared::cluster.v2.u32 [%0],{%1,%2};" ::"r"(peer(place, r)), "r"(key),
                     "r"(column)
                     : "memory");
    }
    __syncwarp();
    cluster_sync();
    rank_entries(found.count, wanted, block_start, sm);
    for (uint64_t left = middle; left; left &= left - 1) {
      const int i = __ffsll(left) - 1;
      const uint32_t column = column_of(i), key = key_at(column);
      if (key > sm.cut.x || (key == sm.cut.x && column <= sm.cut.y)) given |= uint64_t{1} << i;
    }
    __syncwarp();
  }

  // Where each warp begins; then write, in ascending order: lanes follow each other, four columns
  // each.
  const uint32_t n = __reduce_add_sync(~0u, __popcll(given));
  if (lane == 0) sm.warps[warp] = n;
  __syncthreads();
  const uint32_t before = sm.before + __reduce_add_sync(~0u, lane < warp ? sm.warps[lane] : 0);
  // A lane writes kGroups consecutive groups of the stretch, which lie in as many lanes.
  uint8_t* bits = raw + sizeof sm + warp * 32 * kGroups;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) bits[g * 32 + lane] = static_cast<uint8_t>(given >> 4 * g & 15);
  __syncwarp();
  uint64_t mine = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) mine |= uint64_t{bits[lane * kGroups + g]} << 4 * g;
  const uint32_t n_mine = __popcll(mine);
  int32_t* ids = job.ids + before + scan_warp(n_mine) - n_mine;
  const int32_t id = job.base + static_cast<int32_t>(start + lane * kGroups * 4 - row.first) - 1;
  for (; mine; mine &= mine - 1) *ids++ = id + __ffsll(mine);
  __syncwarp();
  if (whole) cluster_wait();
}

}  // namespace winnow::gpu::ranking
