// The tensor cores' products per head, and copies: see multiply_sm90.cu.
#pragma once

#include <cuda_runtime.h>

#include "absorb/kernel.h"
#include "cuda/mma.h"

namespace winnow::internal::absorb::sm90 {

// Whether b is contiguous along the depth and not along the columns.
inline bool contiguous_depth(const Product& p) { return p.b_k == 1 && p.b_col != 1; }

// Whether its operands can be copied 16 bytes at a time. Does not depend on the rows: a row's sums
// are formed by the same instructions in any call.
bool multiply_fits(const Product& p);
// All products and copies in one launch: they must fit, the weights lie alike.
bool multiply_fits(const Params& p);
void multiply(const Params& p);

// Whether there are the rows, and the weights have the size, to stream the rows past weights that
// stay (stream_sm90.cu): the same bits, faster. stream() is false where the copy engine refuses.
bool stream_fits(const Product& p);
bool stream(const Product& p, const Device& device);

// Keys and values of many latents, with RoPE (decompress_sm90.cu). The same bits, faster. expand()
// is false where the copy engine refuses.
bool expand_fits(const Params& p);
bool expand(const Params& p);

// Copies whose inner dimension is consecutive in both and can be copied 16 bytes at a time.
inline bool copies_vectors(const Copy& c) {
  return c.from_stride[2] == 1 && c.to_stride[2] == 1 && c.shape[2] % 8 == 0 &&
         cuda::aligned8(c.from, c.from_stride[0], c.from_stride[1]) &&
         cuda::aligned8(c.to, c.to_stride[0], c.to_stride[1]);
}
inline int64_t vectors_of(const Copy& c) { return c.shape[0] * c.shape[1] * (c.shape[2] / 8); }
__device__ __forceinline__ void copy_vectors(const Copy& c, int64_t first, int64_t step) {
  const int64_t inner = c.shape[2] / 8, all = c.shape[0] * c.shape[1] * inner;
  for (int64_t n = first; n < all; n += step) {
    const int64_t k = n % inner * 8, j = n / inner % c.shape[1], i = n / (inner * c.shape[1]);
    *reinterpret_cast<uint4*>(c.to + i * c.to_stride[0] + j * c.to_stride[1] + k) = __ldg(
        reinterpret_cast<const uint4*>(c.from + i * c.from_stride[0] + j * c.from_stride[1] + k));
  }
}

}  // namespace winnow::internal::absorb::sm90
