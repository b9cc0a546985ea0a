// Sparse attention on Hopper with heads on M: the kernel and its launch. See the layout for the
// plan, docs/prefill-sm90.md for budgets and measurements.
#pragma once

#include "attend/wide_sm90_consume.cuh"
#include "attend/wide_sm90_layout.cuh"

namespace winnow::attention::wide {

// Registers of a consumer thread: what the producers leave of the 65,536 (64,512 with 384 threads,
// where a launch takes 168 each). Below 216 ptxas serialises the matrix products (C7512).
template <class Rows>
constexpr int kRegsMath = (Rows::kThreads == 128 ? 504 - Rows::kRegs : 512 - 2 * Rows::kRegs) / 16 *
                          8;

template <class Rows, bool kPair>
__global__ void __launch_bounds__(kConsumers + Rows::kThreads, 1)
    attend(const __grid_constant__ Args p) {
  using Family = typename Rows::Family;
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  auto& sm = *reinterpret_cast<Smem<Family>*>(raw_smem);
  const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  const int rank = kPair ? blockIdx.x & 1 : 0;
  if (threadIdx.x == 0) {
    for (int b = 0; b < 2; b++) {
      for (int half = 0; half < 2; half++) {
        mb_init(&sm.full[b][half], Rows::arrivals(half, rank));
        mb_init(&sm.empty[b][half], kPair ? 8 : 4);
      }
      if constexpr (kPair) {
        mb_init(&sm.landed[b], Rows::kLandings);
        mb_init(&sm.tail[b], Rows::kLandings);
      }
      mb_init(&sm.p_full[b], 4);
    }
    mb_init(&sm.q_full, Rows::kQThreads);
    mb_init(&sm.q_empty, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (kPair) cluster_sync();
  else __syncthreads();
  if (wg >= 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Rows::kRegs));
    Rows::produce(sm, p, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegsMath<Rows>));
    if (wg == 0) consume<Family, kPair, 0>(sm, p, rank);
    else consume<Family, kPair, 1>(sm, p, rank);
  }
  if constexpr (kPair) cluster_sync();  // the other CTA may still send arrivals here
}

// `ctas`: how many run at once; items are dealt out to them in turn.
template <class Rows, bool kPair>
cudaError_t launch(const Args& p, int ctas, cudaStream_t stream) {
  using Memory = Smem<typename Rows::Family>;
  static_assert(sizeof(Memory) <= 232448);
  static const cudaError_t ready = cudaFuncSetAttribute(
      attend<Rows, kPair>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
  if (ready) return ready;
  const int most = kPair ? ctas / 2 : ctas;
  cudaLaunchConfig_t c{};
  c.gridDim = dim3((p.items < most ? p.items : most) * (kPair ? 2 : 1));
  c.blockDim = dim3(kConsumers + Rows::kThreads);
  c.dynamicSmemBytes = sizeof(Memory);
  c.stream = stream;
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeClusterDimension;
  at[0].val.clusterDim.x = 2;
  at[0].val.clusterDim.y = at[0].val.clusterDim.z = 1;
  c.attrs = at;
  c.numAttrs = kPair ? 1 : 0;
  return cudaLaunchKernelEx(&c, attend<Rows, kPair>, p);
}

}  // namespace winnow::attention::wide
