// Sparse attention on Hopper for many tokens: O = softmax(Q K^T) V over bf16 rows, with heads on M.
// A CTA takes items, a token and 64 heads each, one after the other. Who does what:
// - the last warpgroup copies Q and rows into shared memory, where K lies as bf16 once, for both
//   products (rows_bf16.cuh, sweep.cuh);
// - warpgroups 0 and 1 take blocks of 64 rows in pairs: 0 scores block a and 1 block b, each
//   makes P of its own block (softmax.cuh) and weighs 256 columns of both blocks (consume.cuh,
//   finish.cuh).
// Budget for 64 rows and 64 heads of V3.2: 2,176 cycles of the tensor core, 2,370 of shared memory,
// about 1,450 of the L2; 2,650 are reached. layout.cuh has shared memory and barriers,
// docs/prefill-sm90.md drawings and measurements.
#pragma once

#include "attend/wide_sm90/consume.cuh"
#include "attend/wide_sm90/layout.cuh"
#include "cuda/launch.h"

namespace winnow::internal::attend::wide_sm90 {

// Registers of a consumer thread: what the producers leave of the 65,536 (64,512 with 384 threads,
// where a launch takes 168 each). Below 216 ptxas serialises the matrix products (C7512).
template <class Rows>
constexpr int kConsumerRegisters =
    (Rows::kThreads == 128 ? 504 - Rows::kRegisters : 512 - 2 * Rows::kRegisters) / 2 & ~7;

// Initialises the mbarriers as BarrierTable says. One takes about 70 cycles, so the first lanes of
// all consumer warps share them.
template <class Rows, class Memory>
__device__ __forceinline__ void initialize(Memory& smem) {
  using Table = BarrierTable<Rows>;
  static_assert(Table::in_order());
  if (threadIdx.x % 32 != 0) return;
  // The mbarriers lie one after the other.
  constexpr int kEmpty = sizeof smem.full / 8;
  constexpr int kPFull = kEmpty + sizeof smem.empty / 8;
  constexpr int kScored = kPFull + sizeof smem.p_full / 8;
  constexpr int kQFull = kScored + sizeof smem.scored / 8;
  constexpr int kQEmpty = kQFull + 1;
  static_assert(offsetof(Memory, blocks) == offsetof(Memory, full) + 8 * (kQEmpty + 1));
#pragma unroll 1
  for (int i = threadIdx.x / 32; i <= kQEmpty; i += kConsumers / 32) {
    int arrivals = i % 2 == 0 ? Table::template kArrivals<Barrier::kFull0>
                              : Table::template kArrivals<Barrier::kFull1>;
    if (i >= kEmpty) arrivals = Table::template kArrivals<Barrier::kEmpty>;
    if (i >= kPFull) arrivals = Table::template kArrivals<Barrier::kPFull>;
    if (i >= kScored) arrivals = Table::template kArrivals<Barrier::kScored>;
    if (i == kQFull) arrivals = Table::template kArrivals<Barrier::kQFull>;
    if (i == kQEmpty) arrivals = Table::template kArrivals<Barrier::kQEmpty>;
    mb_init(s32(smem.full) + 8 * i, arrivals);
  }
  fence_barrier_init();
}

// Brings arguments into the caches, by a warp that waits anyway: when a launch begins they are in
// none, and whoever needs them first waits 400 to 1,000 cycles for 64 bytes. Each read is a
// prefetch from an address that is made of the argument, since the compiler leaves out a load whose
// result is not used.
template <class Rows>
__device__ __forceinline__ void touch(const Args& args) {
  Rows::touch(args);
  // What an item's end needs: the sinks, and where the output goes.
  const int head = 4 * threadIdx.x;
  if (args.sink && head < args.heads) prefetch_l2(args.sink + head);
  prefetch_l2(args.out + args.out_token_stride * (args.tokens - 1));
}

template <class Rows>
__global__ void __launch_bounds__(kConsumers + Rows::kThreads, 1)
    attend(const __grid_constant__ Args args) {
  using Family = typename Rows::Family;
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  auto& smem = *reinterpret_cast<Smem<Family>*>(raw_smem);
  const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  // ptxas puts the second branch first: the producers' code, which a launch waits for.
  if (warpgroup < 2) {
    initialize<Rows>(smem);
    bar<kInitialized, kConsumers + Rows::kThreads>();
    if (threadIdx.x < 32) touch<Rows>(args);
    take_registers<kConsumerRegisters<Rows>>();
    consume<Rows::kSorts>(smem, args, warpgroup);
  } else {
    give_registers<Rows::kRegisters>();
    Rows::produce(smem, args);
  }
}

// `ctas`: how many run at once; items are dealt out to them in turn.
template <class Rows>
cudaError_t launch(const Args& args, int ctas, cudaStream_t stream) {
  using Memory = Smem<typename Rows::Family>;
  static_assert(sizeof(Memory) <= kMaxSharedBytes);
  if (const cudaError_t e = allow_shared(attend<Rows>, sizeof(Memory))) return e;
  const cudaLaunchConfig_t config =
      launch_config(dim3(args.items < ctas ? args.items : ctas), kConsumers + Rows::kThreads,
                    sizeof(Memory), stream);
  return cudaLaunchKernelEx(&config, attend<Rows>, args);
}

}  // namespace winnow::internal::attend::wide_sm90
