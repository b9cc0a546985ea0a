// What norm_write()'s kernels see: the parts' own parameters, all checked.
#pragma once

#include <span>

#include "core/kernel_table.h"
#include "norm/kernel.h"
#include "winnow/norm_write.h"
#include "write/kernel.h"

namespace winnow::internal::norm_write {

struct Params {
  norm::Params norm;       // no rows: none
  write::Params write[2];  // no tokens: none
  Device device;
};

struct Shape {};  // every kernel takes every call
using NormWriteKernel = Kernel<Shape, Params>;
std::span<const NormWriteKernel> kernels();

void sm90(const Params& p) noexcept;  // CUDA builds

}  // namespace winnow::internal::norm_write
