// attend, attend_mha, topk_mask, merge.
#include "winnow/attend.h"

#include <cmath>

#include "call.h"

namespace winnow::python {

namespace {

constexpr int64_t kDv = kV32.d_v;  // of every model

nb::object attend_(Call& c) {
  AttendArgs a;
  a.q = c.in("q");
  a.q_rope = c.in("q_rope");
  a.lists[0] = {c.cache("cache"), c.in("indices"), c.in("lengths"), c.in("block_table")};
  a.lists[1] = {c.cache("extra_cache"), c.in("extra_indices"), c.in("extra_lengths"),
                c.in("extra_block_table")};
  a.requests = c.in("requests");
  a.sink = c.in("sink");
  const int64_t tokens = a.q.shape[0], heads = a.q.shape[1];
  a.scale = static_cast<float>(c.number("scale"));
  a.out = c.out("out", DType::kBf16, {tokens, heads, kDv});
  if (c.wanted("lse")) a.lse = c.out("lse", DType::kF32, {tokens, heads});
  if (c.wanted("max_logit")) a.max_logit = c.out("max_logit", DType::kF32, {tokens, heads});
  a.empty_lse_negative = c.flag("empty_lse_negative");
  a.plan = c.plan();
  a.part = c.int32("part");
  a.target = c.target();
  a.precision = precision_of(c);
  // A CPU call without a plan has memory of its own; what the others need is asked of the library,
  // which checks the arguments on the way.
  if (c.given("workspace")) a.workspace = c.workspace(0);
  else if (a.plan) a.workspace = c.scratch(a.plan->workspace_bytes());
  else if (a.target.device.kind == DeviceKind::kCuda)
    a.workspace = c.scratch(attend_workspace_bytes(a));
  c.run([&] { attend(a); });
  return c.result({"out", "lse", "max_logit"});
}

nb::object attend_mha_(Call& c) {
  MhaArgs a;
  a.q = c.in("q");
  a.k = c.in("k");
  a.v = c.in("v");
  a.ids = c.in("ids");
  a.starts = c.in("starts");
  a.lengths = c.in("lengths");
  a.mask = c.in("mask", As::kMask);
  a.bits = c.in("bits");
  a.bias = c.in("bias");
  a.sink = c.in("sink");
  a.scale = static_cast<float>(c.number("scale"));
  a.out = c.out("out", DType::kBf16, {a.q.shape[0], a.q.shape[1], a.v.shape[2]});
  if (c.wanted("lse")) a.lse = c.out("lse", DType::kF32, {a.q.shape[0], a.q.shape[1]});
  a.empty_lse_negative = c.flag("empty_lse_negative");
  a.target = c.target();
  c.run([&] { attend_mha(a); });
  return c.result({"out", "lse"});
}

nb::object topk_mask_(Call& c) {
  TopkMaskArgs a;
  a.ids = c.in("ids");
  a.lengths = c.in("lengths");
  const int64_t bytes = (c.size("keys") + 7) / 8;
  a.mask = c.out("out", DType::kU8, {a.ids.shape[0], bytes});
  if (a.mask.rank == 2 && a.mask.shape[1] != bytes)
    c.fail("out", std::to_string(bytes) + " bytes a row, a bit for each of keys",
           std::to_string(a.mask.shape[1]));
  a.target = c.target();
  c.run([&] { topk_mask(a); });
  return c.result({"out"});
}

nb::object merge_(Call& c) {
  MergeArgs a;
  a.partial_out = c.in("partial_out");
  a.partial_lse = c.in("partial_lse");
  a.sink = c.in("sink");
  const auto& n = a.partial_out.shape;
  a.out = c.out("out", DType::kBf16, {n[1], n[2], n[3]});
  if (c.wanted("lse")) a.lse = c.out("lse", DType::kF32, {n[1], n[2]});
  a.target = c.target();
  c.run([&] { merge(a); });
  return c.result({"out", "lse"});
}

}  // namespace

void bind_attend(nb::module_& m) {
  def(m,
      "def attend(q: Array, cache: Cache, indices: Array, *, scale: float, lengths: "
      "Array | "
      "None = None, block_table: Array | None = None, extra_cache: Cache | None = None, "
      "extra_indices: "
      "Array | None = None, extra_lengths: Array | None = None, extra_block_table: Array | None = "
      "None, "
      "requests: Array | None = None, q_rope: Array | None = None, sink: Array | None = None, out: "
      "Array "
      "| None = None, lse: Array | bool = False, max_logit: Array | bool = False, "
      "empty_lse_negative: "
      "bool = False, plan: Plan | None = None, part: int = 0, workspace: Array | None = None, "
      "kernel: "
      "str | None = None, precision: str = 'full') -> Any",
      attend_,
      R"(Attention of every query over the cache records that its list names.

q           [tokens, heads, d_qk] bf16 (576 or 512), or [tokens, heads, d_nope] with
q_rope      [tokens, heads, 64] bf16
indices     [tokens, topk] int32: slots of the cache (page * page size + offset), -1 and anything
            else outside the cache is skipped; with block_table [requests, pages] int32 they are
            logical ids of the request that `requests` [tokens] int32 gives
lengths     [tokens] int32: entries from there on are skipped
extra_*     the second list of V4, under the same softmax
scale       of the logits, as the model defines it: V3.2 has 192^-0.5 times its YaRN factor
            squared, 0.1352 in all
sink        [heads] f32: out *= e^lse / (e^lse + e^sink)
plan, part  a Plan refilled for this batch, and which of its parts these tokens are
workspace   uint8, what plan.workspace_bytes says; made for the call if not given
precision   "full", or "fp8": queries and weights are rounded to e4m3 (winnow/precision.h has the
            error); fp8 records, and a plan of that precision where one is given

Returns out [tokens, heads, 512] bf16; with lse=True (or an array) and max_logit=True a tuple: out,
lse and max_logit [tokens, heads] f32. A row without a valid entry is 0 with lse +inf
(-inf with empty_lse_negative).)");
  def(m,
      "def attend_mha(q: Array, k: Array, v: Array, *, scale: float, ids: Array | None = None, "
      "starts: Array | None = None, lengths: Array | None = None, mask: Array | None = None, bits: "
      "Array | None = None, bias: Array | None = None, sink: Array | None = None, out: Array | "
      "None = None, lse: Array | bool = False, empty_lse_negative: bool = False, kernel: str | "
      "None = None) -> Any",
      attend_mha_,
      R"(Sparse attention over uncompressed keys and values, one set of keys per token.

q        [tokens, heads, d_qk] bf16
k, v     [keys, heads, d_qk], [keys, heads, d_v] bf16; a head stride of 0 shares one head
ids      [tokens, topk] int32: the keys of a token; duplicates count once; all keys if not given
starts   [tokens] int32: the row of k that id 0 means
lengths  [tokens] int32: ids outside [0, length) are skipped
mask     [tokens, M] uint8 or bool: an id counts only where it is not 0
bits     [tokens, M] uint8: an id counts only where its bit is set, as topk_mask makes them
bias     [tokens, M] f32: added to the logit of an id; -inf excludes it
scale    of the logits, as for attend()

Returns out [tokens, heads, d_v] bf16, or (out, lse [tokens, heads] f32) with lse=True.)");
  def(m,
      "def topk_mask(ids: Array, keys: int, *, lengths: Array | None = None, out: Array | None = "
      "None, "
      "kernel: str | None = None) -> Array",
      topk_mask_,
      R"(The set of each row of ids [tokens, topk] int32 as bits: [tokens, ceil(keys / 8)] uint8,
bit j % 8 of byte j / 8 for key j. Ids outside [0, lengths[t]) are skipped.)");
  def(m,
      "def merge(partial_out: Array, partial_lse: Array, *, sink: Array | None = None, out: Array "
      "| None "
      "= None, lse: Array | bool = False, kernel: str | None = None) -> Any",
      merge_,
      R"(One result from P results over disjoint parts of the lists.

partial_out  [P, tokens, heads, d_v] bf16 or f32
partial_lse  [P, tokens, heads] f32; +inf and -inf both mean "empty"
sink         [heads] f32, applied once, here

Returns out [tokens, heads, d_v] bf16 (f32 if out= is), or (out, lse) with lse=True.)");
}

}  // namespace winnow::python
