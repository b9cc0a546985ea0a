// Sparse decode attention on Hopper. A CTA takes one token, up to 64 heads and a part of its lists:
//   warpgroup 3  copies records as they are stored into a ring of 16-row stages (one bulk copy a
//   row); warpgroup 2  reads rows as matrix fragments, dequantises them in registers (fp8 to fp16,
//   scales
//                divided by the token's power of two), S^T = K Q^T with heads on the N side,
//                softmax;
//   warpgroups 0, 1  read the same rows transposed, dequantise, O^T += V^T P^T, 256 columns each.
// The splits of a token form a cluster and merge through distributed shared memory: no workspace.
// Budget per 64 rows and 64 heads: 2,200 cycles of matrix work, 1,740 of shared memory, 3,300 to
// gather 656-byte rows at the memory's rate. Measured: docs of the decode kernel.
#pragma once

#include "attend/decode_sm90_gather.cuh"
#include "attend/decode_sm90_score.cuh"
#include "attend/decode_sm90_weigh.cuh"

namespace winnow::attention::sm90 {

constexpr int kRegsCopy = 32, kRegsScore = 128, kRegsWeigh = 176;  // 65,536 in all

template <class R, int N>
__global__ void __launch_bounds__(512, 1) decode(const __grid_constant__ Args p) {
  using K = Config<R, N>;
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  auto& sm = *reinterpret_cast<Smem<R, N>*>(raw_smem);
  const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  const int split = blockIdx.x % p.splits, work = blockIdx.x / p.splits,
            head0 = work % p.groups * N, token = work / p.groups;
  if (threadIdx.x == 0) {
    for (int i = 0; i < K::kStages; i++) {
      mb_init(&sm.full[i], R::kSideBytes ? 33 : 1);
      mb_init(&sm.empty[i], 8);
    }
    for (int i = 0; i < 2; i++) {
      mb_init(&sm.pfull[i], 128);
      mb_init(&sm.pempty[i], 256);
    }
    sm.qmax = sm.flag[0] = sm.flag[1] = sm.flag[2] = 0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < N) {
    sm.m[threadIdx.x] = 0.f;
    sm.top[threadIdx.x] = -INFINITY;
  }
  Span sp;
  {
    int n[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (i < p.list_count) {
        n[i] = columns(p.lists[i], token);
      }
    sp.n0 = n[0];
    sp.total = n[0] + n[1];
    const int nb = (sp.total + K::kBlock - 1) / K::kBlock;
    const int first = (int)((int64_t)nb * split / p.splits),
              last = (int)((int64_t)nb * (split + 1) / p.splits);
    sp.begin = first * K::kBlock;
    sp.blocks = last - first;
  }
  __syncthreads();
  if (wg == 3) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegsCopy));
    produce<R, N>(sm, p, sp, token);
    if (p.splits > 1) {
      cluster_sync();
      cluster_sync();
    }
  } else if (wg == 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegsScore));
    const float back = load_q<R, N, true>(sm, p, token, head0);
    score<R, N>(sm, p, sp, back);
    const int t = threadIdx.x & 127;
    if (p.splits == 1 && t < N)
      sm.factor[t] = finish(p, token, head0 + t, sm.m[t], sm.sum[t], sm.top[t], true);
    bar<3, K::kMath>();
    if (p.splits > 1) {
      cluster_sync();
      merge<R, N>(sm, p, token, split, head0);
      cluster_sync();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegsWeigh));
    load_q<R, N, false>(sm, p, token, head0);
    if (wg == 0) weigh<R, N, 0>(sm, p, sp, token, head0);
    else weigh<R, N, 1>(sm, p, sp, token, head0);
    if (p.splits > 1) {
      cluster_sync();
      merge<R, N>(sm, p, token, split, head0);
      cluster_sync();
    }
  }
}

template <class R, int N>
cudaError_t launch(const Args& p, cudaStream_t st) {
  auto once = [] {
    if (cudaError_t e = cudaFuncSetAttribute(
            decode<R, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<R, N>)))
      return e;
    return cudaFuncSetAttribute(decode<R, N>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  };
  static const cudaError_t ready = once();
  if (ready) return ready;
  cudaLaunchConfig_t c{};
  c.gridDim = dim3((unsigned)(p.tokens * p.groups * p.splits));
  c.blockDim = dim3(512);
  c.dynamicSmemBytes = sizeof(Smem<R, N>);
  c.stream = st;
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeClusterDimension;
  at[0].val.clusterDim.x = p.splits;
  at[0].val.clusterDim.y = at[0].val.clusterDim.z = 1;
  c.attrs = at;
  c.numAttrs = p.splits > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&c, decode<R, N>, p);
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
