// locate on the device: a thread per id, a block per stretch of one row. Compaction is a block per
// row that walks it in order, counting with ballots, so that the order is kept. Memory-bound: 8 B
// per id and the block table from L1/L2.
#include <cuda_runtime.h>

#include "locate/kernel.h"

namespace winnow::location {

namespace {

constexpr int kThreads = 256;

// Exclusive count of `valid` before this thread in the block, and the block's total.
struct Rank {
  int before, total;
};
__device__ Rank rank_in_block(bool valid) {
  __shared__ int warp_total[kThreads / 32];
  const unsigned ballot = __ballot_sync(~0u, valid);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) warp_total[warp] = __popc(ballot);
  __syncthreads();
  Rank r{__popc(ballot & ((1u << lane) - 1)), 0};
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) r.before += warp_total[w];
    r.total += warp_total[w];
  }
  return r;
}

// One block per token. In-place calls are safe: a stretch is read whole before anything is written,
// and compaction writes at or before what was read.
__global__ void __launch_bounds__(kThreads) locate_rows(const __grid_constant__ Params p) {
  const int64_t t = blockIdx.x;
  const Row row = row_of(p, t);
  const int32_t* ids = p.ids + t * p.id_stride;
  int32_t* slots = p.slots + t * p.slot_stride;
  int count = 0;
  for (int64_t base = 0; base < p.width; base += kThreads) {
    const int64_t k = base + threadIdx.x;
    const int32_t slot = k < p.width ? slot_of(p, row, ids[k]) : -1;
    const Rank rank = rank_in_block(slot >= 0);
    if (!p.parallel.compact) {
      if (k < p.width) slots[k] = slot;
    } else if (slot >= 0) {
      slots[count + rank.before] = slot;
    }
    count += rank.total;
  }
  if (p.parallel.compact)
    for (int64_t k = count + threadIdx.x; k < p.width; k += kThreads) slots[k] = -1;
  if (p.counts && threadIdx.x == 0) p.counts[t * p.count_stride] = count;
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(p.device.stream);
  locate_rows<<<static_cast<unsigned>(p.tokens), kThreads, 0, stream>>>(p);
}

}  // namespace winnow::location
