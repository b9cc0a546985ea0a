// locate on the device: a block per token, 2,048 ids at a time, eight of a thread, so that a whole
// row is requested at once. A call of few tokens is two reads that wait for each other (ids and
// request, then the block table) and the launch: 6 us. Where slots are counted or compacted,
// ballots count them and every warp adds up what stands before it, so that the order is kept.
// Memory-bound beyond that: 8 B per id and the block table from L1/L2.
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "locate/kernel.h"

namespace winnow::internal::locate {

namespace {

constexpr int kThreads = 256, kEach = 8, kWarps = kThreads / 32;
constexpr int kStretch = kThreads * kEach;
static_assert(kWarps * kEach == 64, "a warp adds up two counts a lane");

// Where this thread's valid ids go, i.e. how many stand before each in the stretch, and their
// number.
struct Ranks {
  int before[kEach], total;
};
__device__ Ranks rank_in_block(const int32_t (&slot)[kEach]) {
  __shared__ int counts[kEach][kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Ranks r;
  __syncthreads();  // the stretch before has been added up
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned ballot = __ballot_sync(~0u, slot[i] >= 0);
    r.before[i] = __popc(ballot & ((1u << lane) - 1));
    if (lane == 0) counts[i][warp] = __popc(ballot);
  }
  __syncthreads();
  // Inclusive sums of all 64 counts, in the order of the ids: two neighbours a lane.
  const int first = (&counts[0][0])[2 * lane], second = (&counts[0][0])[2 * lane + 1];
  int sum = first + second;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += left;
  }
  r.total = __shfl_sync(~0u, sum, 31);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = i * kWarps + warp;
    const int pair = __shfl_sync(~0u, sum - first - second, at / 2);
    const int even = __shfl_sync(~0u, first, at / 2);
    r.before[i] += pair + (at % 2 ? even : 0);
  }
  return r;
}

__device__ void load_ids(int32_t (&id)[kEach], const Params& p, const int32_t* ids, int64_t base) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t k = base + i * kThreads + threadIdx.x;
    id[i] = k < p.width ? ids[k] : -1;
  }
}

// In-place calls are safe: a stretch is read whole before anything is written, and compaction
// writes at or before what was read.
__global__ void __launch_bounds__(kThreads) locate_rows(const __grid_constant__ Params p) {
  const int64_t t = blockIdx.x;
  const int32_t* ids = p.ids + t * p.id_stride;
  int32_t* slots = p.slots + t * p.slot_stride;
  int32_t id[kEach], slot[kEach];
  load_ids(id, p, ids, 0);  // before the row, which is waited for
  const Row row = row_of(p, t);
  const bool compact = p.parallel.compact;
  int count = 0;
  for (int64_t base = 0; base < p.width; base += kStretch) {
    // slot_of(), step by step: entries of the table are requested before one is waited for.
    int32_t page[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) id[i] = position_of(p, row, id[i]);
#pragma unroll
    for (int i = 0; i < kEach; ++i) page[i] = page_of(p, row, id[i]);
#pragma unroll
    for (int i = 0; i < kEach; ++i) slot[i] = slot_in(p, row, id[i], page[i]);
    load_ids(id, p, ids, base + kStretch);
    Ranks ranks;
    if (compact || p.counts) ranks = rank_in_block(slot);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t k = base + i * kThreads + threadIdx.x;
      if (compact ? slot[i] >= 0 : k < p.width)
        slots[compact ? count + ranks.before[i] : k] = slot[i];
    }
    if (compact || p.counts) count += ranks.total;
  }
  if (compact)
    for (int64_t k = count + threadIdx.x; k < p.width; k += kThreads) slots[k] = -1;
  if (p.counts && threadIdx.x == 0) p.counts[t * p.count_stride] = count;
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens == 0) return;
  const auto blocks = static_cast<unsigned>(p.tokens);
  locate_rows<<<blocks, kThreads, 0, cuda::stream_of(p.device)>>>(p);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::locate
