// Plans and the arithmetic of planning in C.
#include "winnow/plan.h"

#include <algorithm>
#include <cstddef>
#include <new>

#include "c_api/communicator.h"

using winnow::Chunk;
using winnow::Plan;
using winnow::internal::c_api::guarded;
using winnow::internal::c_api::In;

namespace {

static_assert(int(winnow::Mode::kDirect) == WINNOW_DIRECT);
static_assert(int(winnow::Mode::kBf16) == WINNOW_BF16_CACHE);
static_assert(int(winnow::SplitPolicy::kFixed) == WINNOW_FIXED);
static_assert(int(winnow::Stage::kLists) == WINNOW_LISTS);
static_assert(int(winnow::Route::kMha) == WINNOW_ROUTE_MHA);
static_assert(int(winnow::Precision::kFp8) == WINNOW_PRECISION_FP8);
// Spans of these are given out as they are.
static_assert(sizeof(Chunk) == sizeof(winnow_chunk) &&
              offsetof(Chunk, last) == offsetof(winnow_chunk, last));
static_assert(sizeof(winnow::Part) == sizeof(winnow_part) &&
              offsetof(winnow::Part, mha) == offsetof(winnow_part, mha));
static_assert(sizeof(winnow::Tile) == sizeof(winnow_tile) &&
              offsetof(winnow::Tile, split) == offsetof(winnow_tile, split));

winnow::PlanOptions plan_options(const winnow_plan_options& o, const In& in) {
  return {.model = winnow::model_of(&in.given(o.model, "model")),
          .format = in.choice(o.format, "format", winnow::CacheFormat::kIndexKeysBf16),
          .heads = o.heads,
          .topk = o.topk,
          .extra_topk = o.extra_topk,
          .ratio = o.ratio,
          .index_heads = o.index_heads,
          .page = o.page,
          .pages = o.pages,
          .max_requests = o.max_requests,
          .max_tokens = o.max_tokens,
          .max_context = o.max_context,
          .decode_threshold = o.decode_threshold,
          .uniform_decode = o.uniform_decode,
          .mode = in.choice(o.mode, "mode", winnow::Mode::kDirect),
          .mha = o.mha,
          .workspace_rows = o.workspace_rows,
          .split = in.choice(o.split, "split", winnow::SplitPolicy::kFixed),
          .split_size = o.split_size,
          .target = in(o.target),
          .precision = in.choice(o.precision, "precision", winnow::Precision::kFp8)};
}

winnow_device c_device(const winnow::Device& d) {
  return {static_cast<winnow_device_kind>(d.kind), d.index, d.stream};
}

winnow_plan_options c_options(const winnow::PlanOptions& o) {
  winnow_plan_options r = WINNOW_PLAN_OPTIONS_INIT;
  r.model = winnow::model_of(o.model.name).name.data();  // a literal, so it ends in a zero
  r.format = static_cast<winnow_format>(o.format);
  r.heads = o.heads;
  r.topk = o.topk;
  r.extra_topk = o.extra_topk;
  r.ratio = o.ratio;
  r.index_heads = o.index_heads;
  r.page = o.page;
  r.pages = o.pages;
  r.max_requests = o.max_requests;
  r.max_tokens = o.max_tokens;
  r.max_context = o.max_context;
  r.decode_threshold = o.decode_threshold;
  r.uniform_decode = o.uniform_decode;
  r.mode = static_cast<winnow_mode>(o.mode);
  r.workspace_rows = o.workspace_rows;
  r.split = static_cast<winnow_split_policy>(o.split);
  r.split_size = o.split_size;
  r.mha = o.mha;
  r.spread = static_cast<winnow_spread>(o.parallel.spread);
  r.interleave = o.parallel.interleave;
  r.wire = static_cast<winnow_wire>(o.parallel.wire);
  r.sharded = o.parallel.sharded;
  r.precision = static_cast<winnow_precision>(o.precision);
  r.target = {c_device(o.target.device), o.target.kernel};
  return r;
}

winnow_ints ints(std::span<const int32_t> s) { return {s.data(), static_cast<int64_t>(s.size())}; }

winnow_batch_split c_split(const winnow::BatchSplit& s) {
  return {s.decodes, s.prefills, s.decode_tokens, s.prefill_tokens, s.active_decodes};
}

// Chunks found -> the caller's array, all of them or none.
template <class From, class To, class F>
void give(const std::vector<From>& found, std::span<To> out, int64_t& count, const In& in, F&& to) {
  count = static_cast<int64_t>(found.size());
  in.check().that(found.size() <= out.size(), "capacity", winnow::cat("at least ", found.size()),
                  winnow::cat(out.size()));
  std::transform(found.begin(), found.end(), out.begin(), to);
}

}  // namespace

