// Wide attention on Hopper: the order in which a copying warp takes a token's rows.
//
// Keys may be taken in any order. CTAs work on many tokens at once. If all of them take their rows
// by ranges of position, upwards for one token and downwards for the next, rows that several tokens
// chose are requested at about the same time, and a token begins where the L2 still holds what the
// one before it read. A warp sorts its own 16 rows of each block, an item ahead: a stable counting
// sort, 64 entries after each pair of blocks, when it would wait longest.
#pragma once

#include "attend/wide_sm90/layout.cuh"

namespace winnow::internal::attend::wide_sm90 {

// For one list of at most kSweepBlocks blocks, of indices below kSweepRows; others are no rows.
class Sweep {
 public:
  __device__ explicit Sweep(Sorted (&orders)[2]) : orders_(orders) {
    // The first item keeps its list's order: there is no work that would hide its sorting.
    orders_[0].summary = -1;
  }

  __device__ bool sorted() const { return here().summary >= 0; }
  // The index at a rank of the item at hand, or -1.
  __device__ int operator[](int rank) const {
    const int summary = here().summary;
    const int low = here().low[rank];
    const bool high = (rank >= (summary & 0x3ff)) == summary >> 20;
    return rank < (summary >> 10 & 0x3ff) ? low | high << 16 : -1;
  }

  // Whether the next item's order is not complete.
  __device__ bool unfinished() const { return steps_done_ < 2 * steps_; }

  // This item's rows are copied from now on: their order is complete, and that of the next item's
  // is begun.
  __device__ void enter(const Args& args, int item) {
    __syncwarp();
    buffer_ ^= 1;
    flip_ ^= kRanges - 1;
    steps_done_ = place_ = steps_ = left_ = 0;
    item += gridDim.x;
    if (item < args.items) {
      const Work next = work_at(args, item);
      const int thread = threadIdx.x - kConsumers;
      const int position = thread % 32 / 16 * kBlock + thread / 32 * 16 + thread % 16;
      from_ = args.lists[0].indices + (int64_t)next.token * args.lists[0].index_stride + position;
      left_ = next.end - position;
      steps_ = ceil_div(next.blocks, 4);
    }
    load(0);
  }

  // Takes 64 entries: they are counted in a first pass, placed in a second. Lane r keeps what
  // concerns range r. Only rare cases branch: a branch that is taken costs as much as a good part
  // of the step.
  __device__ void step() {
    if (!unfinished()) return;
    const int lane = threadIdx.x & 31;
    const bool placing = steps_done_ >= steps_;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int index = index_[j];
      const int range = (index >> kRangeBits & (kRanges - 1)) ^ flip_;
      const bool valid = (uint32_t)index < kSweepRows;
      // Lanes whose entry is of range `lane`, and of this lane's range.
      uint32_t mine = __ballot_sync(~0u, valid);
      uint32_t same = mine;
#pragma unroll
      for (int k = 0; 1 << k < kRanges; k++) {
        const uint32_t bit = __ballot_sync(~0u, range >> k & 1);
        mine &= lane >> k & 1 ? bit : ~bit;
        same &= range >> k & 1 ? bit : ~bit;
      }
      const int rank = __shfl_sync(~0u, place_, range) + __popc(same & ((1u << lane) - 1));
      if (placing && valid) orders_[buffer_].low[rank] = index;
      place_ += __popc(mine);
    }
    // From counts to first places.
    if (++steps_done_ == steps_) {
      const int count = place_;
#pragma unroll
      for (int d = 1; d < kRanges; d *= 2) {
        const int x = __shfl_up_sync(~0u, place_, d);
        if (lane >= d) place_ += x;
      }
      const int summary = __shfl_sync(~0u, place_ - count, kRanges / 2) |
                          __shfl_sync(~0u, place_, kRanges - 1) << 10 | (flip_ == 0) << 20;
      if (lane == 0) orders_[buffer_].summary = summary;
      place_ -= count;
    }
    load(placing || steps_done_ == steps_ ? steps_done_ - steps_ : steps_done_);
  }

 private:
  // 4,096 rows a range: 4.7 MB of V3.2's. A lane for each.
  static constexpr int kRanges = 32, kRangeBits = 12;
  static_assert(kRanges == 32 && kSweepRows == kRanges << kRangeBits && kSweepRows == 1 << 17);

  __device__ void load(int step) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int offset = (4 * step + 2 * j) * kBlock;
      index_[j] = offset < left_ ? __ldg(from_ + offset) : -1;
    }
  }

  __device__ const Sorted& here() const { return orders_[buffer_ ^ 1]; }

  Sorted (&orders_)[2];
  // The next item's indices from this lane's first on, how many there are, and the steps of a pass
  // over them.
  const int32_t* from_ = nullptr;
  int left_ = 0;
  int steps_ = 0;
  int steps_done_ = 0;
  // A count of range `lane`, then the next place of it.
  int place_ = 0;
  int index_[2];
  // The buffer that is written; the other one is read.
  int buffer_ = 0;
  // 0 upwards, kRanges - 1 downwards.
  int flip_ = 0;
};

// The order as given.
struct NoSweep {
  __device__ explicit NoSweep(Sorted (&)[2]) {}
  __device__ bool sorted() const { return false; }
  __device__ bool unfinished() const { return false; }
  __device__ int operator[](int) const { return -1; }
  __device__ void enter(const Args&, int) {}
  __device__ void step() {}
};

}  // namespace winnow::internal::attend::wide_sm90
