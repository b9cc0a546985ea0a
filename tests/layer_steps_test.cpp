// pipeline() from a V4 layer's projections on, against the single verbs: the same bytes in caches
// and states, and the same output, for every kind of layer, prefills in chunks and decodes in one
// batch.
#include <cmath>
#include <cstring>

#include "core/formats.h"
#include "testing.h"
#include "winnow/error.h"
#include "winnow/winnow.h"

namespace winnow {
namespace {

using testing::Guarded;

constexpr int64_t kHeads = 3, kIndexHeads = 2, kRequests = 2, kContext = 320, kDim = 512;
constexpr int32_t kPage = 8;

struct Kind {
  std::string name;
  int32_t ratio = 4, extra = 0;
  bool overlap = false, gate = true, bias = true, indexed = false;
  bool wide = false;  // caches in bf16
  bool ring = false;
  Mode mode = Mode::kAuto;
  const char* kernel = nullptr;
};

std::vector<Kind> kinds() {
  return {
      {"window"},
      {.name = "window_bf16_reference", .wide = true, .kernel = "reference"},
      {.name = "c4a", .extra = 8, .overlap = true, .indexed = true},
      {.name = "c4a_bf16",
       .extra = 8,
       .overlap = true,
       .indexed = true,
       .wide = true,
       .ring = true},
      {.name = "c4a_separate",
       .extra = 8,
       .overlap = true,
       .indexed = true,
       .mode = Mode::kSeparate},
      {.name = "c4a_reference",
       .extra = 8,
       .overlap = true,
       .indexed = true,
       .kernel = "reference"},
      {.name = "c128a", .ratio = 128, .extra = 4},
      {.name = "c128a_ring_separate",
       .ratio = 128,
       .extra = 4,
       .ring = true,
       .mode = Mode::kSeparate},
      {.name = "v41_ratio_2", .ratio = 2, .extra = 160, .bias = false},
      {.name = "v41_ratio_1", .ratio = 1, .extra = 320, .gate = false, .bias = false},
  };
}

// New tokens of each request, and its length with them: decodes stand first.
struct Step {
  int32_t query[kRequests], seq[kRequests];
};
constexpr Step kSteps[] = {
    {{150, 70}, {150, 70}}, {{1, 75}, {151, 145}}, {{1, 1}, {152, 146}},
    {{1, 111}, {153, 257}}, {{2, 1}, {155, 258}},  {{101, 3}, {256, 261}},
};

// A cache that both sides have, all pages dealt out to the requests in turn.
struct Pages {
  Guarded<uint8_t> bytes;
  Guarded<int32_t> table;
  Cache cache;

  Pages(CacheFormat format, int64_t tokens)
      : bytes(count(tokens) * page_bytes(format, kPage), 0), table(count(tokens)) {
    cache = {bytes.data(), format, count(tokens), kPage};
    for (int64_t i = 0; i < count(tokens); ++i)
      table[i] = static_cast<int32_t>(i % width(tokens) * kRequests + i / width(tokens));
  }
  static int64_t width(int64_t tokens) { return tokens / kPage + 1; }
  static int64_t count(int64_t tokens) { return kRequests * width(tokens); }
  Tensor view() {
    return tensor(table.data(), {kRequests, std::ssize(table.values()) / kRequests});
  }
  int64_t slot(int64_t request, int64_t position) const {
    const int64_t wide = static_cast<int64_t>(table.size()) / kRequests;
    return int64_t{table[request * wide + position / kPage]} * kPage + position % kPage;
  }
};

// What one side keeps between steps.
struct Side {
  Pages window, states, keys;
  Guarded<float> state, index_state;

