// The sets of a tile's tokens for the kernel by wgmma: their bits in shared memory, a chunk of
// 4,096 rows at a time.
//
// The CTAs of a cluster have the same tokens and different heads. Each builds the bits of its share
// of the tokens and copies them to the others, so that ids are read once for all of its heads. They
// are 1 MB a tile with a topk of 2,048, against 2.6 MB of keys and values a chunk, and nothing is
// multiplied meanwhile: some 25 us if each CTA builds the bits of all its tokens
// (docs/prefill-sm90.md).
#pragma once

#include <cuda_runtime.h>

#include "cuda/hopper.h"
#include "mha/dense_sm90.h"
#include "mha/set_sm90.cuh"

namespace winnow::internal::mha::dense {

struct Sets {
  static constexpr int kBlocks = 64;                // of a chunk
  alignas(16) uint64_t bits[kTokens][kBlocks + 1];  // one more: tokens begin in different banks
  uint64_t full, drained;  // bits of other CTAs are here; all CTAs are done
};

__device__ inline void init(Sets& sets) {
  cuda::mb_init(&sets.full, 1);
  cuda::mb_init(&sets.drained, cuda::cluster_size());
}

// Consumers of all CTAs meet: what chunk `chunk` had in shared memory is neither read nor copied
// any more.
__device__ inline void drain(Sets& sets, int chunk) {
  cuda::meet<kConsumersMeet, kConsumers>();
  const int size = static_cast<int>(cuda::cluster_size());
  if (size == 1) return;
  if (threadIdx.x < size)
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _,[%0];" ::"r"(
                     cuda::peer(cuda::s32(&sets.drained), threadIdx.x))
                 : "memory");
  cuda::mb_wait_cluster(&sets.drained, chunk & 1);
}

// Consumers build the bits of a chunk of rows for the tokens from `token` on.
__device__ inline void build(Sets& sets, const Params& p, int64_t token, int64_t low, int chunk) {
  if (chunk > 0) drain(sets, chunk - 1);
  const int size = static_cast<int>(cuda::cluster_size()), share = kTokens / size;
  const int rank = static_cast<int>(cuda::cluster_rank()), first = rank * share;
  const sm90::Window window{low + int64_t{chunk} * Sets::kBlocks * kKeys, 2 * Sets::kBlocks};
  const int count = share / (kConsumers / 32), mine = first + threadIdx.x / 32 * count;
  sm90::set_bits(p,
                 {token + mine, count, reinterpret_cast<uint32_t*>(sets.bits[mine]),
                  static_cast<int>(sizeof(sets.bits[0]) / 4)},
                 window);
  if (size > 1) cuda::fence_async();  // a copy reads what threads wrote
  cuda::meet<kConsumersMeet, kConsumers>();
  if (size == 1) return;
  const uint32_t bytes = share * sizeof(sets.bits[0]);
  if (threadIdx.x == 0) cuda::mb_expect(&sets.full, (size - 1) * bytes);
  if (threadIdx.x < size && threadIdx.x != rank) {
    const uint32_t from = cuda::s32(sets.bits[first]);
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%0],[%1],%2,[%3];" ::"r"(cuda::peer(from, threadIdx.x)),
        "r"(from), "r"(bytes), "r"(cuda::peer(cuda::s32(&sets.full), threadIdx.x))
        : "memory");
  }
  cuda::mb_wait_cluster(&sets.full, chunk & 1);
}

}  // namespace winnow::internal::mha::dense