extern "C" {

winnow_status winnow_plan_create(const winnow_plan_options* options, winnow_plan** out) {
  return guarded("plan", options, [&](const winnow_plan_options& o, const In& in) {
    winnow_plan*& plan = in.given(out, "out");  // before there is something to lose
    auto comm = winnow::internal::c_api::ranks_of(o.comm, "comm", in);
    auto control = winnow::internal::c_api::ranks_of(o.control, "control", in);
    winnow::PlanOptions all = plan_options(o, in);
    all.parallel = {.comm = comm.get(),
                    .spread = in.choice(o.spread, "spread", winnow::Spread::kQueries),
                    .interleave = o.interleave,
                    .wire = in.choice(o.wire, "wire", winnow::Wire::kBf16),
                    .control = control.get(),
                    .sharded = in.check().range(o.sharded, "sharded", 0, 1) != 0};
    auto made = Plan(all);
    plan = new (std::nothrow) winnow_plan(std::move(made), std::move(comm), std::move(control));
    if (!plan) winnow::out_of_memory("plan");
  });
}

winnow_status winnow_plan_refill(winnow_plan* plan, const winnow_batch* batch) {
  return guarded("plan", batch, [&](const winnow_batch& b, const In& in) {
    in.given(plan, "plan")
        .plan.refill({.query_starts = in(b.query_starts, "query_starts"),
                      .seq_lens = in(b.seq_lens, "seq_lens"),
                      .tokens = b.tokens});
  });
}

void winnow_plan_destroy(winnow_plan* plan) { delete plan; }

winnow_status winnow_plan_get_options(const winnow_plan* plan, winnow_plan_options* out) {
  return guarded("plan", [&](const In& in) {
    const size_t size = in.size_of(out, "out");
    winnow_plan_options options = c_options(in.given(plan, "plan").plan.options());
    options.struct_size = size;
    std::memcpy(out, &options, size);
  });
}
winnow_mode winnow_plan_mode(const winnow_plan* plan) {
  return static_cast<winnow_mode>(plan->plan.mode());
}
int32_t winnow_plan_request_count(const winnow_plan* plan) { return plan->plan.request_count(); }
int32_t winnow_plan_tokens(const winnow_plan* plan) { return plan->plan.tokens(); }
int32_t winnow_plan_batch_tokens(const winnow_plan* plan) { return plan->plan.batch_tokens(); }
winnow_ints winnow_plan_token_order(const winnow_plan* plan) {
  return ints(plan->plan.token_order());
}
winnow_ints winnow_plan_token_rows(const winnow_plan* plan) {
  return ints(plan->plan.token_rows());
}
winnow_ints winnow_plan_key_starts(const winnow_plan* plan) {
  return ints(plan->plan.key_starts());
}
winnow_ints winnow_plan_prefix_lens(const winnow_plan* plan) {
  return ints(plan->plan.prefix_lens());
}
winnow_ints winnow_plan_row_starts(const winnow_plan* plan) {
  return ints(plan->plan.row_starts());
}
int64_t winnow_plan_gathered_rows(const winnow_plan* plan) { return plan->plan.gathered_rows(); }
winnow_batch_split winnow_plan_split(const winnow_plan* plan) {
  return c_split(plan->plan.split());
}
winnow_ints winnow_plan_query_lens(const winnow_plan* plan) {
  return ints(plan->plan.query_lens());
}
winnow_ints winnow_plan_seq_lens(const winnow_plan* plan) { return ints(plan->plan.seq_lens()); }
winnow_ints winnow_plan_request_ids(const winnow_plan* plan) {
  return ints(plan->plan.request_ids());
}
winnow_ints winnow_plan_positions(const winnow_plan* plan) { return ints(plan->plan.positions()); }
winnow_ints winnow_plan_key_ends(const winnow_plan* plan) { return ints(plan->plan.key_ends()); }
winnow_ints winnow_plan_state_starts(const winnow_plan* plan) {
  return ints(plan->plan.state_starts());
}
winnow_ints winnow_plan_arrays(const winnow_plan* plan) { return ints(plan->plan.arrays()); }
const winnow_chunk* winnow_plan_chunks(const winnow_plan* plan, int64_t* count) {
  const std::span<const Chunk> chunks = plan->plan.chunks();
  if (count) *count = static_cast<int64_t>(chunks.size());
  return reinterpret_cast<const winnow_chunk*>(chunks.data());
}
winnow_ints winnow_plan_workspace_starts(const winnow_plan* plan) {
  return ints(plan->plan.workspace_starts());
}
winnow_ints winnow_plan_prefill_requests(const winnow_plan* plan) {
  return ints(plan->plan.prefill_requests());
}
winnow_ints winnow_plan_compressed_lens(const winnow_plan* plan) {
  return ints(plan->plan.compressed_lens());
}
winnow_ints winnow_plan_gather_starts(const winnow_plan* plan) {
  return ints(plan->plan.gather_starts());
}
winnow_ints winnow_plan_gather_lens(const winnow_plan* plan) {
  return ints(plan->plan.gather_lens());
}
winnow_ints winnow_plan_gather_rows(const winnow_plan* plan) {
  return ints(plan->plan.gather_rows());
}
const winnow_part* winnow_plan_parts(const winnow_plan* plan, int64_t* count) {
  const std::span<const winnow::Part> parts = plan->plan.parts();
  if (count) *count = static_cast<int64_t>(parts.size());
  return reinterpret_cast<const winnow_part*>(parts.data());
}
winnow_schedule winnow_plan_schedule(const winnow_plan* plan, int32_t part) {
  const winnow::Schedule s = plan->plan.schedule(part);
  return {reinterpret_cast<const winnow_tile*>(s.tiles.data()),
          static_cast<int64_t>(s.tiles.size()), ints(s.worker_starts), ints(s.split_starts)};
}
size_t winnow_plan_workspace_bytes(const winnow_plan* plan) { return plan->plan.workspace_bytes(); }
size_t winnow_plan_gather_bytes(const winnow_plan* plan) { return plan->plan.gather_bytes(); }
const char* winnow_plan_kernel(const winnow_plan* plan, winnow_stage stage, int32_t part) {
  if (stage < 0 || stage >= winnow::kStages) return nullptr;
  return plan->plan.kernel(static_cast<winnow::Stage>(stage), part);
}
const char* winnow_plan_reasons(const winnow_plan* plan, winnow_stage stage) {
  if (stage < 0 || stage >= winnow::kStages) return nullptr;
  return plan->plan.reasons(static_cast<winnow::Stage>(stage)).c_str();
}

winnow_status winnow_plan_device(const winnow_plan* plan, const winnow_target* call,
                                 winnow_device* out) {
  return guarded("plan", [&](const In& in) {
    const winnow::Plan& own = in.given(plan, "plan").plan;
    const auto target = call ? in(*call) : winnow::Target{own.options().target.device, nullptr};
    in.given(out, "out") = c_device(own.device(target));
  });
}
winnow_status winnow_plan_upload(const winnow_plan* plan, void* to, winnow_device device) {
  return guarded("plan", [&](const In& in) {
    const winnow::Plan& own = in.given(plan, "plan").plan;
    const winnow::Device where = own.device(in(winnow_target{device, nullptr}));
    in.check().that(to != nullptr, "to", "a pointer", "null");
    own.upload(to, where);
  });
}

winnow_status winnow_prefill_route(const winnow_route_args* args, winnow_route* out) {
  return guarded("prefill_route", args, [&](const winnow_route_args& a, const In& in) {
    in.check().range(a.heads, "heads", winnow::kMinHeads, winnow::kMaxHeads);
    in.check().range(a.tokens, "tokens", 0, INT32_MAX);
    in.check().range(a.context, "context", 0, INT32_MAX);
    const auto route =
        winnow::prefill_route({.model = winnow::model_of(&in.given(a.model, "model")),
                               .heads = a.heads,
                               .tokens = a.tokens,
                               .context = a.context,
                               .mha = a.mha,
                               .device = in.choice(a.device, "device", winnow::DeviceKind::kCuda)});
    in.given(out, "out") = static_cast<winnow_route>(route);
  });
}

winnow_status winnow_request_ids(winnow_ints query_starts, int32_t* out, int64_t tokens) {
  return guarded("request_ids", [&](const In& in) {
    winnow::request_ids(in(query_starts, "query_starts"), in.out(out, tokens, "out"));
  });
}

winnow_status winnow_split_batch(winnow_ints query_starts, int64_t tokens, int32_t threshold,
                                 bool uniform, winnow_batch_split* out) {
  return guarded("split_batch", [&](const In& in) {
    in.given(out, "out") =
        c_split(winnow::split_batch(in(query_starts, "query_starts"), tokens, threshold, uniform));
  });
}

winnow_status winnow_prefill_chunks(winnow_ints seq_lens, int64_t rows, winnow_chunk* out,
                                    int64_t capacity, int64_t* count) {
  return guarded("prefill_chunks", [&](const In& in) {
    give(winnow::prefill_chunks(in(seq_lens, "seq_lens"), rows), in.out(out, capacity, "out"),
         in.given(count, "count"), in, [](const Chunk& c) {
           return winnow_chunk{c.first, c.last};
         });
  });
}

winnow_status winnow_workspace_starts(winnow_ints seq_lens, const winnow_chunk* chunks,
                                      int64_t chunk_count, int32_t* out) {
  return guarded("workspace_starts", [&](const In& in) {
    const auto given = in.out(chunks, chunk_count, "chunks");
    std::vector<Chunk> copy(given.size());
    std::transform(given.begin(), given.end(), copy.begin(), [](const winnow_chunk& c) {
      return Chunk{c.first, c.last};
    });
    winnow::workspace_starts(in(seq_lens, "seq_lens"), copy, in.out(out, seq_lens.count, "out"));
  });
}

winnow_status winnow_prefill_request_ids(winnow_ints query_starts, int32_t decodes, int32_t* out,
                                         int64_t tokens) {
  return guarded("prefill_request_ids", [&](const In& in) {
    winnow::prefill_request_ids(in(query_starts, "query_starts"), decodes,
                                in.out(out, tokens, "out"));
  });
}

winnow_status winnow_v4_prefill_chunks(const winnow_v4_chunk_args* args, winnow_v4_chunk* out,
                                       int64_t capacity, int64_t* count) {
  return guarded("v4_prefill_chunks", args, [&](const winnow_v4_chunk_args& a, const In& in) {
    give(winnow::v4_prefill_chunks({.query_lens = in(a.query_lens, "query_lens"),
                                    .seq_lens = in(a.seq_lens, "seq_lens"),
                                    .ratio = a.ratio,
                                    .window = a.window,
                                    .max_model_len = a.max_model_len,
                                    .max_batched_tokens = a.max_batched_tokens}),
         in.out(out, capacity, "out"), in.given(count, "count"), in, [](const winnow::V4Chunk& c) {
           return winnow_v4_chunk{c.first, c.last, c.compressed, c.rows};
         });
  });
}

}  // extern "C"
