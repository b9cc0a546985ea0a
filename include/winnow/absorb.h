// absorb: the projections around sparse MLA. Loading and splitting kv_b_proj, moving queries into
// the latent space and outputs out of it, and decompressing latents for per-head attention.
// Weights may have any strides. The last dimension of rows (queries, outputs, latents) must be
// contiguous. A row's result does not depend on the other rows of the call. Where a CPU multiplies
// by bf16 dot products (winnow support: avx512bf16), subnormal bf16 values count as 0.
#pragma once

#include "winnow/tensor.h"

namespace winnow {

struct DequantizeWeightArgs {
  Tensor weight;  // [rows, cols] e4m3
  // [ceil(rows / 128), ceil(cols / 128)] f32 (weight_scale_inv), or [1] for one per tensor.
  Tensor scale;
  Tensor out;  // [rows, cols] bf16
  Target target = {};
};

// out = bf16(weight * scale). Done once, at load.
void dequantize_weight(const DequantizeWeightArgs& args);

struct SplitKvBArgs {
  // [L, H, P + V] bf16, any strides. A checkpoint's kv_b_proj.weight, [H * (P + V), L] in memory,
  // is the view {L, H, P + V} with strides {1, (P + V) * L, L}.
  Tensor weight;
  Tensor w_uk;  // [L, H, P] bf16, out
  Tensor w_uv;  // [L, H, V] bf16, out
  Target target = {};
};

// w_uk[l, h, p] = weight[l, h, p], w_uv[l, h, v] = weight[l, h, P + v].
void split_kv_b(const SplitKvBArgs& args);

struct AbsorbQueryArgs {
  Tensor q_nope;  // [T, H, P] bf16
  Tensor w_uk;    // [L, H, P] bf16
  Tensor out;     // [T, H, L] bf16, any token and head strides (the front of a 576-wide query)
  Target target = {};
};

// out[t, h, l] = sum_p q_nope[t, h, p] * w_uk[l, h, p], fp32 sums. Cost: 2 * T * H * L * P FLOP.
void absorb_query(const AbsorbQueryArgs& args);

struct ProjectOutputArgs {
  Tensor attn;  // [T, H, L] bf16: out of attend()
  Tensor w_uv;  // [L, H, V] bf16
  Tensor out;   // [T, H, V] bf16
  Target target = {};
};

// out[t, h, v] = sum_l attn[t, h, l] * w_uv[l, h, v], fp32 sums. Cost: 2 * T * H * L * V FLOP.
void project_output(const ProjectOutputArgs& args);

struct DecompressArgs {
  Tensor latent;  // [N, L + R] bf16: latent || RoPE rows, as gather() gives them
  Tensor w_uk;    // [L, H, P] bf16
  Tensor w_uv;    // [L, H, V] bf16
  Tensor k;       // [N, H, P + R] bf16, out: (W_UK c) || k_pe
  Tensor v;       // [N, H, V] bf16, out: W_UV c
  Target target = {};
};

// Per-head keys and values of latent rows, for attend_mha(). L is the first dimension of w_uk, R
// the rest of a latent row. Cost: 2 * N * H * L * (P + V) FLOP.
void decompress(const DecompressArgs& args);

}  // namespace winnow
