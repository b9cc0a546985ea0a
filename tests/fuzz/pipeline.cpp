// pipeline(), bit for bit what the single verbs give one after the other, with slots that are left
// out and hostile block tables: V3.2 against write, score_select, locate and attend; V4 from a
// layer's projections on (LayerSteps).
#include "winnow/pipeline.h"

#include <numeric>

#include "layer_steps_problem.h"
#include "target.h"

namespace winnow::testing {
namespace {

// Requests of which each has a few new tokens behind a prefix; the last may be padding.
struct FuzzRequests {
  std::vector<int32_t> starts = {0}, lens;

  explicit FuzzRequests(Source& s) {
    for (int64_t n = draw(s, 1, 3); n > 0; --n) {
      const int32_t query = draw32(s, 0, 3);
      starts.push_back(starts.back() + query);
      lens.push_back(query + draw32(s, 0, 9));
    }
  }
};

// Pages of a cache in a random order, for R requests; some entries name no page. Pages are named
// once: which of two tokens a slot would keep is not promised.
Guarded<int32_t> dealt(Source& s, int64_t pages, int64_t entries) {
  std::vector<int32_t> order(pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), s);
  Guarded<int32_t> table(entries);
  for (int64_t i = 0; i < entries; ++i)
    table[i] = chance(s, 85) ? order[i] : index_for(s, pages, 100);
  return table;
}

// A layer of V3.2 and a batch.
struct FuzzLayer {
  static constexpr int64_t kHeads = 2, kIndexHeads = 2, kWidth = 6;
  FuzzRequests requests;
  int64_t R, T, pages;
  int32_t page, topk;
  CacheFormat format;
  Plan plan;
  Guarded<int32_t> table;
  Guarded<int64_t> slots;
  Guarded<bf16> kv, keys, q;
  Guarded<e4m3> index_q;
  Guarded<float> weights;
  std::vector<std::byte> workspace;

  explicit FuzzLayer(Source& s)
      : requests(s),
        R(std::ssize(requests.lens)),
        T(requests.starts.back()),
        pages(R * kWidth),
        page(draw32(s, 2, 5)),
        topk(draw32(s, 1, 8)),
        format(chance(s, 70) ? CacheFormat::kV32Fp8 : CacheFormat::kV32Bf16),
        plan(options(s)),
        table(dealt(s, pages, R * kWidth)),
        slots(T),
        kv(normals(s, T * 576, 0.1f)),
        keys(normals(s, T * kIndexDim)),
        q(normals(s, T * kHeads * 576)),
        index_q(T * kIndexHeads * kIndexDim),
        weights(T * kIndexHeads),
        workspace(pipeline_workspace_bytes(plan)) {
    plan.refill({.query_starts = requests.starts, .seq_lens = requests.lens});
    for (int64_t t = 0; t < T; ++t) {
      const int32_t position = plan.positions()[t];
      const int64_t at =
          position < 0 ? -1 : table[plan.request_ids()[t] * kWidth + position / page];
      const bool left_out = at < 0 || at >= pages || chance(s, 10);
      slots[t] = left_out ? draw(s, INT64_MIN, -1) : at * page + position % page;
    }
    for (e4m3& x : index_q) x = to_e4m3(s.normal());
    for (float& x : weights) x = s.normal();
  }
  PlanOptions options(Source& s) const {
    const bool fp8 = format == CacheFormat::kV32Fp8;
    return {.format = format,
            .heads = kHeads,
            .topk = topk,
            .index_heads = kIndexHeads,
            .page = page,
            .pages = pages,
            .max_requests = 3,
            .max_tokens = 9,
            .max_context = 12,
            .mode = !fp8            ? Mode::kAuto
                    : chance(s, 50) ? Mode::kMixed
                                    : Mode::kDirect,
            .split = chance(s, 50) ? SplitPolicy::kBalanced : SplitPolicy::kFixed,
            .split_size = draw32(s, 1, 8)};
  }
};

// The caches of one side and what it gave.
struct FuzzSide {
  Guarded<uint8_t> latent, index;
  Guarded<bf16> out;
  Guarded<float> lse;

  explicit FuzzSide(const FuzzLayer& l)
      : latent(l.pages * page_bytes(l.format, l.page), 0),
        index(l.pages * page_bytes(CacheFormat::kIndexKeys, l.page), 0),
        out(l.T * FuzzLayer::kHeads * 512),
        lse(l.T * FuzzLayer::kHeads) {}

