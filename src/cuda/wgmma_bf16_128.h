// wgmma 64 x 128 x 16 with bf16 operands and fp32 sums, and bf16 rows from its accumulators.
// Descriptors come as their lower halves (desc() of hopper.h); the upper one is kDescHigh.
#pragma once

#include "cuda/hopper.h"
#include "cuda/wgmma_f16.h"
#include "winnow/tensor.h"

namespace winnow::internal::cuda {

// d (+)= A B: A 64 x 16 in shared memory, rows along K; B 128 columns, along K or (kTransB) along
// N. keep: 0 starts from zero.
template <int kTransB>
__device__ __forceinline__ void wgmma128(float (&d)[64], uint32_t a, uint32_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %66, 0;\nmov.b64 a, {%64, %67};\n"
      "mov.b64 b, {%65, %67};\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "
      "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, a, b, p, 1, 1, 0, %68;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a), "r"(b), "r"(keep), "n"(kDescHigh), "n"(kTransB));
}

// d += A B: A 64 x 16 in registers, B in shared memory, its rows along N.
__device__ __forceinline__ void wgmma128(float (&d)[64], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, 1, 0;\nmov.b64 b, {%68, %69};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "
      "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, b, p, 1, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kDescHigh));
}

// Where 16-byte chunk c (0..7) of row r lies in a tile of 64 columns, 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled(int r, int c) {
  return r * 128 + ((c ^ (r & 7)) << 4);
}

// 16 bytes of a row to a tile, zeros where there are none; `from` is then not read.
__device__ __forceinline__ void copy16(uint32_t to, const bf16* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

// Lane i of four gets element i of the others' arrays, in order.
__device__ __forceinline__ void exchange4(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t y = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = y;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t y = __shfl_xor_sync(~0u, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = y;
  }
}

// A thread's two rows of an accumulator, lane / 4 and 8 more of its warp, times their factors, as
// bf16. Four lanes share a row: they exchange what they hold of 32 columns, so that each stores 16
// bytes and all of them 64 in a row. row[i]: where row i begins, null: it is not stored; columns at
// or behind `width` (a multiple of 8) neither.
__device__ __forceinline__ void store_rows(const float (&d)[64], const float (&factor)[2],
                                           bf16* const (&row)[2], int width) {
  const int first = threadIdx.x % 4 * 8;
#pragma unroll
  for (int c = 0; c < 4; c++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        x[j] = pack<true>(d[c * 16 + j * 4 + 2 * i] * factor[i],
                          d[c * 16 + j * 4 + 2 * i + 1] * factor[i]);
      exchange4(x);
      if (row[i] && c * 32 + first < width)
        __stcs(reinterpret_cast<uint4*>(row[i] + c * 32 + first),
               make_uint4(x[0], x[1], x[2], x[3]));
    }
}

}  // namespace winnow::internal::cuda
