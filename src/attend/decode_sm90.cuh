// Sparse decode attention on Hopper. A CTA takes one token, up to 64 heads, a part of its lists:
// - warpgroup 3 copies records as they are stored into a ring of 16-row stages, a bulk copy a row;
//   its last warp tells the others what a block's rows are like;
// - warpgroup 2 reads rows as matrix fragments, dequantises them in registers (fp8 to fp16, scales
//   divided by the token's power of two), S^T = K Q^T with heads on the N side, hands on log2 P;
// - warpgroups 0, 1 make P of half of the heads each, read the same rows transposed, dequantise
//   them again, O^T += V^T P^T, 256 columns each.
// The splits of a token form a cluster and merge through distributed shared memory, each sending
// its sums to their owner: no workspace. Budget per 64 rows and 64 heads: 2,200 cycles of matrix
// work, 1,740 of shared memory, 3,300 to gather 656-byte rows at the memory's rate. Measured:
// docs/decode-sm90.md.
#pragma once

#include <algorithm>
#include <atomic>

#include "attend/decode_sm90_gather.cuh"
#include "attend/decode_sm90_score.cuh"
#include "attend/decode_sm90_weigh.cuh"

namespace winnow::attention::sm90 {

// Registers a thread, 65,536 in all. Making bf16 rows takes the copying warps a few more.
template <class R>
constexpr int kRegsCopy = R::kFp8 ? 40 : 48;
template <class R>
constexpr int kRegsScore = R::kFp8 ? 104 : 96;
constexpr int kRegsWeigh = 184;

// This split's part of the token's lists.
template <class K>
__device__ __forceinline__ void cut_list(const Args& p, Span& sp) {
  const unsigned split = cluster_rank();
  sp.n0 = sp.total = columns(p.lists[0], sp.token);
  if (p.list_count > 1) sp.total += columns(p.lists[1], sp.token);
  // at most 2^25 blocks and 16 splits
  const unsigned nb = (static_cast<unsigned>(sp.total) + K::kBlock - 1) / K::kBlock,
                 first = over_splits(p, nb * split), last = over_splits(p, nb * (split + 1));
  sp.begin = static_cast<int>(first) * K::kBlock;
  sp.blocks = static_cast<int>(last - first);
  sp.end = min(sp.total, sp.begin + sp.blocks * K::kBlock);
}

template <class R, int N>
__global__ void __launch_bounds__(512, 1) decode(const __grid_constant__ Args p) {
  using K = Config<R, N>;
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  auto& sm = *reinterpret_cast<Smem<R, N>*>(raw_smem);
  const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  if (blockIdx.z && token_here() >= p.tokens) return;  // a whole cluster
  // The first indices are asked for at once.
  Span ahead{};
  int first = -1, list = 0;
  if (wg == 3) {
    ahead = job<N>(p);
    cut_list<K>(p, ahead);
    first = first_index<K>(p, ahead, list);
  }
  // Every launch waits for this, and a barrier takes about 70 cycles: three for each warp.
  const int tid = threadIdx.x;
  if ((tid & 31) == 0) {
#pragma unroll 1
    for (int b = tid / 32; b < Smem<R, N>::kBarriers; b += 16)
      mb_init(s32(sm.full) + 8 * b, Smem<R, N>::arrivals(b));
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
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegsWeigh));
    cut_list<K>(p, sp);
    weigh<R, N>(sm, p, sp, wg);
    if (p.splits > 1) merge<R, N>(sm, p, sp, cluster_rank());
  } else if (wg == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegsScore<R>));
    Span sp = job<N>(p);
    const float back = load_q<R, N, true>(sm, p, sp);
    cut_list<K>(p, sp);
    score<R, N>(sm, p, sp, back);
    meet<3, K::kMath>();
    if (p.splits > 1) {
      cluster_meet();
      make_weights<R, N>(sm, p, sp, cluster_rank());
      merge<R, N>(sm, p, sp, cluster_rank());
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegsCopy<R>));
    copy<R, N>(sm, p, ahead, first, list);
    if ((thread_here() & 96) == 96) look_ahead<R, N>(sm, p, ahead);
    if (p.splits > 1) cluster_meet();
  }
}

// The kernel's attributes, set once a device.
template <class R, int N>
cudaError_t prepare() {
  static std::atomic<uint64_t> done{0};  // a bit for each device
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  if (const cudaError_t e = cudaFuncSetAttribute(
          decode<R, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<R, N>)))
    return e;
  if (const cudaError_t e =
          cudaFuncSetAttribute(decode<R, N>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
    return e;
  done.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

// A launch in clusters of `cluster`.
template <class R, int N>
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute[1];
  cudaError_t ready = prepare<R, N>();

  Launch(dim3 grid, unsigned cluster, cudaStream_t stream) {
    config.gridDim = grid;
    config.blockDim = dim3(Config<R, N>::kThreads);
    config.dynamicSmemBytes = sizeof(Smem<R, N>);
    config.stream = stream;
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = cluster;
    attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
    config.attrs = attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
  }
};

template <class R, int N>
cudaError_t launch(const Args& p, cudaStream_t stream) {
  const auto splits = static_cast<unsigned>(p.splits), tokens = static_cast<unsigned>(p.tokens);
  const dim3 grid(splits * static_cast<unsigned>(p.groups), std::min<unsigned>(tokens, kTokensY),
                  (tokens + kTokensY - 1) / kTokensY);
  const Launch<R, N> l(grid, splits, stream);
  return l.ready ? l.ready : cudaLaunchKernelEx(&l.config, decode<R, N>, p);
}

// The instantiation whose CTA has `size` heads.
template <class R, int kMax>
void launch_size(const Args& p, int size, cudaStream_t stream) {
  switch (size) {
    case 8: launch<R, 8>(p, stream); break;
    case 16: launch<R, 16>(p, stream); break;
    case 24: launch<R, 24>(p, stream); break;
    case 32: launch<R, 32>(p, stream); break;
    case 48: launch<R, 48>(p, stream); break;
    default:
      if constexpr (kMax >= 64) launch<R, 64>(p, stream);
  }
}

}  // namespace winnow::attention::sm90
