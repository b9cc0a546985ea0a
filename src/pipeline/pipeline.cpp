// One layer's batch through all six stages: the public functions in order, and the memory between
// them. Everything is checked before the first of them writes.
#include "winnow/pipeline.h"

#include <array>
#include <string_view>

#include "core/arena.h"
#include "core/arithmetic.h"
#include "core/check.h"
#include "cuda/device.h"
#include "pipeline/pipeline_checks.h"
#include "pipeline/queries.h"
#include "pipeline/ranks.h"

namespace winnow {

namespace {

// What the stages hand on to each other, laid out for the plan's capacity. T = max_tokens.
struct Memory {
  std::byte* stage;   // scratch of whichever stage runs
  int32_t* ids;       // [T, picked]: the indexer's choice unless the caller keeps it, then slots
  int32_t* window;    // V4: [T, topk]
  int32_t* combined;  // V4, kSeparate: [T, combined_width]
  int32_t* lengths;   // V4: [T]
  bf16* rows;         // kSeparate: [workspace_rows, d]
  int64_t* slots;     // V4 with compressed states: [T], of the entries that a step closes
  int32_t* arrays;    // CUDA: the plan's arrays; null on the CPU, where they are read in place
  int64_t picked = 0, combined_width = 0;
  RankMemory ranks;
  QueryMemory queries;

  Memory(Arena& arena, const Plan& plan) {
    const PlanOptions& o = plan.options();
    const Layer layer(o);
    const int64_t tokens = o.max_tokens;
    // Sized by the capacity, not by the batch, so that a caller can keep one workspace.
    picked = layer.v4 ? o.extra_topk : o.topk;
    combined_width = layer.v4 && layer.separate ? round_up(o.topk + o.extra_topk, 128) : 0;
    stage = arena.take<std::byte>(plan.workspace_bytes());
    // Ranks gather an equal number of rows each.
    const int32_t sharing = several_ranks(o) ? o.parallel.comm->size() : 1;
    ids = arena.take<int32_t>(round_up(tokens, sharing) * picked);
    window = arena.take<int32_t>(layer.v4 ? tokens * o.topk : 0);
    combined = arena.take<int32_t>(tokens * combined_width);
    lengths = arena.take<int32_t>(layer.v4 ? tokens : 0);
    rows = arena.take<bf16>(plan.gather_bytes() / sizeof(bf16));
    slots = arena.take<int64_t>(layer.v4 && layer.compressed ? tokens : 0);
    const bool on_cpu = o.target.device.kind == DeviceKind::kCpu;
    arrays = on_cpu ? nullptr : arena.take<int32_t>(plan.arrays().size());
    ranks = RankMemory(arena, o, picked);
    queries = QueryMemory(arena, plan);
  }
};

// Rows [first, last) of a tensor.
Tensor slice(const Tensor& t, int64_t first, int64_t last) {
  Tensor r = t;
  if (!t) return r;
  if (t.data) r.data = static_cast<std::byte*>(t.data) + first * t.stride[0] * size_of(t.dtype);
  r.shape[0] = last - first;
  return r;
}

class Flow {
 public:
  Flow(const PipelineArgs& a, const Memory& m)
      : a_(a),
        m_(m),
        plan_(*a.plan),
        o_(plan_.options()),
        layer_(o_),
        indexed_(uses_indexer(a)),
        shared_(several_ranks(o_)) {
    slots_ = tensor(m.ids, {plan_.tokens(), m.picked});
    ids_ = a.ids ? a.ids : slots_;
    if (!by_sharded_queries(o_)) return;
    Arena rows(a.prefix.empty() ? m.queries.prefix : a.prefix);
    prefix_ = PrefixMemory(rows, plan_);
  }

