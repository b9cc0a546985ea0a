// The accuracy bar of attention: how far a kernel may be from the reference, and how far it is.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "winnow/tensor.h"

namespace winnow::tools {

// An element passes if |got - want| is below `absolute`, or below `relative` * |want|; the tensor
// passes if also its cosine difference, 1 - 2 <a, r> / (|a|^2 + |r|^2) in double, is below
// `cosine`. bf16 results carry 2^-8 of rounding, P rounded to bf16 before the second product the
// same again: the relative bars below are four (decode) and six (prefill) such steps; lse has no
// 16-bit step.
struct Bar {
  double absolute, relative;
  double cosine = std::numeric_limits<double>::infinity();
};
// Where values of both signs cancel, the error follows the sum of magnitudes, not the result. A
// kernel may round P and the dequantised V to bf16, each by at most 2^-8 of a term: 2 * 2^-8 of
// sum_j p_j |v_j|.
inline constexpr double kCancellation = 0x1p-7;
inline constexpr Bar kDecodeOut{1e-3, 2.01 / 128, 5e-6};
inline constexpr Bar kDecodeLse{1e-6, 8.01 / 65536};
inline constexpr Bar kPrefillOut{8e-4, 3.01 / 128, 7e-6};
inline constexpr Bar kPrefillLse{1e-6, 2.01 / 65536};  // max_logit too
inline constexpr Bar kExact{0, 0};                     // bit for bit

struct Deviation {
  double worst = 0;  // share of its bound that the worst element uses; below 1 passes
  int64_t at = -1;   // its row-major index, -1 when every element is equal
  double got = 0, want = 0;
  double largest = 0;  // largest |got - want| of all finite elements
  double cosine = 0;
  int64_t wrong = 0;  // elements that fail
  int64_t count = 0;
  bool ok = true;

  // "worst 0.31 of its bound: got 0.1250, expected 0.1255 at [2, 0, 17]; cosine 3.1e-07"
  std::string text(const Tensor& like) const;
};

// Compares two tensors of one shape; any dtype, any strides. Infinities and NaN must match in place
// (NaN equals NaN); they count in `wrong` with an infinite share when they do not.
// `magnitude`, of the same shape, holds sum_j p_j |v_j|: an element also passes below kCancellation
// times it.
Deviation compare(const Tensor& got, const Tensor& want, const Bar& bar,
                  const Tensor& magnitude = {});

// Row-major index -> "[2, 0, 17]".
std::string place(const Tensor& t, int64_t index);
// Element i, in row-major order, as a double (int64 above 2^53 loses its low bits).
double element(const Tensor& t, int64_t index);

}  // namespace winnow::tools
