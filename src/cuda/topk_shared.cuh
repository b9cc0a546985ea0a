// Top-k of a row by a cluster of blocks that hold it in registers: the form for few rows, where
// latency is all there is.
//
// Who does what: each warp owns a contiguous stretch of the row. Every block takes the same 512
// spread logits, whose range gives 512 even bins; counts its own logits in them; and sends
// the counts to every block, whose mbarrier counts the bytes: so all know the bin of the K-th
// largest and how many of each block lie above it. The few entries of that bin go to every block
// the same way; each ranks them and writes the ids of its own stretch. Nobody reads another's
// memory, and a block ends only after all that was sent to it has arrived. Rows that do not fit
// the scheme (no range, more than kRanked entries in the bin) go through select_exactly().
//
// Measured for 32k logits on 8 blocks, in cycles: loads and range of the sample 2,000; counts 600,
// on their way 1,000; search 750; entries 750, on their way 1,000; ranks 500; ids 800. Since then
// some 1,800 less, by fewer instructions: four warps share a scheduler, so there is no branch a
// logit and no division after the wait. Code that runs once is fetched once: what is unrolled over
// the logits is a few instructions each.
#pragma once

#include <type_traits>

#include "cuda/topk_exact.cuh"

namespace winnow::internal::cuda::ranking {

constexpr uint32_t kEven = kThreads;     // bins
constexpr uint32_t kRanked = 256;        // entries of one bin
constexpr uint32_t kPieces = kEven / 8;  // of 16 bytes, that a block's counts are sent in
static_assert(kPieces * kMaxBlocks == kThreads);

struct alignas(16) SharedRowMemory {
  uint64_t counted, listed;         // mbarriers: all blocks' counts have come; all entries have
  uint2 rank[kRanked];              // key and column of the entries of the middle bin
  uint16_t all[kMaxBlocks][kEven];  // counts of every block; zero where there is none
  uint32_t none[4];                 // counts below the bins; zero at first, as all that follows
  uint32_t own[kEven];              // counts of this block
  Scan scan;
  uint2 range[kWarps];     // of each warp's sample: keys, the complement of the least
  Found found;             // the middle bin: the one of the K-th
  uint32_t lower_entries;  // entries of the middle bin in lower blocks
  uint32_t before;         // ids of the middle bin that lower blocks give
  uint32_t below[kWarps];  // ids above it that lower blocks give, in parts
  uint32_t entries;        // of the middle bin in this block
  uint32_t warps[kWarps];  // ids that each warp gives
};

template <int kGroups>
constexpr size_t kSharedRowBytes = sizeof(SharedRowMemory) + kThreads* kGroups;  // a byte a group

// Even bins over a range: a bin is the nearest integer of a linear function, which stands in the
// low bits of a float above 2^23. It does not decrease in x, whatever the rounding; from 0 to
// kEven - 1 at the ends of the range. The last bin has no end; what lies below the first, and NaN,
// is at 2^23 - 1 or half of one above it: two words or one before bin 0.
struct EvenBins {
  static constexpr float kZero = 8388608.0f;  // bin 0
  float scale, offset;