  explicit Side(const Kind& k)
      : window(k.wide ? CacheFormat::kV4Bf16 : CacheFormat::kV4Fp8, kContext),
        states(window.cache.format, kContext / k.ratio),
        keys(k.wide ? CacheFormat::kIndexKeysBf16 : CacheFormat::kIndexKeys, kContext / k.ratio),
        state(kRequests * kContext * 2 * values(k, kDim), 0),
        index_state(kRequests * kContext * 2 * values(k, 128), 0) {}
  static int64_t values(const Kind& k, int64_t d) { return k.overlap ? 2 * d : d; }
};

class Layer {
 public:
  explicit Layer(const Kind& kind)
      : k(kind),
        plan({.model = kV4,
              .format = kind.wide ? CacheFormat::kV4Bf16 : CacheFormat::kV4Fp8,
              .heads = kHeads,
              .topk = 16,
              .extra_topk = kind.extra,
              .ratio = kind.ratio,
              .index_heads = kIndexHeads,
              .page = kPage,
              .pages = Pages::count(kContext),
              .max_requests = kRequests,
              .max_tokens = 256,
              .max_context = kContext,
              .mode = kind.mode,
              .target = {.kernel = kind.kernel}}),
        angles(kContext * 64),
        kv_weight(kDim),
        weight(kDim),
        bias(kind.ratio * 2 * kDim),
        state_table(kRequests),
        workspace(pipeline_workspace_bytes(plan)) {
    for (Guarded<float>* of : {&kv_weight, &weight, &bias})
      for (float& x : *of) x = 1 + 0.3f * testing::normal(rng);
    rope_table({.theta = 160000, .table = tensor(angles.data(), {kContext, 2, 32})});
    for (int64_t r = 0; r < kRequests; ++r) state_table[r] = static_cast<int32_t>(r);
  }

  void draw(const Step& step) {
    std::vector<int32_t> starts = {0};
    for (const int32_t n : step.query) starts.push_back(starts.back() + n);
    plan.refill({starts, step.seq});
    tokens = plan.tokens();
    const auto fill = [&](auto& values, int64_t count) {
      values.resize(count);
      for (auto& x : values)
        if constexpr (sizeof x == 4) x = testing::normal(rng);
        else x = to_bf16(testing::normal(rng));
    };
    fill(q, tokens * kHeads * kDim);
    fill(kv, tokens * kDim);
    fill(rows, tokens * columns(kDim));
    fill(index_rows, tokens * columns(128));
    fill(index_q, tokens * kIndexHeads * 128);
    fill(index_weights, tokens * kIndexHeads);
  }
  int64_t columns(int64_t d) const { return (k.gate ? 2 : 1) * Side::values(k, d); }
  Rope rope() { return {.table = tensor(angles.data(), {kContext, 2, 32})}; }
  Tensor positions() { return tensor(plan.positions().data(), {tokens}); }
  Tensor requests() { return tensor(plan.request_ids().data(), {tokens}); }
  Target target() const { return {.kernel = k.kernel}; }

