// What norm()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/kernel_table.h"
#include "core/prologue.h"
#include "winnow/norm.h"

namespace winnow::internal::norm {

struct Rows {
  const bf16* x = nullptr;
  int64_t x_stride = 0;
  bf16* out = nullptr;  // may be x
  int64_t out_stride = 0;
  int64_t count = 0, width = 0;
  core::NormParams norm;
};

struct Params {
  Rows rows[2];  // the second may be empty
  Device device;
};

struct Shape {};  // every kernel takes every call
using NormKernel = Kernel<Shape, Params>;
std::span<const NormKernel> kernels();

// The call as its kernels see it; throws Error if it is wrong, whose names of the second rows'
// arguments are those of `check_second`.
Params checked(const Check& check, const Check& check_second, const NormArgs& a);

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;
void sm90(const Params& p) noexcept;  // CUDA builds

}  // namespace winnow::internal::norm
