// What select()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "core/blocks.h"
#include "core/kernel_table.h"
#include "core/range.h"
#include "winnow/select.h"

namespace winnow::internal::select {

struct Params {
  const float* logits = nullptr;
  int64_t logit_stride = 0;
  int64_t tokens = 0;
  Ranges ranges;
  int32_t* ids = nullptr;
  int64_t id_stride = 0, width = 0;
  float* values = nullptr;  // may be null
  int64_t value_stride = 0;
  bool relative = false;
  core::Blocks blocks;
  Device device;
};

// What the choice of a kernel depends on.
struct Shape {
  int64_t tokens = 1, columns = 0;
  int32_t topk = 2048;
  bool aligned = true;  // CUDA: every row's first logit lies on a 16-byte boundary
  int device = 0;       // CUDA: its index
  bool blocks = false;  // of columns
};
using SelectKernel = Kernel<Shape, Params>;
std::span<const SelectKernel> kernels();

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;
std::array<SelectKernel, 5> sm90_kernels();  // CUDA builds

}  // namespace winnow::internal::select
