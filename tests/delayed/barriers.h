// Hopper's barriers with delays: the build of cuda_delays_test includes this in front of a kernel's
// source, whose calls then find these functions in the place of those of cuda/hopper.h.
//
// Warps sleep behind every wait, arrival and copy, as a hash of seed, CTA, warp and barrier says:
// three of four not at all, the others for 32 ns to 16 us, so that any role may fall behind or run
// ahead by more than the ring holds. Lanes of a warp sleep alike, and without a branch, since a
// branch between the matrix products of a group would make the compiler serialise them. A wait of
// two seconds is a deadlock and traps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "delayed/delays.h"

// The functions as they are keep a name of their own.
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

__device__ __forceinline__ uint32_t nanoseconds_here() {
  uint32_t time;
  asm volatile("mov.u32 %0,%%globaltimer_lo;" : "=r"(time));
  return time;
}

// `site`: a barrier's address, or the number of a named one.
__device__ __forceinline__ void sleep_here(uint32_t site) {
  const uint32_t seed = delays.seed;
  uint32_t x = seed * 0x9e3779b1u + site;
  x = (x ^ (x >> 15)) * 0x85ebca77u + static_cast<uint32_t>(thread_here() / 32);
  x = (x ^ (x >> 13)) * 0xc2b2ae3du + blockIdx.x + (blockIdx.y << 8);
  x += seed % 2 * (nanoseconds_here() >> 12);
  x = (x ^ (x >> 16)) * 0x27d4eb2fu;
  x ^= x >> 15;
  const uint32_t time = 32u << (x >> 2) % 10;
  __nanosleep(seed != 0 && x % 4 == 0 ? time : 0);
}

__device__ __forceinline__ bool is_left_out(const uint64_t* barrier) {
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  const uint32_t at = s32(barrier) - s32(dynamic_memory);
  return at >= delays.skip_first && at < delays.skip_last;
}

// Loops until done() of a wait is true.
template <class Done>
__device__ __forceinline__ void wait_until(const uint64_t* barrier, const Done& done) {
  const uint32_t begin = nanoseconds_here();
  while (!done()) {
    if (is_left_out(barrier)) break;
    if (nanoseconds_here() - begin > 2'000'000'000u) __trap();
  }
  sleep_here(s32(barrier));
}

__device__ __forceinline__ bool try_wait(uint64_t* barrier, uint32_t phase) {
  int done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p,[%1],%2;\nselp.b32 %0,1,0,p;\n}"
      : "=r"(done)
      : "r"(s32(barrier)), "r"(phase)
      : "memory");
  return done;
}

__device__ __forceinline__ void mb_wait(uint64_t* barrier, uint32_t phase) {
  wait_until(barrier, [&] { return try_wait(barrier, phase); });
}
__device__ __forceinline__ void mb_wait_all(uint64_t* barrier, uint32_t phase) {
  wait_until(barrier, [&] { return __all_sync(~0u, try_wait(barrier, phase)); });
}
__device__ __forceinline__ void mb_wait_cluster(uint64_t* barrier, uint32_t phase) {
  wait_until(barrier, [&] {
    int done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p,[%1],%2;\n"
        "selp.b32 %0,1,0,p;\n}"
        : "=r"(done)
        : "r"(s32(barrier)), "r"(phase)
        : "memory");
    return done != 0;
  });
}
__device__ __forceinline__ bool mb_done(uint64_t* barrier, uint32_t phase) {
  sleep_here(s32(barrier));
  return mb_done_plain(barrier, phase);
}

__device__ __forceinline__ void mb_arrive(uint64_t* barrier) {
  mb_arrive_plain(barrier);
  sleep_here(s32(barrier) + 1);
}
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
