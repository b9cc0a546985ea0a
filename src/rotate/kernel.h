// What the kernels of rotate() and rope_table() see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/kernel_table.h"
#include "core/prologue.h"
#include "core/quantizer.h"
#include "winnow/rotate.h"

namespace winnow::internal::rotate {

struct Params {
  const bf16* x = nullptr;
  int64_t x_token = 0, x_head = 0;
  bf16* out = nullptr;  // may be x; null: codes and scales instead
  e4m3* codes = nullptr;
  int64_t out_token = 0, out_head = 0;  // of out or codes
  float* scales = nullptr;
  int64_t scale_token = 0, scale_head = 0, scale_tile = 0;
  core::Quantizer quantizer;
  int64_t tokens = 0, heads = 0, width = 0;
  const int32_t* positions = nullptr;
  int64_t position_stride = 0;
  core::RopeParams rope;
  Device device;
};

struct TableParams {
  float frequencies[core::kPairs];  // angle of position 1
  float* table = nullptr;
  int64_t positions = 0, position_stride = 0, sine_stride = 0, pair_stride = 0;
  Device device;
};

inline constexpr int kTile = 128;  // values that share a scale

struct Shape {
  bool quantized = false;  // the output
};
using RotateKernel = Kernel<Shape, Params>;
using TableKernel = Kernel<Shape, TableParams>;
std::span<const RotateKernel> kernels();
std::span<const TableKernel> table_kernels();

namespace reference {
void rotate(const Params& p) noexcept;
void rope_table(const TableParams& p) noexcept;
}  // namespace reference
namespace simd {
void rotate(const Params& p) noexcept;
}  // namespace simd
namespace sm90 {  // CUDA builds
void rotate(const Params& p) noexcept;
void rope_table(const TableParams& p) noexcept;
}  // namespace sm90

}  // namespace winnow::internal::rotate