  void run() const {
    upload();
    if (has_steps(a_)) prepare_query(query_args());
    write_records();
    if (indexed_ && a_.steps.index_query.q) index_query(index_query_args());
    // The ids that each token attends to.
    if (indexed_) score_and_select();
    else if (layer_.compressed && !a_.ids) list_all_states();

    // Locate V3.2's ids in the pages, or in the rows that their chunk will be gathered to.
    // Over sharded caches an id is the row of its record already.
    if (!layer_.v4 && !by_sharded_queries(o_))
      locate({.plan = &plan_,
              .ids = ids_,
              .requests = view(plan_.request_ids()),
              .block_table = a_.block_table,
              .page = a_.cache.page,
              .pages = a_.cache.pages,
              .prefill_requests = layer_.separate ? view(plan_.prefill_requests()) : Tensor{},
              .workspace_starts = view(plan_.workspace_starts()),
              .workspace_rows = o_.workspace_rows,
              .slots = slots_,
              .target = a_.target});

    // Attend, part by part. A chunk's rows are overwritten by the next chunk's.
    const std::span<const Part> parts = plan_.parts();
    for (size_t p = 0; p < parts.size(); ++p) {
      const Part& part = parts[p];
      if (part.gathered) gather_chunk(part);
      AttendArgs args{.plan = &plan_,
                      .part = static_cast<int32_t>(p),
                      .q = tokens(a_.q, part),
                      .scale = a_.scale,
                      .sink = a_.sink,
                      .out = tokens(a_.out, part),
                      .lse = tokens(a_.lse, part),
                      .workspace = {m_.stage, plan_.workspace_bytes()},
                      .target = a_.target};
      if (!layer_.v4) args.lists[0] = v32_list(part);
      else if (part.gathered) args.lists[0] = combined_list(part);
      else args.lists = paged_lists(part, static_cast<int32_t>(p));
      if (by_context(o_)) attend_over_ranks(args, m_.ranks);
      else attend(args);
    }
    if (has_steps(a_)) rotate(output_args());
  }

  // The steps around the stages with no tokens: they check their arguments and do nothing else.
  void try_steps() const {
    const LayerSteps& steps = a_.steps;
    PrepareQueryArgs query = query_args();
    query.q.shape[0] = query.positions.shape[0] = query.out.shape[0] = 0;
    prepare_query(query);
    WriteArgs kv = write_args();
    kv.slots.shape[0] = kv.prologue.positions.shape[0] = 0;
    write(kv);
    const auto none = [&](const Compressor& c, const Cache& cache) {
      CompressArgs args = compress_args(c, cache);
      args.positions.shape[0] = args.requests.shape[0] = args.slots.shape[0] = 0;
      compress(args);
    };
    if (steps.states.rows) none(steps.states, a_.compressed);
    if (steps.index.rows) none(steps.index, a_.indexer.keys);
    if (indexed_ && projected_keys(a_)) {
      WriteArgs keys = projected_key_args();
      keys.slots.shape[0] = keys.prologue.positions.shape[0] = 0;
      write(keys);
    }
    if (steps.index_query.q) {
      IndexQueryArgs args = index_query_args();
      args.q.shape[0] = args.weights.shape[0] = args.positions.shape[0] = 0;
      args.out.shape[0] = args.out_weights.shape[0] = 0;
      index_query(args);
    }
    RotateArgs output = output_args();
    output.x.shape[0] = output.positions.shape[0] = output.out.shape[0] = 0;
    rotate(output);
  }

 private:
  // New tokens, compressed states and index keys.
  void write_records() const {
    const LayerSteps& steps = a_.steps;
    if (by_queries(o_)) write_share();
    else write(write_args());
    if (layer_.compressed && steps.states.rows)
      compress_entries(steps.states, a_.compressed, a_.compressed_table);
    else if (layer_.compressed && given_states(a_))
      write({.plan = &plan_,
             .kv = a_.compressed_kv,
             .slots = a_.compressed_slots,
             .cache = a_.compressed,
             .target = a_.target});
    if (!indexed_ || by_queries(o_)) return;
    const Indexer& x = a_.indexer;
    if (steps.index.rows) {
      compress_entries(steps.index, x.keys, x.block_table);
    } else if (projected_keys(a_)) {
      find_slots(x.keys, x.block_table);
      write(projected_key_args());
    } else if (given_keys(a_)) {
      write({.plan = &plan_, .kv = x.k, .slots = x.slots, .cache = x.keys, .target = a_.target});
    }
  }

