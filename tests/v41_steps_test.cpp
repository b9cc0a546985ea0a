// pipeline() over layers that share: one keeps states and index keys and finds blocks, one chooses
// anew inside these, one takes that choice. The same bytes in caches and lists and the same output
// as from the single verbs, in chunks, decodes and mixed batches.
#include <cstring>
#include <deque>

#include "layer_steps_problem.h"

namespace winnow {
namespace {

using testing::device_finished;
using testing::Guarded;
using testing::MappedVector;
using testing::steps::kDim;
using testing::steps::kHeads;
using testing::steps::Kind;
using testing::steps::Layer;
using testing::steps::same;
using testing::steps::Side;
using testing::steps::Step;

constexpr int32_t kChosen = 24, kBlocks = 4;
constexpr float kEps = 1e-20f;

enum class Role : uint8_t { kSource, kChooses, kTakes };
constexpr Role kRoles[] = {Role::kSource, Role::kChooses, Role::kTakes};

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (const int32_t ratio : {1, 2}) {
    const std::string name = "ratio_" + std::to_string(ratio);
    Kind k{.name = name, .ratio = ratio, .extra = kChosen, .gate = ratio > 1, .bias = false};
    k.indexed = true;
    all.push_back(k);
    k.name = name + "_reference";
    k.kernel = "reference";
    all.push_back(k);
    k.kernel = nullptr;
    k.name = name + "_separate";
    k.mode = Mode::kSeparate;
    all.push_back(k);
    k.mode = Mode::kAuto;
    k.name = name + "_bf16_ring";
    k.wide = k.ring = true;
    all.push_back(k);
  }
  return testing::steps::on_devices(all);
}

// A layer's part of a model: its own window, and what it shares with the layers behind it.
struct Shared {
  Side source;
  std::deque<Side> windows;  // of kRoles; a Side does not move
  Guarded<int32_t> ids, blocks;
  Guarded<bf16> latent, projected, out;

  explicit Shared(const Kind& k)
      : source(k),
        ids(k.tokens * kChosen),
        blocks(k.tokens * kBlocks),
        latent(k.tokens * kDim),
        projected(k.tokens * 128),
        out(k.tokens * kHeads * kDim) {
    for (size_t i = 0; i < std::size(kRoles); ++i) windows.emplace_back(k);
    for (bf16& x : latent) x = bf16{0};
  }
};

class Model {
 public:
  explicit Model(const Kind& kind) : layer(kind), weight(kDim) {
    for (float& x : weight) x = 1 + 0.3f * layer.values.normal();
  }

  // What a call of pipeline() takes in this role, from projections on.
  PipelineArgs args(Shared& s, Role role) {
    PipelineArgs a = layer.fused(s.windows[static_cast<size_t>(role)], s.out.data());
    a.compressed = s.source.states.cache;
    a.compressed_table = s.source.states.view();
    a.indexer.keys = s.source.keys.cache;
    a.indexer.block_table = s.source.keys.view();
    a.steps.states = a.steps.index = {};
    a.steps.q_norm.kind = NormKind::kNone;
    a.steps.kv_norm.eps = kEps;
    a.ids = tensor(s.ids.data(), {layer.tokens, kChosen});
    const Tensor blocks = tensor(s.blocks.data(), {layer.tokens, kBlocks});
    if (role == Role::kSource) {
      a.indexer.k = tensor(s.projected.data(), {layer.tokens, 128});
      a.steps.index.norm = norm_of(128);
      a.blocks.best = blocks;
    } else if (role == Role::kChooses) {
      a.blocks.within = blocks;
    } else {
      a.indexer = {};
      a.steps.index_query = {};
    }
    return a;
  }

