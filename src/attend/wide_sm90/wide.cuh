// Sparse attention on Hopper with heads on M: the kernel and its launch. See the layout for the
// plan, docs/prefill-sm90.md for budgets and measurements.
#pragma once

#include "attend/wide_sm90/consume.cuh"
#include "attend/wide_sm90/layout.cuh"

namespace winnow::internal::attend::wide_sm90 {

// Registers of a consumer thread: what the producers leave of the 65,536 (64,512 with 384 threads,
// where a launch takes 168 each). Below 216 ptxas serialises the matrix products (C7512).
template <class Rows>
constexpr int kRegsMath = (Rows::kThreads == 128 ? 504 - Rows::kRegs : 512 - 2 * Rows::kRegs) / 2 &
                          ~7;

template <class Rows>
__global__ void __launch_bounds__(kConsumers + Rows::kThreads, 1)
    attend(const __grid_constant__ Args p) {
  using Family = typename Rows::Family;
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  auto& sm = *reinterpret_cast<Smem<Family>*>(raw_smem);
  const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int b = 0; b < 2; b++) {
      for (int half = 0; half < 2; half++) {
        mb_init(&sm.full[b][half], Rows::arrivals(half));
        for (int part = 0; part < 4; part++) mb_init(&sm.empty[b][half][part], 4);
      }
      mb_init(&sm.p_full[b], 4);
      mb_init(&sm.scored[b], 4);
    }
    mb_init(&sm.q_full, Rows::kThreads + 1);
    mb_init(&sm.q_empty, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (wg >= 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Rows::kRegs));
    Rows::produce(sm, p);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegsMath<Rows>));
    if (wg == 0) consume<Family, 0>(sm, p);
    else consume<Family, 1>(sm, p);
  }
}

// `ctas`: how many run at once; items are dealt out to them in turn.
template <class Rows>
cudaError_t launch(const Args& p, int ctas, cudaStream_t stream) {
  using Memory = Smem<typename Rows::Family>;
  static_assert(sizeof(Memory) <= 232448);
  const cudaError_t ready = cudaFuncSetAttribute(  // of this device
      attend<Rows>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
  if (ready) return ready;
  cudaLaunchConfig_t c{};
  c.gridDim = dim3(p.items < ctas ? p.items : ctas);
  c.blockDim = dim3(kConsumers + Rows::kThreads);
  c.dynamicSmemBytes = sizeof(Memory);
  c.stream = stream;
  return cudaLaunchKernelEx(&c, attend<Rows>, p);
}

}  // namespace winnow::internal::attend::wide_sm90