  void score_and_select() const {
    const Indexer& x = a_.indexer;
    ScoreSelectArgs all{.score = {.plan = &plan_,
                                  .q = x.q,
                                  .weights = x.weights,
                                  .keys = x.keys,
                                  .block_table = x.block_table,
                                  .requests = view(plan_.request_ids()),
                                  .ends = view(plan_.key_ends()),
                                  .target = a_.target},
                        .ids = ids_,
                        .blocks = a_.blocks,
                        .workspace = {m_.stage, plan_.workspace_bytes()}};
    if (by_sharded_queries(o_)) {
      all.score.starts = view(plan_.key_starts());
      set_gathered_keys(plan_, prefix_, all.score);
    }
    if (shared_ && !by_queries(o_)) select_over_ranks(plan_, all, m_.ranks);
    else score_select(all);
  }

  // Where a verb without a plan of its own runs. If the plan requests a kernel by a name that all
  // of these verbs have, they run that one too.
  Target target() const {
    const char* asked = nullptr;
    for (const char* name : {"reference", "simd"})
      if (o_.target.kernel && std::string_view(o_.target.kernel) == name) asked = name;
    return {.device = plan_.device(a_.target), .kernel = asked};
  }
  PrepareQueryArgs query_args() const {
    return {.q = a_.q,
            .norm = a_.steps.q_norm,
            .positions = view(plan_.positions()),
            .rope = a_.steps.rope,
            .out = a_.q,
            .target = target()};
  }
  WriteArgs write_args() const {
    WriteArgs args{.plan = &plan_,
                   .kv = a_.kv,
                   .slots = a_.slots,
                   .cache = a_.cache,
                   .scale = a_.steps.scale,
                   .target = a_.target};
    if (has_steps(a_))
      args.prologue = {
          .norm = a_.steps.kv_norm, .rope = a_.steps.rope, .positions = view(plan_.positions())};
    return args;
  }
  CompressArgs compress_args(const Compressor& c, const Cache& cache) const {
    return {.rows = c.rows,
            .positions = view(plan_.positions()),
            .requests = view(plan_.request_ids()),
            .ratio = o_.ratio,
            .overlap = c.overlap,
            .gate = c.gate,
            .bias = c.bias,
            .state = c.state,
            .norm = c.norm,
            .rope = a_.steps.rope,
            .hadamard = c.hadamard,
            .slots = entry_slots(),
            .cache = cache,
            .scale = c.scale,
            .target = target()};
  }
  // V4.1: an index key of a projected latent, turned to where its state begins.
  WriteArgs projected_key_args() const {
    const Compressor& c = a_.steps.index;
    return {.plan = &plan_,
            .kv = a_.indexer.k,
            .slots = entry_slots(),
            .cache = a_.indexer.keys,
            .scale = c.scale,
            .prologue = {.norm = c.norm,
                         .rope = a_.steps.rope,
                         .positions = view(plan_.state_starts()),
                         .hadamard = c.hadamard},
            .target = a_.target};
  }
  void compress_entries(const Compressor& c, const Cache& cache, const Tensor& table) const {
    find_slots(cache, table);
    compress(compress_args(c, cache));
  }
  // Slots of the entries that the batch closes.
  Tensor entry_slots() const { return tensor(m_.slots, {plan_.tokens()}); }
  void find_slots(const Cache& cache, const Tensor& table) const {
    compressed_slots({.plan = &plan_,
                      .positions = view(plan_.positions()),
                      .requests = view(plan_.request_ids()),
                      .block_table = table,
                      .ratio = o_.ratio,
                      .page = cache.page,
                      .pages = cache.pages,
                      .slots = entry_slots(),
                      .target = a_.target,
                      .shard = shard()});
  }
  IndexQueryArgs index_query_args() const {
    const RawIndexQuery& raw = a_.steps.index_query;
    return {.q = raw.q,
            .weights = raw.weights,
            .positions = view(plan_.positions()),
            .rope = a_.steps.rope,
            .hadamard = raw.hadamard,
            .scale = raw.scale,
            .factor = raw.factor,
            .out = a_.indexer.q,
            .out_weights = a_.indexer.weights,
            .target = target()};
  }
  // Attention's output, turned back.
  RotateArgs output_args() const {
    Rope rope = a_.steps.rope;
    rope.inverse = true;
    return {.x = a_.out,
            .positions = view(plan_.positions()),
            .rope = rope,
            .out = a_.out,
            .target = target()};
  }

