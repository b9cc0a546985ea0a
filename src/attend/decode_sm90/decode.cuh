// Sparse decode attention on Hopper. A CTA takes one token, up to 64 heads, a part of its lists, or
// one token after the other, all of their lists:
// - the last warpgroup, or two of them (Crew), copies records as they are stored into a ring of
//   16-row stages, a bulk copy a row; its last warp tells the others what a block's rows are like;
// - warpgroup 2, with 32 heads or fewer also 3, each every other block, reads rows as matrix
//   fragments, dequantises them in registers (fp8 to fp16, scales divided by the token's power of
//   two), S^T = K Q^T with heads on the N side, hands on log2 P;
// - warpgroups 0, 1 make P of half of the heads each, read the same rows transposed, dequantise
//   them again, O^T += V^T P^T, 256 columns each.
// The splits of a token form a cluster and merge through distributed shared memory, each sending
// its sums to their owner, or they merge through a workspace. Budget per 64 rows and 64 heads:
// 2,200 cycles of matrix work, 1,740 of shared memory, 3,300 to gather 656-byte rows at the
// memory's rate. Measured: docs/decode-sm90.md.
#pragma once

#include <algorithm>
#include <atomic>

#include "attend/decode_sm90/gather.cuh"
#include "attend/decode_sm90/launch.h"
#include "attend/decode_sm90/query.cuh"
#include "attend/decode_sm90/score.cuh"
#include "attend/decode_sm90/weigh.cuh"

namespace winnow::internal::attend::decode_sm90 {

template <class R, int N, Way W>
__global__ void __launch_bounds__(Crew<R, N, W>::kThreads, 1)
    decode(const __grid_constant__ Args p) {
  using K = Config<R, N>;
  using C = Crew<R, N, W>;
  constexpr bool kMany = W == Way::kMany;
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  auto& sm = *reinterpret_cast<Smem<R, N>*>(raw_smem);
  const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  if (blockIdx.z && token_here() >= p.tokens) return;  // a whole cluster
  // The first indices are asked for at once.
  Span ahead{};
  int first = -1, list = 0, last = 0;
  if (wg >= K::kCopy) {
    ahead = job<N>(p);
    cut_list<K>(p, ahead);
    first = first_index<K, C>(p, ahead, list);
    if constexpr (!kMany) last = last_index(p, ahead);
  }
  if (W >= Way::kCluster && wg == 1) prefetch_q<N>(p);
  // Every launch waits for this, and a barrier takes about 70 cycles: three for each warp.
  const int tid = threadIdx.x;
  if ((tid & 31) == 0) {
#pragma unroll 1
    for (int b = tid / 32; b < Smem<R, N>::kBarriers; b += C::kThreads / 32)
      mb_init(s32(sm.full) + 8 * b, Smem<R, N>::arrivals(b, W));
    fence_barrier_init();
  }
  if (tid == 0) sm.qmax = sm.moved[1] = 0, sm.moved[0] = 1;
  if (tid < N) {
    sm.m[tid] = sm.sum[tid] = 0.f;
    sm.top[tid] = -INFINITY;
  }
  __syncthreads();
  // The copying warps' code comes out first, next to this: a jump to code that is in no cache takes
  // hundreds of cycles.
  if (wg < 2) {
    Span sp = job<N>(p);
    load_q<R, N, false>(sm, p, sp);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::kRegsWeigh));
    count_blocks<W>(sm, p, sp);
    Weighed<N> at{};
#pragma unroll
    for (auto& o : at.o) hold(o);  // zeros once, not again where no block follows
#pragma unroll 1
    do weigh<R, N, W>(sm, p, sp, wg, at);
    while (kMany && next_token<K>(p, sp));
    if constexpr (W == Way::kCluster) merge<R, N>(sm, p, sp, split_here(p));
  } else if (wg < K::kCopy) {
    if constexpr (C::kThreads > 640)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::kRegsScore));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::kRegsScore));
    Span sp = job<N>(p);
    float back = load_q<R, N, true>(sm, p, sp);
    count_blocks<W>(sm, p, sp);
    Progress at{thread_here() / 32 & 3};
    if constexpr (kMany) {
      // The next token's Q replaces this one's while weigh is at the last block; then weigh has
      // made way for the token's statistics.
#pragma unroll 1
      for (uint32_t phase = 0;;) {
        if (first_scorer()) expect_q<R>(p, sp);
        score<R, N>(sm, p, sp, back, at);
        const bool some = sp.blocks > 0;
        if (!next_token<K>(p, sp)) return;
        if (sp.blocks > 0) back = reload_q(sm, p, sp.token, sp.head0);
        if (some) mb_wait(&sm.inbox, phase), phase ^= 1;
      }
    }
    score<R, N>(sm, p, sp, back, at);
    if constexpr (W == Way::kExchange) {
      if (first_scorer()) return exchanged_weights<R, N>(sm, p, sp);
      bar<2, K::kScore>();  // as they do there, and when the weights are made
      meet<3, K::kMath>();
    } else if constexpr (W == Way::kCluster) {
      meet<3, K::kMath>();
      cluster_meet();
      if (first_scorer()) return make_weights<R, N>(sm, p, sp, split_here(p));
      meet<3, K::kMath>();
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::kRegsCopy));
    if constexpr (!kMany) {
      trim<K>(p, ahead, last);
      if (thread_here() == 128 * K::kCopy) {
        sm.blocks = ahead.blocks;
        mb_arrive(&sm.counted);
      }
    }
    copy<R, N, W>(sm, p, ahead, first, list);
    if (copy_warp<C>() >= C::kCopiers) look_ahead<R, N, W>(sm, p, ahead);
    if constexpr (W == Way::kExchange) {
      const int w = copy_warp<C>();
      Span here = job<N>(p);  // again, rather than in registers of the loops before
      here.blocks = ahead.blocks;
      if (w == 0) open<R, N>(sm, p, here);
      if (w == 1 || w == 2) mark_units<R, N>(sm, p, here);
    } else if constexpr (W == Way::kCluster) {
      cluster_meet();
    }
  }
}

