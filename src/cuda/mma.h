// bf16 tiles for the tensor cores' warp-level instructions: copies of global rows into padded
// shared memory, matrix loads and m16n8k16 products. No attention logic.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/hopper.h"
#include "winnow/tensor.h"

namespace winnow::internal::cuda {

// Elements after each row of a tile: rows then start in different banks, and matrix loads of eight
// rows do not collide.
inline constexpr int kTilePad = 8;

// Eight elements of global memory, `stride` apart, of which the first `valid` exist; zeros take the
// place of the others, which are not read. `fast`: stride 1 and 16-byte alignment, copied
// asynchronously (copy_commit, copy_wait).
struct Source {
  const bf16* from;
  int64_t stride;
  bool fast;
};
__device__ __forceinline__ void copy8(bf16* to, const Source& s, int64_t valid) {
  const int count = valid < 0 ? 0 : valid > 8 ? 8 : static_cast<int>(valid);
  if (s.fast) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s32(to)), "l"(s.from),
                 "r"(2 * count)
                 : "memory");
    return;
  }
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < count ? s.from[2 * i * s.stride].bits : 0;
    const uint32_t high = 2 * i + 1 < count ? s.from[(2 * i + 1) * s.stride].bits : 0;
    packed[i] = low | high << 16;
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most N of this thread's committed groups are under way.
template <int N>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Whether rows of eight can be copied asynchronously.
inline bool aligned8(const void* data, int64_t stride0, int64_t stride1) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride0 % 8 == 0 && stride1 % 8 == 0;
}

// Fragments of a tile of `width` elements a row. A: rows [row, row + 16), columns [col, col + 16).
__device__ __forceinline__ void load_a(uint32_t (&r)[4], const bf16* tile, int width, int row,
                                       int col) {
  const int lane = threadIdx.x % 32;
  ldsm(r, s32(tile + (row + lane % 16) * width + col + lane / 16 * 8));
}
// B, 16 deep and 16 columns wide: {0, 1} are the operand of the first eight columns, {2, 3} of the
// others. From a tile that holds a column of B as its row:
__device__ __forceinline__ void load_b(uint32_t (&r)[4], const bf16* tile, int width, int column,
                                       int depth) {
  const int lane = threadIdx.x % 32;
  ldsm(r, s32(tile + (column + lane / 16 * 8 + lane % 8) * width + depth + lane / 8 % 2 * 8));
}
// ... and from one that holds B as it is:
__device__ __forceinline__ void load_b_rows(uint32_t (&r)[4], const bf16* tile, int width,
                                            int column, int depth) {
  const int lane = threadIdx.x % 32;
  ldsm_t(r, s32(tile + (depth + lane / 8 % 2 * 8 + lane % 8) * width + column + lane / 16 * 8));
}

// d (16 x 8) += a (16 x 16) * b (16 x 8). Lane i holds rows i / 4 (d[0], d[1]) and i / 4 + 8 (d[2],
// d[3]), columns i % 4 * 2 and the next.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace winnow::internal::cuda
