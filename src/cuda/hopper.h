// Hopper instructions behind one-line wrappers: mbarriers, named barriers, ldmatrix, clusters, and
// number conversions on packed registers. No attention logic.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace winnow::gpu {

__device__ __forceinline__ uint32_t s32(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}
// threadIdx.x, read where it stands: roles of a CTA then share no register that one of them spills.
__device__ __forceinline__ int thread_here() {
  int x;
  asm volatile("mov.u32 %0,%%tid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ void mb_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(b), "r"(n));
}
__device__ __forceinline__ void mb_init(uint64_t* b, int n) { mb_init(s32(b), n); }
__device__ __forceinline__ void fence_barrier_init() {  // for copies and for other blocks
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mb_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(s32(b)) : "memory");
}
__device__ __forceinline__ void mb_arrive(uint64_t* b, int count) {
  asm volatile("mbarrier.arrive.shared.b64 _,[%0],%1;" ::"r"(s32(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void mb_expect(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(s32(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mb_wait(uint64_t* b, uint32_t ph) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p,[%0],%1;\n@p bra D;\nbra "
      "W;\nD:\n}" ::"r"(s32(b)),
      "r"(ph)
      : "memory");
}
// A warp whose lanes wait for several barriers, without diverging.
__device__ __forceinline__ void mb_wait_all(uint64_t* b, uint32_t ph) {
  int ok;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p,[%1],%2;\nselp.b32 %0,1,0,p;\n}"
        : "=r"(ok)
        : "r"(s32(b)), "r"(ph)
        : "memory");
  } while (!__all_sync(~0u, ok));
}
__device__ __forceinline__ void mb_wait_cluster(uint64_t* b, uint32_t ph) {  // what peers stored
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 "
      "p,[%0],%1;\n@p "
      "bra D;\nbra W;\nD:\n}" ::"r"(s32(b)),
      "r"(ph)
      : "memory");
}
// One copy of global memory whose bytes count on a barrier: multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// The same by one lane of a converged warp whose lanes hold the same arguments.
__device__ __forceinline__ void bulk_copy_one(uint32_t to, uint64_t from, uint32_t bytes,
                                              uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\nelect.sync _|p,0xffffffff;\n@p "
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];\n}" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// And from shared to global memory, in the bulk group of the warp: multiples of 16.
__device__ __forceinline__ void bulk_store_one(void* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "{\n.reg .pred p;\nelect.sync _|p,0xffffffff;\n@p "
      "cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;\n}" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ bool mb_done(uint64_t* b, uint32_t ph) {  // the whole warp agrees
  int ok;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p,[%1],%2;\nselp.b32 %0,1,0,p;\n}"
      : "=r"(ok)
      : "r"(s32(b)), "r"(ph)
      : "memory");
  return __all_sync(~0u, ok);
}
__device__ __forceinline__ uint32_t desc(uint32_t addr,
                                         uint32_t lbo) {  // low half; kDescHigh is the other
  return ((addr & 0x3FFFF) >> 4) | (lbo >> 4) << 16;
}
__device__ __forceinline__ void wg_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wg_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Warpgroups may meet from different code; synccheck takes that from the unaligned form alone.
template <int kId, int kThreads>
__device__ __forceinline__ void bar() {
  if constexpr (kThreads > 128)
    asm volatile("barrier.sync %0,%1;" ::"n"(kId), "n"(kThreads) : "memory");
  else asm volatile("bar.sync %0,%1;" ::"n"(kId), "n"(kThreads) : "memory");
}
// The same for warps that come from different code: about 15 cycles more, and compute-sanitizer
// can tell it from divergence.
template <int kId, int kThreads>
__device__ __forceinline__ void meet() {
  asm volatile("barrier.cta.sync %0,%1;" ::"n"(kId), "n"(kThreads) : "memory");
}
__device__ __forceinline__ uint32_t fresh(uint32_t d) {  // computed here and not ahead of time
  asm volatile("" : "+r"(d));
  return d;
}
template <int N>
__device__ __forceinline__ void hold(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float max_nan(float a, float b) {  // NaN if one of them is
  float y;
  asm("max.NaN.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
template <bool kBf16>
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  uint32_t r;
  if constexpr (kBf16) asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ void ldsm(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
__device__ __forceinline__ void ldsm_t(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
// The same where `on` is not 0; a is kept where it is.
__device__ __forceinline__ void ldsm_t_if(int on, uint32_t (&a)[4], uint32_t addr) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p,%5,0;\n@p ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
      "{%0,%1,%2,%3},[%4];\n}"
      : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])
      : "r"(addr), "r"(on)
      : "memory");
}
__device__ __forceinline__ void stsm2(uint32_t a, uint32_t x, uint32_t y) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0],{%1,%2};" ::"r"(a), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void stsm4(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t u) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(x),
               "r"(y), "r"(z), "r"(u)
               : "memory");
}
__device__ __forceinline__ void e4m3x4(uint32_t w, uint32_t& lo, uint32_t& hi) {
  asm("{\n.reg .b16 a,b;\nmov.b32 {a,b},%2;\ncvt.rn.f16x2.e4m3x2 %0,a;\ncvt.rn.f16x2.e4m3x2 "
      "%1,b;\n}"
      : "=r"(lo), "=r"(hi)
      : "r"(w));
}
__device__ __forceinline__ uint32_t twice(uint16_t x) {
  uint32_t r;
  asm("mov.b32 %0,{%1,%1};" : "=r"(r) : "h"(x));
  return r;
}
__device__ __forceinline__ uint32_t mul_h2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t mul_b2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Bytes 0 and 2 of x, or 1 and 3, from e4m3 to bf16 / 2^120: exact, but a NaN is 480 there.
__device__ __forceinline__ uint32_t e4m3_b2(uint32_t x, bool odd) {
  const uint32_t high = __byte_perm(x, 0, odd ? 0x3414 : 0x2404);
  return (high & 0x80008000) | ((high >> 4) & 0x07f007f0);
}
__device__ __forceinline__ float pow2i(int e) { return __int_as_float((e + 127) << 23); }

// Lets the next kernel of the stream start; waits until the one before has finished. Both do
// nothing unless the kernels were launched to overlap. A kernel that lets another start must wait
// in every block, so that its own end still means the end of all before it.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// The same where no global writes are handed on: saves a fence of several hundred cycles.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// Its halves: what was read of other blocks is there, and blocks whose memory is read stay.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ uint32_t cluster_index() {
  uint32_t r;
  asm("mov.u32 %0,%%clusterid.x;" : "=r"(r));
  return r;
}
__device__ __forceinline__ uint32_t peer(uint32_t addr, int rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(r) : "r"(addr), "r"(rank));
  return r;
}
// Stores into a peer's shared memory that its mbarrier `inbox` counts, in bytes.
__device__ __forceinline__ void peer_put(uint32_t a, float4 x, uint32_t inbox) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[%0],{%1,%2,%3,%4},[%5];" ::"r"(a),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(inbox)
      : "memory");
}
__device__ __forceinline__ void peer_put(uint32_t a, uint4 x, uint32_t inbox) {
  peer_put(a,
           float4{__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                  __uint_as_float(x.w)},
           inbox);
}
__device__ __forceinline__ void peer_put(uint32_t a, uint2 x, uint32_t inbox) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0],{%1,%2},[%3];" ::"r"(
          a),
      "r"(x.x), "r"(x.y), "r"(inbox)
      : "memory");
}

}  // namespace winnow::gpu
