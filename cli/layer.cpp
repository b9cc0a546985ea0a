#include "layer.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace winnow::cli {

namespace {

Cache cache_of(const tools::Buffer<std::byte>& memory, CacheFormat format, const Limits& limits) {
  const int64_t bytes = page_bytes(format, limits.page);
  return {.data = memory.data(),
          .format = format,
          .pages = static_cast<int64_t>(memory.size()) / bytes,
          .page = limits.page};
}

PlanOptions plan_of(const LayerOptions& o, const Requests& requests) {
  const bool v4 = o.model.lists == 2;
  PlanOptions p{.model = o.model, .format = o.model.fp8, .heads = o.heads};
  p.topk = v4 ? o.model.window : o.topk;
  p.extra_topk = v4 ? o.topk : 0;
  p.ratio = o.limits.ratio;
  p.index_heads = o.index_heads;
  p.page = o.limits.page;
  p.pages = requests.pages();
  p.max_requests = o.limits.requests;
  p.max_tokens = o.limits.step_tokens;
  p.max_context = o.limits.context;
  p.target.kernel = o.kernel.empty() ? nullptr : o.kernel.c_str();
  return p;
}

// A plan's array as a tensor; stages only read it.
Tensor view(std::span<const int32_t> values) {
  return tensor(values.data(), {static_cast<int64_t>(values.size())});
}

int64_t slot_of(const std::vector<int32_t>& pages, int64_t at, int32_t page) {
  return int64_t{pages[static_cast<size_t>(at / page)]} * page + at % page;
}

}  // namespace

// V3.2's indexer keys lie in the pages of their tokens; V4's in those of their compressed states.
Layer::Layer(const LayerOptions& o, const Requests& r)
    : options_(o),
      width_(r.table_width()),
      state_width_(r.state_width()),
      keys_(std::max(o.limits.context / o.limits.ratio, 1)),
      plan_(plan_of(o, r)),
      random_(o.seed + 99),
      memory_(r.pages() * page_bytes(o.model.fp8, o.limits.page)),
      state_memory_(r.state_pages() * page_bytes(o.model.fp8, o.limits.page)),
      key_memory_((v4() ? r.state_pages() : r.pages()) *
                  page_bytes(CacheFormat::kIndexKeys, o.limits.page)),
      shadow_(static_cast<int64_t>(memory_.size())),
      state_shadow_(static_cast<int64_t>(state_memory_.size())),
      key_shadow_(static_cast<int64_t>(key_memory_.size())),
      cache_(cache_of(memory_, o.model.fp8, o.limits)),
      states_(cache_of(state_memory_, o.model.fp8, o.limits)),
      keys_cache_(cache_of(key_memory_, CacheFormat::kIndexKeys, o.limits)) {
  const int64_t most = o.limits.step_tokens, requests = o.limits.requests;
  kv_ = tools::Buffer<bf16>(std::max<int64_t>(most, o.limits.context) * o.model.d_qk);
  state_kv_ = tools::Buffer<bf16>(v4() ? static_cast<int64_t>(kv_.size()) : 0);
  index_k_ = tools::Buffer<bf16>(std::max<int64_t>(most, o.limits.context) * kIndexDim);
  q_ = tools::Buffer<bf16>(most * o.heads * o.model.d_qk);
  index_q_ = tools::Buffer<e4m3>(most * o.index_heads * kIndexDim);
  weights_ = tools::Buffer<float>(most * o.index_heads);
  sink_ = tools::Buffer<float>(o.heads);
  random_.normals(sink_.span(), 1.0f);
  table_ = tools::Buffer<int32_t>(requests * width_);
  state_table_ = tools::Buffer<int32_t>(requests * state_width_);
  slots_ = tools::Buffer<int64_t>(std::max<int64_t>(most, o.limits.context));
  state_slots_ = tools::Buffer<int64_t>(static_cast<int64_t>(slots_.size()));
  logits_ = tools::Buffer<float>(most * keys_);
  ids_ = tools::Buffer<int32_t>(most * o.topk);
  picked_ = tools::Buffer<int32_t>(most * o.topk);
  window_ = tools::Buffer<int32_t>(most * o.model.window);
  window_lengths_ = tools::Buffer<int32_t>(most);
  out_ = tools::Buffer<bf16>(most * o.heads * o.model.d_v);
  lse_ = tools::Buffer<float>(most * o.heads);
  workspace_ = tools::Buffer<std::byte>(static_cast<int64_t>(plan_.workspace_bytes()));
}

template <class F>
void Layer::timed(Timed stage, F&& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  StageTotal& t = totals_[stage];
  t.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ++t.calls;
}

