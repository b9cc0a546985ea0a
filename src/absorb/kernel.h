// What the kernels of <winnow/absorb.h> see: checked, plain, strides in elements. The verbs are
// made of two parts, products per head and strided copies; one table serves them all.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "core/kernel_table.h"
#include "winnow/absorb.h"

namespace winnow::internal::absorb {

// For every head: out[row, head, col] = sum_k a[row, head, k] * b[k, head, col].
struct Product {
  const bf16* a = nullptr;  // k contiguous
  int64_t a_row = 0, a_head = 0;
  const bf16* b = nullptr;
  int64_t b_k = 0, b_head = 0, b_col = 0;
  bf16* out = nullptr;  // col contiguous
  int64_t out_row = 0, out_head = 0;
  int64_t rows = 0, heads = 0, depth = 0, cols = 0;
};

// to[i, j, k] = from[i, j, k].
struct Copy {
  const bf16* from = nullptr;
  std::array<int64_t, 3> from_stride{};
  bf16* to = nullptr;
  std::array<int64_t, 3> to_stride{};
  std::array<int64_t, 3> shape{};
};

struct Params {
  std::array<Product, 2> products;
  std::array<Copy, 2> copies;
  int product_count = 0, copy_count = 0;
  Device device;
};

struct DequantizeParams {
  const e4m3* weight = nullptr;
  int64_t weight_row = 0;
  const float* scale = nullptr;
  int64_t scale_row = 0, scale_col = 0;  // both 0: one scale for all
  bf16* out = nullptr;
  int64_t out_row = 0;
  int64_t rows = 0, cols = 0;
  Device device;
};
inline constexpr int64_t kBlock = 128;  // rows and columns that share a scale

// The choice depends on how the operands lie, so it looks at the parameters themselves.
using AbsorbKernel = Kernel<Params, Params>;
using DequantizeKernel = Kernel<DequantizeParams, DequantizeParams>;
std::span<const AbsorbKernel> kernels();
std::span<const DequantizeKernel> dequantize_kernels();

namespace reference {
void absorb(const Params& p) noexcept;
void dequantize(const DequantizeParams& p) noexcept;
}  // namespace reference
void avx512bf16(const Params& p) noexcept;  // x86
namespace simd {
void absorb(const Params& p) noexcept;
void copies(const Params& p) noexcept;  // those of a call alone
void dequantize(const DequantizeParams& p) noexcept;
}  // namespace simd
namespace sm90 {  // CUDA builds
std::array<AbsorbKernel, 5> kernels();
void dequantize(const DequantizeParams& p) noexcept;
}  // namespace sm90

}  // namespace winnow::internal::absorb
