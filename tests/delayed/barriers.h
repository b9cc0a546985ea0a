// Hopper's barriers with delays: cuda_delays_test compiles this in front of a kernel's source,
// whose calls then find these functions in the place of those of cuda/hopper.h.
//
// Warps sleep after every wait and copy and around every named barrier, as a hash of seed, CTA,
// warp and barrier says: three of four not at all, the others for up to 16 us, so that any role may
// fall behind or run ahead by more than the ring holds. Lanes of a warp sleep alike. They do not
// sleep after they have arrived at an mbarrier: that is often between matrix products that run, and
// the compiler would serialise these, which hides more than it shows. (Five forms of score it
// serialises even so; score waits for each product at once.) A wait of two seconds is a deadlock
// and traps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "delayed/delays.h"

// The functions as they are keep a name of their own.
#define mb_init mb_init_plain
#define mb_arrive mb_arrive_plain
#define mb_expect mb_expect_plain
#define mb_wait mb_wait_plain
#define mb_wait_all mb_wait_all_plain
#define mb_wait_cluster mb_wait_cluster_plain
#define mb_done mb_done_plain
#define bulk_copy bulk_copy_plain
#define bulk_copy_one bulk_copy_one_plain
#define copies_arrive copies_arrive_plain
#define bar bar_plain
#define meet meet_plain
#define cluster_meet cluster_meet_plain
#include "cuda/hopper.h"
#undef mb_init
#undef mb_arrive
#undef mb_expect
#undef mb_wait
#undef mb_wait_all
#undef mb_wait_cluster
#undef mb_done
#undef bulk_copy
#undef bulk_copy_one
#undef copies_arrive
#undef bar
#undef meet
#undef cluster_meet

namespace winnow::internal::cuda {
namespace {

// Constant memory: reading it takes no time that would hide an order.
__constant__ testing::Delays delays;

const bool registered = [] {
  testing::register_delays(&delays);
  return true;
}();

// `site`: a barrier's address, or the number of a named one.
__device__ __forceinline__ void sleep_here(uint32_t site) {
  const uint32_t warp = static_cast<uint32_t>(thread_here() / 32);
  uint32_t x = (site + warp + 16 * blockIdx.x + 272 * blockIdx.y) * delays.factor;
  x = (x ^ (x >> 15)) * 0x85ebca77u;
  __nanosleep(x < 1u << 30 ? x >> 16 : 0);
}

__device__ __forceinline__ void mb_init(uint32_t barrier, int arrivals) {
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  const uint32_t at = barrier - s32(dynamic_memory);
  const bool early = at >= delays.early_first && at < delays.early_last;
  mb_init_plain(barrier, early ? 1 : arrivals);
}
__device__ __forceinline__ void mb_init(uint64_t* barrier, int arrivals) {
  mb_init(s32(barrier), arrivals);
}

// The waits of hopper.h with a limit of two seconds.
#define WINNOW_LIMITED_WAIT(instruction)                                                     \
  "{\n.reg .pred p;\n.reg .u32 begin,now;\nmov.u32 begin,%%globaltimer_lo;\nW: " instruction \
  " p,[%0],%1;\n@p bra D;\nmov.u32 now,%%globaltimer_lo;\nsub.u32 now,now,begin;\n"          \
  "setp.gt.u32 p,now,2000000000;\n@p trap;\nbra W;\nD:\n}"

__device__ __forceinline__ void mb_wait(uint64_t* barrier, uint32_t phase) {
  asm volatile(WINNOW_LIMITED_WAIT("mbarrier.try_wait.parity.shared.b64")::"r"(s32(barrier)),
               "r"(phase)
               : "memory");
  sleep_here(s32(barrier));
}
__device__ __forceinline__ void mb_wait_cluster(uint64_t* barrier, uint32_t phase) {
  asm volatile(WINNOW_LIMITED_WAIT("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64")::"r"(
                   s32(barrier)),
               "r"(phase)
               : "memory");
  sleep_here(s32(barrier));
}
// Its lanes may wait for different barriers. Without a limit: whoever should arrive has one.
__device__ __forceinline__ void mb_wait_all(uint64_t* barrier, uint32_t phase) {
  mb_wait_all_plain(barrier, phase);
  sleep_here(phase);
}
__device__ __forceinline__ bool mb_done(uint64_t* barrier, uint32_t phase) {
  sleep_here(s32(barrier));
  return mb_done_plain(barrier, phase);
}

__device__ __forceinline__ void mb_arrive(uint64_t* barrier) { mb_arrive_plain(barrier); }
__device__ __forceinline__ void mb_arrive(uint64_t* barrier, int count) {
  mb_arrive_plain(barrier, count);
  sleep_here(s32(barrier) + 1);
}
__device__ __forceinline__ void mb_expect(uint64_t* barrier, uint32_t bytes) {
  mb_expect_plain(barrier, bytes);
  sleep_here(s32(barrier) + 2);
}
__device__ __forceinline__ void copies_arrive(uint64_t* barrier) {
  copies_arrive_plain(barrier);
  sleep_here(s32(barrier) + 3);
}

__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  bulk_copy_plain(to, from, bytes, barrier);
  sleep_here(to);
}
__device__ __forceinline__ void bulk_copy_one(uint32_t to, uint64_t from, uint32_t bytes,
                                              uint32_t barrier) {
  bulk_copy_one_plain(to, from, bytes, barrier);
  sleep_here(to);
}

template <int kId, int kThreads>
__device__ __forceinline__ void bar() {
  sleep_here(kId);
  bar_plain<kId, kThreads>();
  sleep_here(kId + 16);
}
template <int kId, int kThreads>
__device__ __forceinline__ void meet() {
  sleep_here(kId);
  meet_plain<kId, kThreads>();
  sleep_here(kId + 16);
}
__device__ __forceinline__ void cluster_meet() {
  sleep_here(15);
  cluster_meet_plain();
  sleep_here(31);
}

}  // namespace
}  // namespace winnow::internal::cuda
