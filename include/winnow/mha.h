// mha: sparse attention over uncompressed keys and values, one set per token.
#pragma once

#include <limits>

#include "winnow/tensor.h"

namespace winnow {

// A number that has no right default and was not given.
inline constexpr float kNotGiven = std::numeric_limits<float>::quiet_NaN();

struct MhaArgs {
  Tensor q;  // [T, H, d_qk] bf16
  Tensor k;  // [N, H, d_qk] bf16: decompressed keys, per head (stride 0 over heads shares one)
  Tensor v;  // [N, H, d_v] bf16
  // [T, K] int32, optional (all keys): the keys of each token as a set, so duplicates count once.
  Tensor ids = {};
  Tensor starts = {};   // [T] int32: row of k that id 0 of token t means, optional (0)
  Tensor lengths = {};  // [T] int32: ids outside [0, lengths[t]) are ignored, optional (N - start)
  // [T, M] uint8, optional: id j counts only if mask[t, j] != 0 (ids >= M do not).
  Tensor mask = {};
  // [T, M] uint8, optional: id j counts only if bit j % 8 of bits[t, j / 8] is set (ids >= 8 M do
  // not). topk_mask() makes such bits.
  Tensor bits = {};
  // [T, M] f32, optional: added to the logit of id j (0 for ids >= M). -inf excludes the id.
  Tensor bias = {};
  // Of the logits, as the model defines it: there is no default.
  float scale = kNotGiven;
  Tensor sink = {};  // [H] f32, optional
  Tensor out;        // [T, H, d_v] bf16
  Tensor lse = {};   // [T, H] f32, optional
  bool empty_lse_negative = false;
  Target target = {};
};

// Sparse attention over uncompressed per-head keys and values, with set semantics and any d_qk and
// d_v. Rows outside [0, N) are never read. A row without keys: out = 0, lse = +inf. Without ids (or
// with K >= sequence length) and with lengths = position + 1 this is causal attention.
// On the CPU a call allocates its scratch memory. Cost: 2 * H * (d_qk + d_v) FLOP per token and
// key. Neighbouring tokens whose sets overlap much read a key once for all of them.
void attend_mha(const MhaArgs& args);

}  // namespace winnow
