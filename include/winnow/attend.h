// attend: queries, cache(s), slots -> output, log-sum-exp, max logit.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "winnow/mask.h"
#include "winnow/merge.h"
#include "winnow/mha.h"
#include "winnow/precision.h"
#include "winnow/tensor.h"

namespace winnow {

class Plan;

// One list of keys per query token. V3.2 has one list. V4 has two (sliding window, compressed),
// each with a cache of its own, under one softmax.
struct KvList {
  Cache cache;
  // [T, K] int32: physical slots, or logical ids when block_table is given.
  Tensor indices;
  // [T] int32, optional: entries at positions >= lengths[t] are invalid and cost nothing. Pass it
  // if you have it. Otherwise pad with -1: trailing ones are trimmed (on Hopper: V3.2, one token
  // per CTA); one in the middle costs as much as a row.
  Tensor lengths = {};
  // [R, W] int32, optional.
  Tensor block_table = {};
};

struct AttendArgs {
  const Plan* plan = nullptr;
  // With a plan: the tokens below are those of plan->parts()[part].
  int32_t part = 0;
  // [T, H, d_qk] bf16, or [T, H, d_nope] when q_rope is given; any token and head strides.
  Tensor q;
  Tensor q_rope = {};                // [T, H, d_rope] bf16, optional
  std::array<KvList, 2> lists = {};  // the second stays empty when there is one list
  Tensor requests = {};  // [T] int32: row of the block tables; needed with logical ids only
  // Of the logits. There is no default, since it belongs to the model, not to the size of q: V3.2
  // has 192^-1/2 * m^2 with YaRN's m = 0.1 ln(factor) + 1 (0.1352 for a factor of 40), GLM-5
  // 256^-1/2, V4 512^-1/2.
  float scale = kNotGiven;
  Tensor sink = {};  // [H] f32, optional
  // [T, H, d_v] bf16, or f32 for merge() and combine(). f32 may also be [W, T, H / W, d_v], blocks
  // of heads as combine() sends them; lse is [W, T, H / W] then.
  Tensor out;
  Tensor lse = {};        // [T, H] f32, optional, natural logarithm
  Tensor max_logit = {};  // [T, H] f32, optional
  // Gives lse = -inf instead of +inf to a row without a valid entry, as merge() needs it.
  bool empty_lse_negative = false;
  // At least plan->workspace_bytes(), without a plan attend_workspace_bytes(). May be empty without
  // a plan: then a CPU call allocates its own, and a CUDA call with few tokens is slower. One call
  // at a time may use it. Until a CUDA call is done, neither it nor what the call reads may change:
  // blocks that read a length twice wait for each other by it.
  std::span<std::byte> workspace = {};
  Target target = {};
  // With a plan: the plan's, and kFull here means that. kFp8 needs fp8 records.
  Precision precision = Precision::kFull;
};

// For every token t and head h, over the valid entries j of its lists:
//   s_j       = scale * q . K_j
//   lse       = ln sum e^{s_j}
//   out       = sum e^{s_j - lse} V_j
//   max_logit = max s_j
//
// Valid entries: position < length and 0 <= slot < pages * page. Invalid ones may be anywhere and
// are never read. Duplicates count as often as they appear.
// No valid entry: out = 0, lse = +inf, max_logit = -inf, whatever the sink.
// Sink: out *= e^lse / (e^lse + e^sink). lse does not change.
// Infinities: a logit of -inf has weight 0, and a row of them alone is empty. A logit of +inf has
// weight 1, and finite logits beside it have weight 0. NaN: the results of its row are NaN.
// Precision: Hopper rounds an fp8 record's scale, and the value made with it, to fp16 for the
// output, and with more than 32 heads for the logits too. Where scales are not powers of two, a
// logit is then off by up to 2^-10 of scale * sum |q_i K_i|. CPU kernels round no logit below fp32.
// For the output avx512bf16 and amx round weights to bf16, amx also the value made with an fp32
// scale, and a part that another core merges to fp16: within 2^-11 of a value, or 2^-39 of the
// head's largest one.
//
// The same call serves decode (paged fp8), prefill from contiguous bf16 (a cache of one page) and
// prefill from the pages: they differ in sizes only. Cost: 2 * T * H * K * (d_qk + d_v) FLOP.
void attend(const AttendArgs& args);

// Workspace of an attend() call without a plan.
size_t attend_workspace_bytes(const AttendArgs& args);

}  // namespace winnow
