// Copies from global to shared memory that a thread requests and waits for by itself (cp.async).
#pragma once

#include <cuda_runtime.h>

#include "cuda/hopper.h"

namespace winnow::internal::cuda {

// Copies kBytes, 8 or 16.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(s32(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(s32(to)), "l"(from), "n"(kBytes)
                 : "memory");
}
// Copies 16 B, from and to constant distances behind two addresses.
template <int kTo, int kFrom>
__device__ __forceinline__ void copy_async_behind(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0+%2],[%1+%3],16;" ::"r"(to), "l"(from), "n"(kTo),
               "n"(kFrom)
               : "memory");
}
// The thread's copies since the last call form a group.
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until no more than kGroups of the thread's groups are under way.
template <int kGroups>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace winnow::internal::cuda
