// The set of keys that a tile of tokens attends to, as attend_mha's kernel walks it: rows of k and
// v in ascending order, those that some token of the tile wants, 64 at a time.
//
// Rows are looked at a chunk of 4,096 at a time: every token's bits in shared memory, then the list
// of rows that have any. Duplicate ids set the same bit, so they count once.
#pragma once

#include <cuda_runtime.h>

#include "mha/set_sm90.cuh"

namespace winnow::internal::mha::sm90 {

constexpr int kThreads = 128;
constexpr int kTokens = 64, kKeys = 64;  // of a tile
constexpr int kChunk = 4096;             // rows whose bits are held at a time
constexpr int kWords = kChunk / 32;
constexpr int kSlots = 4;  // blocks of keys that are known at a time: one in use, the others ahead

// Up to 64 rows, and which of them each token wants (bit i: row i).
struct Block {
  int32_t rows[kKeys];
  uint64_t wanted[kTokens];
  int32_t count;
  bool partial;  // some token does not want all of them
};

struct SetMemory {
  uint32_t bits[kTokens][kWords + 1];  // one word more: tokens start in different banks
  uint16_t list[kChunk];               // rows of the chunk that some token wants
  uint64_t merged[kChunk / 64];
  Block blocks[kSlots];
};

// Walks the set. All threads of a block call its functions together and agree on its fields.
class Walk {
 public:
  __device__ Walk(const Params& p, SetMemory& m, int64_t first_token)
      : p_(p), m_(m), first_(first_token), chunk_(-kChunk) {}

  // Puts the next block of rows into blocks[slot]; false when there is none.
  __device__ bool next(int slot) {
    while (at_ >= count_) {
      chunk_ += kChunk;
      if (chunk_ >= p_.rows) return false;
      build_chunk();
    }
    take(m_.blocks[slot]);
    at_ += kKeys;
    return true;
  }

 private:
  // One copy of it: loads are issued in three places.
  __device__ __noinline__ void build_chunk() {
    __syncthreads();                                 // nobody reads the chunk before any more
    constexpr int kShare = kTokens * 32 / kThreads;  // a warp's tokens
    const int first = threadIdx.x / 32 * kShare;
    set_bits(p_, {first_ + first, kShare, m_.bits[first], kWords + 1}, {chunk_, kWords});
    __syncthreads();
    // Rows that any token wants: a thread per 64 of them, which then lists its own.
    const int word = threadIdx.x;
    if (word < kChunk / 64) {
      uint32_t low = 0, high = 0;
      for (int t = 0; t < kTokens; ++t) {
        low |= m_.bits[t][2 * word];
        high |= m_.bits[t][2 * word + 1];
      }
      m_.merged[word] = low | static_cast<uint64_t>(high) << 32;
    }
    __syncthreads();
    int before = 0;
    count_ = 0;
    for (int w = 0; w < kChunk / 64; ++w) {
      const int n = __popcll(m_.merged[w]);
      before += w < word ? n : 0;
      count_ += n;
    }
    if (word < kChunk / 64)
      for (uint64_t rest = m_.merged[word]; rest != 0; rest &= rest - 1)
        m_.list[before++] = static_cast<uint16_t>(word * 64 + __ffsll(rest) - 1);
    at_ = 0;
    __syncthreads();
  }

  // The rows from list[at_] on, and each token's bits of them (two threads a token).
  __device__ void take(Block& block) {
    const int n = min(count_ - at_, kKeys);
    const int first = m_.list[at_], last = m_.list[at_ + n - 1];
    if (threadIdx.x < kKeys)
      block.rows[threadIdx.x] =
          threadIdx.x < n ? static_cast<int32_t>(chunk_ + m_.list[at_ + threadIdx.x]) : -1;
    const int token = threadIdx.x % kTokens, half = threadIdx.x / kTokens;
    uint32_t wanted = 0;
    if (last - first == kKeys - 1 && first % kKeys == 0) {
      wanted = m_.bits[token][first / 32 + half];  // 64 rows side by side
    } else {
      for (int i = 0; i < 32 && 32 * half + i < n; ++i) {
        const int row = m_.list[at_ + 32 * half + i];
        wanted |= (m_.bits[token][row / 32] >> row % 32 & 1) << i;
      }
    }
    reinterpret_cast<uint32_t*>(&block.wanted[token])[half] = wanted;
    const int mine = min(max(n - 32 * half, 0), 32);
    const uint32_t all = mine == 0 ? 0 : ~0u >> (32 - mine);
    const bool partial = __syncthreads_or(wanted != all && first_ + token < p_.tokens);
    if (threadIdx.x == 0) {
      block.count = n;
      block.partial = partial;
    }
    __syncthreads();
  }

  const Params& p_;
  SetMemory& m_;
  int64_t first_, chunk_;
  int count_ = 0, at_ = 0;  // rows listed of the chunk, and how many of them were taken
};

}  // namespace winnow::internal::mha::sm90
