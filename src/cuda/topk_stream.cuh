// Top-k of a row by a cluster of blocks that stream it once: the form for few rows that the
// registers of as many clusters as run at once do not hold.
//
// Who does what: every block takes the same sample of the row (topk_filter.cuh), which gives a bar
// and bins above it, and lists what reaches the bar in a stretch of its own. From there the lists
// are to the cluster what the row is in topk_shared.cuh: counts of the bins go to every block, then
// the entries of the K-th's bin; each block marks what it gives in a bitmap of its stretch and
// writes it in ascending order. A block whose list is too short for its stretch (the best logits
// may all stand there) counts the stretch itself and, the bin being known, lists it again from
// there: K and kRanked entries at most. Rows that do not fit the scheme (no range, more than
// kRanked entries in the bin) go through select_exactly().
//
// Budget for 1M logits and K = 2,048 on 8 blocks: of 23 us about 8 for start, sample and bar, bins,
// entries and ids; 512 KB a block at 20 B a cycle the rest. Loads are requested while the step
// before is looked at; what limits them is the cache they arrive in (stream_room()).
#pragma once

#include "core/arithmetic.h"
#include "cuda/topk_filter.cuh"
#include "cuda/topk_shared.cuh"

namespace winnow::internal::cuda::ranking {

constexpr uint32_t kLeastStreamRoom = 4096;  // logits a block's list holds
constexpr uint32_t kMostStreamRoom = 16384;

struct StreamMemory {
  SharedRowMemory shared;
  uint32_t bins[kBins];  // of the sample
  uint32_t count;
  alignas(16) uint2 entries[2];  // of the list, as many as it has room for; the bitmap follows
};

// Columns of a block.
__host__ __device__ __forceinline__ uint32_t stretch_of(uint32_t columns, uint32_t blocks) {
  return round_up(ceil_div(columns, blocks), 128);
}
// One and a half even shares of what reaches the bar, and what reaches the K-th's bin. More room
// would be taken from the cache that loads arrive in: 32 rows of 1M take 74 us with 72 KB of lists,
// 95 with 128.
inline uint32_t stream_room(int64_t width, int64_t columns, int blocks) {
  const auto even = room_for(width, columns, 4096) * 3 / 2 / static_cast<uint32_t>(blocks);
  const auto least = std::max(kLeastStreamRoom, static_cast<uint32_t>(width) + kRanked);
  return std::min(round_up(std::max(even, least), 16), kMostStreamRoom);
}
inline size_t stream_bytes(int64_t columns, int blocks, uint32_t room) {
  const uint32_t stretch =
      stretch_of(static_cast<uint32_t>(columns), static_cast<uint32_t>(blocks));
  return offsetof(StreamMemory, entries) +
         std::max(room * sizeof(uint2) + stretch / 8, sizeof(ExactMemory));
}

// The block's columns that are given.
struct Marks {
  uint32_t* bitmap;
  uint32_t start, stretch;

