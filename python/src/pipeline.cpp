// pipeline: one layer's batch through all six stages.
#include "winnow/pipeline.h"

#include "layers.h"

namespace winnow::python {

namespace {

// Names of a compressor's arguments.
struct CompressorNames {
  const char *rows, *bias, *norm, *state, *table;
};

Compressor compressor_of(Call& c, const CompressorNames& names) {
  Compressor r;
  r.rows = c.in(names.rows);
  r.norm.weight = c.in(names.norm);
  r.norm.eps = static_cast<float>(c.number("eps", 1e-6));
  if (!r.rows) return r;
  r.overlap = c.flag("overlap");
  r.gate = c.flag("gate", true);
  r.bias = c.in(names.bias);
  // An entry of one row needs none (V4.1's ratio 1).
  if (c.given(names.state)) r.state.rows = c.out(names.state, DType::kF32, {-1, -1, -1});
  r.state.table = c.in(names.table);
  r.state.ring = c.flag("ring");
  return r;
}

// The steps of a V4 layer; none without a table.
LayerSteps steps_of(Call& c) {
  LayerSteps s;
  if (!c.given("table")) return s;
  s.rope = rope_of(c, "table");
  const auto eps = static_cast<float>(c.number("eps", 1e-6));
  if (c.given("kv_norm")) s.kv_norm = {.weight = c.in("kv_norm"), .eps = eps};
  if (c.flag("q_norm")) s.q_norm = {.eps = eps};
  s.states = compressor_of(c, {"state_rows", "state_bias", "state_norm", "state", "state_table"});
  s.states.scale = s.scale = scale_mode(c, "record_scale");
  s.index = compressor_of(
      c, {"index_rows", "index_bias", "index_norm", "index_state", "index_state_table"});
  s.index_query.q = c.in("raw_index_q");
  s.index_query.weights = c.in("raw_index_weights");
  s.index_query.factor = static_cast<float>(c.number("index_factor", 1.0));
  s.index.hadamard = s.index_query.hadamard = c.flag("hadamard");
  s.index.scale = s.index_query.scale = scale_mode(c, "index_scale");
  return s;
}

// Index queries and weights: inputs, or what the steps make.
void set_index_query(Call& c, PipelineArgs& a) {
  const Tensor& raw = a.steps.index_query.q;
  if (!raw) {
    a.indexer.q = c.in("index_q", As::kE4m3);
    a.indexer.weights = c.in("index_weights");
    return;
  }
  const bool wide = a.indexer.keys.format == CacheFormat::kIndexKeysBf16;
  a.indexer.q = c.out("index_q", wide ? DType::kBf16 : DType::kE4m3,
                      {raw.shape[0], raw.shape[1], raw.shape[2]});
  a.indexer.weights = c.out("index_weights", DType::kF32, {raw.shape[0], raw.shape[1]});
}

// What the indexer chooses: for the caller and the layers behind, or of a layer before.
void set_choice(Call& c, PipelineArgs& a) {
  const PlanOptions& o = a.plan->options();
  const int64_t tokens = a.q.shape[0], picked = o.model.lists == 2 ? o.extra_topk : o.topk;
  if (!c.wanted("ids")) a.ids = {};
  else if (a.indexer.q) a.ids = c.out("ids", DType::kI32, {tokens, picked});
  else a.ids = c.in("ids");
  a.blocks = blocks_of(c, tokens);
}

// Over a shared context a rank attends with all heads and gets the result of its own.
int64_t own_share(const Plan& plan) {
  const Parallel& p = plan.options().parallel;
  return p.comm && p.spread == Spread::kContext ? p.comm->size() : 1;
}

nb::object pipeline_(Call& c) {
  PipelineArgs a;
  a.steps = steps_of(c);
  a.kv = c.in("kv");
  a.slots = c.in("slots");
  a.cache = c.cache("cache", true);
  a.block_table = c.in("block_table");
  a.compressed_kv = c.in("compressed_kv");
  a.compressed_slots = c.in("compressed_slots");
  a.compressed = c.cache("compressed", true);
  a.compressed_table = c.in("compressed_table");
  a.indexer.k = c.in("index_k");
  a.indexer.slots = c.in("index_slots");
  a.indexer.keys = c.cache("index_keys", true);
  a.indexer.block_table = c.in("index_table");
  set_index_query(c, a);
  // The steps prepare q in place.
  a.q = a.steps.rope.table ? c.out("q", DType::kBf16, {-1, -1, -1}) : c.in("q");
  a.sink = c.in("sink");
  a.scale = static_cast<float>(c.number("scale"));
  a.plan = c.plan();
  if (!a.plan) c.fail("plan", "a plan", "none");
  const int64_t heads = a.q.shape[1] / own_share(*a.plan);
  a.out = c.out("out", DType::kBf16, {a.q.shape[0], heads, kV32.d_v});
  if (c.wanted("lse")) a.lse = c.out("lse", DType::kF32, {a.q.shape[0], heads});
  set_choice(c, a);
  a.target.device = c.device();
  a.workspace = c.workspace(pipeline_workspace_bytes(*a.plan));
  if (c.given("prefix")) a.prefix = c.bytes("prefix");
  c.run([&] { pipeline(a); });
  return c.result({"out", "lse", "ids", "best_blocks"});
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
      "None, out: Array | None = None, lse: Array | bool = False, workspace: Array | None = None, "
      "table: Array | None = None, pairs: str = 'interleaved', slice: str = 'last', eps: float = "
      "1e-6, kv_norm: Array | None = None, q_norm: bool = False, record_scale: str = 'default', "
      "overlap: bool = False, gate: bool = True, ring: bool = False, state_rows: Array | None = "
      "None, state_bias: "
      "Array | None = None, state_norm: Array | None = None, state: Array | None = None, "
      "state_table: Array | None = None, index_rows: Array | None = None, index_bias: Array | None "
      "= None, index_norm: Array | None = None, index_state: Array | None = None, "
      "index_state_table: Array | None = None, raw_index_q: Array | None = None, "
      "raw_index_weights: Array | None = None, index_factor: float = 1.0, hadamard: bool = False, "
      "index_scale: str = 'default', prefix: Array | None = None, ids: Array | bool = False, "
      "within: Array | None = None, block: int = 8, best: int = 0, best_blocks: Array | None = "
      "None) -> Any",
      pipeline_,
      R"(write -> score -> select -> locate -> attend for the batch that plan was refilled with.

q            [tokens, heads, d_qk] bf16
kv, slots    [>= tokens, d] bf16 of the new tokens, [tokens] int64
block_table  [>= requests, pages] int32, of cache
index_*      the indexer: keys [states, 128] bf16 and slots of the new tokens (V4: states), its
             cache and block table, queries [tokens, heads, 128] e4m3 and weights [tokens, heads] f32
scale        of the logits, as for attend()
compressed*  V4: the new compressed states, their slots, cache and block table; a cache of states or
             index keys without new ones is another layer's, and read only
ids          the indexer's choice [tokens, topk] int32 (V4: extra_topk): True or an array to be
             filled; without index queries the choice of a layer before, which is attended to
within, block, best, best_blocks
             blocks of columns, as score_select() takes and gives them (V4.1)

table        V4: the layer's rope_table(). The call begins at the projections then: q [tokens, heads,
             512], which is prepared in place, and kv are their outputs, out is turned back
kv_norm      weights of kv's norm, with eps; q_norm: whether heads of q are normalised
state_*      the compressor of states (instead of compressed_kv and compressed_slots): rows, bias and
             norm weights as compress() takes them, and its state with a table or a ring
index_rows, index_bias, index_norm, index_state*
             the compressor of index keys (instead of index_k and index_slots). index_k with
             index_norm alone: projections of the latents, of which index keys are made (V4.1)
raw_index_*  index queries [tokens, heads, 128] bf16 and weights, of which index_query() makes
             index_q and index_weights

prefix       over a plan with sharded=True: what gather_prefix() gave for this layer

Returns out [tokens, heads, 512] bf16, or a tuple of it and what is asked for of lse [tokens, heads]
f32, ids and best_blocks. Over a plan with spread="context" they have the heads of this rank alone. With spread="queries" q, kv and out have
the tokens of this rank (shard_batch() says which), and slots those of the whole batch.)");
  def(m, "def pipeline_workspace_bytes(plan: Plan) -> int", workspace_bytes,
      "Bytes of pipeline()'s workspace for the plan's capacity.");
}

}  // namespace winnow::python
