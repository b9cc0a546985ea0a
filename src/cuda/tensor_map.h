// bf16 tensors for the copy engine, which fetches a box of one into a tile of shared memory with
// the 128-byte swizzle that wgmma reads, zeros where the tensor ends.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/hopper.h"
#include "winnow/tensor.h"

namespace winnow::internal::cuda {

// Three dimensions, the innermost contiguous; strides in elements.
struct Boxed {
  const bf16* data;
  int64_t shape[3];   // innermost first
  int64_t stride[2];  // of the middle and the outermost dimension
  uint32_t rows;      // of a box, which is 64 elements wide
};

// Whether the engine can read it: 16-byte alignment, positive strides, a driver that knows how.
bool describe(CUtensorMap& map, const Boxed& tensor);

struct At {
  int x, y, z;  // innermost first
};
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, At at,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0],[%1,{%2,%3,%4}],[%5];" ::"r"(to),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(s32(barrier))
      : "memory");
}
// To the same place of two blocks of a cluster, each of whose barriers counts the bytes.
__device__ __forceinline__ void copy_box_twice(uint32_t to, const CUtensorMap& map, At at,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0],[%1,{%2,%3,%4}],[%5],%6;" ::"r"(to),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(s32(barrier)), "h"(uint16_t{3})
      : "memory");
}

}  // namespace winnow::internal::cuda
