// What the kernels of cut on Hopper share: a row's candidates as they travel, the cut among a few
// of them or by digits, and what a rank keeps.
#pragma once

#include "cuda/topk_shared.cuh"
#include "cut/kernel.h"

namespace winnow::internal::cut {

using namespace cuda::ranking;

// The candidates of a row: column c is entry c % width of rank c / width.
struct Candidates {
  const uint32_t* keys;
  int64_t block_stride;
  uint32_t width, total;

  __device__ __forceinline__ Candidates(const Params& p, int64_t row)
      : keys(reinterpret_cast<const uint32_t*>(p.candidates) + row * 2 * p.width),
        block_stride(p.rows * 2 * p.width),
        width(static_cast<uint32_t>(p.width)),
        total(width * static_cast<uint32_t>(p.blocks)) {}
  __device__ __forceinline__ const uint32_t* at(uint32_t column) const {
    const uint32_t block = column / width;
    return keys + block * block_stride + (column - block * width);
  }
  __device__ __forceinline__ int32_t position(uint32_t column) const {
    return static_cast<int32_t>(at(column)[width]);
  }
};

// A cut as one number: the key above, below it what positions must not exceed, counted from
// INT32_MAX down. 0 there lets every candidate of the key stay; 0 as a whole, every candidate.
__device__ __forceinline__ uint64_t cut_at(uint32_t key, uint32_t low) {
  return uint64_t{key} << 32 | low;
}
__device__ __forceinline__ uint32_t low_of(int32_t position) {
  return static_cast<uint32_t>(INT32_MAX - position);
}

struct FindMemory {
  SharedRowMemory even;
  uint32_t bins[kBins];
  uint32_t valid;  // candidates of the row
  uint32_t given;  // positions collected
  uint64_t cut;
};

// The cut is the `wanted`-th of the `count` entries (key, column) in sm.even.rank. A warp ranks an
// entry by its key; positions are read where a key's entries are not all wanted. The same candidate
// may be there again: ids are data. Ends with a barrier.
__device__ __forceinline__ uint64_t rank_candidates(const Candidates& row, uint32_t count,
                                                    uint32_t wanted, FindMemory& sm) {
  const uint32_t lane = threadIdx.x % 32;
  const auto counts = [](uint32_t better, uint32_t same, uint32_t rank) {
    return better < rank && rank <= better + same;
  };
  for (uint32_t e = threadIdx.x / 32; e < count; e += kWarps) {
    const uint2 mine = sm.even.rank[e];
    uint32_t better = 0, same = 0;
    for (uint32_t i = lane; i - lane < count; i += 32) {
      const uint32_t key = i < count ? sm.even.rank[i].x : 0;
      better += __popc(__ballot_sync(~0u, key > mine.x));
      same += __popc(__ballot_sync(~0u, key == mine.x));
    }
    if (!counts(better, same, wanted)) continue;
    uint32_t low = 0;
    if (better + same > wanted) {
      const int32_t position = row.position(mine.y);
      same = 0;
      for (uint32_t i = lane; i - lane < count; i += 32) {
        const uint2 other = i < count ? sm.even.rank[i] : uint2{};
        const int32_t its = other.x == mine.x ? row.position(other.y) : INT32_MAX;
        better += __popc(__ballot_sync(~0u, other.x == mine.x && its < position));
        same += __popc(__ballot_sync(~0u, other.x == mine.x && its == position));
      }
      if (!counts(better, same, wanted)) continue;
      low = low_of(position);
    }
    if (lane == 0) sm.cut = cut_at(mine.x, low);
  }
  __syncthreads();
  return sm.cut;
}

// The cut by digits of the keys, then of the positions from above, for a row of more candidates
// than are wanted. keys.each(visit) calls visit(column, key) for this thread's.
template <class Keys>
__device__ __forceinline__ uint64_t cut_by_digits(const Candidates& row, const Keys& keys,
                                                  FindMemory& sm) {
  uint32_t prefix = 0, mask = 0, tie = 0, wanted = row.width;
  bool tied = false, whole = false;  // whether positions decide; whether the rest is wanted whole
  const uint32_t bins = cuda::fresh(cuda::s32(sm.bins));
#pragma unroll 1
  for (int round = 0; round < 6 && !whole; ++round) {
    if (round == 3) {
      tie = prefix;
      tied = true;
      prefix = mask = 0;
    }
    const int shift = shift_of(round % 3);
    const uint32_t digits = digits_of(round % 3);
    clear(sm.bins, sizeof sm.bins);
    __syncthreads();
    keys.each([&](uint32_t column, uint32_t key) {
      if (key == 0 || (tied && key != tie)) return;
      const uint32_t word = tied ? low_of(row.position(column)) : key;
      if ((word & mask) == prefix) count(bins, word >> shift & digits);
    });
    __syncthreads();
    const Found found = find(sm.bins, wanted, sm.even.scan);
    prefix |= found.digit << shift;
    mask |= digits << shift;
    wanted -= found.above;
    whole = found.count == wanted;
  }
  return tied ? cut_at(tie, prefix) : cut_at(prefix, 0);
}

// Entries of this rank's row that a thread looks at together.
struct KeptTile {
  static constexpr uint32_t kEach = 4, kSize = kEach * kThreads;
  uint32_t key[kEach];
  int32_t id[kEach];