  // Entries and their latents, and a projection of these.
  void compress_states(Shared& s, bool fused) {
    MappedVector<int64_t> slots(layer.tokens);
    find_slots(s.source.states, slots);
    CompressArgs a = layer.compressor(s.source, kDim);
    a.norm = norm_of(kDim);
    a.latent = tensor(s.latent.data(), {layer.tokens, kDim});
    if (fused) {
      a.rope = layer.rope();
      a.slots = tensor(slots.data(), {layer.tokens});
      a.cache = s.source.states.cache;
    }
    compress(a);
    EXPECT_TRUE(device_finished());
    for (int64_t t = 0; t < layer.tokens; ++t)
      std::memcpy(&s.projected[t * 128], &s.latent[t * kDim], 128 * sizeof(bf16));
    if (fused) return;
    MappedVector<bf16> turned(s.latent.begin(), s.latent.begin() + layer.tokens * kDim);
    turn(turned, kDim, state_starts());
    write({.kv = tensor(turned.data(), {layer.tokens, kDim}),
           .slots = tensor(slots.data(), {layer.tokens}),
           .cache = s.source.states.cache,
           .target = layer.target()});
    EXPECT_TRUE(device_finished());
  }

  // The step of args() by the single verbs.
  void by_verbs(Shared& s, Role role) {
    PipelineArgs a = args(s, role);
    prepare_query({.q = a.q,
                   .norm = a.steps.q_norm,
                   .positions = layer.positions(),
                   .rope = layer.rope(),
                   .out = a.q,
                   .target = layer.target()});
    MappedVector<bf16> kv = layer.kv;
    normalise(kv, kDim, a.steps.kv_norm);
    turn(kv, kDim, layer.positions());
    a.kv.data = kv.data();
    write({.plan = a.plan, .kv = a.kv, .slots = a.slots, .cache = a.cache});
    if (role == Role::kSource) write_keys(s);
    if (role != Role::kTakes) choose(a);
    Rope back = layer.rope();
    back.inverse = true;
    if (layer.plan.mode() == Mode::kSeparate) {
      // Chunks are gathered: the stages as one call, which other tests take apart.
      a.steps = {};
      a.indexer = {};
      a.blocks = {};
      pipeline(a);
    } else {
      attend_to(a);
    }
    rotate({.x = a.out,
            .positions = layer.positions(),
            .rope = back,
            .out = a.out,
            .target = layer.target()});
    EXPECT_TRUE(device_finished());
  }

  Layer layer;

 private:
  Norm norm_of(int64_t d) { return {.weight = tensor(weight.data(), {d}), .eps = kEps}; }
  Tensor state_starts() { return tensor(layer.plan.state_starts().data(), {layer.tokens}); }

