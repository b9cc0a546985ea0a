// Norm and RoPE of heads on the device, shared by rotate() and prepare_query().
#pragma once

#include <cstdint>

#include "core/prologue.h"
#include "winnow/tensor.h"

namespace winnow::internal::cuda {

struct HeadParams {
  const bf16* x = nullptr;
  int64_t x_token = 0, x_head = 0;
  bf16* out = nullptr;  // may be x
  int64_t out_token = 0, out_head = 0;
  int64_t tokens = 0, heads = 0, width = 0;
  core::NormParams norm;  // kNone: RoPE alone
  const int32_t* positions = nullptr;
  int64_t position_stride = 0;
  core::RopeParams rope;
  Device device;
};

// out = rotate(norm(x)); tokens whose position is outside the table are skipped.
void prepare_heads(const HeadParams& p) noexcept;

}  // namespace winnow::internal::cuda
