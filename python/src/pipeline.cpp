// pipeline: one layer's batch through all six stages.
#include "winnow/pipeline.h"

#include "call.h"

namespace winnow::python {

namespace {

nb::object pipeline_(Call& c) {
  PipelineArgs a;
  a.kv = c.in("kv");
  a.slots = c.in("slots");
  a.cache = c.cache("cache", true);
  a.block_table = c.in("block_table");
  a.compressed_kv = c.in("compressed_kv");
  a.compressed_slots = c.in("compressed_slots");
  a.compressed = c.cache("compressed", true);
  a.compressed_table = c.in("compressed_table");
  a.indexer = {c.in("index_k"),     c.in("index_slots"),        c.cache("index_keys", true),
               c.in("index_table"), c.in("index_q", As::kE4m3), c.in("index_weights")};
  a.q = c.in("q");
  a.sink = c.in("sink");
  a.scale = static_cast<float>(c.number("scale"));
  a.out = c.out("out", DType::kBf16, {a.q.shape[0], a.q.shape[1], kV32.d_v});
  if (c.wanted("lse")) a.lse = c.out("lse", DType::kF32, {a.q.shape[0], a.q.shape[1]});
  a.plan = c.plan();
  if (!a.plan) c.fail("plan", "a plan", "none");
  a.target.device = c.device();
  a.workspace = c.workspace(pipeline_workspace_bytes(*a.plan));
  c.run([&] { pipeline(a); });
  return c.result({"out", "lse"});
}

nb::object workspace_bytes(Call& c) {
  const Plan* plan = c.plan();
  if (!plan) c.fail("plan", "a plan", "none");
  return nb::int_(pipeline_workspace_bytes(*plan));
}

}  // namespace

void bind_pipeline(nb::module_& m) {
  def(m,
      "def pipeline(plan: Plan, q: Array, kv: Array, slots: Array, cache: Cache, block_table: "
      "Array, *, "
      "scale: float, index_k: Array | None = None, index_slots: Array | None = None, index_keys: "
      "Cache | None = "
      "None, "
      "index_table: Array | None = None, index_q: Array | None = None, index_weights: Array | None "
      "= None, "
      "compressed_kv: Array | None = None, compressed_slots: Array | None = None, compressed: "
      "Cache | None "
      "= None, compressed_table: Array | None = None, sink: Array | "
      "None = "
      "None, out: Array | None = None, lse: Array | bool = False, workspace: Array | None = None) "
      "-> Any",
      pipeline_,
      R"(write -> score -> select -> locate -> attend for the batch that plan was refilled with.

q            [tokens, heads, d_qk] bf16
kv, slots    [>= tokens, d] bf16 of the new tokens, [tokens] int64
block_table  [>= requests, pages] int32, of cache
index_*      the indexer: keys [states, 128] bf16 and slots of the new tokens (V4: states), its
             cache and block table, queries [tokens, heads, 128] e4m3 and weights [tokens, heads] f32
scale        of the logits, as for attend()
compressed*  V4: the new compressed states, their slots, cache and block table

Returns out [tokens, heads, 512] bf16, or (out, lse [tokens, heads] f32) with lse=True.)");
  def(m, "def pipeline_workspace_bytes(plan: Plan) -> int", workspace_bytes,
      "Bytes of pipeline()'s workspace for the plan's capacity.");
}

}  // namespace winnow::python