  void find_slots(testing::steps::Pages& pages, MappedVector<int64_t>& slots) {
    compressed_slots({.positions = layer.positions(),
                      .requests = layer.requests(),
                      .block_table = pages.view(),
                      .ratio = layer.k.ratio,
                      .page = pages.page,
                      .pages = pages.cache.pages,
                      .slots = tensor(slots.data(), {layer.tokens}),
                      .target = layer.target()});
  }
  void normalise(MappedVector<bf16>& rows, int64_t d, const Norm& by) {
    const Tensor view = tensor(rows.data(), {layer.tokens, d});
    NormArgs a;
    a.rows[0] = {.x = view, .out = view, .norm = by};
    a.target = layer.target();
    norm(a);
  }
  void turn(MappedVector<bf16>& rows, int64_t d, const Tensor& positions) {
    const Tensor view = tensor(rows.data(), {layer.tokens, 1, d});
    rotate({.x = view,
            .positions = positions,
            .rope = layer.rope(),
            .out = view,
            .target = layer.target()});
  }
  void write_keys(Shared& s) {
    MappedVector<bf16> keys(s.projected.begin(), s.projected.begin() + layer.tokens * 128);
    MappedVector<int64_t> slots(layer.tokens);
    find_slots(s.source.keys, slots);
    normalise(keys, 128, norm_of(128));
    turn(keys, 128, state_starts());
    write({.kv = tensor(keys.data(), {layer.tokens, 128}),
           .slots = tensor(slots.data(), {layer.tokens}),
           .cache = s.source.keys.cache,
           .target = layer.target()});
    EXPECT_TRUE(device_finished());
  }
  void choose(const PipelineArgs& a) {
    const RawIndexQuery& raw = a.steps.index_query;
    index_query({.q = raw.q,
                 .weights = raw.weights,
                 .positions = layer.positions(),
                 .rope = layer.rope(),
                 .factor = raw.factor,
                 .out = a.indexer.q,
                 .out_weights = a.indexer.weights,
                 .target = layer.target()});
    const int64_t columns = layer.k.context / layer.k.ratio;
    MappedVector<float> logits(layer.tokens * columns);
    const Tensor ends = tensor(layer.plan.key_ends().data(), {layer.tokens});
    score({.plan = a.plan,
           .q = a.indexer.q,
           .weights = a.indexer.weights,
           .keys = a.indexer.keys,
           .block_table = a.indexer.block_table,
           .requests = layer.requests(),
           .ends = ends,
           .logits = tensor(logits.data(), {layer.tokens, columns})});
    select({.logits = tensor(logits.data(), {layer.tokens, columns}),
            .ends = ends,
            .ids = a.ids,
            .blocks = a.blocks,
            .target = layer.target()});
    EXPECT_TRUE(device_finished());
  }
  void attend_to(const PipelineArgs& a) {
    const int64_t tokens = layer.tokens, window = layer.k.window;
    MappedVector<int32_t> slots(tokens * kChosen), near(tokens * window), lengths(tokens);
    locate({.ids = a.ids,
            .requests = layer.requests(),
            .block_table = a.compressed_table,
            .page = a.compressed.page,
            .pages = a.compressed.pages,
            .slots = tensor(slots.data(), {tokens, kChosen}),
            .target = layer.target()});
    window_lists({.positions = layer.positions(),
                  .requests = layer.requests(),
                  .block_table = a.block_table,
                  .window = layer.k.window,
                  .page = a.cache.page,
                  .pages = a.cache.pages,
                  .lists = tensor(near.data(), {tokens, window}),
                  .lengths = tensor(lengths.data(), {tokens}),
                  .target = layer.target()});
    attend({.plan = a.plan,
            .q = a.q,
            .lists = {KvList{.cache = a.cache, .indices = tensor(near.data(), {tokens, window})},
                      KvList{.cache = a.compressed,
                             .indices = tensor(slots.data(), {tokens, kChosen})}},
            .scale = a.scale,
            .out = a.out,
            .workspace = a.workspace});
    EXPECT_TRUE(device_finished());
  }

