// The cuts of rows whose keys the registers of a cluster hold: the form for what a plan sends.
//
// Who does what: as in cuda/topk_shared.cuh, whose parts these are. Every block of the row's
// cluster takes the same 512 spread keys, whose range gives 512 even bins, and counts its own keys
// in them. The blocks send each other their counts, then the few entries of the bin in which the
// K-th key lies. The first block ranks these by key, which gives the cut, and keeps this rank's
// entries. Positions are read only where a tie of keys is cut. A row that does not fit the scheme
// (ties, infinities, few candidates) goes by digits, in the first block.
//
// Measured for 32 rows of 8 x 2,048 candidates in twos, in cycles: addresses 900; sample and keys
// 3,600, of L2 1,250; counts 1,700, with a branch a key, which is gone since; on their way 550;
// search 720; entries 760, on their way 870; ranks 400; keeping 2,048 entries 1,600.
#include <algorithm>

#include "core/arithmetic.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cut/row_sm90.cuh"

namespace winnow::internal::cut {

namespace {

constexpr uint32_t kGroupColumns = 4 * kThreads;  // a thread has four neighbours of a group
constexpr int kMostGroups = 8;                    // of a block: 32 registers a thread

struct ClusterArgs {
  FindArgs find;
  uint32_t inverse;  // 2^32 / width, rounded up: exact where column * width < 2^32
};

// Where a column's key is, without a division.
__device__ __forceinline__ const uint32_t* key_at(const Candidates& row, uint32_t column,
                                                  uint32_t inverse) {
  const uint32_t block = __umulhi(column, inverse);
  return row.keys + block * row.block_stride + (column - block * row.width);
}

// The four from a multiple of four on, 0 after the row.
__device__ __forceinline__ uint4 keys_at(const Candidates& row, uint32_t column, uint32_t inverse) {
  if (column >= row.total) return {};
  return *reinterpret_cast<const uint4*>(key_at(row, column, inverse));
}

// A thread's column of the sample: quads of neighbours, as topk_shared.cuh has them, where few
// ranks share a row.
__device__ __forceinline__ uint32_t sample_column(uint32_t total, uint32_t wanted) {
  const bool quads = wanted > total / 20;
  const uint32_t k = quads ? threadIdx.x / 4 : threadIdx.x;
  const uint32_t place = k << 16 | (k * 40503 & 0xffff);  // steps of the golden section
  const auto column = static_cast<uint32_t>(uint64_t{place} * total >> (quads ? 23 : 25));
  return quads ? column / 4 * 4 + threadIdx.x % 4 : column;
}

// All keys of a row, by one block, from memory.
struct KeysInMemory {
  static constexpr int kLoads = 4;  // in flight, of four keys each
  const Candidates& row;
  uint32_t inverse;

  template <class Visit>
  __device__ __forceinline__ void each(Visit&& visit) const {
#pragma unroll 1
    for (uint32_t first = threadIdx.x * 4; first < row.total; first += kLoads * kGroupColumns) {
      uint4 four[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) four[i] = keys_at(row, first + i * kGroupColumns, inverse);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint32_t column = first + i * kGroupColumns;
        visit(column, four[i].x);
        visit(column + 1, four[i].y);
        visit(column + 2, four[i].z);
        visit(column + 3, four[i].w);
      }
    }
  }
};

// A row that does not fit the bins, by one block.
__device__ __noinline__ uint64_t cut_alone(const Candidates row, uint32_t inverse, FindMemory& sm) {
  const KeysInMemory keys{row, inverse};
  uint32_t valid = 0;
  keys.each([&](uint32_t, uint32_t key) { valid += key != 0; });
  valid = __reduce_add_sync(~0u, valid);
  if (threadIdx.x % 32 == 0) atomicAdd(&sm.valid, valid);
  __syncthreads();
  return sm.valid > row.width ? cut_by_digits(row, keys, sm) : 0;
}

// kGroups: groups of four keys that a thread holds. kAlone: the cluster is one block.
template <int kGroups, bool kAlone>
__global__ void __launch_bounds__(kThreads, kGroups > 4 ? 1 : 2)
    find_in_cluster(const __grid_constant__ ClusterArgs args) {
  __shared__ FindMemory sm;
  const unsigned rank = kAlone ? 0 : cuda::cluster_rank();
  const unsigned blocks = kAlone ? 1 : cuda::cluster_size();
  const int64_t row = kAlone ? blockIdx.x : cuda::cluster_index();
  const Candidates candidates(args.find.p, row);
  const uint32_t width = candidates.width;

  // The sample first, so that its range is known when the rest arrives.
  const uint32_t sample = *key_at(candidates, sample_column(candidates.total, width), args.inverse);
  const uint32_t first = rank * kGroups * kGroupColumns + threadIdx.x * 4;
  uint4 held[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
    held[g] = keys_at(candidates, first + g * kGroupColumns, args.inverse);
  KeptTile tile;
  const bool keeps = args.find.keeps && rank == 0;
  if (keeps) tile.load(args.find.keeping, row, 0);
  args.find.touch();
  if (threadIdx.x == 0) {
    sm.valid = 0;
    sm.cut = 0;
  }
  if constexpr (kAlone) clear(&sm.even, sizeof sm.even);
  else begin(sm.even, blocks);
  const auto each = [&](auto&& visit) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      visit(4 * g, held[g].x);
      visit(4 * g + 1, held[g].y);
      visit(4 * g + 2, held[g].z);
      visit(4 * g + 3, held[g].w);
    }
  };

