// attend: queries, cache(s), slots -> output, log-sum-exp, max logit.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "winnow/mask.h"
#include "winnow/merge.h"
#include "winnow/mha.h"
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

}  // namespace winnow
