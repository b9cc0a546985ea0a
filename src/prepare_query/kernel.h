// What prepare_query()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/kernel_table.h"
#include "core/prologue.h"
#include "winnow/prepare_query.h"

namespace winnow::internal::prepare_query {

struct Params {
  const bf16* q = nullptr;
  int64_t q_token = 0, q_head = 0;
  bf16* out = nullptr;  // may be q
  int64_t out_token = 0, out_head = 0;
  int64_t tokens = 0, heads = 0, width = 0;
  core::NormParams norm;
  const int32_t* positions = nullptr;
  int64_t position_stride = 0;
  core::RopeParams rope;
  Device device;
};

struct Shape {};  // every kernel takes every call
using PrepareQueryKernel = Kernel<Shape, Params>;
std::span<const PrepareQueryKernel> kernels();

// The call as its kernels see it; throws Error if it is wrong.
Params checked(const Check& check, const PrepareQueryArgs& a);

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;
void sm90(const Params& p) noexcept;  // CUDA builds

}  // namespace winnow::internal::prepare_query