  // Count, tell the cluster, find the middle bin. Keys of 0 and of NaN are NaN again, below all
  // bins. Ranks may have fewer candidates than they send: the sample tells how many the row has.
  const uint32_t length = __syncthreads_count(sample != 0) * candidates.total / kThreads;
  const EvenBins even = bins_of(value_of(sample), length, width, sm.even);
  const uint32_t bins = bins_at(sm.even);
  each([&](int, uint32_t key) { count(bins, __float_as_uint(even.position(value_of(key)))); });
  __syncthreads();
  if constexpr (kAlone) {
    const uint32_t bin = kEven - 1 - threadIdx.x;
    const uint32_t n = sm.even.own[bin];
    const uint32_t above = scan_block(n, sm.even.scan);
    if (above < width && width <= above + n) sm.even.found = {bin, above, n};
    __syncthreads();
  } else {
    cuda::cluster_wait();
    exchange_counts(sm.even, rank, blocks);
    find_shared(width, sm.even, rank);
  }
  const Found found = sm.even.found;

  uint64_t cut;
  if (!even.good() || found.count == 0 || found.count > kRanked) {
    if (rank > 0) return;  // it is the same for all blocks
    cut = cut_alone(candidates, args.inverse, sm);
  } else {
    const float bin = EvenBins::kZero + static_cast<float>(found.digit);
    uint32_t middle = 0;                 // which of this thread's keys are in the middle bin
    uint32_t last = 0, before_last = 0;  // of them
    each([&](int i, uint32_t key) {
      if (even.position(value_of(key)) != bin) return;
      middle |= 1u << i;
      before_last = last;
      last = key;
    });
    const auto next = [&](uint2& known) {
      const int i = __ffs(static_cast<int>(middle)) - 1;
      const uint32_t column = first + i / 4 * kGroupColumns + i % 4;
      middle &= middle - 1;
      const uint32_t left = __popc(middle);
      known = {left == 0   ? last
               : left == 1 ? before_last
                           : *key_at(candidates, column, args.inverse),
               column};
      return middle != 0;
    };
    if constexpr (kAlone) {
      while (middle != 0) {
        uint2 known;
        next(known);
        sm.even.rank[atomicAdd(&sm.even.entries, 1u)] = known;
      }
    } else {
      if (threadIdx.x == 0) cuda::mb_expect(&sm.even.listed, found.count * sizeof(uint2));
      send_entries(middle != 0, next, sm.even, blocks);
    }
    __syncthreads();
    if constexpr (!kAlone) {
      cuda::mb_wait_cluster(&sm.even.listed, 0);
      if (rank > 0) return;
    }
    cut = rank_candidates(candidates, found.count, width - found.above, sm);
  }
  if (threadIdx.x == 0) args.find.p.cuts[row] = static_cast<int64_t>(cut);
  if (keeps) keep_row(args.find.keeping, row, cut, tile, sm.even.scan);
}

// Groups of four keys that a thread has with `blocks` a row.
int64_t groups_of(const Params& p, int blocks) {
  return ceil_div<int64_t>(p.width * p.blocks, int64_t{kGroupColumns} * blocks);
}
// Two blocks a row where every block has a multiprocessor, and more where that leaves half of them
// idle: 32 rows took 9.9 us in twos and fours, 16 rows 8.4 in fours and 9.0 in eights (H200,
// 05ad6bb).
int blocks_of(const Params& p) {
  const int64_t busy = cuda::multiprocessors(p.device.index);
  const auto room = [&](int blocks) { return p.rows * blocks * (blocks > 2 ? 2 : 1) <= busy; };
  int blocks = 1;
  while (blocks < kMaxBlocks &&
         (groups_of(p, blocks) > kMostGroups || (groups_of(p, blocks) > 1 && room(2 * blocks))))
    blocks *= 2;
  return blocks;
}

template <int kGroups>
void launch(const ClusterArgs& args, int blocks) noexcept {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  const dim3 grid(static_cast<unsigned>(args.find.p.rows * blocks));
  cudaLaunchConfig_t config =
      cuda::launch_config(grid, kThreads, 0, cuda::stream_of(args.find.p.device));
  config.attrs = &attribute;
  config.numAttrs = blocks > 1;
  cuda::keep_error(cudaLaunchKernelEx(
      &config, blocks > 1 ? find_in_cluster<kGroups, false> : find_in_cluster<kGroups, true>,
      args));
}

}  // namespace

bool fits_cluster(const Params& p) {
  const int64_t total = p.width * p.blocks;
  return !p.positions && p.width > 0 && p.width % 4 == 0 && total * p.width < int64_t{1} << 32 &&
         groups_of(p, kMaxBlocks) <= kMostGroups && p.rows <= INT32_MAX / kMaxBlocks;
}

void find_in_clusters(const FindArgs& find) noexcept {
  const auto width = static_cast<uint64_t>(find.p.width);
  const ClusterArgs args{find, static_cast<uint32_t>(ceil_div(uint64_t{1} << 32, width))};
  const int blocks = blocks_of(find.p);
  const int64_t groups = groups_of(find.p, blocks);
  if (groups <= 1) return launch<1>(args, blocks);
  if (groups <= 2) return launch<2>(args, blocks);
  if (groups <= 4) return launch<4>(args, blocks);
  launch<kMostGroups>(args, blocks);
}

}  // namespace winnow::internal::cut
