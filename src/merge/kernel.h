// What merge()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/kernel_table.h"
#include "winnow/tensor.h"

namespace winnow::internal::merge {

struct Params {
  const void* partial_out = nullptr;
  bool partial_bf16 = false;  // else f32
  int64_t part_stride = 0, token_stride = 0, head_stride = 0;
  const float* partial_lse = nullptr;
  int64_t lse_part_stride = 0, lse_token_stride = 0, lse_head_stride = 0;
  int64_t parts = 0, tokens = 0, heads = 0, d_v = 0;
  const float* sink = nullptr;  // [H], may be null
  void* out = nullptr;
  bool out_bf16 = false;
  int64_t out_token_stride = 0, out_head_stride = 0;
  float* lse = nullptr;  // may be null
  int64_t out_lse_token_stride = 0, out_lse_head_stride = 0;
  Device device;
};

struct Shape {};
using MergeKernel = Kernel<Shape, Params>;
std::span<const MergeKernel> kernels();

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;
void sm90(const Params& p) noexcept;  // CUDA builds

}  // namespace winnow::internal::merge