// The kernel's attributes, set once a device.
template <class R, int N, Way W>
cudaError_t prepare() {
  static std::atomic<uint64_t> done{0};  // a bit for each device
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  if (const cudaError_t e = cudaFuncSetAttribute(
          decode<R, N, W>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<R, N>)))
    return e;
  if (const cudaError_t e =
          cudaFuncSetAttribute(decode<R, N, W>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
    return e;
  done.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

// A launch in clusters of `cluster`; of 0: all CTAs at once, or none.
template <class R, int N, Way W>
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute[1];
  cudaError_t ready = prepare<R, N, W>();

  Launch(dim3 grid, unsigned cluster, cudaStream_t stream) {
    config.gridDim = grid;
    config.blockDim = dim3(Crew<R, N, W>::kThreads);
    config.dynamicSmemBytes = sizeof(Smem<R, N>);
    config.stream = stream;
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = cluster;
    attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
    config.attrs = attribute;
    config.numAttrs = cluster != 1 ? 1 : 0;
    if (cluster == 0) {
      attribute[0].id = cudaLaunchAttributeCooperative;
      attribute[0].val.cooperative = 1;
    }
  }
};

template <class R, int N, Way W>
cudaError_t launch(const Args& p, unsigned tokens, cudaStream_t stream) {
  const auto splits = static_cast<unsigned>(p.splits);
  const dim3 grid(splits * static_cast<unsigned>(p.groups), std::min<unsigned>(tokens, kTokensY),
                  (tokens + kTokensY - 1) / kTokensY);
  const Launch<R, N, W> l(grid, W == Way::kExchange ? 0 : splits, stream);
  return l.ready ? l.ready : cudaLaunchKernelEx(&l.config, decode<R, N, W>, p);
}

// From token to token where fewer run at once than there are, and goes_on() says so.
template <class R, int N>
cudaError_t launch(const Args& p, int at_once, cudaStream_t stream) {
  if constexpr (goes_on(R::Stored::kFormat, N, false))
    if (at_once < p.tokens) return launch<R, N, Way::kMany>(p, at_once, stream);
  if (p.exchange) return launch<R, N, Way::kExchange>(p, p.tokens, stream);
  if (p.splits > 1) return launch<R, N, Way::kCluster>(p, p.tokens, stream);
  return launch<R, N, Way::kAlone>(p, p.tokens, stream);
}

// The instantiation whose CTA has `size` heads.
template <class R, int kMax>
void launch_size(const Args& p, Share share, void* to) {
  const auto stream = static_cast<cudaStream_t>(to);
  switch (share.heads) {
    case 8: launch<R, 8>(p, share.tokens, stream); break;
    case 16: launch<R, 16>(p, share.tokens, stream); break;
    case 24: launch<R, 24>(p, share.tokens, stream); break;
    case 32: launch<R, 32>(p, share.tokens, stream); break;
    case 48: launch<R, 48>(p, share.tokens, stream); break;
    default:
      if constexpr (kMax >= 64) launch<R, 64>(p, share.tokens, stream);
  }
}

}  // namespace winnow::internal::attend::decode_sm90
