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

// The addresses of the 16 rows that a warp copies of each block, two blocks at a time and ahead: a
// lane finds one row of this block or of the next, and gets the addresses that it copies from other
// lanes.
template <class Record, bool kSwept>
class Addresses {
 public:
  __device__ Addresses(Smem<FamilyOf<Record>>& smem, const Args& args, int warp)
      : sweep(smem.sorted[warp]), args_(args), first_row_(warp * 16) {}
  std::conditional_t<kSwept, Sweep, NoSweep> sweep;
  Work work;
  // Row 4 k + lane / 8, from byte 16 * (lane % 8) on.
  const std::byte* from[4];
  // A bit for each row.
  uint32_t valid;

  // Requests the first indices.
  __device__ void start(int item) {
    work = work_at(args_, item);
    sweep.enter(args_, item);
    request_ = request_of(args_, work);
    int list;
    last_ = work.end > 0 ? index_at(args_, work, work.end - 1, list) : 0;
    fetch(0);
  }
  // Blocks of the item, once what start() requested is there.
  __device__ int blocks() {
    trim(args_, work, last_);
    return work.blocks;
  }
  // Moves to block i, which must follow the last one.
  __device__ void next(int i) {
    if (i % 2 == 0) {
      resolve_fetched();
      fetch(i + 2);
    }
    const int lane = threadIdx.x & 31;
    const int first_lane = i % 2 * 16;
    valid = __ballot_sync(~0u, row_ != nullptr) >> first_lane & 0xffff;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint64_t address =
          __shfl_sync(~0u, reinterpret_cast<uint64_t>(row_), first_lane + 4 * k + lane / 8);
      const std::byte* row = reinterpret_cast<const std::byte*>(address);
      from[k] = (row ? row : reinterpret_cast<const std::byte*>(zeros)) + (lane & 7) * 16;
    }
  }

 private:
  // Loads a lane's index of block i or of the next.
  __device__ void fetch(int i) {
    const int lane = threadIdx.x & 31;
    const int block = i + lane / 16;
    if (sweep.sorted()) {
      index_ = block < work.blocks ? sweep[block * 16 + lane % 16] : -1;
      // The first item, taken as given, may have looked past its end.
      list_ = 0;
      return;
    }
    const int position = block * kBlock + first_row_ + lane % 16;
    index_ = block < work.blocks ? index_at(args_, work, position, list_) : -1;
  }
  // The address of the row whose index was fetched, null where there is none.
  __device__ void resolve_fetched() {
    const ListView& list = args_.lists[list_];
    const Entry entry = resolve(list, index_, request_);
    row_ = entry.page < 0
               ? nullptr
               : list.data + entry.page * list.page_stride + Record::row(entry.offset, list.page);
  }

  const Args& args_;
  const int first_row_;
  int request_ = 0;
  // The last entry of the item.
  int last_ = 0;
  int index_ = -1;
  int list_ = 0;
  const std::byte* row_ = nullptr;
};

// The producer of rows that are bf16 in the cache (layout.cuh says what a producer does). It copies
// by 16-byte cp.async, four rows of a tile an instruction: each of four warps copies 16 rows of
// each block and a part of Q. The copy of a half starts as soon as it is free, with addresses at
// hand. kSwept: rows in the order of sweep.cuh.
//
// Memory brings 256 bytes to the L2 at once if the copy asks for it (copy_16<true>). V3.2's rows
// are 4.5 times 256 bytes: asked for at both ends, that would bring 128 bytes of a neighbour. All
// tiles but the first and the last have the other half of their 256 bytes in the row, wherever the
// row begins.
template <class Record, bool kSwept = false>
requires(!Record::kQuantized) struct Rows {
  using Family = FamilyOf<Record>;
  using Tiles = TilesOf<Family>;
  static constexpr bool kSorts = kSwept;
  static constexpr int kThreads = 128;
  static constexpr int kRegisters = kSwept ? 64 : 56;
  // With its first half a block brings `valid`.
  static constexpr int arrivals(int half) { return kThreads + (half ? 0 : 4); }

  // Has read here, by a warp that waits anyway, what producers need between the first indices and
  // the first rows. See touch() in wide.cuh.
  static __device__ void touch(const Args& args) {
    if (args.lists[0].pages > 0) prefetch_l2(args.lists[0].data);
    prefetch_l2(zeros);
  }

  static __device__ void produce(Smem<Family>& smem, const Args& args) {
    const int thread = threadIdx.x - kConsumers;
    const int warp = __shfl_sync(~0u, thread / 32, 0);
    const int lane = thread & 31;
    constexpr int kTailOffset = Tiles::kValueTiles * kTileBytes;
    Addresses<Record, kSwept> rows(smem, args, warp);
    // The phases of `empty` to wait for, a bit for each buffer.
    uint32_t phase = 3;
    uint32_t q_phase = 1;
    // Rows 4 k + lane / 8: chunk_offset() has two forms, for even and odd k.
    const uint32_t even = chunk_offset(warp * 16 + lane / 8, lane & 7);
    const uint32_t odd = even ^ 64;
#pragma unroll 1
    for (int item = blockIdx.x; item < args.items; item += gridDim.x) {
      rows.start(item);
      if (item == blockIdx.x) bar<kInitialized, kConsumers + kThreads>();
      mb_wait(&smem.q_empty, q_phase);
      q_phase ^= 1;
      copy_queries(smem, args, rows.work, thread, kThreads);
      const int blocks = rows.blocks();
      if (thread == 0) {
        smem.blocks = blocks;
        mb_arrive(&smem.q_full);
      }
#pragma unroll 1
      for (int i = 0; i < blocks || rows.sweep.unfinished(); i++) {
        const int buffer = i & 1;
        if (i < blocks) {
          rows.next(i);
          // All CTAs begin at once, and memory serves what is requested at the same time together.
          // So a CTA's second block is requested when its first Q is there: the first block is then
          // scored earlier, and makes room for the third while the second arrives.
          if (i == 1 && item == blockIdx.x) mb_wait(&smem.q_full, 0);
          const uint32_t base = s32(smem.k[buffer]);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            mb_wait(&smem.empty[buffer][half][warp], phase >> buffer & 1);
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
              for (int tile = half * 4; tile < half * 4 + 4; tile++) {
                const uint32_t to = base + (k & 1 ? odd : even) + k * 512 + tile * kTileBytes;
                if (tile > 0 || !Tiles::kTail) copy_16<true>(to, rows.from[k] + tile * 128);
                else copy_16<false>(to, rows.from[k]);
              }
            if (Tiles::kTail && tail_with(buffer, half)) {
              // P lies there until the last product.
              mb_wait(&smem.empty[buffer][half][3], phase >> buffer & 1);
#pragma unroll
              for (int k = 0; k < 4; k++)
                copy_16<false>(base + (k & 1 ? odd : even) + k * 512 + kTailOffset,
                               rows.from[k] + 1024);
            }
            copies_arrive(&smem.full[buffer][half]);
            if (half == 0 && lane == 0) {
              reinterpret_cast<uint16_t*>(&smem.valid[buffer])[warp] = rows.valid;
              mb_arrive(&smem.full[buffer][0]);
            }
          }
          phase ^= 1 << buffer;
        }
        if (buffer) rows.sweep.step();
      }
    }
  }
};

}  // namespace winnow::internal::attend::wide_sm90