  __device__ __forceinline__ uint32_t columns() const { return stretch; }
  __device__ __forceinline__ void add(uint32_t column) const {
    atomicOr(&bitmap[(column - start) / 32], 1u << (column - start) % 32);
  }
};

// Bins from the bar up to the greatest of the sample. Where the K-th may lie above the sample, they
// reach three times as far.
__device__ __forceinline__ EvenBins bins_above(float bar, const Sample<8>& sample, bool farther,
                                               SharedRowMemory& sm) {
  constexpr uint32_t kInfinity = 0xff800000u;  // its key
  uint32_t greatest = 0;
#pragma unroll
  for (const uint32_t key : sample.keys) greatest = max(greatest, key < kInfinity ? key : 0);
  greatest = __reduce_max_sync(~0u, greatest);
  if (threadIdx.x % 32 == 0) sm.range[threadIdx.x / 32].y = greatest;
  __syncthreads();
  const float top = value_of(__reduce_max_sync(~0u, sm.range[threadIdx.x % kWarps].y));
  return EvenBins::from(bar, farther ? 3 * (top - bar) : top - bar);
}

// What is listed once the K-th's bin is known.
struct ReachesBin {
  float bar;
  EvenBins even;
  float bin;
  __device__ __forceinline__ bool operator()(float y) const {
    return y >= bar && even.position(y) >= bin;
  }
  __device__ __forceinline__ bool again(float y) const { return operator()(y); }
};

// Counts the list, or the stretch where the list holds but a part of it.
__device__ __forceinline__ void count_stretch(const Row& part, float bar, const EvenBins& even,
                                              const List& list, SharedRowMemory& sm) {
  const uint32_t bins = bins_at(sm);
  const auto add = [&](float y) {
    if (y >= bar) count(bins, __float_as_uint(even.position(y)));
  };
  if (const uint32_t listed = *list.count; listed <= list.room) {
    for (uint32_t i = threadIdx.x; i < listed; i += kThreads)
      add(__uint_as_float(list.entries[i].x));
  } else {
    for (uint32_t v = part.first / 4 * 4 + threadIdx.x * 4; v < part.last; v += kThreads * 4) {
      const float4 x = load_near_edge(part, v);
      add(x.x);
      add(x.y);
      add(x.z);
      add(x.w);
    }
  }
}

// The bin of the K-th, as a position, and whether it is given whole.
struct Middle {
  float bin;
  bool whole;
};

// Marks what the list has above the middle bin, and in it too if it is given whole; else sends the
// entries in it.
__device__ __forceinline__ void mark_or_send(const EvenBins& even, const Middle& middle,
                                             const Marks& marks, StreamMemory& sm,
                                             unsigned blocks) {
  const uint32_t listed = sm.count;
  for (uint32_t first = threadIdx.x / 32 * 32; first < listed; first += kThreads) {
    const uint32_t i = first + threadIdx.x % 32;
    const uint2 entry = sm.entries[min(i, listed - 1)];
    const float y = __uint_as_float(entry.x);
    const float position = even.position(y);
    const bool in = i < listed && position == middle.bin;
    if (i < listed && (position > middle.bin || (in && middle.whole))) marks.add(entry.y);
    const auto next = [&](uint2& known) {
      known = {key_of(y), entry.y};
      return false;
    };
    if (!middle.whole) send_entries(in, next, sm.shared, blocks);
  }
}

// The cluster's job, with the place of its values computed here rather than kept in a register.
__device__ __forceinline__ Job with_values(const TopkParams& p, Job job) {
  const int64_t token = fresh(cluster_index());
  job.values = p.values ? p.values + token * p.value_stride : nullptr;
  return job;
}

__global__ void __launch_bounds__(kThreads, 1)
    stream_kernel(const __grid_constant__ TopkParams p, uint32_t room) {
  extern __shared__ __align__(16) unsigned char raw[];
  StreamMemory& sm = *reinterpret_cast<StreamMemory*>(raw);
  const unsigned rank = cluster_rank(), blocks = cluster_size(), lane = threadIdx.x % 32;
  const Job job = begin(p, sm.shared);
  if (give_whole(p, job)) return;
  const Row row = job.row;
  const uint32_t width = static_cast<uint32_t>(p.width);
  const uint32_t stretch = stretch_of(row.last, blocks), start = rank * stretch;
  const Row part{row.origin, max(row.first, start), min(row.last, start + stretch)};
  const List list{sm.entries, room, &sm.count};
  const Marks marks{reinterpret_cast<uint32_t*>(sm.entries + room), start, stretch};
  clear(marks.bitmap, stretch / 8);
  if (threadIdx.x == 0) sm.count = 0;
  cluster_wait();
  wait_for_previous();

  // The bar, what reaches it, the middle bin.
  const Sample<8> sample(row);
  const float bar = bar_of(sample, width, blocks * room, sm.bins, sm.shared.scan);
  const bool farther = static_cast<float>(width) * sample.share < 16;
  const EvenBins even = bins_above(bar, sample, farther, sm.shared);
  collect<8, true>(part, reaching(bar), list);
  __syncthreads();
  count_stretch(part, bar, even, list, sm.shared);
  __syncthreads();
  exchange_counts(sm.shared, rank, blocks);
  const Found found = find_shared(width, sm.shared, rank);
  const uint32_t wanted = width - found.above;
  const bool whole = found.count == wanted;  // the middle bin is given whole
  if (!even.good() || found.count == 0 || (!whole && found.count > kRanked)) {
    ExactMemory& rest = *reinterpret_cast<ExactMemory*>(sm.entries);  // the same for all blocks
    clear(&rest, sizeof rest);
    cluster_sync();
    return select_exactly<0, true>(with_values(p, job), width, rest, rank, blocks);
  }

  // What this block gives.
  const float bin = EvenBins::kZero + static_cast<float>(found.digit);
  if (sm.count > room) {
    __syncthreads();
    if (threadIdx.x == 0) sm.count = 0;
    __syncthreads();
    collect<1, false>(part, ReachesBin{bar, even, bin}, list);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    if (whole) sm.shared.before = sm.shared.lower_entries;
    else mb_expect(&sm.shared.listed, found.count * sizeof(uint2));
  }
  mark_or_send(even, {bin, whole}, marks, sm, blocks);
  if (!whole) {
    __syncthreads();
    mb_wait_cluster(&sm.shared.listed, 0);
    rank_entries(found.count, wanted, marks, sm.shared);
  }
  __syncthreads();
  const uint32_t below = __reduce_add_sync(~0u, lane < kWarps ? sm.shared.below[lane] : 0);
  write_marked(marks.bitmap, stretch / 32, with_values(p, job), sm.shared.before + below, start,
               sm.shared.scan);
}

}  // namespace winnow::internal::cuda::ranking
