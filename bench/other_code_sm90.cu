// Code of another kernel, as a model runs it before: a line of 13,312 products, 208 KB of 16-byte
// instructions. It leaves nothing of what was there in a multiprocessor's instruction caches (of
// 128 KB it would leave a part).
#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda_backend.h"

namespace winnow::bench {

namespace {

constexpr int kThreads = 128;  // a warp for each quarter of a multiprocessor
constexpr int kParts = 1664;   // of eight instructions each

__global__ void __launch_bounds__(kThreads) other_code(float* out, float y) {
  float x = static_cast<float>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kParts; ++i)  // volatile: the compiler does not shorten them
    asm volatile(
        "fma.rn.f32 %0, %0, %1, %1; fma.rn.f32 %0, %0, %1, %1;\n\t"
        "fma.rn.f32 %0, %0, %1, %1; fma.rn.f32 %0, %0, %1, %1;\n\t"
        "fma.rn.f32 %0, %0, %1, %1; fma.rn.f32 %0, %0, %1, %1;\n\t"
        "fma.rn.f32 %0, %0, %1, %1; fma.rn.f32 %0, %0, %1, %1;"
        : "+f"(x)
        : "f"(y));
  if (x == 1.2345f) out[0] = x;
}

}  // namespace

void cuda_run_other_code(void* stream) {
  static auto* out = static_cast<float*>(cuda_allocate(sizeof(float)));
  static const int blocks = internal::cuda::multiprocessors(0);
  other_code<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(out, 0.5f);
}

}  // namespace winnow::bench
