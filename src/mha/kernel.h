// What attend_mha()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/arithmetic.h"
#include "core/hd.h"
#include "core/kernel_table.h"
#include "winnow/tensor.h"

namespace winnow::internal::mha {

struct Params {
  const bf16 *q = nullptr, *k = nullptr, *v = nullptr;
  int64_t q_token_stride = 0, q_head_stride = 0;
  int64_t k_row_stride = 0, k_head_stride = 0, v_row_stride = 0, v_head_stride = 0;
  int64_t tokens = 0, heads = 0, rows = 0, d_qk = 0, d_v = 0;
  const int32_t* ids = nullptr;  // null: every id below the length
  int64_t id_stride = 0, topk = 0;
  const int32_t *starts = nullptr, *lengths = nullptr;  // may be null
  int64_t start_stride = 0, length_stride = 0;
  const uint8_t* mask = nullptr;  // may be null
  int64_t mask_stride = 0, mask_width = 0;
  const uint8_t* bits = nullptr;  // may be null; width and stride in bytes
  int64_t bits_stride = 0, bits_width = 0;
  const float* bias = nullptr;  // may be null
  int64_t bias_stride = 0, bias_width = 0;
  float scale = 1.0f;
  const float* sink = nullptr;  // [H], may be null
  bf16* out = nullptr;
  int64_t out_token_stride = 0, out_head_stride = 0;
  float* lse = nullptr;  // may be null
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  float empty_lse = 0;             // +inf or -inf
  std::span<std::byte> workspace;  // of a CPU kernel
  Device device;
};

// Ids of token t mean rows start + id, for ids in [0, length).
WINNOW_HD inline int64_t start_of(const Params& p, int64_t t) {
  return p.starts ? p.starts[t * p.start_stride] : 0;
}
WINNOW_HD inline int64_t length_of(const Params& p, int64_t t) {
  return p.lengths ? p.lengths[t * p.length_stride] : p.rows - start_of(p, t);
}
WINNOW_HD inline float bias_of(const Params& p, int64_t t, int64_t id) {
  return p.bias && id < p.bias_width ? p.bias[t * p.bias_stride + id] : 0.0f;
}

// The one place that decides whether an id counts: its row of k and v, or -1.
WINNOW_HD inline int64_t row_of(const Params& p, int64_t t, int64_t id) {
  if (id < 0 || id >= length_of(p, t)) return -1;
  const int64_t row = start_of(p, t) + id;
  if (row < 0 || row >= p.rows) return -1;
  if (p.mask && (id >= p.mask_width || p.mask[t * p.mask_stride + id] == 0)) return -1;
  if (p.bits && (id / 8 >= p.bits_width || !(p.bits[t * p.bits_stride + id / 8] >> id % 8 & 1)))
    return -1;
  return bias_of(p, t, id) < -3.402823466e38f ? -1 : row;  // -inf excludes
}

// The rows of token t as bits: words() of them, each row once whatever the ids repeat.
inline int64_t words(int64_t rows) { return ceil_div(rows, 64); }
void build_set(const Params& p, int64_t t, uint64_t* bits) noexcept;

// What the choice of a kernel and the size of its workspace depend on.
struct Shape {
  int64_t tokens = 0, heads = 0, rows = 0, d_qk = 0, d_v = 0;
  int64_t topk = -1;     // ids of a token; -1: none are given
  bool bias = false;     // given
  bool aligned = false;  // CUDA: rows of q, k, v and out begin on 16-byte boundaries
};
Shape shape_of(const Params& p);
struct MhaKernel : Kernel<Shape, Params> {
  size_t (*workspace)(const Shape&);
};
std::span<const MhaKernel> kernels();

void reference(const Params& p) noexcept;
size_t reference_workspace(const Shape& shape);
void simd(const Params& p) noexcept;
size_t simd_workspace(const Shape& shape);

// CUDA builds. Any dimensions, leaving out the rows that none of its 64 tokens wants.
void tiles_sm90(const Params& p) noexcept;
// Keys of 192 and values of 128 by wgmma; every row is read.
namespace dense {
const char* fits(const Shape& shape);
const char* slower(const Shape& shape);
void attend(const Params& p) noexcept;
}  // namespace dense

}  // namespace winnow::internal::mha
