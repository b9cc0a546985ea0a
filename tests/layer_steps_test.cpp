// pipeline() from a V4 layer's projections on, against the single verbs: the same bytes in caches
// and states, and the same output, for every kind of layer, prefills in chunks and decodes in one
// batch.
#include <cmath>
#include <cstring>

#include "layer_steps_problem.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using testing::Guarded;
using testing::steps::kDim;
using testing::steps::kHeads;
using testing::steps::Kind;
using testing::steps::Layer;
using testing::steps::Side;
using testing::steps::Step;

std::vector<Kind> kinds() {
  return testing::steps::on_devices({
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
  });
}

constexpr Step kSteps[] = {
    {{150, 70}, {150, 70}}, {{1, 75}, {151, 145}}, {{1, 1}, {152, 146}},
    {{1, 111}, {153, 257}}, {{2, 1}, {155, 258}},  {{101, 3}, {256, 261}},
};

class PipelineSteps : public ::testing::TestWithParam<Kind> {};

TEST_P(PipelineSteps, AreTheSingleVerbs) {
  Layer layer(GetParam());
  Side one(GetParam()), other(GetParam());
  for (const Step& step : kSteps)
    ASSERT_NO_FATAL_FAILURE(testing::steps::expect_same_step(layer, step, one, other));
}

INSTANTIATE_TEST_SUITE_P(Kinds, PipelineSteps, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

TEST(PipelineStepsErrors, NameTheArgumentAndWriteNothing) {
  const Kind kind{.name = "", .extra = 8, .overlap = true, .indexed = true};
  Layer layer(kind);
  Side side(kind);
  layer.draw(kSteps[0]);
  Guarded<bf16> out(layer.tokens * kHeads * kDim);
  const testing::MappedVector<bf16> q = layer.q;
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
  expect([](Args a) { a.steps.index_query.weights.data = a.indexer.weights.data; },
         {"pipeline: indexer.weights: expected memory apart from steps.index_query.weights"});
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
