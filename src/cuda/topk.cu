// Top-k on Hopper: an exact radix select per row, by a cluster of blocks that holds the row's valid
// range in shared memory.
//
// Who does what: block b of a cluster owns the b-th slice of the range. Three rounds (11, 11, 10
// bits) count the digits of the order-preserving integer keys that share the prefix found so far;
// the blocks add their histograms through distributed shared memory and find the digit of the K-th
// largest. A last pass takes everything above that key and the first ties, in ascending order:
// warps count, a scan over warps and blocks places them, warps write.
//
// Budget for 32k logits in one block: 128 KB in at 64 B per cycle 2,048 cycles, three histogram
// passes of 32 shared-memory atomics per thread about 1,500 each, two passes of ballots 1,000 each:
// about 5 us. Rows beyond the shared memory of 8 blocks (393,216 logits) re-read device memory in
// every pass.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/topk.h"

namespace winnow::gpu {

namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kMaxBlocks = 8;  // of a cluster, portable
constexpr int kBins = 2048;
constexpr int64_t kSlice = 49152;  // keys a block holds

struct SharedMemory {
  uint32_t histogram[kBins];
  uint32_t warp_above[kWarps], warp_ties[kWarps];
  uint32_t block_above, block_ties;  // of this block, read by the others
  uint32_t digit, above;             // result of a round
  uint32_t scan[kWarps];
  uint32_t keys[1];  // the slice, when it fits
};

// Ascending integers in the order of the floats: NaN lowest, then -inf ... +inf; -0 equals +0.
__device__ __forceinline__ uint32_t key_of(float x) {
  if (isnan(x)) return 0;
  if (x == 0.0f) x = 0.0f;
  const uint32_t u = __float_as_uint(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

struct Slice {
  const float* logits;  // at the row's first valid column
  int32_t begin, end;   // of this block, relative to it
};

template <bool kCached>
__device__ __forceinline__ uint32_t key_at(const SharedMemory& sm, const Slice& s, int32_t i) {
  return kCached ? sm.keys[i - s.begin] : key_of(s.logits[i]);
}

// Sums the histograms of the cluster into every block's own view of one bin range and finds, from
// the top, the bin in which the wanted rank falls. Returns {bin, how many lie above it}.
__device__ uint2 find_digit(SharedMemory& sm, cg::cluster_group& cluster, int blocks,
                            uint32_t wanted) {
  cluster.sync();
  // Each thread adds two neighbouring bins over the blocks; bins descend with the thread.
  const int hi = kBins - 1 - 2 * threadIdx.x, lo = hi - 1;
  uint32_t a = 0, b = 0;
  for (int r = 0; r < blocks; ++r) {
    const uint32_t* h = blocks > 1 ? cluster.map_shared_rank(sm.histogram, r) : sm.histogram;
    a += h[hi], b += h[lo];
  }
  // Inclusive scan of a + b over the block.
  uint32_t inclusive = a + b;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t up = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += up;
  }
  if (lane == 31) sm.scan[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  for (int w = 0; w < warp; ++w) before += sm.scan[w];
  inclusive += before;
  const uint32_t exclusive = inclusive - a - b;
  if (exclusive < wanted && wanted <= inclusive) {
    const bool first = wanted <= exclusive + a;
    sm.digit = first ? hi : lo;
    sm.above = first ? exclusive : exclusive + a;
  }
  cluster.sync();  // all have read the histograms
  return {sm.digit, sm.above};
}

template <bool kCached>
__global__ void __launch_bounds__(kThreads, 1)
    topk_kernel(const __grid_constant__ TopkParams p, int blocks) {
  extern __shared__ __align__(16) unsigned char raw[];
  SharedMemory& sm = *reinterpret_cast<SharedMemory*>(raw);
  cg::cluster_group cluster = cg::this_cluster();
  const int64_t t = blockIdx.x / blocks;
  const int rank = blocks > 1 ? static_cast<int>(cluster.block_rank()) : 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // Find the valid range; a range no longer than K is given whole.
  const Range range = p.ranges.of(t);
  const int32_t length = static_cast<int32_t>(range.last - range.first);
  const int32_t base = static_cast<int32_t>(p.relative ? 0 : range.first);
  int32_t* ids = p.ids + t * p.id_stride;
  if (length <= p.width) {
    for (int64_t k = rank * kThreads + threadIdx.x; k < p.width; k += blocks * kThreads)
      ids[k] = k < length ? static_cast<int32_t>(base + k) : -1;
    return;
  }
  const int32_t share = (length + blocks - 1) / blocks;
  const Slice slice{p.logits + t * p.logit_stride + (p.from_start ? 0 : range.first),
                    min(rank * share, length), min((rank + 1) * share, length)};

  // Bring the slice in once, eight loads in flight per thread.
  if constexpr (kCached) {
    int32_t i = slice.begin + threadIdx.x;
    for (; i + 7 * kThreads < slice.end; i += 8 * kThreads) {
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = slice.logits[i + k * kThreads];
#pragma unroll
      for (int k = 0; k < 8; ++k) sm.keys[i + k * kThreads - slice.begin] = key_of(x[k]);
    }
    for (; i < slice.end; i += kThreads) sm.keys[i - slice.begin] = key_of(slice.logits[i]);
  }

  // Find the K-th largest key, digit by digit.
  uint32_t prefix = 0, mask = 0, wanted = static_cast<uint32_t>(p.width);
  for (int round = 0; round < 3; ++round) {
    const int shift = round == 0 ? 21 : round == 1 ? 10 : 0, bits = round == 2 ? 10 : 11;
    __syncthreads();
    for (int b = threadIdx.x; b < kBins; b += kThreads) sm.histogram[b] = 0;
    __syncthreads();
#pragma unroll 8
    for (int32_t i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
      const uint32_t key = key_at<kCached>(sm, slice, i);
      if ((key & mask) == prefix) atomicAdd(&sm.histogram[key >> shift & ((1u << bits) - 1)], 1u);
    }
    const uint2 found = find_digit(sm, cluster, blocks, wanted);
    prefix |= found.x << shift;
    mask |= ((1u << bits) - 1) << shift;
    wanted -= found.y;
  }
  // Now `prefix` is that key and `wanted` the number of its ties to take, the lowest indices first.

  // Count, per warp over its own stretch, then over warps and blocks.
  const int32_t stretch = (slice.end - slice.begin + kWarps - 1) / kWarps;
  const int32_t from = min(slice.begin + warp * stretch, slice.end),
                to = min(from + stretch, slice.end);
  uint32_t above = 0, ties = 0;
#pragma unroll 4
  for (int32_t i = from; i < to; i += 32) {
    const uint32_t key = i + lane < to ? key_at<kCached>(sm, slice, i + lane) : 0;
    const bool in = i + lane < to;
    above += __popc(__ballot_sync(~0u, in && key > prefix));
    ties += __popc(__ballot_sync(~0u, in && key == prefix));
  }
  if (lane == 0) sm.warp_above[warp] = above, sm.warp_ties[warp] = ties;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t a = 0, b = 0;
    for (int w = 0; w < kWarps; ++w) a += sm.warp_above[w], b += sm.warp_ties[w];
    sm.block_above = a, sm.block_ties = b;
  }
  cluster.sync();
  uint32_t above_before = 0, ties_before = 0;
  for (int r = 0; r < rank; ++r) {
    above_before += *cluster.map_shared_rank(&sm.block_above, r);
    ties_before += *cluster.map_shared_rank(&sm.block_ties, r);
  }
  for (int w = 0; w < warp; ++w) above_before += sm.warp_above[w], ties_before += sm.warp_ties[w];

  // Write, in ascending order.
  const uint32_t below = (1u << lane) - 1;
#pragma unroll 4
  for (int32_t i = from; i < to; i += 32) {
    const bool in = i + lane < to;
    const uint32_t key = in ? key_at<kCached>(sm, slice, i + lane) : 0;
    const uint32_t over = __ballot_sync(~0u, in && key > prefix);
    const uint32_t tied = __ballot_sync(~0u, in && key == prefix);
    const uint32_t tie_rank = ties_before + __popc(tied & below);
    const bool take = in && (key > prefix || (key == prefix && tie_rank < wanted));
    if (take)
      ids[above_before + __popc(over & below) + min(tie_rank, wanted)] =
          static_cast<int32_t>(base + i + lane);
    above_before += __popc(over), ties_before += __popc(tied);
  }
  cluster.sync();  // no block leaves while another may read its shared memory
}

template <bool kCached>
void launch(const TopkParams& p, int blocks, size_t bytes) noexcept {
  cudaFuncSetAttribute(topk_kernel<kCached>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(bytes));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(p.tokens * blocks), 1, 1};
  config.blockDim = {kThreads, 1, 1};
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(p.device.stream);
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, topk_kernel<kCached>, p, blocks);
}

}  // namespace

void topk(const TopkParams& p) noexcept {
  if (p.tokens == 0 || p.width == 0) return;
  // As many blocks per row as its slices need to fit, and more while multiprocessors are idle.
  const int64_t columns = p.ranges.limit;
  const int64_t fit = (columns + kSlice - 1) / kSlice;
  const int64_t idle = multiprocessors(p.device.index);
  int blocks = 1;
  while (blocks < kMaxBlocks &&
         (blocks < fit || (p.tokens * blocks * 2 <= idle && columns / blocks > 4096)))
    blocks *= 2;
  const int64_t slice = (columns + blocks - 1) / blocks;
  const bool cached = slice <= kSlice;
  const size_t bytes = sizeof(SharedMemory) + (cached ? slice * sizeof(uint32_t) : 0);
  cached ? launch<true>(p, blocks, bytes) : launch<false>(p, blocks, bytes);
}

}  // namespace winnow::gpu