  static __device__ __forceinline__ const uint32_t* keys_of_row(const Keeping& k, int64_t row) {
    return reinterpret_cast<const uint32_t*>(k.own.packed) + row * 2 * k.own.width;
  }
  // Requests those of the tile that begins at column `first`, four at a time where they are
  // aligned.
  __device__ __forceinline__ void load(const Keeping& k, int64_t row, uint32_t first) {
    static_assert(kEach == 4);
    const auto width = static_cast<uint32_t>(k.own.width);
    const uint32_t column = first + threadIdx.x * kEach;
    const uint32_t* const keys = keys_of_row(k, row) + column;
    const int32_t* const ids = k.own.ids + row * k.own.id_stride + column;
    const auto bits = reinterpret_cast<uintptr_t>(keys) | reinterpret_cast<uintptr_t>(ids);
    if (bits % 16 == 0 && column + kEach <= width) {
      const uint4 four = *reinterpret_cast<const uint4*>(keys);
      const int4 theirs = *reinterpret_cast<const int4*>(ids);
      const uint32_t near_keys[kEach] = {four.x, four.y, four.z, four.w};
      const int32_t near_ids[kEach] = {theirs.x, theirs.y, theirs.z, theirs.w};
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        key[i] = near_keys[i];
        id[i] = near_ids[i];
      }
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const bool there = column + i < width;
      key[i] = there ? keys[i] : 0;
      id[i] = there ? ids[i] : 0;
    }
  }
};

// This rank's entries of a row that are not behind the cut, in their order; `tile` has the first
// ones. All of a tile are read before one is written at or before them, so `kept` may be the ids.
__device__ __forceinline__ void keep_row(const Keeping& k, int64_t row, uint64_t cut, KeptTile tile,
                                         Scan& scan) {
  const auto width = static_cast<uint32_t>(k.own.width);
  const auto cut_key = static_cast<uint32_t>(cut >> 32), cut_low = static_cast<uint32_t>(cut);
  const uint32_t* const positions = KeptTile::keys_of_row(k, row) + width;
  int32_t* const kept = k.kept ? k.kept + row * k.kept_stride : nullptr;
  uint32_t before = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < width; first += KeptTile::kSize) {
    if (first > 0) {
      __syncthreads();
      tile.load(k, row, first);
    }
    uint32_t n = 0;
    bool stays[KeptTile::kEach];
#pragma unroll
    for (uint32_t i = 0; i < KeptTile::kEach; ++i) {
      const uint32_t key = tile.key[i];
      stays[i] = key != 0 && key >= cut_key;
      if (stays[i] && key == cut_key && cut_low > 0) {
        const uint32_t column = first + threadIdx.x * KeptTile::kEach + i;
        stays[i] = low_of(static_cast<int32_t>(positions[column])) >= cut_low;
      }
      n += stays[i];
    }
    uint32_t place = before + scan_block(n, scan);
    before += __reduce_add_sync(~0u, threadIdx.x % 32 < kWarps ? scan.warps[threadIdx.x % 32] : 0);
#pragma unroll
    for (uint32_t i = 0; i < KeptTile::kEach; ++i)
      if (kept && stays[i]) kept[place++] = tile.id[i];
  }
  for (uint32_t column = before + threadIdx.x; kept && column < width; column += kThreads)
    kept[column] = -1;
  if (k.counts && threadIdx.x == 0) k.counts[row * k.count_stride] = static_cast<int32_t>(before);
}

// A row's cut, and what follows with it.
struct FindArgs {
  Params p;
  Keeping keeping;
  bool keeps;

  // Has the arguments read that are used last: a launch finds them in no cache, and what follows
  // the first loads is a wait anyway.
  __device__ __forceinline__ void touch() const {
    asm volatile("" ::"l"(p.cuts), "l"(keeping.kept), "l"(keeping.kept_stride), "l"(keeping.counts),
                 "l"(keeping.count_stride));
  }
};

// Rows that the registers of a cluster hold, without positions (cluster_sm90.cu).
bool fits_cluster(const Params& p);
void find_in_clusters(const FindArgs& args) noexcept;

}  // namespace winnow::internal::cut
