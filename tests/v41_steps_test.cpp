// pipeline() over layers that share: one keeps states and index keys and finds blocks, one chooses
// anew inside these, one takes that choice. The same bytes in caches and lists and the same output
// as from the single verbs, in chunks, decodes and mixed batches.
#include <cstring>

#include "v41_steps_problem.h"

namespace winnow {
namespace {

using testing::device_finished;
using testing::MappedVector;
using namespace testing::steps;

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (const int32_t ratio : {1, 2}) {
    const std::string name = "ratio_" + std::to_string(ratio);
    Kind k{.name = name, .ratio = ratio, .extra = 24, .gate = ratio > 1, .bias = false};
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
  return on_devices(all);
}

class SharedStates : public ::testing::TestWithParam<Kind> {};

constexpr Step kSteps[] = {
    {{150, 71}, {150, 71}}, {{1, 75}, {151, 146}}, {{1, 1}, {152, 147}},
    {{1, 110}, {153, 257}}, {{2, 1}, {155, 258}},  {{101, 3}, {256, 261}},
};

TEST_P(SharedStates, AreTheSingleVerbs) {
  SharingLayers layers(GetParam());
  Shared one(GetParam()), other(GetParam());
  for (const Step& step : kSteps)
    ASSERT_NO_FATAL_FAILURE(expect_same_shared_step(layers, step, one, other));
}

INSTANTIATE_TEST_SUITE_P(Kinds, SharedStates, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

// A choice that names what is not there is attended to as nothing.
TEST(SharedStatesErrors, HostileIdsAreNotThere) {
  for (const Mode mode : {Mode::kDirect, Mode::kSeparate}) {
    Kind kind = kinds()[0];
    kind.mode = mode;
    SharingLayers layers(kind);
    Shared s(kind), none(kind);
    layers.layer.draw(kSteps[0]);
    const MappedVector<bf16> q = layers.layer.q;
    constexpr int32_t kHostile[] = {-1, -7, INT32_MIN, INT32_MAX, 100000};
    for (size_t i = 0; i < s.ids.size(); ++i) s.ids[i] = kHostile[i % std::size(kHostile)];
    for (int32_t& id : none.ids) id = -1;
    pipeline(layers.args(s, Role::kTakes));
    ASSERT_TRUE(device_finished());
    layers.layer.q = q;
    pipeline(layers.args(none, Role::kTakes));
    ASSERT_TRUE(device_finished());
    EXPECT_TRUE(same(s.out, none.out));
  }
}

TEST(SharedStatesErrors, NameTheArgumentAndWriteNothing) {
  const Kind kind = kinds()[0];
  SharingLayers layers(kind);
  Shared s(kind);
  layers.layer.draw(kSteps[0]);
  const MappedVector<bf16> q = layers.layer.q;
  const auto expect = [&](Role role, auto change, std::initializer_list<const char*> words) {
    PipelineArgs a = layers.args(s, role);
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
  EXPECT_EQ(std::memcmp(q.data(), layers.layer.q.data(), q.size() * 2), 0);
  for (const bf16 x : s.out) ASSERT_EQ(x.bits, 0xcdcd);
  for (const uint8_t x : s.source.keys.bytes) ASSERT_EQ(x, 0);
  for (Side& side : s.windows)
    for (const uint8_t x : side.window.bytes) ASSERT_EQ(x, 0);
}

}  // namespace
}  // namespace winnow