// By the kernel, timed, and by the reference into the shadow, not timed.
void Layer::write_both(const WriteArgs& args, std::byte* shadow) {
  timed(kWriteTime, [&] { write(args); });
  const double record = static_cast<double>(page_bytes_used(args.cache.format, 64)) / 64;
  totals_[kWriteTime].bytes += static_cast<double>(args.slots.shape[0]) *
                               (record + 2.0 * static_cast<double>(args.kv.shape[1]));
  WriteArgs reference = args;
  reference.plan = nullptr;
  reference.cache.data = shadow;
  reference.target.kernel = "reference";
  write(reference);
}

// What a prefix cache would have brought: `length` tokens of KV and index keys, out of nowhere.
void Layer::write_prefix(const Request& r) {
  const int32_t page = options_.limits.page, ratio = options_.limits.ratio;
  const int64_t d = options_.model.d_qk, n = r.length, states = v4() ? n / ratio : 0;
  const std::array<StageTotal, kTimed> before = totals_;
  random_.normals(kv_.span(0, n * d), tools::kLatentSigma);
  for (int64_t i = 0; i < n; ++i) slots_[i] = slot_of(r.pages, i, page);
  write_both(
      {.kv = tensor(kv_.data(), {n, d}), .slots = tensor(slots_.data(), {n}), .cache = cache_},
      shadow_.data());
  if (v4()) {
    for (int64_t i = 0; i < states; ++i) slots_[i] = slot_of(r.state_pages, i, page);
    write_both({.kv = tensor(kv_.data(), {states, d}),
                .slots = tensor(slots_.data(), {states}),
                .cache = states_},
               state_shadow_.data());
  }
  const int64_t keys = v4() ? states : n;
  random_.normals(index_k_.span(0, keys * kIndexDim), 1.0f);
  write_both({.kv = tensor(index_k_.data(), {keys, kIndexDim}),
              .slots = tensor(slots_.data(), {keys}),
              .cache = keys_cache_},
             key_shadow_.data());
  totals_ = before;  // not a step's work
}

void Layer::draw_inputs(const Step& step) {
  const LayerOptions& o = options_;
  tokens_ = step.tokens();
  rows_ = static_cast<int64_t>(step.requests.size());
  random_.normals(kv_.span(0, tokens_ * o.model.d_qk), tools::kLatentSigma);
  if (v4()) random_.normals(state_kv_.span(0, tokens_ * o.model.d_qk), tools::kLatentSigma);
  random_.normals(index_k_.span(0, tokens_ * kIndexDim), 1.0f);
  random_.normals(q_.span(0, tokens_ * o.heads * o.model.d_qk), 1.0f);
  random_.normals(index_q_.span(0, tokens_ * o.index_heads * kIndexDim), 1.0f);
  random_.normals(weights_.span(0, tokens_ * o.index_heads), 0.1f);
  for (int64_t r = 0; r < rows_; ++r) {
    const Request& request = *step.requests[r];
    std::copy(request.pages.begin(), request.pages.end(), table_.begin() + r * width_);
    std::copy(request.state_pages.begin(), request.state_pages.end(),
              state_table_.begin() + r * state_width_);
    for (int32_t t = step.query_starts[r]; t < step.query_starts[r + 1]; ++t)
      slots_[t] = slot_of(request.pages, request.length + t - step.query_starts[r], o.limits.page);
  }
}

void Layer::write_tokens() {
  const int64_t d = options_.model.d_qk;
  write_both({.plan = &plan_,
              .kv = tensor(kv_.data(), {tokens_, d}),
              .slots = tensor(slots_.data(), {tokens_}),
              .cache = cache_},
             shadow_.data());
  if (v4())
    write_both({.plan = &plan_,
                .kv = tensor(state_kv_.data(), {tokens_, d}),
                .slots = tensor(state_slots_.data(), {tokens_}),
                .cache = states_},
               state_shadow_.data());
  write_both({.plan = &plan_,
              .kv = tensor(index_k_.data(), {tokens_, kIndexDim}),
              .slots = tensor(v4() ? state_slots_.data() : slots_.data(), {tokens_}),
              .cache = keys_cache_},
             key_shadow_.data());
}

ScoreArgs Layer::score_args() {
  const int64_t heads = options_.index_heads;
  return {.plan = &plan_,
          .q = tensor(index_q_.data(), {tokens_, heads, kIndexDim}),
          .weights = tensor(weights_.data(), {tokens_, heads}),
          .keys = keys_cache_,
          .block_table = v4() ? tensor(state_table_.data(), {rows_, state_width_})
                              : tensor(table_.data(), {rows_, width_}),
          .requests = view(plan_.request_ids()),
          .ends = view(plan_.key_ends()),
          .logits = tensor(logits_.data(), {tokens_, keys_})};
}

