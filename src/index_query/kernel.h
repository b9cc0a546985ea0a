// What index_query()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/kernel_table.h"
#include "core/prologue.h"
#include "core/quantizer.h"
#include "winnow/index_query.h"

namespace winnow::internal::index_query {

inline constexpr int kWidth = 128;

struct Params {
  const bf16* q = nullptr;
  int64_t q_token = 0, q_head = 0;
  const void* weights = nullptr;  // float, or bf16
  bool weights_are_bf16 = false;
  int64_t weight_token = 0, weight_head = 0;
  int64_t tokens = 0, heads = 0;
  const int32_t* positions = nullptr;
  int64_t position_stride = 0;
  core::RopeParams rope;
  bool hadamard = false;
  core::Quantizer quantizer;
  float factor = 1;
  void* out = nullptr;  // e4m3, or bf16
  bool out_is_bf16 = false;
  int64_t out_token = 0, out_head = 0;
  float* out_weights = nullptr;
  int64_t out_weight_token = 0, out_weight_head = 0;
  Device device;
};

WINNOW_HD inline float weight_of(const Params& p, int64_t token, int64_t head) {
  const int64_t at = token * p.weight_token + head * p.weight_head;
  return p.weights_are_bf16 ? to_float(static_cast<const bf16*>(p.weights)[at])
                            : static_cast<const float*>(p.weights)[at];
}

struct Shape {};  // every kernel takes every call
using IndexQueryKernel = Kernel<Shape, Params>;
std::span<const IndexQueryKernel> kernels();

// The call as its kernels see it; throws Error if it is wrong.
Params checked(const Check& check, const IndexQueryArgs& a);

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;
void sm90(const Params& p) noexcept;  // CUDA builds

}  // namespace winnow::internal::index_query
