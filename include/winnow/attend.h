// attend: queries, cache(s), slots -> output, log-sum-exp, max logit.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "winnow/tensor.h"

namespace winnow {

class Plan;

// One list of keys per query token. V3.2 has one; V4 has two (sliding window, compressed), each
// with a cache of its own, under one softmax.
struct KvList {
  Cache cache;
  Tensor indices;       // [T, K] int32: physical slots, or logical ids when block_table is given
  Tensor lengths = {};  // [T] int32, optional: entries at positions >= lengths[t] are invalid, and
                        // cost nothing
  Tensor block_table = {};  // [R, W] int32, optional
};

struct AttendArgs {
  const Plan* plan = nullptr;
  int32_t part = 0;  // of the plan: the tokens below are those of plan->parts()[part]
  // [T, H, d_qk] bf16, or [T, H, d_nope] when q_rope is given; any token and head strides
  Tensor q;
  Tensor q_rope = {};                // [T, H, d_rope] bf16, optional
  std::array<KvList, 2> lists = {};  // the second stays empty when there is one list
  Tensor requests = {};   // [T] int32: row of the block tables; needed with logical ids only
  float scale = 1.0f;     // of the logits
  Tensor sink = {};       // [H] f32, optional
  Tensor out;             // [T, H, d_v] bf16
  Tensor lse = {};        // [T, H] f32, optional, natural logarithm
  Tensor max_logit = {};  // [T, H] f32, optional
  bool empty_lse_negative =
      false;  // lse of a row without valid entry: -inf (for merging) instead of +inf
  std::span<std::byte> workspace = {};  // at least attend_workspace_bytes() /
                                        // plan->workspace_bytes(); empty, without a plan: a CPU
                                        // call takes its own, a CUDA call with few tokens is slower
  Target target = {};
};

// For every token t and head h, over the valid entries j of its lists:
//   s_j = scale * q . K_j,  lse = ln sum e^{s_j},  out = sum e^{s_j - lse} V_j,  max_logit = max
//   s_j.
// Valid: position < length, 0 <= slot < pages * page. Holes may stand anywhere; invalid entries are
// never read, duplicates count as often as they appear. No valid entry: out = 0, lse = +inf,
// max_logit = -inf, whatever the sink. sink: out *= e^lse / (e^lse + e^sink); lse is unchanged.
// A logit of -inf weighs nothing (a row of them alone is empty), one of +inf weighs 1 beside finite
// ones that weigh nothing; a NaN makes its row's results NaN.
// On Hopper an fp8 record's scale, and the value made with it, are rounded to fp16: a logit is off
// by up to 2^-10 of scale * sum |q_i K_i| where scales are no powers of two.
//
// Serves decode (paged fp8), prefill from contiguous bf16 (a cache of one page) and prefill
// straight from the pages: they differ in sizes only. Cost: 2 * T * H * K * (d_qk + d_v) FLOP.
void attend(const AttendArgs& args);

// Workspace of an attend() call without a plan.
size_t attend_workspace_bytes(const AttendArgs& args);

struct MhaArgs {
  Tensor q;  // [T, H, d_qk] bf16
  Tensor k;  // [N, H, d_qk] bf16: decompressed keys, per head (stride 0 over heads shares one)
  Tensor v;  // [N, H, d_v] bf16
  // [T, K] int32: keys of each token as a set, duplicates count once; optional (all keys)
  Tensor ids = {};
  Tensor starts = {};   // [T] int32: row of k that id 0 of token t means, optional (0)
  Tensor lengths = {};  // [T] int32: ids outside [0, lengths[t]) are ignored, optional (N - start)
  // [T, M] uint8, optional: id j counts only if mask[t, j] != 0 (ids >= M do not)
  Tensor mask = {};
  Tensor bits = {};  // [T, M] uint8, optional: id j counts only if bit j % 8 of bits[t, j / 8] is
                     // set (ids >= 8 M do not), as topk_mask() makes them
  Tensor bias = {};  // [T, M] f32, optional: added to the logit of id j (0 for ids >= M); -inf
                     // excludes it
  float scale = 1.0f;
  Tensor sink = {};  // [H] f32, optional
  Tensor out;        // [T, H, d_v] bf16
  Tensor lse = {};   // [T, H] f32, optional
  bool empty_lse_negative = false;
  Target target = {};
};

// Sparse attention over uncompressed per-head keys and values, set semantics. Any d_qk and d_v.
// Rows outside [0, N) are never read. A row with no key: out = 0, lse = +inf. On the CPU a call
// allocates its scratch. Cost: 2 * H * (d_qk + d_v) FLOP per token and key; neighbouring tokens
// whose sets have much in common read a key once for all of them. With ids absent (or K >= sequence
// length) and lengths = position + 1 this is causal attention.
void attend_mha(const MhaArgs& args);

struct TopkMaskArgs {
  Tensor ids;           // [T, K] int32
  Tensor lengths = {};  // [T] int32, optional: ids outside [0, lengths[t]) are ignored
  // [T, M] uint8, out: bit j % 8 of byte j / 8 = key j selected; 8 * M bounds the keys
  Tensor mask;
  Target target = {};
};

// The set of each row of ids as bits. Every byte of mask is written.
void topk_mask(const TopkMaskArgs& args);

struct MergeArgs {
  Tensor partial_out;  // [P, T, H, d_v] f32 or bf16: results over P disjoint parts of the lists
  Tensor partial_lse;  // [P, T, H] f32, natural; +inf and -inf both mean "empty"
  Tensor sink = {};    // [H] f32, optional, applied once, here
  Tensor out;          // [T, H, d_v] bf16 or f32
  Tensor lse = {};     // [T, H] f32, optional; -inf where all parts are empty
  Target target = {};
};

// lse = ln sum e^{lse_p}, out = sum e^{lse_p - lse} out_p. All parts empty: (0, -inf).
void merge(const MergeArgs& args);

}  // namespace winnow
