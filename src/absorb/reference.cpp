// The products and copies of absorb, and the dequantisation of weights, as specified.
#include "absorb/kernel.h"
#include "core/formats.h"

namespace winnow::internal::absorb::reference {

namespace {

void multiply(const Product& p) {
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t head = 0; head < p.heads; ++head)
      for (int64_t col = 0; col < p.cols; ++col) {
        const bf16* a = p.a + row * p.a_row + head * p.a_head;
        double sum = 0;
        for (int64_t k = 0; k < p.depth; ++k)
          sum += static_cast<double>(to_float(a[k])) *
                 to_float(p.b[k * p.b_k + head * p.b_head + col * p.b_col]);
        p.out[row * p.out_row + head * p.out_head + col] = to_bf16(static_cast<float>(sum));
      }
}

void copy(const Copy& c) {
  for (int64_t i = 0; i < c.shape[0]; ++i)
    for (int64_t j = 0; j < c.shape[1]; ++j)
      for (int64_t k = 0; k < c.shape[2]; ++k)
        c.to[i * c.to_stride[0] + j * c.to_stride[1] + k * c.to_stride[2]] =
            c.from[i * c.from_stride[0] + j * c.from_stride[1] + k * c.from_stride[2]];
}

}  // namespace

void absorb(const Params& p) noexcept {
  for (int i = 0; i < p.product_count; ++i) multiply(p.products[i]);
  for (int i = 0; i < p.copy_count; ++i) copy(p.copies[i]);
}

void dequantize(const DequantizeParams& p) noexcept {
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t col = 0; col < p.cols; ++col) {
      const float s = p.scale[row / kBlock * p.scale_row + col / kBlock * p.scale_col];
      p.out[row * p.out_row + col] = to_bf16(to_float(p.weight[row * p.weight_row + col]) * s);
    }
}

}  // namespace winnow::internal::absorb::reference