  // Rows of the compressor of width d, as both sides have it.
  CompressArgs compressor(Side& s, int64_t d) {
    const bool main = d == kDim;
    const int64_t values = Side::values(k, d);
    CompressArgs a{.rows = tensor((main ? rows : index_rows).data(), {tokens, columns(d)}),
                   .positions = positions(),
                   .requests = requests(),
                   .ratio = k.ratio,
                   .overlap = k.overlap,
                   .gate = k.gate,
                   .norm = {.weight = tensor(weight.data(), {d})},
                   .target = target()};
    if (k.bias) a.bias = tensor(bias.data(), {k.ratio, values});
    if (k.gate)
      a.state = {.rows = tensor((main ? s.state : s.index_state).data(),
                                {kRequests, kContext, 2 * values}),
                 .table = tensor(state_table.data(), {kRequests, 1}),
                 .ring = k.ring};
    return a;
  }
  PipelineArgs args(Side& s, bf16* out) {
    slots.resize(tokens);
    for (int64_t t = 0; t < tokens; ++t)
      slots[t] = s.window.slot(plan.request_ids()[t], plan.positions()[t]);
    PipelineArgs a{.plan = &plan,
                   .kv = tensor(kv.data(), {tokens, kDim}),
                   .slots = tensor(slots.data(), {tokens}),
                   .cache = s.window.cache,
                   .block_table = s.window.view(),
                   .q = tensor(q.data(), {tokens, kHeads, kDim}),
                   .scale = 0.05f,
                   .out = tensor(out, {tokens, kHeads, kDim}),
                   .workspace = {workspace.data(), workspace.size()}};
    if (k.extra > 0) {
      a.compressed = s.states.cache;
      a.compressed_table = s.states.view();
    }
    if (k.indexed) {
      a.indexer.keys = s.keys.cache;
      a.indexer.block_table = s.keys.view();
      codes.assign(tokens * kIndexHeads * 128, 0);
      made_weights.assign(tokens * kIndexHeads, 0);
      a.indexer.q = k.wide
                        ? tensor(reinterpret_cast<bf16*>(codes.data()), {tokens, kIndexHeads, 128})
                        : tensor(reinterpret_cast<e4m3*>(codes.data()), {tokens, kIndexHeads, 128});
      a.indexer.weights = tensor(made_weights.data(), {tokens, kIndexHeads});
    }
    return a;
  }
  // The same step in one call.
  PipelineArgs fused(Side& s, bf16* out) {
    PipelineArgs a = args(s, out);
    a.steps = {
        .rope = rope(), .kv_norm = {.weight = tensor(kv_weight.data(), {kDim})}, .q_norm = {}};
    const auto set = [&](Compressor& to, const CompressArgs& from) {
      to = {.rows = from.rows,
            .overlap = from.overlap,
            .gate = from.gate,
            .bias = from.bias,
            .state = from.state,
            .norm = from.norm};
    };
    if (k.extra > 0) set(a.steps.states, compressor(s, kDim));
    if (k.indexed) {
      set(a.steps.index, compressor(s, 128));
      a.steps.index_query = {.q = tensor(index_q.data(), {tokens, kIndexHeads, 128}),
                             .weights = tensor(index_weights.data(), {tokens, kIndexHeads}),
                             .factor = 0.0625f};
    }
    return a;
  }
  // Entries as rows of their own, rotated, and their slots.
  void entries(Side& s, int64_t d, std::vector<bf16>& latent, std::vector<int64_t>& to) {
    Pages& pages = d == kDim ? s.states : s.keys;
    latent.assign(tokens * d, bf16{0});
    to.resize(tokens);
    CompressArgs a = compressor(s, d);
    a.latent = tensor(latent.data(), {tokens, d});
    compress(a);
    std::vector<int32_t> first(tokens, -1);
    for (int64_t t = 0; t < tokens; ++t)
      if (const int32_t p = plan.positions()[t]; (p + 1) % k.ratio == 0)
        first[t] = p / k.ratio * k.ratio;
    const Tensor view = tensor(latent.data(), {tokens, 1, d});
    rotate({.x = view,
            .positions = tensor(first.data(), {tokens}),
            .rope = rope(),
            .out = view,
            .target = target()});
    compressed_slots({.positions = positions(),
                      .requests = requests(),
                      .block_table = pages.view(),
                      .ratio = k.ratio,
                      .page = kPage,
                      .pages = pages.cache.pages,
                      .slots = tensor(to.data(), {tokens})});
  }
  void composed(Side& s, bf16* out) {
    PipelineArgs a = args(s, out);
    prepare_query({.q = a.q,
                   .norm = {},
                   .positions = positions(),
                   .rope = rope(),
                   .out = a.q,
                   .target = target()});
    NormArgs normed;
    normed.rows[0] = {.x = a.kv, .out = a.kv, .norm = {.weight = tensor(kv_weight.data(), {kDim})}};
    normed.target = target();
    norm(normed);
    const Tensor view = tensor(kv.data(), {tokens, 1, kDim});
    rotate({.x = view, .positions = positions(), .rope = rope(), .out = view, .target = target()});
    std::vector<bf16> states, keys;
    std::vector<int64_t> state_slots, key_slots;
    if (k.extra > 0) {
      entries(s, kDim, states, state_slots);
      a.compressed_kv = tensor(states.data(), {tokens, kDim});
      a.compressed_slots = tensor(state_slots.data(), {tokens});
    }
    if (k.indexed) {
      entries(s, 128, keys, key_slots);
      a.indexer.k = tensor(keys.data(), {tokens, 128});
      a.indexer.slots = tensor(key_slots.data(), {tokens});
      index_query({.q = tensor(index_q.data(), {tokens, kIndexHeads, 128}),
                   .weights = tensor(index_weights.data(), {tokens, kIndexHeads}),
                   .positions = positions(),
                   .rope = rope(),
                   .factor = 0.0625f,
                   .out = a.indexer.q,
                   .out_weights = a.indexer.weights,
                   .target = target()});
    }
    pipeline(a);
    Rope back = rope();
    back.inverse = true;
    rotate({.x = a.out, .positions = positions(), .rope = back, .out = a.out, .target = target()});
  }

  Kind k;
  Plan plan;
  testing::Rng rng{5};
  int64_t tokens = 0;
  std::vector<bf16> q, kv, index_q;
  std::vector<float> rows, index_rows, index_weights, made_weights;
  std::vector<int64_t> slots;
  std::vector<uint16_t> codes;