  Guarded<float> weight;
};

class SharedStates : public ::testing::TestWithParam<Kind> {};

constexpr Step kSteps[] = {
    {{150, 71}, {150, 71}}, {{1, 75}, {151, 146}}, {{1, 1}, {152, 147}},
    {{1, 110}, {153, 257}}, {{2, 1}, {155, 258}},  {{101, 3}, {256, 261}},
};

TEST_P(SharedStates, AreTheSingleVerbs) {
  Model model(GetParam());
  Shared one(GetParam()), other(GetParam());
  for (const Step& step : kSteps)
    for (const Role role : kRoles) {
      SCOPED_TRACE(static_cast<int>(role));
      model.layer.draw(step);
      const MappedVector<bf16> q = model.layer.q;
      if (role == Role::kSource)
        for (Shared* s : {&one, &other}) model.compress_states(*s, s == &one);
      pipeline(model.args(one, role));
      ASSERT_TRUE(device_finished());
      model.layer.q = q;
      model.by_verbs(other, role);
      const auto part = [&](auto& values, int64_t width) {
        return std::vector(values.begin(), values.begin() + model.layer.tokens * width);
      };
      ASSERT_EQ(part(one.ids, kChosen), part(other.ids, kChosen));
      ASSERT_EQ(part(one.blocks, kBlocks), part(other.blocks, kBlocks));
      const size_t at = static_cast<size_t>(role);
      ASSERT_TRUE(same(one.windows[at].window.bytes, other.windows[at].window.bytes));
      ASSERT_TRUE(same(one.source.states.bytes, other.source.states.bytes));
      ASSERT_TRUE(same(one.source.keys.bytes, other.source.keys.bytes));
      ASSERT_TRUE(same(one.source.state, other.source.state));
      ASSERT_EQ(std::memcmp(one.out.data(), other.out.data(),
                            model.layer.tokens * kHeads * kDim * sizeof(bf16)),
                0);
    }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SharedStates, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

// A choice that names what is not there is attended to as nothing.
TEST(SharedStatesErrors, HostileIdsAreNotThere) {
  for (const Mode mode : {Mode::kDirect, Mode::kSeparate}) {
    Kind kind = kinds()[0];
    kind.mode = mode;
    Model model(kind);
    Shared s(kind), none(kind);
    model.layer.draw(kSteps[0]);
    const MappedVector<bf16> q = model.layer.q;
    constexpr int32_t kHostile[] = {-1, -7, INT32_MIN, INT32_MAX, 100000};
    for (size_t i = 0; i < s.ids.size(); ++i) s.ids[i] = kHostile[i % std::size(kHostile)];
    for (int32_t& id : none.ids) id = -1;
    pipeline(model.args(s, Role::kTakes));
    ASSERT_TRUE(device_finished());
    model.layer.q = q;
    pipeline(model.args(none, Role::kTakes));
    ASSERT_TRUE(device_finished());
    EXPECT_TRUE(same(s.out, none.out));
  }
}

TEST(SharedStatesErrors, NameTheArgumentAndWriteNothing) {
  const Kind kind = kinds()[0];
  Model model(kind);
  Shared s(kind);
  model.layer.draw(kSteps[0]);
  const MappedVector<bf16> q = model.layer.q;
  const auto expect = [&](Role role, auto change, std::initializer_list<const char*> words) {
    PipelineArgs a = model.args(s, role);
    change(a);
    testing::expect_invalid([&] { pipeline(a); }, words);
  };
  using Args = PipelineArgs&;
  const Role source = Role::kSource, takes = Role::kTakes;
  expect(source, [](Args a) { a.indexer.k.shape[0] = 4; }, {"indexer.k", "at least"});
  expect(source, [](Args a) { a.indexer.k.dtype = DType::kF32; }, {"indexer.k"});
  expect(source, [](Args a) { a.steps.index.norm.eps = -1; }, {"pipeline: steps: write", "eps"});
  expect(source, [](Args a) { a.steps = {}; }, {"indexer.slots", "nothing"});
  expect(source, [](Args a) { a.ids.shape[1] = 3; }, {"ids", "24"});
  expect(source, [](Args a) { a.ids.stride[0] = 0; }, {"ids", "overlap"});
  expect(source, [](Args a) { a.ids.dtype = DType::kI64; }, {"ids", "int64"});
  expect(source, [](Args a) { a.blocks.best.shape[0] = 1; }, {"blocks.best"});
  expect(source, [](Args a) { a.blocks.size = 0; }, {"blocks.size"});
  expect(source, [](Args a) { a.indexer.keys.format = CacheFormat::kV4Fp8; }, {"indexer.keys"});
  expect(takes, [](Args a) { a.ids.shape[0] = 2; }, {"ids"});
  expect(takes, [](Args a) { a.ids.data = nullptr; }, {"ids", "null"});
  expect(takes, [](Args a) { a.ids = {}; }, {"plan", "extra_topk of at least"});
  expect(takes, [](Args a) { a.blocks.within = a.ids; }, {"blocks", "none without indexer.q"});
  expect(takes, [](Args a) { a.compressed_kv = a.kv; }, {"compressed_slots", "nothing"});
  expect(takes, [](Args a) { a.compressed = {}; }, {"compressed"});
  EXPECT_EQ(std::memcmp(q.data(), model.layer.q.data(), q.size() * 2), 0);
  for (const bf16 x : s.out) ASSERT_EQ(x.bits, 0xcdcd);
  for (const uint8_t x : s.source.keys.bytes) ASSERT_EQ(x, 0);
  for (Side& side : s.windows)
    for (const uint8_t x : side.window.bytes) ASSERT_EQ(x, 0);
}

}  // namespace
}  // namespace winnow