  // Brings the plan's arrays to the device: the only host memory that the stages read.
  void upload() const {
#ifdef WINNOW_WITH_CUDA
    if (!m_.arrays) return;
    plan_.upload(m_.arrays, plan_.device(a_.target));
    internal::cuda::check_launch("pipeline");
#endif
  }
  // One of the plan's arrays, where the kernels can read it.
  Tensor view(std::span<const int32_t> s) const {
    const int32_t* data = s.data();
    if (m_.arrays && data) data = m_.arrays + (data - plan_.arrays().data());
    return tensor(data, {static_cast<int64_t>(s.size())});
  }
  static Tensor tokens(const Tensor& t, const Part& p) {
    return slice(t, p.first_token, p.last_token);
  }
  // Of an array by prefill request: those of a gathered part.
  Tensor prefills(std::span<const int32_t> s, const Part& p) const {
    const int32_t base = plan_.split().decodes;
    return slice(view(s), p.first_request - base, p.last_request - base);
  }
  static Tensor requests(const Tensor& t, const Part& p) {
    return slice(t, p.first_request, p.last_request);
  }
  Cache gathered() const {
    return {m_.rows, o_.model.bf16, 1, static_cast<int32_t>(o_.workspace_rows)};
  }

  // Over a shared context a list is as long as this rank's part of it.
  KvList v32_list(const Part& part) const {
    const bool by_rows = by_sharded_queries(o_);
    KvList list{.cache = part.gathered ? gathered()
                         : by_rows     ? gathered_records(plan_, prefix_)
                                       : a_.cache,
                .indices = tokens(slots_, part)};
    if (by_context(o_)) list.lengths = tensor(m_.ranks.counts, {plan_.tokens()});
    return list;
  }
  // The states and window positions of this rank, where the context is shared out.
  Shard shard() const { return by_context(o_) ? o_.parallel.shard() : Shard{}; }

  // kQueries: new records of all ranks, and over sharded caches those before them.
  void write_share() const {
    if (by_sharded_queries(o_) && a_.prefix.empty())
      gather_prefix({.plan = &plan_,
                     .cache = a_.cache,
                     .block_table = a_.block_table,
                     .keys = a_.indexer.keys,
                     .key_table = a_.indexer.block_table,
                     .rows = m_.queries.prefix,
                     .target = a_.target});
    const auto ints = [&](std::span<const int32_t> s) {
      return static_cast<const int32_t*>(view(s).data);
    };
    write_over_ranks(a_, m_.queries, prefix_,
                     {ints(plan_.token_order()), ints(plan_.token_rows())});
  }

  // C128A: slots for rows that read pages, state numbers for those of gathered chunks.
  void list_all_states() const {
    c128a_lists({.plan = &plan_,
                 .positions = view(plan_.positions()),
                 .requests = view(plan_.request_ids()),
                 .block_table = a_.compressed_table,
                 .ratio = o_.ratio,
                 .page = a_.compressed.page,
                 .pages = a_.compressed.pages,
                 .decode_tokens = plan_.parts()[0].gathered ? 0 : plan_.parts()[0].last_token,
                 .lists = slots_,
                 .lengths = tensor(by_context(o_) ? m_.ranks.counts : m_.lengths, {plan_.tokens()}),
                 .target = a_.target,
                 .shard = shard()});
  }

  // The chunk's pages as contiguous bf16 rows; V4: compressed states first, then window tokens.
  void gather_chunk(const Part& part) const {
    const Tensor out = tensor(m_.rows, {o_.workspace_rows, o_.model.d_qk});
    gather({.plan = &plan_,
            .cache = a_.cache,
            .block_table = requests(a_.block_table, part),
            .starts = prefills(plan_.gather_starts(), part),
            .lengths = prefills(plan_.gather_lens(), part),
            .out_starts = prefills(plan_.gather_rows(), part),
            .out = out,
            .target = a_.target});
    if (layer_.compressed)
      gather({.plan = &plan_,
              .cache = a_.compressed,
              .block_table = requests(a_.compressed_table, part),
              .lengths = prefills(plan_.compressed_lens(), part),
              .out_starts = prefills(plan_.workspace_starts(), part),
              .out = out,
              .target = a_.target});
  }

