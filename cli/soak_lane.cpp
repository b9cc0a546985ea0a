#include "soak_lane.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "accuracy.h"
#include "core/formats.h"
#include "winnow/error.h"

namespace winnow::cli {

namespace {

// Small shapes, so that steps are many; a step that prefills is longer than one that decodes.
constexpr int32_t kHeads = 4, kIndexHeads = 2, kTopk = 24, kPage = 16, kContext = 192;
constexpr int32_t kStepTokens = 20, kPadding = 2, kRequests = 5, kRatio = 4;
constexpr int64_t kTokens = kStepTokens + kPadding;
constexpr int64_t kRows = std::max<int64_t>(kTokens, kContext);  // of kv: a prefix is longer

constexpr Mode kLaneModes[] = {Mode::kMixed, Mode::kDirect, Mode::kSeparate, Mode::kAuto};
constexpr int64_t kPlanLife = 500;  // steps after which a plan is made anew
constexpr int64_t kBurst = 500;     // replays between two comparisons

int64_t slot_of(const std::vector<int32_t>& pages, int64_t at) {
  return int64_t{pages[static_cast<size_t>(at / kPage)]} * kPage + at % kPage;
}

// The bar of decoding; a batch of one token is too small for the mean that its cosine is. All
// elements may be rounded the same way, by 2^-9 in P, in V and in both outputs: (4 * 2^-9)^2 / 2.
constexpr tools::Bar kOutBar{tools::kDecodeOut.absolute, tools::kDecodeOut.relative, 0x1p-15};

[[noreturn]] void off(const std::string& what) {
  throw Error(ErrorCode::kRuntime, "soak: " + what);
}

}  // namespace

SoakCache::SoakCache(const Queue& queue, CacheFormat f, int32_t page_, int64_t pages_)
    : format(f),
      page(page_),
      pages(pages_),
      memory(queue, pages * page_bytes(f, page)),
      shadow(pages * page_bytes(f, page)) {}

Limits SoakLane::limits() const {
  return {.requests = kRequests,
          .context = kContext,
          .step_tokens = kStepTokens,
          .page = kPage,
          .ratio = v4() ? kRatio : 1};
}

SoakLane::SoakLane(const LaneOptions& o)
    : options_(o),
      random_(o.seed),
      queue_(o.cuda),
      requests_(limits(), o.seed + 1),
      main_(queue_, o.model.fp8, kPage, requests_.pages()),
      states_(queue_, o.model.fp8, kPage, v4() ? requests_.state_pages() : 0),
      keys_(queue_, CacheFormat::kIndexKeys, kPage,
            v4() ? requests_.state_pages() : requests_.pages()),
      kv_(queue_, kRows * o.model.d_qk),
      state_kv_(queue_, kRows * o.model.d_qk),
      index_k_(queue_, kRows * kIndexDim),
      q_(queue_, kTokens * kHeads * o.model.d_qk),
      out_(queue_, kTokens * kHeads * o.model.d_v),
      slots_(queue_, kRows),
      state_slots_(queue_, kRows),
      table_(queue_, int64_t{kRequests} * requests_.table_width()),
      state_table_(queue_, int64_t{kRequests} * std::max(requests_.state_width(), 1)),
      index_q_(queue_, kTokens * kIndexHeads * kIndexDim),
      weights_(queue_, kTokens * kIndexHeads),
      sink_(queue_, kHeads),
      lse_(queue_, kTokens * kHeads),
      rounding_(kTokens * kHeads),
      want_{tools::Buffer<bf16>(kTokens * kHeads * o.model.d_v),
            tools::Buffer<float>(kTokens * kHeads)} {
  random_.normals(sink_.host.span(), 1.0f);
  sink_.upload(queue_);
  for (int mode = 0; mode < kModes; ++mode) make_plan(mode);
}

PlanOptions SoakLane::plan_options(int mode, bool reference) const {
  PlanOptions p{.model = options_.model, .format = options_.model.fp8, .heads = kHeads};
  p.topk = kTopk;
  if (v4()) {
    p.extra_topk = kTopk;
    p.ratio = kRatio;
  }
  p.index_heads = kIndexHeads;
  p.page = kPage;
  p.pages = requests_.pages();
  p.max_requests = kRequests;
  p.max_tokens = static_cast<int32_t>(kTokens);
  p.max_context = kContext;
  p.mode = kLaneModes[mode];
  if (p.mode == Mode::kAuto) p.split = SplitPolicy::kFixed;
  p.split_size = 16;
  if (reference) p.target.kernel = "reference";
  else p.target.device = queue_.device();
  return p;
}

void SoakLane::make_plan(int mode) {
  Planned& p = planned_[mode];
  p.plan = std::make_unique<Plan>(plan_options(mode, false));
  p.reference = std::make_unique<Plan>(plan_options(mode, true));
  const size_t bytes = pipeline_workspace_bytes(*p.plan);
  p.device = std::make_unique<DeviceMemory>(queue_.cuda() ? bytes : 0);
  p.workspace = tools::Buffer<std::byte>(queue_.cuda() ? 0 : static_cast<int64_t>(bytes));
  p.reference_workspace =
      tools::Buffer<std::byte>(static_cast<int64_t>(pipeline_workspace_bytes(*p.reference)));
  ++counts_.plans;
}

// By the kernel where the lane runs, and by the reference into the shadow.
void SoakLane::write_both(SoakCache& to, const Mirror<bf16>& rows, const Mirror<int64_t>& slots,
                          int64_t n) {
  const int64_t d = record_dim(to.format);
  rows.upload(queue_);
  slots.upload(queue_);
  write({.kv = tensor(rows.at(queue_), {n, d}),
         .slots = tensor(slots.at(queue_), {n}),
         .cache = to.cache(to.memory.at(queue_)),
         .target = {.device = queue_.device()}});
  write({.kv = tensor(rows.host.data(), {n, d}),
         .slots = tensor(slots.host.data(), {n}),
         .cache = to.cache(to.shadow.data()),
         .target = {.kernel = "reference"}});
  queue_.wait();
}

// Index keys, queries and weights are small integers and powers of two: logits are exact, so that
// every kernel selects the same keys.
void small_integers(tools::Random& random, std::span<bf16> out) {
  for (bf16& x : out) x = to_bf16(static_cast<float>(random.draw(-3, 3)));
}

// What a prefix cache would have brought.
void SoakLane::write_prefix(const Request& r) {
  const int64_t d = options_.model.d_qk, n = r.length, states = n / kRatio;
  random_.normals(kv_.host.span(0, n * d), tools::kLatentSigma);
  for (int64_t i = 0; i < n; ++i) slots_.host[i] = slot_of(r.pages, i);
  write_both(main_, kv_, slots_, n);
  if (v4()) {
    for (int64_t i = 0; i < states; ++i) slots_.host[i] = slot_of(r.state_pages, i);
    write_both(states_, kv_, slots_, states);
  }
  const int64_t keys = v4() ? states : n;
  small_integers(random_, index_k_.host.span(0, keys * kIndexDim));
  write_both(keys_, index_k_, slots_, keys);
}

void SoakLane::draw_inputs(const Step& step) {
  const int64_t d = options_.model.d_qk;
  tokens_ = step.tokens() + random_.draw(0, kPadding);
  rows_ = static_cast<int64_t>(step.requests.size());
  random_.normals(kv_.host.span(0, tokens_ * d), tools::kLatentSigma);
  if (v4()) random_.normals(state_kv_.host.span(0, tokens_ * d), tools::kLatentSigma);
  small_integers(random_, index_k_.host.span(0, tokens_ * kIndexDim));
  random_.normals(q_.host.span(0, tokens_ * kHeads * d), 1.0f);
  for (e4m3& x : index_q_.host.span(0, tokens_ * kIndexHeads * kIndexDim))
    x = to_e4m3(static_cast<float>(random_.draw(-2, 2)));
  for (float& x : weights_.host.span(0, tokens_ * kIndexHeads))
    x = std::ldexp(random_.draw(0, 1) ? 1.0f : -1.0f, static_cast<int>(random_.draw(-1, 2)));
  std::fill(slots_.host.begin(), slots_.host.end(), -1);
  std::fill(state_slots_.host.begin(), state_slots_.host.end(), -1);
  const int32_t width = requests_.table_width(), state_width = requests_.state_width();
  for (int64_t r = 0; r < rows_; ++r) {
    const Request& request = *step.requests[r];
    std::copy(request.pages.begin(), request.pages.end(), table_.host.begin() + r * width);
    std::copy(request.state_pages.begin(), request.state_pages.end(),
              state_table_.host.begin() + r * state_width);
    for (int32_t t = step.query_starts[r]; t < step.query_starts[r + 1]; ++t) {
      const int64_t position = request.length + t - step.query_starts[r];
      slots_.host[t] = slot_of(request.pages, position);
      if (v4() && (position + 1) % kRatio == 0)
        state_slots_.host[t] = slot_of(request.state_pages, position / kRatio);
    }
  }
  for (const auto* m : {&kv_, &state_kv_, &index_k_, &q_}) m->upload(queue_);
  for (const auto* m : {&slots_, &state_slots_}) m->upload(queue_);
  for (const auto* m : {&table_, &state_table_}) m->upload(queue_);
  index_q_.upload(queue_);
  weights_.upload(queue_);
}

PipelineArgs SoakLane::args(bool reference) {
  static const Queue host(false);
  const Queue& queue = reference ? host : queue_;
  const Planned& p = planned_[mode_];
  const int64_t d = options_.model.d_qk, dv = options_.model.d_v;
  const auto cache = [&](const SoakCache& c) {
    return c.cache(reference ? c.shadow.data() : c.memory.at(queue));
  };
  bf16* out = reference ? want_.out.data() : out_.at(queue);
  float* lse = reference ? want_.lse.data() : lse_.at(queue);
  const Tensor table = tensor(table_.at(queue), {rows_, requests_.table_width()});
  const Tensor state_table = tensor(state_table_.at(queue), {rows_, requests_.state_width()});
  PipelineArgs a{.plan = reference ? p.reference.get() : p.plan.get(),
                 .kv = tensor(kv_.at(queue), {tokens_, d}),
                 .slots = tensor(slots_.at(queue), {tokens_}),
                 .cache = cache(main_),
                 .block_table = table,
                 .q = tensor(q_.at(queue), {tokens_, kHeads, d}),
                 .scale = 1.0f / std::sqrt(static_cast<float>(d)),
                 .sink = tensor(sink_.at(queue), {kHeads}),
                 .out = tensor(out, {tokens_, kHeads, dv}),
                 .lse = tensor(lse, {tokens_, kHeads}),
                 .workspace = reference ? p.reference_workspace.span() : p.workspace.span()};
  if (queue.cuda()) a.workspace = {p.device->data(), pipeline_workspace_bytes(*p.plan)};
  if (v4()) {
    a.compressed_kv = tensor(state_kv_.at(queue), {tokens_, d});
    a.compressed_slots = tensor(state_slots_.at(queue), {tokens_});
    a.compressed = cache(states_);
    a.compressed_table = state_table;
  }
  a.indexer = {.k = tensor(index_k_.at(queue), {tokens_, kIndexDim}),
               .slots = v4() ? a.compressed_slots : a.slots,
               .keys = cache(keys_),
               .block_table = v4() ? state_table : table,
               .q = tensor(index_q_.at(queue), {tokens_, kIndexHeads, kIndexDim}),
               .weights = tensor(weights_.at(queue), {tokens_, kIndexHeads})};
  return a;
}

void SoakLane::run_batch(const Step& step) {
  Planned& p = planned_[mode_];
  const Batch batch{step.query_starts, step.seq_lens, tokens_};
  p.plan->refill(batch);
  pipeline(args(false));
  // The shadow has what the reference writes, in every step.
  const int64_t d = options_.model.d_qk;
  const auto write_shadow = [&](const SoakCache& to, const Mirror<bf16>& rows, int64_t width,
                                const Mirror<int64_t>& slots) {
    write({.kv = tensor(rows.host.data(), {tokens_, width}),
           .slots = tensor(slots.host.data(), {tokens_}),
           .cache = to.cache(to.shadow.data()),
           .target = {.kernel = "reference"}});
  };
  write_shadow(main_, kv_, d, slots_);
  if (v4()) write_shadow(states_, state_kv_, d, state_slots_);
  write_shadow(keys_, index_k_, kIndexDim, v4() ? state_slots_ : slots_);
  out_.download(queue_);
  lse_.download(queue_);
  queue_.wait();
  if (counts_.steps == options_.damage_step) damage();
  if (counts_.steps % options_.check_every != 0) return;
  p.reference->refill(batch);
  pipeline(args(true));
  check();
}

// The first byte of the batch's first request, as a stray write would do it.
void SoakLane::damage() {
  main_.memory.download(queue_);
  queue_.wait();
  const int64_t first = int64_t{table_.host[0]} * page_bytes(main_.format, kPage);
  main_.memory.host[first] ^= std::byte{1};
  main_.memory.upload(queue_);
  queue_.wait();
}

void SoakLane::check_cache(const SoakCache& c, const char* name) const {
  c.memory.download(queue_);
  queue_.wait();
  if (std::memcmp(c.memory.host.data(), c.shadow.data(), c.shadow.size()) != 0)
    off(std::string("the ") + name + " cache has other bytes than the reference wrote");
}

// On Hopper an fp8 record's scale and values are rounded to fp16: a logit is off by up to 2^-10 of
// scale * sum |q_i K_i|, and no value is beyond 3.5 sigma. As compare() takes it.
Tensor SoakLane::logit_rounding() {
  if (!queue_.cuda()) return {};
  const int64_t d = options_.model.d_qk;
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  for (int64_t row = 0; row < tokens_ * kHeads; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < d; ++i) sum += std::fabs(to_float(q_.host[row * d + i]));
    rounding_[row] = static_cast<float>(0x1p-10 * scale * sum * 3.5 * tools::kLatentSigma /
                                        tools::kCancellation);
  }
  return tensor(rounding_.data(), {tokens_, kHeads});
}