SelectArgs Layer::select_args() {
  return {.plan = &plan_,
          .logits = tensor(logits_.data(), {tokens_, keys_}),
          .ends = view(plan_.key_ends()),
          .ids = tensor(ids_.data(), {tokens_, options_.topk})};
}

LocateArgs Layer::locate_args() {
  return {.plan = &plan_,
          .ids = tensor(ids_.data(), {tokens_, options_.topk}),
          .requests = view(plan_.request_ids()),
          .block_table = v4() ? tensor(state_table_.data(), {rows_, state_width_})
                              : tensor(table_.data(), {rows_, width_}),
          .page = options_.limits.page,
          .pages = v4() ? states_.pages : cache_.pages,
          .slots = tensor(picked_.data(), {tokens_, options_.topk})};
}

AttendArgs Layer::attend_args() {
  const LayerOptions& o = options_;
  AttendArgs a{.plan = &plan_,
               .q = tensor(q_.data(), {tokens_, o.heads, o.model.d_qk}),
               .scale = 1.0f / std::sqrt(static_cast<float>(o.model.d_qk)),
               .out = tensor(out_.data(), {tokens_, o.heads, o.model.d_v}),
               .lse = tensor(lse_.data(), {tokens_, o.heads}),
               .workspace = workspace_.span()};
  const KvList chosen{.cache = v4() ? states_ : cache_,
                      .indices = tensor(picked_.data(), {tokens_, o.topk})};
  if (!v4()) {
    a.lists[0] = chosen;
    return a;
  }
  a.lists[0] = {.cache = cache_,
                .indices = tensor(window_.data(), {tokens_, o.model.window}),
                .lengths = tensor(window_lengths_.data(), {tokens_})};
  a.lists[1] = chosen;
  a.sink = tensor(sink_.data(), {o.heads});
  return a;
}

void Layer::run(const Step& step) {
  const LayerOptions& o = options_;
  for (const Request* r : step.arrived) write_prefix(*r);
  draw_inputs(step);
  timed(kPlanTime, [&] {
    plan_.refill({.query_starts = step.query_starts, .seq_lens = step.seq_lens});
    if (!v4()) return;
    compressed_slots({.plan = &plan_,
                      .positions = view(plan_.positions()),
                      .requests = view(plan_.request_ids()),
                      .block_table = tensor(state_table_.data(), {rows_, state_width_}),
                      .ratio = o.limits.ratio,
                      .page = o.limits.page,
                      .pages = states_.pages,
                      .slots = tensor(state_slots_.data(), {tokens_})});
    window_lists({.plan = &plan_,
                  .positions = view(plan_.positions()),
                  .requests = view(plan_.request_ids()),
                  .block_table = tensor(table_.data(), {rows_, width_}),
                  .window = o.model.window,
                  .page = o.limits.page,
                  .pages = cache_.pages,
                  .lists = tensor(window_.data(), {tokens_, o.model.window}),
                  .lengths = tensor(window_lengths_.data(), {tokens_})});
  });
  write_tokens();
  timed(kScoreTime, [&] { score(score_args()); });
  timed(kSelectTime, [&] { select(select_args()); });
  timed(kLocateTime, [&] { locate(locate_args()); });
  timed(kAttendTime, [&] { attend(attend_args()); });

  // What the stages had to do, for the throughput.
  double keys = 0, attended = 0;
  for (int64_t t = 0; t < tokens_; ++t) {
    const int32_t end = plan_.key_ends()[t];
    keys += end;
    attended += std::min<double>(end, o.topk) + (v4() ? window_lengths_[t] : 0);
  }
  const double record = static_cast<double>(page_bytes_used(o.model.fp8, 64)) / 64;
  const double picked = static_cast<double>(tokens_) * o.topk;
  totals_[kScoreTime].flops += keys * o.index_heads * 2 * kIndexDim;
  totals_[kScoreTime].bytes +=
      keys * static_cast<double>(page_bytes_used(CacheFormat::kIndexKeys, 1));
  totals_[kSelectTime].bytes += 4 * keys + 4 * picked;
  totals_[kLocateTime].bytes += 8 * picked;
  totals_[kAttendTime].flops += 2 * attended * o.heads * (o.model.d_qk + o.model.d_v);
  totals_[kAttendTime].bytes += attended * record;
}

}  // namespace winnow::cli