  static __device__ __forceinline__ EvenBins from(float low, float span) {
    const float scale = __fdividef(kEven - 1, span);
    return {scale, __fmaf_rn(-low, scale, kZero)};
  }
  __device__ float position(float x) const {
    return fminf(fmaxf(__fmaf_rn(x, scale, offset), kZero - 1), kZero + (kEven - 1));
  }
  __device__ bool good() const { return scale > 0 && scale < INFINITY && isfinite(offset); }
};

// A thread's place of the sample. If more than 1/20 of the row is wanted, quads of neighbours are
// taken: a warp then requests 8 lines and not 32, each of which delays the row's loads by a cycle
// or two. Even if all neighbours were alike, only one of 700 rows would have no quad above its
// K-th.
__device__ __forceinline__ const float* sample_place(const Row& row, uint32_t wanted) {
  if (wanted <= (row.last - row.first) / 20) return sampled(row, threadIdx.x, 9);
  const auto column = static_cast<uint32_t>(sampled(row, threadIdx.x / 4, 7) - row.origin);
  return row.origin + min(max(column / 4 * 4 + threadIdx.x % 4, row.first), row.last - 1);
}

// Bins over the range of the sample, of which a thread has one logit. Where at most a quarter of
// the row is wanted, they begin at the least of the greatest of every eight: between 30 and 60 % of
// the row lie above it, and the bins are half as wide; where at most 1/14 is, of every sixteen: 10
// to 30 %. Where at most 1/48 is (ten of the sample), at the least of the greatest of every warp,
// which 2 to 17 % exceed, and they reach farther than the sample, which the K-th may exceed: a row
// misses its bins once in 20,000 times.
__device__ __forceinline__ EvenBins bins_of(float x, uint32_t length, uint32_t wanted,
                                            SharedRowMemory& sm) {
  uint32_t key = isfinite(x) ? key_of(x) : 0;
  const uint32_t greatest = __reduce_max_sync(~0u, key);
  const bool upper = wanted <= length / 4, top = wanted <= length / 48;
  if (upper) {
    for (int d = 1; d < 8; d *= 2) key = max(key, __shfl_xor_sync(~0u, key, d));
    if (wanted <= length / 14) key = max(key, __shfl_xor_sync(~0u, key, 8));
  }
  if (top) key = greatest;
  const uint32_t least = __reduce_max_sync(~0u, key ? ~key : 0);
  if (threadIdx.x % 32 == 0) sm.range[threadIdx.x / 32] = {least, greatest};
  __syncthreads();
  const uint2 part = sm.range[threadIdx.x % kWarps];
  const float low = value_of(~__reduce_max_sync(~0u, part.x));
  const float span = value_of(__reduce_max_sync(~0u, part.y)) - low;
  return EvenBins::from(low, wanted < length / 128 ? 2 * span : top ? 1.5f * span : span);
}

// The address that position 0 would have where bin 0 is sm.own[0].
__device__ __forceinline__ uint32_t bins_at(SharedRowMemory& sm) {
  return fresh(s32(sm.own)) - __float_as_uint(EvenBins::kZero) * 4;
}

// Sends this block's counts to all, 16 bits each (65,535 stands for more, which is no K of
// topk_stream.cuh and no count of a row in registers); waits for all blocks'.
__device__ __forceinline__ void exchange_counts(SharedRowMemory& sm, unsigned rank,
                                                unsigned blocks) {
  const unsigned to = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  if (to < blocks) {
    const uint4* own = reinterpret_cast<const uint4*>(sm.own) + piece * 2;
    const auto least = [](const uint4& x) {
      return uint4{min(x.x, 0xffffu), min(x.y, 0xffffu), min(x.z, 0xffffu), min(x.w, 0xffffu)};
    };
    const uint4 a = least(own[0]), b = least(own[1]);
    peer_put(peer(s32(&sm.all[rank][piece * 8]), to),
             uint4{a.x | a.y << 16, a.z | a.w << 16, b.x | b.y << 16, b.z | b.w << 16},
             peer(s32(&sm.counted), to));
  }
  mb_wait_cluster(&sm.counted, 0);
}

// The middle bin, from all blocks' counts; sm.lower_entries and sm.below say what lower blocks
// have in it and above it. Its count is 0 if the counts do not reach `wanted`.
__device__ __forceinline__ Found find_shared(uint32_t wanted, SharedRowMemory& sm, unsigned rank) {
  const unsigned bin = kEven - 1 - threadIdx.x;
  uint32_t n = 0, lower = 0;
#pragma unroll
  for (unsigned r = 0; r < kMaxBlocks; ++r) {
    const uint32_t theirs = sm.all[r][bin];  // 0 where there is no such block
    n += theirs;
    if (r < rank) lower += theirs;
  }
  const uint32_t above = scan_block(n, sm.scan);
  if (above < wanted && wanted <= above + n) {
    sm.found = {bin, above, n};
    sm.lower_entries = lower;
  }
  const uint32_t below = __reduce_add_sync(~0u, above + n < wanted ? lower : 0);
  if (threadIdx.x % 32 == 0) sm.below[threadIdx.x / 32] = below;
  __syncthreads();
  return sm.found;
}

// Where a block's ids come from: a byte with four bits for each group of four columns.
template <int kGroups>
struct Given {
  uint8_t* bits;           // [warp][group][lane]
  uint32_t start, groups;  // of the block; of a thread
  uint32_t share;          // a line's share of a warp's stretch: what divides by `groups`
  SharedRowMemory* sm;

  __device__ __forceinline__ uint32_t columns() const { return kWarps * groups * 128; }