void SoakLane::check() {
  check_cache(main_, "main");
  check_cache(keys_, "index key");
  if (v4()) check_cache(states_, "compressed");
  const int64_t dv = options_.model.d_v;
  const Tensor out = tensor(out_.host.data(), {tokens_, kHeads, dv});
  const Tensor lse = tensor(lse_.host.data(), {tokens_, kHeads});
  const tools::Deviation o =
      tools::compare(out, tensor(want_.out.data(), {tokens_, kHeads, dv}), kOutBar);
  const tools::Deviation l = tools::compare(lse, tensor(want_.lse.data(), {tokens_, kHeads}),
                                            tools::kDecodeLse, logit_rounding());
  if (!o.ok) off("out: " + o.text(out));
  if (!l.ok) off("lse: " + l.text(lse));
  counts_.worst = std::max({counts_.worst, o.worst, l.worst});
  ++counts_.checked;
}

void SoakLane::step() {
  if (random_.draw(0, 15) == 0 && requests_.evict()) ++counts_.evicted;
  const Step& step = requests_.next();
  for (const Request* r : step.arrived) write_prefix(*r);
  const int mode = static_cast<int>(random_.draw(0, kModes - 1));
  counts_.mode_changes += mode != mode_;
  mode_ = mode;
  if (counts_.steps % kPlanLife == kPlanLife - 1) make_plan(mode_);
  draw_inputs(step);
  ++counts_.steps;
  run_batch(step);
  requests_.done();
  counts_.tokens += step.tokens();
  counts_.arrived += static_cast<int64_t>(step.arrived.size());
  counts_.finished += step.finished;
}

void SoakLane::replay(int64_t times) {
  const auto bits = [&] {
    std::vector<std::byte> all(static_cast<size_t>(tokens_ * kHeads) *
                               (static_cast<size_t>(options_.model.d_v) * 2 + 4));
    const size_t out = static_cast<size_t>(tokens_ * kHeads * options_.model.d_v) * 2;
    std::memcpy(all.data(), out_.host.data(), out);
    std::memcpy(all.data() + out, lse_.host.data(), all.size() - out);
    return all;
  };
  const std::vector<std::byte> want = bits();  // of the call itself
  const PipelineArgs captured = args(false);
  const Replay graph(queue_, [&] { pipeline(captured); });
  for (int64_t left = times; left > 0; left -= kBurst) {
    const int64_t burst = std::min(left, kBurst);
    graph.launch(burst);
    out_.download(queue_);
    lse_.download(queue_);
    queue_.wait();
    counts_.replays += burst;
    if (bits() != want) off("a replayed graph gave other bits than the call");
  }
}

}  // namespace winnow::cli
