// What topk_mask()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/kernel_table.h"
#include "winnow/tensor.h"

namespace winnow::internal::mask {

struct Params {
  const int32_t* ids = nullptr;
  int64_t id_stride = 0;
  int64_t tokens = 0, topk = 0;
  const int32_t* lengths = nullptr;  // may be null
  int64_t length_stride = 0;
  uint8_t* mask = nullptr;
  int64_t mask_stride = 0, bytes = 0;  // of a row
  Device device;
};

struct Shape {};
using MaskKernel = Kernel<Shape, Params>;
std::span<const MaskKernel> kernels();

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;
void sm90(const Params& p) noexcept;  // CUDA builds

}  // namespace winnow::internal::mask
