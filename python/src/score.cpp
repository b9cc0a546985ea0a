// score, score_select, select, locate: from the indexer's queries to slots.
#include "winnow/score.h"

#include "layers.h"
#include "winnow/locate.h"
#include "winnow/select.h"

namespace winnow::python {

namespace {

ScoreArgs score_inputs(Call& c) {
  ScoreArgs a;
  a.q = c.in("q", As::kE4m3);
  a.weights = c.in("weights");
  a.ends = c.in("ends");
  a.starts = c.in("starts");
  a.keys = c.cache("keys");
  a.block_table = c.in("block_table");
  a.requests = c.in("requests");
  a.key_rows = c.in("key_rows", As::kE4m3);
  a.key_scales = c.in("key_scales");
  a.plan = c.plan();
  a.some_tokens = c.flag("some_tokens");
  a.target = c.target();
  return a;
}

nb::object score_(Call& c) {
  ScoreArgs a = score_inputs(c);
  const int64_t keys = a.key_rows ? a.key_rows.shape[0] : a.block_table.shape[1] * a.keys.page;
  a.logits = c.out("out", DType::kF32, {a.q.shape[0], c.size("width", keys)});
  c.agree("width", c.size("width", keys), a.logits, 1);
  a.clean = c.flag("clean");
  c.run([&] { score(a); });
  return c.result({"out"});
}

nb::object score_select_(Call& c) {
  ScoreSelectArgs a;
  a.score = score_inputs(c);
  a.ids = c.out("out", DType::kI32, {a.score.q.shape[0], c.size("topk")});
  c.agree("topk", c.size("topk"), a.ids, 1);
  if (c.wanted("values")) a.values = c.out("values", DType::kF32, {a.ids.shape[0], a.ids.shape[1]});
  a.relative = c.flag("relative");
  a.blocks = blocks_of(c, a.score.q.shape[0]);
  const bool own = !a.score.plan && a.score.target.device.kind == DeviceKind::kCpu;
  if (c.given("workspace")) a.workspace = c.workspace(0);
  else if (a.score.plan) a.workspace = c.scratch(a.score.plan->workspace_bytes());
  else if (!own) a.workspace = c.scratch(score_select_workspace_bytes(a));
  c.run([&] { score_select(a); });
  return c.result({"out", "values", "best_blocks"});
}

nb::object select_(Call& c) {
  SelectArgs a;
  a.logits = c.in("logits");
  a.starts = c.in("starts");
  a.ends = c.in("ends");
  a.ids = c.out("out", DType::kI32, {a.logits.shape[0], c.size("topk")});
  c.agree("topk", c.size("topk"), a.ids, 1);
  if (c.wanted("values")) a.values = c.out("values", DType::kF32, {a.ids.shape[0], a.ids.shape[1]});
  a.relative = c.flag("relative");
  a.blocks = blocks_of(c, a.logits.shape[0]);
  a.plan = c.plan();
  a.target = c.target();
  c.run([&] { select(a); });
  return c.result({"out", "values", "best_blocks"});
}

nb::object locate_(Call& c) {
  LocateArgs a;
  a.ids = c.in("ids");
  a.requests = c.in("requests");
  a.block_table = c.in("block_table");
  a.page = c.int32("page", 64);
  a.pages = c.pages_of_table();
  a.rows_per_page = c.int32("rows_per_page");
  a.prefill_requests = c.in("prefill_requests");
  a.workspace_starts = c.in("workspace_starts");
  a.workspace_rows = c.integer("workspace_rows");
  a.parallel = {c.int32("world", 1), c.int32("rank"), c.int32("interleave", 1), c.flag("compact")};
  a.slots = c.out("out", DType::kI32, {a.ids.shape[0], a.ids.shape[1]});
  if (c.wanted("counts")) a.counts = c.out("counts", DType::kI32, {a.ids.shape[0]});
  a.plan = c.plan();
  a.part = c.int32("part", -1);
  a.target = c.target();
  c.run([&] { locate(a); });
  return c.result({"out", "counts"});
}

}  // namespace

void bind_score(nb::module_& m) {
  def(m,
      "def score(q: Array, weights: Array, ends: Array, *, starts: Array | None = None, keys: "
      "Cache | None "
      "= None, block_table: Array | None = None, requests: Array | None = None, key_rows: Array | "
      "None = "
      "None, key_scales: Array | None = None, width: int | None = None, clean: bool = False, out: "
      "Array | "
      "None = None, plan: Plan | None = None, some_tokens: bool = False, kernel: str | None = "
      "None) "
      "-> Array",
      score_,
      R"(The indexer's logits: s_k[j] * sum_h weights[t, h] * max(0, q[t, h] . k[j]).

q            [tokens, heads, 128] e4m3 (float8_e4m3fn, or uint8 with its bits), or bf16
weights      [tokens, heads] f32, with q's scale and the softmax factors in them
starts, ends [tokens] int32: valid keys of a token
keys         a Cache of "index_keys" (q in bf16: "index_keys_bf16"), with block_table [requests,
             pages] int32 and requests [tokens] int32; or
key_rows     [keys, 128] e4m3 with key_scales [keys] f32; bf16 has no scales
width        columns of the array that is made; all keys if not given
clean        fills entries outside a token's range with -inf; else they are left as they are, which
             in a new array can be anything
some_tokens  with a plan: q has some of its tokens, as a rank's share of the rows

Returns logits [tokens, width] f32.)");
  def(m,
      "def score_select(q: Array, weights: Array, ends: Array, topk: int | None = None, *, starts: "
      "Array | "
      "None = None, keys: Cache | None = None, block_table: Array | None = None, requests: Array | "
      "None = "
      "None, key_rows: Array | None = None, key_scales: Array | None = None, relative: bool = "
      "False, within: Array | None = None, block: int = 8, best: int = 0, out: Array | None = "
      "None, "
      "best_blocks: Array | None = None, values: Array | bool = False, plan: Plan | None = None, "
      "some_tokens: bool = False, workspace: Array | None = None, kernel: str | None = None) -> "
      "Array | tuple",
      score_select_,
      R"(score() and select() in one call, without the matrix of logits: ids [tokens, topk]
int32. within, block, best and values as in select(), some_tokens as in score(); values on the CPU
alone.)");
  def(m,
      "def select(logits: Array, topk: int | None = None, *, starts: Array | None = None, ends: "
      "Array | "
      "None = None, relative: bool = False, within: Array | None = None, block: int = 8, best: int "
      "= 0, out: Array | None = None, best_blocks: Array | None = None, values: Array "
      "| bool = False, plan: Plan | None = None, kernel: str | None = None) -> Array | tuple",
      select_,
      R"(The topk largest of each row's valid range, exactly: ties to the lowest index, NaN last.

logits        [tokens, keys] f32, rows of any stride
starts, ends  [tokens] int32: the valid range; the whole row if not given
relative      column - start instead of column
within        [tokens, blocks] int32, ascending: ids come from these blocks of `block` columns alone
best          that many blocks with the largest logits are given too, the last valid one always
values        True or an array: the logits at the ids too

Returns ids [tokens, topk] int32, ascending, then -1; with values also these [tokens, topk]
f32, -inf where an id is -1; with best, last, the blocks [tokens, best] int32 (out=, values= and
best_blocks= give the places).)");
  def(m,
      "def locate(ids: Array, requests: Array | None = None, block_table: Array | None = None, *, "
      "page: int "
      "= 64, pages: int = 0, rows_per_page: int = 0, prefill_requests: Array | None = None, "
      "workspace_starts: Array | None = None, workspace_rows: int = 0, world: int = 1, rank: int = "
      "0, "
      "interleave: int = 1, compact: bool = False, out: Array | None = None, counts: Array | bool "
      "= False, "
      "plan: Plan | None = None, part: int = -1, kernel: str | None = None) -> Any",
      locate_,
      R"(Logical ids to slots of the cache: block_table[request][id / page] * page + id % page.

ids          [tokens, topk] int32
requests     [tokens] int32: row of block_table [requests, pages] int32
pages        in the cache: what the table finds outside it becomes -1
prefill_requests, workspace_starts, workspace_rows
             tokens with prefill_requests[t] = p >= 0 get rows workspace_starts[p] + id instead
world, rank, interleave, compact
             decode context parallelism: entries of other ranks become -1, or are squeezed out

Returns slots [tokens, topk] int32, or (slots, counts [tokens] int32) with counts=True. out= may be
ids itself.)");
}

}  // namespace winnow::python
