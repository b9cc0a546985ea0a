// All checks of a pipeline() call. The stages check again what they get, which costs little; here
// the point is that the third stage must not refuse what the first has already written.
#include "pipeline/pipeline_checks.h"

#include "core/blocks.h"
#include "core/check.h"
#include "parallel/on_device.h"
#include "pipeline/queries.h"
#include "winnow/model.h"

namespace winnow {

namespace {

struct Insertion {
  const Tensor& kv;
  const Tensor& slots;
  const Cache& cache;
  const char *kv_name, *slots_name, *cache_name;
  DeviceKind device;
  int64_t rows = -1;  // of kv that are read, if not as many as slots
};

// All that write() could refuse; `tokens` slots, or any number.
void check_insertion(const Check& check, const Insertion& in, CacheFormat format, int64_t tokens) {
  const Cache cache = check.cache(in.cache, in.cache_name, {in.device, true});
  check.that(cache.format == format, in.cache_name, cat("format ", name_of(format)),
             cat(name_of(cache.format)));
  check.tensor(in.slots, in.slots_name, DType::kI64, {tokens});
  check.tensor(in.kv, in.kv_name, DType::kBf16, {Check::kAny, record_dim(format)});
  const int64_t count = in.slots.shape[0], capacity = cache.pages * cache.page;
  const int64_t rows = in.rows < 0 ? count : in.rows;
  check.that(in.kv.shape[0] >= rows, in.kv_name, cat("at least ", rows, " rows"),
             cat(in.kv.shape[0]));
  check.apart({{internal::core::pages_view(cache), in.cache_name}},
              {{in.kv, in.kv_name}, {in.slots, in.slots_name}});
  // Slots are contents, but of the one kind that write() refuses on the CPU.
  if (in.device != DeviceKind::kCpu) return;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t slot = static_cast<const int64_t*>(in.slots.data)[t];
    check.that(slot < capacity, in.slots_name, cat("slots below ", capacity),
               cat(slot, " at token ", t));
  }
}

// Rows for every request, into a cache that has pages; what the rows hold is checked where it is
// read.
struct TableOf {
  const Tensor& table;
  const char* name;
  const Cache& cache;
};
void check_table(const Check& check, const TableOf& in, int64_t requests) {
  const auto& [table, name, cache] = in;
  check.tensor(table, name, DType::kI32, {Check::kAny, Check::kAny});
  check.that(cache.pages > 0 || table.size() == 0, name, "pages of a cache that has some",
             "a cache of 0 pages");
  check.that(table.shape[0] >= requests, name, cat("at least ", requests, " rows"),
             cat(table.shape[0]));
}

// Rows for every token, and nothing of what they are instead of.
void check_compressor(const Check& check, const Tensor& rows, const char* name, int64_t tokens) {
  const DType dtype = rows.dtype == DType::kBf16 ? DType::kBf16 : DType::kF32;
  check.tensor(rows, name, dtype, {Check::kAny, Check::kAny});
  check.that(rows.shape[0] >= tokens, name, cat("at least ", tokens, " rows"), cat(rows.shape[0]));
}
void check_none(const Check& check, const Tensor& t, const char* argument, const char* instead) {
  check.that(!t, argument, cat("none with ", instead), shape_of(t));
}

// Which steps a layer has, and the shapes that the plan gives them; their own verbs check the rest.
void check_steps(const Check& check, const PipelineArgs& a) {
  const LayerSteps& s = a.steps;
  const PlanOptions& o = a.plan->options();
  const Layer layer(o);
  const int64_t tokens = a.plan->tokens();
  const bool any = s.states.rows || s.index.rows || s.index_query.q;
  check.that(has_steps(a) || !any, "steps.rope.table", "a table", "nothing");
  if (!has_steps(a)) return;
  check.that(layer.v4, "steps", "none for V3.2, whose queries are absorbed in between", "some");
  if (s.states.rows && !layer.compressed)
    check.fail("steps.states.rows", "none (the plan's extra_topk is 0)", shape_of(s.states.rows));
  check.that(uses_indexer(a) || !(s.index.rows || s.index_query.q), "steps.index",
             "none without indexer.q", "some");
  check.output(a.q, "q", DType::kBf16, {tokens, o.heads, o.model.d_qk});
  if (s.states.rows) {
    check_compressor(check, s.states.rows, "steps.states.rows", tokens);
    check_none(check, a.compressed_kv, "compressed_kv", "steps.states");
    check_none(check, a.compressed_slots, "compressed_slots", "steps.states");
  }
  if (s.index.rows) {
    check_compressor(check, s.index.rows, "steps.index.rows", tokens);
    check_none(check, a.indexer.k, "indexer.k", "steps.index");
    check_none(check, a.indexer.slots, "indexer.slots", "steps.index");
  }
  if (!s.index_query.q) return;
  const bool wide = s.index_query.weights.dtype == DType::kBf16;
  check.tensor(s.index_query.q, "steps.index_query.q", DType::kBf16,
               {tokens, o.index_heads, kIndexDim});
  check.strided(s.index_query.weights, "steps.index_query.weights",
                wide ? DType::kBf16 : DType::kF32, {tokens, o.index_heads});
  check.output(a.indexer.q, "indexer.q", a.indexer.q.dtype, {tokens, o.index_heads, kIndexDim});
  check.output(a.indexer.weights, "indexer.weights", DType::kF32, {tokens, o.index_heads});
  check.apart({{a.indexer.q, "indexer.q"}, {a.indexer.weights, "indexer.weights"}},
              {{s.index_query.q, "steps.index_query.q", &a.indexer.q},
               {s.index_query.weights, "steps.index_query.weights"}});
}

// A cache that entries are compressed into, or that is only read.
void check_entries(const Check& check, const Cache& entries, const char* name, CacheFormat format,
                   DeviceKind device) {
  const Cache cache = check.cache(entries, name, {device, true});
  check.that(cache.format == format, name, cat("format ", name_of(format)),
             cat(name_of(cache.format)));
}

void check_indexer(const Check& check, const Indexer& x, const PipelineArgs& a) {
  const Plan& plan = *a.plan;
  const PlanOptions& o = plan.options();
  const int64_t tokens = plan.tokens();
  const DeviceKind device = o.target.device.kind;
  const bool is_bf16 = x.q.dtype == DType::kBf16;
  check.tensor(x.q, "indexer.q", is_bf16 ? DType::kBf16 : DType::kE4m3,
               {tokens, o.index_heads, kIndexDim});
  check.tensor(x.weights, "indexer.weights", DType::kF32, {tokens, o.index_heads});
  const CacheFormat format = is_bf16 ? CacheFormat::kIndexKeysBf16 : CacheFormat::kIndexKeys;
  if (projected_keys(a)) {
    check.tensor(x.k, "indexer.k", DType::kBf16, {Check::kAny, kIndexDim});
    check.that(x.k.shape[0] >= tokens, "indexer.k", cat("at least ", tokens, " rows"),
               cat(x.k.shape[0]));
  }
  if (a.steps.index.rows || projected_keys(a) || !given_keys(a))
    check_entries(check, x.keys, "indexer.keys", format, device);
  else
    check_insertion(check,
                    {x.k, x.slots, x.keys, "indexer.k", "indexer.slots", "indexer.keys", device,
                     by_queries(o) ? tokens : -1},
                    format, Layer(o).v4 ? Check::kAny : plan.batch_tokens());
  check_table(check, {x.block_table, "indexer.block_table", x.keys}, plan.request_count());
}

void check_compressed(const Check& check, const PipelineArgs& a) {
  const PlanOptions& o = a.plan->options();
  if (a.steps.states.rows || !given_states(a))
    check_entries(check, a.compressed, "compressed", o.format, o.target.device.kind);
  else
    check_insertion(check,
                    {a.compressed_kv, a.compressed_slots, a.compressed, "compressed_kv",
                     "compressed_slots", "compressed", o.target.device.kind},
                    o.format, Check::kAny);
  check_table(check, {a.compressed_table, "compressed_table", a.compressed},
              a.plan->request_count());
  if (a.indexer.q || a.ids) return;
  // All states are attended to: a list that is too narrow would drop some silently. Of several
  // ranks the first has most of them; all refuse what that one must.
  const Shard most =
      by_context(o) ? Shard{o.parallel.comm->size(), 0, o.parallel.interleave} : Shard{};
  for (const int32_t position : a.plan->positions()) {
    const int64_t states = most.local_length((int64_t{position} + 1) / o.ratio);
    check.that(states <= o.extra_topk, "plan",
               cat("extra_topk of at least ", states, ", all states of a token (no indexer.q)"),
               cat(o.extra_topk));
  }
}

// The choice that is taken from another layer or left for others.
void check_choice(const Check& check, const PipelineArgs& a) {
  const PlanOptions& o = a.plan->options();
  const Layer layer(o);
  const int64_t tokens = a.plan->tokens();
  const internal::core::Blocks blocks = internal::core::checked_blocks(check, a.blocks, tokens);
  check.that(!blocks.given() || uses_indexer(a), "blocks", "none without indexer.q", "some");
  check.that(!blocks.given() || !several_ranks(o), "blocks", "none over several ranks", "some");
  if (!a.ids) return;
  check.that(!layer.v4 || layer.compressed, "ids", "none (the plan's extra_topk is 0)",
             shape_of(a.ids));
  check.that(!several_ranks(o), "ids", "none over several ranks", shape_of(a.ids));
  const int64_t picked = layer.v4 ? o.extra_topk : o.topk;
  if (uses_indexer(a)) check.output_rows(a.ids, "ids", DType::kI32, {tokens, picked});
  else check.tensor(a.ids, "ids", DType::kI32, {tokens, picked});
}

}  // namespace