  PipelineArgs args(FuzzLayer& l) {
    const Tensor table = tensor(l.table.data(), {l.R, FuzzLayer::kWidth});
    const Tensor slots = tensor(l.slots.data(), {l.T});
    return {.plan = &l.plan,
            .kv = tensor(l.kv.data(), {l.T, 576}),
            .slots = slots,
            .cache = {latent.data(), l.format, l.pages, l.page},
            .block_table = table,
            .indexer = {.k = tensor(l.keys.data(), {l.T, kIndexDim}),
                        .slots = slots,
                        .keys = {index.data(), CacheFormat::kIndexKeys, l.pages, l.page},
                        .block_table = table,
                        .q = tensor(l.index_q.data(), {l.T, FuzzLayer::kIndexHeads, kIndexDim}),
                        .weights = tensor(l.weights.data(), {l.T, FuzzLayer::kIndexHeads})},
            .q = tensor(l.q.data(), {l.T, FuzzLayer::kHeads, 576}),
            .scale = 0.05f,
            .out = tensor(out.data(), {l.T, FuzzLayer::kHeads, 512}),
            .lse = tensor(lse.data(), {l.T, FuzzLayer::kHeads}),
            .workspace = l.workspace};
  }
};

void by_verbs(FuzzLayer& l, const PipelineArgs& a) {
  const Tensor requests = tensor(l.plan.request_ids().data(), {l.T});
  write({.plan = a.plan, .kv = a.kv, .slots = a.slots, .cache = a.cache});
  write({.plan = a.plan, .kv = a.indexer.k, .slots = a.indexer.slots, .cache = a.indexer.keys});
  Guarded<int32_t> ids(l.T * l.topk), located(l.T * l.topk);
  const Tensor id_view = tensor(ids.data(), {l.T, l.topk});
  score_select({.score = {.plan = a.plan,
                          .q = a.indexer.q,
                          .weights = a.indexer.weights,
                          .keys = a.indexer.keys,
                          .block_table = a.indexer.block_table,
                          .requests = requests,
                          .ends = tensor(l.plan.key_ends().data(), {l.T})},
                .ids = id_view,
                .workspace = a.workspace});
  locate({.plan = a.plan,
          .ids = id_view,
          .requests = requests,
          .block_table = a.block_table,
          .page = l.page,
          .pages = l.pages,
          .slots = tensor(located.data(), {l.T, l.topk})});
  AttendArgs attended{.plan = a.plan,
                      .part = 0,
                      .q = a.q,
                      .scale = a.scale,
                      .out = a.out,
                      .lse = a.lse,
                      .workspace = a.workspace};
  attended.lists[0] = {.cache = a.cache, .indices = tensor(located.data(), {l.T, l.topk})};
  attend(attended);
}

void v32_any(Source& s) {
  FuzzLayer layer(s);
  if (layer.T == 0) return;
  FuzzSide one(layer), other(layer);
  pipeline(one.args(layer));
  by_verbs(layer, other.args(layer));
  expect_same(one.latent, other.latent.values(), "pipeline: cache");
  expect_same(one.index, other.index.values(), "pipeline: index keys");
  expect_same(one.out, other.out.values(), "pipeline: out");
  expect_same(one.lse, other.lse.values(), "pipeline: lse");
}

steps::Kind any_kind(Source& s) {
  constexpr int32_t ratios[] = {1, 2, 4};
  steps::Kind k{.name = "", .ratio = ratios[draw(s, 0, 2)]};
  k.context = 16;
  k.tokens = 10;
  k.page = draw32(s, 2, 5);
  k.window = draw32(s, 1, 5);
  k.gate = k.ratio > 1 || chance(s, 50);
  k.overlap = k.gate && chance(s, 50);
  k.bias = k.gate && chance(s, 50);
  k.wide = chance(s, 30);
  k.ring = chance(s, 50);
  const int64_t lists = draw(s, 0, 2);  // the window alone, all states, the indexer's
  k.indexed = lists == 2;
  if (lists > 0) k.extra = k.indexed ? draw32(s, 1, 4) : k.context / k.ratio;
  constexpr Mode modes[] = {Mode::kAuto, Mode::kMixed, Mode::kSeparate, Mode::kDirect};
  if (!k.wide) k.mode = modes[draw(s, 0, 3)];
  if (chance(s, 30)) k.kernel = "reference";
  return k;
}

void v4_any(Source& s) {
  const steps::Kind kind = any_kind(s);
  steps::Layer layer(kind);
  layer.values = Source(s());
  steps::Side one(kind), other(kind);
  // Some entries of the tables name no page, on both sides the same.
  for (const auto part : {&steps::Side::window, &steps::Side::states, &steps::Side::keys}) {
    steps::Pages &own = one.*part, &its = other.*part;
    for (size_t i = 0; i < own.table.size(); ++i)
      if (chance(s, 5)) own.table[i] = its.table[i] = index_for(s, own.cache.pages, 100);
  }
  int32_t done[] = {0, 0};
  for (int64_t n = draw(s, 1, 3); n > 0; --n) {
    steps::Step step{};
    for (int r = 0; r < 2; ++r) {
      step.query[r] = draw32(s, r == 0 ? 1 : 0, 5);
      step.seq[r] = done[r] += step.query[r];
    }
    steps::expect_same_step(layer, step, one, other);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

void run(Source& s) { chance(s, 50) ? v32_any(s) : v4_any(s); }

const FuzzTarget pipeline_target{"pipeline", 1, run};

}  // namespace
}  // namespace winnow::testing
