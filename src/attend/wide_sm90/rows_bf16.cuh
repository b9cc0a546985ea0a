// Wide attention on Hopper: rows that are bf16 already, copied to shared memory as they are.
#pragma once

#include <type_traits>

#include "attend/wide_sm90/layout.cuh"
#include "attend/wide_sm90/sweep.cuh"

namespace winnow::internal::attend::wide_sm90 {

template <class Record>
using FamilyOf = std::conditional_t<std::is_base_of_v<V32, Record>, V32, V4>;

// What an invalid entry's copy reads.
static __device__ uint4 zeros[kMaxKeyDim / 8];

// Addresses of the 16 rows that a warp copies of each block, fetched ahead: a lane finds one row of
// this block or of the next, and takes the addresses it copies from others.
template <class Record, bool kSwept>
class Addresses {
 public:
  __device__ Addresses(Smem<FamilyOf<Record>>& sm, const Args& p, int w)
      : sweep(sm.sorted[w]), p_(p), row0_(w * 16) {}
  std::conditional_t<kSwept, Sweep, NoSweep> sweep;
  Work work;
  const std::byte* at[4];  // row 4 k + lane / 8, from byte 16 * (lane % 8) on
  uint32_t valid;          // a bit for each row

  __device__ void start(int item) {
    work = work_at(p_, item);
    sweep.enter(p_, item);
    request_ = request_of(p_, work);
    int list;
    const int last = work.end > 0 ? index_at(p_, work, work.end - 1, list) : 0;
    fetch(0);
    trim(p_, work, last);
    turn();
  }
  // On to block i, which must follow the last one.
  __device__ void next(int i) {
    if (i > 0 && i % 2 == 0) turn();
    if (i % 2 == 0) fetch(i + 2);
    const int lane = threadIdx.x & 31, base = i % 2 * 16;
    valid = __ballot_sync(~0u, row_ != nullptr) >> base & 0xffff;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint64_t a =
          __shfl_sync(~0u, reinterpret_cast<uint64_t>(row_), base + 4 * k + lane / 8);
      const std::byte* row = reinterpret_cast<const std::byte*>(a);
      at[k] = (row ? row : reinterpret_cast<const std::byte*>(zeros)) + (lane & 7) * 16;
    }
  }

 private:
  __device__ void fetch(int i) {
    const int lane = threadIdx.x & 31, b = i + lane / 16;
    if (sweep.sorted()) {
      index_ = b < work.blocks ? sweep[b * 16 + lane % 16] : -1;
      list_ = 0;  // the first item, as given, may have looked behind its end
      return;
    }
    const int pos = b * kBlock + row0_ + lane % 16;
    index_ = b < work.blocks ? index_at(p_, work, pos, list_) : -1;
  }
  __device__ void turn() {
    const ListView& l = p_.lists[list_];
    const Entry e = resolve(l, index_, request_);
    row_ = e.page < 0 ? nullptr : l.data + e.page * l.page_stride + Record::row(e.offset, l.page);
  }

  const Args& p_;
  const int row0_;
  int request_ = 0, index_ = -1, list_ = 0;
  const std::byte* row_ = nullptr;
};

// V3.2's rows are 4.5 times 256 bytes: asking for 256 at both ends would bring 128 of a neighbour.
// Each tile but the first and the last has its other half in the row, wherever the row begins.
//
// 16-byte asynchronous copies, four rows of a tile an instruction: four warps copy 16 rows of each
// block and a part of Q. The copy of a half starts as soon as it is free, with addresses at hand.
// kSwept: rows in the order of sweep.cuh.
template <class Record, bool kSwept = false>
requires(!Record::kQuantized) struct Rows {
  using Family = FamilyOf<Record>;
  static constexpr int kThreads = 128, kRegs = kSwept ? 64 : 56;
  // With its first half a block brings `valid`.
  static constexpr int arrivals(int half) { return kThreads + (half ? 0 : 4); }

  static __device__ void produce(Smem<Family>& sm, const Args& p) {
    const int t = threadIdx.x - kConsumers, w = __shfl_sync(~0u, t / 32, 0), lane = t & 31;
    constexpr int kTail = Shape<Family>::kValueTiles * kTileBytes;
    Addresses<Record, kSwept> rows(sm, p, w);
    uint32_t ph = 3, q_ph = 1;  // a bit for each buffer
    // Rows 4 k + lane / 8: chunk() has two forms, for even and odd k.
    const uint32_t even = chunk(w * 16 + lane / 8, lane & 7), odd = even ^ 64;
#pragma unroll 1
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
      rows.start(item);
      mb_wait(&sm.q_empty, q_ph);
      q_ph ^= 1;
      begin(sm, p, rows.work, t, kThreads);
#pragma unroll 1
      for (int i = 0; i < rows.work.blocks; i++) {
        const int b = i & 1;
        rows.next(i);
        const uint32_t base = s32(sm.k[b]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          mb_wait(&sm.empty[b][half][w], ph >> b & 1);
#pragma unroll
          for (int k = 0; k < 4; k++)
#pragma unroll
            for (int tile = half * 4; tile < half * 4 + 4; tile++) {
              const uint32_t to = base + (k & 1 ? odd : even) + k * 512 + tile * kTileBytes;
              if (tile > 0 || !Shape<Family>::kTail) copy16<true>(to, rows.at[k] + tile * 128);
              else copy16<false>(to, rows.at[k]);
            }
          if (Shape<Family>::kTail && tail_with(b, half)) {
            mb_wait(&sm.empty[b][half][3], ph >> b & 1);  // P lies there until the last product
#pragma unroll
            for (int k = 0; k < 4; k++)
              copy16<false>(base + (k & 1 ? odd : even) + k * 512 + kTail, rows.at[k] + 1024);
          }
          copies_arrive(&sm.full[b][half]);
          if (half == 0 && lane == 0) {
            reinterpret_cast<uint16_t*>(&sm.valid[b])[w] = rows.valid;
            mb_arrive(&sm.full[b][0]);
          }
        }
        ph ^= 1 << b;
        if (b) rows.sweep.step();
      }
    }
  }
};

}  // namespace winnow::internal::attend::wide_sm90