void check_pipeline(const PipelineArgs& a) {
  const Check check("pipeline");
  check.that(a.plan != nullptr, "plan", "a plan", "none");
  const PlanOptions& o = a.plan->options();
  check.that(!o.mha, "plan", "one made without mha", "one whose parts may be for attend_mha()");
  const Layer layer(o);
  const int64_t tokens = a.plan->tokens(), heads = o.heads;
  check_insertion(check,
                  {a.kv, a.slots, a.cache, "kv", "slots", "cache", o.target.device.kind,
                   by_queries(o) ? tokens : -1},
                  o.format, a.plan->batch_tokens());
  check.that(a.prefix.empty() || by_sharded_queries(o), "prefix",
             "none but for kQueries with sharded caches", cat(a.prefix.size(), " bytes"));
  if (!a.prefix.empty())
    check.that(a.prefix.size() >= gather_prefix_bytes(*a.plan), "prefix",
               cat("at least ", gather_prefix_bytes(*a.plan), " bytes"),
               cat(a.prefix.size(), " bytes"));
  check_table(check, {a.block_table, "block_table", a.cache}, a.plan->request_count());
  if (layer.compressed) check_compressed(check, a);
  else check.that(!a.compressed, "compressed", "none (the plan's extra_topk is 0)", "a cache");
  if (uses_indexer(a)) check_indexer(check, a.indexer, a);
  check_choice(check, a);
  check.tensor(a.q, "q", DType::kBf16, {tokens, heads, o.model.d_qk});
  check.scale(a.scale);
  // Over a shared context every rank attends with all heads and gets the result of its own.
  const int64_t own = by_context(o) ? heads / o.parallel.comm->size() : heads;
  check.optional(a.sink, "sink", DType::kF32, {own});
  check.output_rows(a.out, "out", DType::kBf16, {tokens, own, o.model.d_v});
  if (a.lse) check.output(a.lse, "lse", DType::kF32, {tokens, own});
  const Tensor none;
  check.apart({{a.out, "out"}, {a.lse, "lse"}, {uses_indexer(a) ? a.ids : none, "ids"}},
              {{a.q, "q"}, {a.kv, "kv"}, {uses_indexer(a) ? none : a.ids, "ids"}});
  if (o.target.device.kind == DeviceKind::kCuda) {  // as attend() wants them
    check.rows_of_16(a.q, "q");
    check.rows_of_16(a.out, "out");
  }
  check_steps(check, a);
  check.workspace(a.workspace, pipeline_workspace_bytes(*a.plan));
  if (by_queries(o))
    internal::parallel::check_lengths_not_captured("pipeline", a.plan->device(a.target));
}

}  // namespace winnow
