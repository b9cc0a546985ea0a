// Loads that are issued at one place and used at another. The compiler is free to move what uses a
// plain load up to it, before the next load: a block that has just started then waits for one load
// out of a cold L2 after the other, 0.5 us each.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/range.h"

namespace winnow::internal::cuda {

// Loads here: after the loads above and before those below.
__device__ __forceinline__ int32_t load_here(const int32_t* from) {
  int32_t x;
  asm volatile("ld.global.b32 %0,[%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// A load that is issued here and waited for in get().
class Asked {
 public:
  __device__ __forceinline__ explicit Asked(int32_t x) : x_(x) {}
  __device__ __forceinline__ explicit Asked(const int32_t* from) : x_(load_here(from)) {}
  // Its value, which the compiler uses from here on and not before.
  __device__ __forceinline__ int32_t get() {
    asm volatile("" : "+r"(x_)::"memory");
    return x_;
  }

 private:
  int32_t x_;
};

// A token's range.
struct AskedRange {
  Asked start, end;
  __device__ __forceinline__ AskedRange(const Ranges& r, int64_t token)
      : start(r.starts ? Asked(r.starts + token * r.start_stride) : Asked(0)),
        end(r.ends ? Asked(r.ends + token * r.end_stride) : Asked(0)) {}
  __device__ __forceinline__ Range get(const Ranges& r) {
    const int64_t first = start.get(), last = end.get();
    return r.clamp(first, r.ends ? last : r.limit);
  }
};

}  // namespace winnow::internal::cuda
