// norm: RMSNorm and LayerNorm of bf16 rows.
#pragma once

#include "winnow/tensor.h"

namespace winnow {

enum class NormKind : uint8_t {
  kNone,   // the row stays as it is (in calls where a norm is one of several steps)
  kRms,    // x * (mean x^2 + eps)^-1/2
  kLayer,  // (x - mean x) * (mean (x - mean x)^2 + eps)^-1/2
};

// How a row of d values is normalised.
struct Norm {
  NormKind kind = NormKind::kRms;
  Tensor weight = {};  // [d] f32, optional (1)
  Tensor bias = {};    // [d] f32, optional (0)
  float eps = 1e-6f;   // above 0
};

struct NormRows {
  Tensor x;    // [T, d] bf16, rows of any stride
  Tensor out;  // [T, d] bf16, out; may be x
  Norm norm = {};
};

struct NormArgs {
  NormRows rows[2] = {{}, {}};  // the second is optional: query and KV latents in one call
  Target target = {};
};

// out = bf16(normalised x * weight + bias), fp32 with one rounding at the end; without a bias -0
// stays -0. Rows do not depend on each other. Kernels other than the reference sum squares in fp32:
// where they exceed 3.4e38 (one value above 1.8e19 is enough) a normalised row is zeros, of kLayer
// zeros or NaNs. Cost: one pass over x.
void norm(const NormArgs& args);

}  // namespace winnow