  // V4 from the pages: the window, and the compressed states picked.
  std::array<KvList, 2> paged_lists(const Part& part, int32_t number) const {
    const Tensor slots = tokens(slots_, part), numbers = tokens(view(plan_.request_ids()), part);
    const Tensor window = tokens(tensor(m_.window, {plan_.tokens(), o_.topk}), part);
    const Tensor lengths = tokens(tensor(m_.lengths, {plan_.tokens()}), part);
    window_lists({.plan = &plan_,
                  .positions = tokens(view(plan_.positions()), part),
                  .requests = numbers,
                  .block_table = a_.block_table,
                  .window = o_.topk,
                  .page = a_.cache.page,
                  .pages = a_.cache.pages,
                  .lists = window,
                  .lengths = lengths,
                  .target = a_.target,
                  .shard = shard()});
    KvList near{.cache = a_.cache, .indices = window};
    if (by_context(o_)) near.lengths = lengths;
    if (!layer_.compressed) return {near};
    if (indexed_ || a_.ids)
      locate({.plan = &plan_,
              .part = number,
              .ids = tokens(ids_, part),
              .requests = numbers,
              .block_table = a_.compressed_table,
              .page = a_.compressed.page,
              .pages = a_.compressed.pages,
              .slots = slots,
              .target = a_.target});
    KvList far{.cache = a_.compressed, .indices = slots};
    if (by_context(o_)) far.lengths = tokens(tensor(m_.ranks.counts, {plan_.tokens()}), part);
    return {near, far};
  }

  // V4 from a gathered chunk: states and window rows side by side in one list.
  KvList combined_list(const Part& part) const {
    const Tensor lists = tokens(tensor(m_.combined, {plan_.tokens(), m_.combined_width}), part);
    const Tensor lengths = tokens(tensor(m_.lengths, {plan_.tokens()}), part);
    combined_lists({.plan = &plan_,
                    .topk = tokens(ids_, part),
                    .positions = tokens(view(plan_.positions()), part),
                    .requests = tokens(view(plan_.request_ids()), part),
                    .first_request = part.first_request,
                    .seq_lens = requests(view(plan_.seq_lens()), part),
                    .gather_lens = prefills(plan_.gather_lens(), part),
                    .ratio = o_.ratio,
                    .window = o_.topk,
                    .compressed = part.compressed,
                    .rows = part.rows,
                    .lists = lists,
                    .lengths = lengths,
                    .target = a_.target});
    return {.cache = gathered(), .indices = lists, .lengths = lengths};
  }

  const PipelineArgs& a_;
  const Memory& m_;
  const Plan& plan_;
  const PlanOptions& o_;
  const Layer layer_;
  Tensor ids_, slots_;   // what tokens attend to: by number, and in the cache
  PrefixMemory prefix_;  // kQueries over sharded caches
  const bool indexed_;
  const bool shared_;  // with other ranks
};

// What the steps' own verbs refuse, before anything is written.
void check_steps(const Flow& flow) try { flow.try_steps(); } catch (const Error& e) {
  throw Error(e.code(), cat("pipeline: steps: ", e.what()));
}

}  // namespace

void pipeline(const PipelineArgs& args) try {
  check_pipeline(args);
  Arena arena(args.workspace);
  const Memory memory(arena, *args.plan);
  const Flow flow(args, memory);
  if (has_steps(args)) check_steps(flow);
  flow.run();
} catch (const std::bad_alloc&) {
  out_of_memory("pipeline");
}

size_t pipeline_workspace_bytes(const Plan& plan) try {
  Arena arena;
  Memory(arena, plan);
  return arena.bytes();
} catch (const std::bad_alloc&) {
  out_of_memory("pipeline");
}

}  // namespace winnow