  __device__ __forceinline__ uint8_t* of_warp(unsigned warp) const {
    return bits + warp * 32 * kGroups;
  }
  __device__ __forceinline__ void add(uint32_t column) const {
    const uint32_t warp = (column - start) / 128 * share >> 16;
    const uint32_t at = (column - start) - warp * groups * 128;
    const uint32_t byte = warp * 32 * kGroups + at / 4;
    atomicOr(reinterpret_cast<uint32_t*>(bits) + byte / 4, 1u << (byte % 4 * 8 + at % 4));
    atomicAdd(&sm->warps[warp], 1u);
  }
};

// Sends the entries of the middle bin that a warp has to every block, a lane for each. `has`: the
// lane has one or more; next() takes one.
template <class Next>
__device__ __forceinline__ void send_entries(bool has, Next&& next, SharedRowMemory& sm,
                                             unsigned blocks) {
  const unsigned lane = threadIdx.x % 32;
  const uint32_t listed = peer(s32(&sm.listed), lane % kMaxBlocks);
  const uint32_t rank = peer(s32(sm.rank), lane % kMaxBlocks);
  while (uint32_t lanes = __ballot_sync(~0u, has)) {
    uint32_t place = 0;  // of the first
    if (lane == 0) place = atomicAdd(&sm.entries, __popc(lanes)) + sm.lower_entries;
    uint2 known{};
    if (has) has = next(known);
    place = __shfl_sync(~0u, place, 0);
    for (; lanes; lanes &= lanes - 1, ++place) {
      const int from = __ffs(lanes) - 1;
      const uint2 entry{__shfl_sync(~0u, known.x, from), __shfl_sync(~0u, known.y, from)};
      if (lane < blocks) peer_put(rank + place * sizeof(uint2), entry, listed);
    }
  }
}

// Ranks the entries of the middle bin, a warp for each. The first `wanted` are given: counted in
// sm.before if they are of lower blocks, added to `given` if they are this block's.
template <class Given>
__device__ __forceinline__ void rank_entries(uint32_t entries, uint32_t wanted, const Given& given,
                                             SharedRowMemory& sm) {
  const unsigned lane = threadIdx.x % 32;
  for (uint32_t e = threadIdx.x / 32; e < entries; e += kWarps) {
    const uint2 mine = sm.rank[e];
    uint32_t better = 0;
    for (uint32_t i = 0; i < entries; i += 32) {
      const uint2 other = sm.rank[i + lane];
      const bool wins = other.x > mine.x || (other.x == mine.x && other.y < mine.y);
      better += __popc(__ballot_sync(~0u, i + lane < entries && wins));
    }
    if (lane == 0 && better < wanted) {
      if (mine.y < given.start) atomicAdd(&sm.before, 1u);
      else if (mine.y - given.start < given.columns()) given.add(mine.y);
    }
  }
}

// Prepares a block's memory; others may send once cluster_wait() has passed.
__device__ __forceinline__ void begin(SharedRowMemory& sm, unsigned blocks) {
  if (threadIdx.x == 0) {
    mb_init(&sm.counted, 1);
    mb_init(&sm.listed, 1);
  }
  clear(sm.none, sizeof sm - offsetof(SharedRowMemory, none));
  clear(sm.all[blocks], (kMaxBlocks - blocks) * sizeof sm.all[0]);
  fence_barrier_init();
  cluster_arrive();
  __syncthreads();
  if (threadIdx.x == 0) mb_expect(&sm.counted, blocks * kEven * sizeof(uint16_t));
}

// The job of this cluster, whose range is on its way while the block prepares its memory.
__device__ __forceinline__ Job begin(const TopkParams& p, SharedRowMemory& sm) {
  let_next_start();
  AskedRange range(p.ranges, cluster_index());
  begin(sm, cluster_size());
  return job_of(p, cluster_index(), range.get(p.ranges));
}
// Gives a range that is no longer than the list whole, and says so: for all of the cluster.
__device__ __forceinline__ bool give_whole(const TopkParams& p, const Job& job) {
  if (job.row.last - job.row.first > static_cast<uint32_t>(p.width)) return false;
  cluster_wait();
  wait_for_previous();
  give_all(p, job, cluster_rank(), cluster_size());
  return true;
}

// Groups of four logits that a thread has, without a division: blocks are a power of two.
__device__ __forceinline__ uint32_t groups_each(const Row& row, unsigned blocks) {
  const int shift = __ffs(static_cast<int>(blocks * kWarps * 128)) - 1;
  return ((row.last - 1) >> shift) + 1;
}

// kGroups: groups of four logits that a thread holds.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, kGroups > 2 ? 1 : 2)
    shared_row_kernel(const __grid_constant__ TopkParams p) {
  extern __shared__ __align__(16) unsigned char raw[];
  SharedRowMemory& sm = *reinterpret_cast<SharedRowMemory*>(raw);
  const unsigned rank = cluster_rank(), blocks = cluster_size();
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Job job = begin(p, sm);
  if (give_whole(p, job)) return;
  const Row row = job.row;
  const uint32_t width = static_cast<uint32_t>(p.width);

  const uint32_t groups = groups_each(row, blocks);
  const uint32_t share = fresh((1u << 16) / groups + 1);  // exact for lines, which are at most 256
  const uint32_t block_start = rank * kWarps * groups * 128;
  const uint32_t start = block_start + warp * groups * 128, from = start + lane * 4;
  // The sample first, so that its range is known when the rest arrives.
  const float* place = sample_place(row, width);
  cluster_wait();
  wait_for_previous();
  const float sample = *place;
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
    for (int g = 0; g < kGroups; ++g) {
      visit(4 * g, x[g].x);
      visit(4 * g + 1, x[g].y);
      visit(4 * g + 2, x[g].z);
      visit(4 * g + 3, x[g].w);
    }
  };