 private:
  Guarded<float> angles, kv_weight, weight, bias;
  Guarded<int32_t> state_table;
  Guarded<std::byte> workspace;
};

class PipelineSteps : public ::testing::TestWithParam<Kind> {};

TEST_P(PipelineSteps, AreTheSingleVerbs) {
  Layer layer(GetParam());
  Side one(GetParam()), other(GetParam());
  for (const Step& step : kSteps) {
    layer.draw(step);
    const std::vector<bf16> q = layer.q, kv = layer.kv;
    Guarded<bf16> got(layer.tokens * kHeads * kDim), want(layer.tokens * kHeads * kDim);
    pipeline(layer.fused(one, got.data()));
    const std::vector<uint16_t> codes = layer.codes;
    ASSERT_EQ(std::memcmp(kv.data(), layer.kv.data(), kv.size() * 2), 0) << "kv is an input";
    layer.q = q;
    layer.composed(other, want.data());
    ASSERT_EQ(codes, layer.codes);
    ASSERT_TRUE(one.window.bytes.values() == other.window.bytes.values());
    ASSERT_TRUE(one.states.bytes.values() == other.states.bytes.values());
    ASSERT_TRUE(one.keys.bytes.values() == other.keys.bytes.values());
    ASSERT_TRUE(one.state.values() == other.state.values());
    ASSERT_TRUE(one.index_state.values() == other.index_state.values());
    ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(bf16)), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, PipelineSteps, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

TEST(PipelineStepsErrors, NameTheArgumentAndWriteNothing) {
  const Kind kind{.name = "", .extra = 8, .overlap = true, .indexed = true};
  Layer layer(kind);
  Side side(kind);
  layer.draw(kSteps[0]);
  Guarded<bf16> out(layer.tokens * kHeads * kDim);
  const std::vector<bf16> q = layer.q;
  const auto expect = [&](auto change, std::initializer_list<const char*> words) {
    PipelineArgs a = layer.fused(side, out.data());
    change(a);
    testing::expect_invalid([&] { pipeline(a); }, words);
  };
  using Args = PipelineArgs&;
  expect([](Args a) { a.steps.rope.table = {}; }, {"pipeline: steps.rope.table", "nothing"});
  expect([](Args a) { a.steps.rope.table.shape[2] = 16; }, {"pipeline: steps:", "rope.table"});
  expect([](Args a) { a.steps.q_norm.eps = -1; }, {"pipeline: steps:", "eps"});
  expect([](Args a) { a.steps.kv_norm.weight.shape[0] = 9; }, {"pipeline: steps:", "weight"});
  expect([](Args a) { a.steps.states.rows.shape[0] = 5; }, {"steps.states.rows", "at least"});
  expect([](Args a) { a.steps.states.rows.data = nullptr; }, {"steps.states.rows", "null"});
  expect([](Args a) { a.steps.states.rows.shape[1] = 7; }, {"pipeline: steps: compress: rows"});
  expect([](Args a) { a.steps.states.state = {}; }, {"pipeline: steps: compress: state"});
  expect([](Args a) { a.steps.index.bias.shape[0] = 3; }, {"pipeline: steps: compress: bias"});
  expect([](Args a) { a.steps.index_query.q.shape[1] = 3; }, {"steps.index_query.q"});
  expect([](Args a) { a.steps.index_query.weights.data = nullptr; }, {"steps.index_query.weights"});
  expect([](Args a) { a.steps.index_query.factor = NAN; }, {"steps: index_query: factor"});
  expect([](Args a) { a.indexer.q.stride[0] = 0; }, {"indexer.q", "overlap"});
  expect([](Args a) { a.q.stride[0] = 0; }, {"q", "overlap"});
  expect([](Args a) { a.compressed_kv = a.kv; }, {"compressed_kv", "none with steps.states"});
  expect([](Args a) { a.indexer.slots = a.slots; }, {"indexer.slots", "none with steps.index"});
  expect([](Args a) { a.compressed.format = CacheFormat::kV4Bf16; }, {"compressed"});
  for (const bf16 x : out) EXPECT_EQ(x.bits, 0xcdcd);
  EXPECT_EQ(std::memcmp(q.data(), layer.q.data(), q.size() * 2), 0);
  for (Guarded<uint8_t>* bytes : {&side.window.bytes, &side.states.bytes, &side.keys.bytes})
    for (const uint8_t x : *bytes) ASSERT_EQ(x, 0);
  for (const float x : side.state) ASSERT_EQ(x, 0);
}

}  // namespace
}  // namespace winnow
