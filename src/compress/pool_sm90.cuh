// compress on the device: the rows of an entry, pooled by a block or a cluster.
//
// A thread takes 4 values of 8 or 4 rows at once, 16 B each, so that a window of C4A (32 KiB) is in
// flight in one block, half of C128A (512 KiB) in a cluster of 8. Windows of more than 8 rows are
// shared by 16 groups of threads, whose partial sums meet in shared memory.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "compress/kernel.h"

namespace winnow::internal::compress {

namespace cg = cooperative_groups;

inline constexpr int kQuad = 4;         // values of a thread
inline constexpr int kFewRows = 8;      // rows of an entry that one group of threads takes
inline constexpr int kManyGroups = 16;  // of threads, for windows of more than 8 rows
inline constexpr int kQuadsOfRank =
    16;  // ... which then take 64 values of a row, a block of a cluster
inline constexpr int kMaxThreads = kManyGroups * kQuadsOfRank;
inline constexpr int kMaxTokens = 32;  // of a block: a lane each

// How rows are read. State and bias are always floats.
enum class Load : uint8_t {
  kFloats,  // four at a time
  kBf16,    // rows of bf16, state and bias as above
  kAny,     // one at a time: something is not aligned
};

// Rows that are to be stored.
struct List {
  int64_t tokens[kMaxTokens];  // whose
  float* places[kMaxTokens];   // where; null: not
};

struct Shared : List {
  Row rows[kMaxRows];                   // of the entry
  alignas(16) float pooled[kMaxWidth];  // in the first block of a cluster
  float largest[kManyGroups][kQuadsOfRank * kQuad];
  float whole[kManyGroups][kQuadsOfRank * kQuad];
  float sum[kManyGroups][kQuadsOfRank * kQuad];
};

struct Quad {
  float v[kQuad];
};

template <Load kLoad>
__device__ __forceinline__ Quad load_quad(const void* data, bool is_bf16, int64_t at) {
  __builtin_assume(__isGlobal(data));  // or the loads would ask where it is
  const float* from = static_cast<const float*>(data) + at;
  const bf16* half = static_cast<const bf16*>(data) + at;
  if constexpr (kLoad == Load::kAny) {
    Quad quad;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) quad.v[k] = is_bf16 ? to_float(half[k]) : from[k];
    return quad;
  }
  if (kLoad == Load::kBf16 && is_bf16) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(half);
    return {__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
            __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u)};
  }
  const float4 all = *reinterpret_cast<const float4*>(from);
  return {all.x, all.y, all.z, all.w};
}

template <Load kLoad>
__device__ __forceinline__ void store_quad(float* to, const Quad& quad) {
  if constexpr (kLoad == Load::kAny) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) to[k] = quad.v[k];
  } else {
    *reinterpret_cast<float4*>(to) = {quad.v[0], quad.v[1], quad.v[2], quad.v[3]};
  }
}

template <Load kLoad>
__device__ __forceinline__ void add_bias(Quad& scores, const float* bias, int64_t at) {
  const Quad added = load_quad<kLoad>(bias, false, at);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) scores.v[k] = __fadd_rn(scores.v[k], added.v[k]);
}

// A softmax over some of the rows, value by value. Exponentials are those of the hardware: off by
// 2^-22 and by 2^-23 of their argument.
struct Pool {
  float largest[kQuad], whole[kQuad], sum[kQuad];
};

// Rows [first, first + kRowsEach) below `count` join the pool; `at` is the thread's first value.
template <Load kLoad, int kRowsEach>
__device__ __forceinline__ void add_rows(Pool& pool, const Row* rows, int first, int count,
                                         int64_t at) {
  Quad values[kRowsEach], scores[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    if (first + i >= count) continue;
    const Row& row = rows[first + i];
    values[i] = load_quad<kLoad>(row.values, row.are_bf16, at);
    scores[i] = load_quad<kLoad>(row.scores, row.are_bf16, at);
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i)
    if (first + i < count && rows[first + i].bias != nullptr)
      add_bias<kLoad>(scores[i], rows[first + i].bias, at);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    float largest = pool.largest[k];
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i)
      if (first + i < count) largest = fmaxf(largest, scores[i].v[k]);
    const float kept = largest == pool.largest[k] ? 1.0f : __expf(pool.largest[k] - largest);
    float whole = __fmul_rn(pool.whole[k], kept);
    float sum = __fmul_rn(pool.sum[k], kept);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i)
      if (first + i < count) {
        const float weight = __expf(scores[i].v[k] - largest);
        sum = __fmaf_rn(weight, values[i].v[k], sum);
        whole = __fadd_rn(whole, weight);
      }
    pool.largest[k] = largest;
    pool.whole[k] = whole;
    pool.sum[k] = sum;
  }
}

// The pool of all groups, for value `column` of this block.
__device__ __forceinline__ float merged(const Shared& shared, int column) {
  float largest = -INFINITY, whole = 0, sum = 0;
#pragma unroll
  for (int g = 0; g < kManyGroups; ++g) largest = fmaxf(largest, shared.largest[g][column]);
#pragma unroll
  for (int g = 0; g < kManyGroups; ++g) {
    const float kept = __expf(shared.largest[g][column] - largest);
    whole = __fmaf_rn(shared.whole[g][column], kept, whole);
    sum = __fmaf_rn(shared.sum[g][column], kept, sum);
  }
  return __fdiv_rn(sum, whole);
}

// Puts the weighted mean of an entry's rows into the first block's `pooled`.
template <Load kLoad, int kGroups>
__device__ __forceinline__ void pool_rows(const Params& p, Shared& shared, int count, int rank) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int group = kGroups == 1 ? 0 : thread / kQuadsOfRank;
  const int quad = kGroups == 1 ? thread : rank * kQuadsOfRank + thread % kQuadsOfRank;
  const int at = quad * kQuad;
  // Rows that a thread has in flight; half of them let two blocks share a multiprocessor.
  constexpr int kRowsEach = kGroups == 1 ? kFewRows : kFewRows / 2;
  Pool pool;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) pool.largest[k] = -INFINITY, pool.whole[k] = pool.sum[k] = 0;
  if (at < p.width)
    for (int first = group * kRowsEach; first < count; first += kGroups * kRowsEach)
      add_rows<kLoad, kRowsEach>(pool, shared.rows, first, count, at);
  if constexpr (kGroups == 1) {
    if (at < p.width) {
      Quad mean;
#pragma unroll
      for (int k = 0; k < kQuad; ++k) mean.v[k] = __fdiv_rn(pool.sum[k], pool.whole[k]);
      store_quad<Load::kFloats>(shared.pooled + at, mean);
    }
    __syncthreads();
  } else {
    const int column = at - rank * kQuadsOfRank * kQuad;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      shared.largest[group][column + k] = pool.largest[k];
      shared.whole[group][column + k] = pool.whole[k];
      shared.sum[group][column + k] = pool.sum[k];
    }
    __syncthreads();
    const int value = rank * kQuadsOfRank * kQuad + thread;
    if (thread < kQuadsOfRank * kQuad && value < p.width)
      cg::this_cluster().map_shared_rank(shared.pooled, 0)[value] = merged(shared, thread);
    cg::this_cluster().sync();
  }
}

}  // namespace winnow::internal::compress