  // Count, tell the cluster, find the middle bin.
  const EvenBins even = bins_of(sample, row.last - row.first, width, sm);
  const uint32_t bins = bins_at(sm);
  each([&](int, float y) { count(bins, __float_as_uint(even.position(y))); });
  __syncthreads();
  exchange_counts(sm, rank, blocks);
  const Found found = find_shared(width, sm, rank);
  const uint32_t wanted = width - found.above;
  const bool whole = found.count == wanted;  // the middle bin is given whole
  if (!even.good() || found.count == 0 || (!whole && found.count > kRanked)) {
    unsigned char* rest = raw + kSharedRowBytes<kGroups>;  // it is the same for all blocks
    clear(rest, sizeof(ExactMemory));
    cluster_sync();
    return select_exactly<0, true>(job, width, *reinterpret_cast<ExactMemory*>(rest), rank, blocks);
  }

  // Bits of this lane's logits above the middle bin and in it.
  using Bits = std::conditional_t<(kGroups > 8), uint64_t, uint32_t>;
  const float bin = EvenBins::kZero + static_cast<float>(found.digit);
  Bits given = 0, middle = 0;
  float entry = 0;  // the one in the middle bin, where there is one
  each([&](int i, float y) {
    const float position = even.position(y);
    if (position > bin) given |= Bits{1} << i;
    if (position == bin) {
      middle |= Bits{1} << i;
      entry = y;
    }
  });
  if (whole) {
    given |= middle;
    middle = 0;
  }
  const Given<kGroups> map{raw + sizeof sm, block_start, groups, share, &sm};
  uint8_t* bits = map.of_warp(warp);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) bits[g * 32 + lane] = static_cast<uint8_t>(given >> 4 * g & 15);
  const uint32_t n = __reduce_add_sync(~0u, __popcll(given));
  if (lane == 0) sm.warps[warp] = n;
  if (whole) {
    if (threadIdx.x == 0) sm.before = sm.lower_entries;
  } else {
    if (threadIdx.x == 0) mb_expect(&sm.listed, found.count * sizeof(uint2));
    const bool several = middle & (middle - 1);
    const auto next = [&](uint2& known) {
      const int i = __ffsll(middle) - 1;
      const uint32_t column = from + i / 4 * 128 + i % 4;
      middle &= middle - 1;
      known = {key_of(several ? row.origin[column] : entry), column};
      return middle != 0;
    };
    send_entries(middle != 0, next, sm, blocks);
    __syncthreads();
    mb_wait_cluster(&sm.listed, 0);
    rank_entries(found.count, wanted, map, sm);
  }
  __syncthreads();

  // Write, in ascending order: a lane has kGroups consecutive groups of the stretch.
  Bits mine = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) mine |= Bits{bits[lane * kGroups + g]} << 4 * g;
  const uint32_t parts = (lane < kWarps ? sm.below[lane] : 0) + (lane < warp ? sm.warps[lane] : 0);
  const uint32_t before = sm.before + __reduce_add_sync(~0u, parts);
  const uint32_t n_mine = __popcll(mine);
  uint32_t next = before + scan_warp(n_mine) - n_mine;
  const uint32_t column = start + lane * kGroups * 4 - 1;
  for (; mine; mine &= mine - 1) job.put(next++, column + __ffsll(mine));
}

}  // namespace winnow::internal::cuda::ranking
