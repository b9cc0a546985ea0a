// Wide attention on Hopper: the order in which a copying warp takes a token's rows.
//
// Keys may be taken in any order. The CTAs work on as many tokens at once; if all take their rows
// by ranges of position, upwards for one token and downwards for the next, rows that several chose
// are asked for at about the same time, and a token begins where the L2 still holds what the one
// before it read. A warp sorts its own 16 rows of each block, an item ahead: a stable counting
// sort, 64 entries after each pair of blocks, when it would wait longest.
#pragma once

#include "attend/wide_sm90/layout.cuh"

namespace winnow::internal::attend::wide_sm90 {

// For one list of at most kSweepBlocks blocks, of indices below kSweepRows; others are no rows.
class Sweep {
 public:
  __device__ explicit Sweep(Sorted (&orders)[2]) : orders_(orders) {
    orders_[0].about = -1;  // taken as given: there is nothing to hide its sorting behind
  }

  __device__ bool sorted() const { return here().about >= 0; }
  // The index at a rank of the item at hand, or -1.
  __device__ int operator[](int rank) const {
    const int about = here().about, low = here().low[rank];
    const bool high = (rank >= (about & 0x3ff)) == about >> 20;
    return rank < (about >> 10 & 0x3ff) ? low | high << 16 : -1;
  }

  // This item's rows are copied from now on: their order is completed, and that of the next item's
  // begun.
  __device__ void enter(const Args& p, int item) {
#pragma unroll 1
    while (at_ < 2 * steps_) step();
    __syncwarp();
    buffer_ ^= 1, flip_ ^= kRanges - 1;
    at_ = place_ = steps_ = left_ = 0;
    item += gridDim.x;
    if (item < p.items) {
      const Work next = work_at(p, item);
      const int t = threadIdx.x - kConsumers;
      const int pos = t % 32 / 16 * kBlock + t / 32 * 16 + t % 16;
      from_ = p.lists[0].indices + (int64_t)next.token * p.lists[0].index_stride + pos;
      left_ = next.end - pos;
      steps_ = (next.blocks + 3) / 4;
    }
    load(0);
  }

  // 64 entries: counted in a first pass, placed in a second. Lane r keeps what concerns range r.
  // All in one line but for the rare: a taken branch costs as much as a good part of it.
  __device__ void step() {
    if (at_ >= 2 * steps_) return;
    const int lane = threadIdx.x & 31;
    const bool placing = at_ >= steps_;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int index = index_[j], range = (index >> kRangeBits & (kRanges - 1)) ^ flip_;
      const bool there = (uint32_t)index < kSweepRows;
      uint32_t mine = __ballot_sync(~0u, there), same = mine;
#pragma unroll
      for (int k = 0; 1 << k < kRanges; k++) {
        const uint32_t bit = __ballot_sync(~0u, range >> k & 1);
        mine &= lane >> k & 1 ? bit : ~bit;
        same &= range >> k & 1 ? bit : ~bit;
      }
      const int rank = __shfl_sync(~0u, place_, range) + __popc(same & ((1u << lane) - 1));
      if (placing && there) orders_[buffer_].low[rank] = index;
      place_ += __popc(mine);
    }
    if (++at_ == steps_) {  // from counts to first places
      const int count = place_;
#pragma unroll
      for (int d = 1; d < kRanges; d *= 2) {
        const int x = __shfl_up_sync(~0u, place_, d);
        if (lane >= d) place_ += x;
      }
      const int about = __shfl_sync(~0u, place_ - count, kRanges / 2) |
                        __shfl_sync(~0u, place_, kRanges - 1) << 10 | (flip_ == 0) << 20;
      if (lane == 0) orders_[buffer_].about = about;
      place_ -= count;
    }
    load(placing || at_ == steps_ ? at_ - steps_ : at_);
  }

 private:
  // 4,096 rows a range: 4.7 MB of V3.2's. A lane for each.
  static constexpr int kRanges = 32, kRangeBits = 12;
  static_assert(kRanges == 32 && kSweepRows == kRanges << kRangeBits && kSweepRows == 1 << 17);

  __device__ void load(int step) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int pos = (4 * step + 2 * j) * kBlock;
      index_[j] = pos < left_ ? __ldg(from_ + pos) : -1;
    }
  }

  __device__ const Sorted& here() const { return orders_[buffer_ ^ 1]; }

  Sorted (&orders_)[2];
  const int32_t* from_ = nullptr;  // the next window's positions, from this lane's first on,
  int left_ = 0, steps_ = 0;       // how many there are, steps of a pass over them
  int at_ = 0, place_ = 0, index_[2];
  int buffer_ = 0, flip_ = 0;  // the buffer that is written; the other one is read
};

// The order as given.
struct NoSweep {
  __device__ explicit NoSweep(Sorted (&)[2]) {}
  __device__ bool sorted() const { return false; }
  __device__ int operator[](int) const { return -1; }
  __device__ void enter(const Args&, int) {}
  __device__ void step() {}
};

}  // namespace winnow::internal::attend::wide_sm90
