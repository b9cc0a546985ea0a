// Plan: defaults and modes, what a batch fills, refills that change or refuse, memory that stays.
#include "winnow/plan.h"

#include "core/kernel_table.h"
#include "plan/plan_cases.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using internal::plan::Ints;
using internal::plan::ints;
using internal::plan::Lengths;
using testing::expect_invalid;

PlanOptions small() {
  return {.heads = 16, .topk = 256, .page = 16, .pages = 64, .max_requests = 8, .max_tokens = 64};
}

TEST(Plan, ResolvesDefaults) {
  const Plan v32({.page = 64, .pages = 100});
  EXPECT_EQ(v32.options().topk, 2048);
  EXPECT_EQ(v32.options().ratio, 1);
  EXPECT_EQ(v32.options().max_context, 6400);
  EXPECT_EQ(v32.gather_bytes(), 0u);
  const Plan v4({.model = kV4, .format = CacheFormat::kV4Fp8, .extra_topk = 512, .pages = 100});
  EXPECT_EQ(v4.options().topk, 128);
  EXPECT_EQ(v4.options().ratio, 4);
  const Plan separate({.pages = 100, .max_context = 1000, .mode = Mode::kSeparate});
  EXPECT_EQ(separate.options().workspace_rows, 5000);
  EXPECT_EQ(separate.gather_bytes(), 5000u * 576 * 2);
  // No chunk needs more rows than the cache has, or than the longest sequence.
  const auto rows = [](int64_t pages, int32_t longest) {
    return Plan({.pages = pages, .max_context = longest, .mode = Mode::kSeparate})
        .options()
        .workspace_rows;
  };
  EXPECT_EQ(rows(100, 0), 6400);
  EXPECT_EQ(rows(50, 1000), 3200);
  EXPECT_EQ(rows(10, 1000), 1000);
  EXPECT_EQ(rows(0, 1000), 5000);
  const Plan v4_separate({.model = kV4,
                          .format = CacheFormat::kV4Fp8,
                          .extra_topk = 512,
                          .pages = 100,
                          .max_tokens = 300,
                          .max_context = 1001,
                          .mode = Mode::kSeparate});
  EXPECT_EQ(v4_separate.options().workspace_rows, 4 * (251 + 128 + 300));
}

TEST(Plan, KeepsNoTextOfTheCaller) {
  const std::string name = "v32", kernel = "simd";
  Model model = kV32;
  model.name = name;
  const Plan plan({.model = model, .pages = 100, .target = {.kernel = kernel.c_str()}});
  EXPECT_EQ(plan.options().model.name.data(), kV32.name.data());
  EXPECT_NE(plan.options().target.kernel, kernel.c_str());
  EXPECT_STREQ(plan.options().target.kernel, "simd");
}

TEST(Plan, ChoosesTheMode) {
  const auto mode = [](CacheFormat format, int32_t heads) {
    const Model& model = format <= CacheFormat::kV32Bf16 ? kV32 : kV4;
    return Plan({.model = model, .format = format, .heads = heads, .pages = 4}).mode();
  };
  EXPECT_EQ(mode(CacheFormat::kV32Bf16, 16), Mode::kBf16);
  EXPECT_EQ(mode(CacheFormat::kV4Bf16, 128), Mode::kBf16);
  EXPECT_EQ(mode(CacheFormat::kV32Fp8, 31), Mode::kMixed);
  EXPECT_EQ(mode(CacheFormat::kV32Fp8, 32), Mode::kDirect);
  EXPECT_EQ(mode(CacheFormat::kV4Fp8, 8), Mode::kMixed);
  EXPECT_EQ(mode(CacheFormat::kV4Fp8, 64), Mode::kDirect);
}

TEST(Plan, FillsTheBatch) {
  PlanOptions o = small();
  o.decode_threshold = 2;  // one speculative token
  Plan plan(o);
  EXPECT_EQ(plan.tokens(), 0);
  EXPECT_EQ(plan.parts().size(), 1u);
  const Lengths l({2, 2, 5}, {100, 2, 8});
  plan.refill(l.batch(12));
  EXPECT_EQ(plan.request_count(), 3);
  EXPECT_EQ(plan.tokens(), 12);
  EXPECT_EQ(plan.split(), (BatchSplit{2, 1, 4, 8, 2}));
  EXPECT_EQ(ints(plan.request_ids()), (Ints{0, 0, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0}));
  EXPECT_EQ(ints(plan.positions()), (Ints{98, 99, 0, 1, 3, 4, 5, 6, 7, -1, -1, -1}));
  EXPECT_EQ(ints(plan.key_ends()), (Ints{99, 100, 1, 2, 4, 5, 6, 7, 8, 0, 0, 0}));
  EXPECT_EQ(ints(plan.query_lens()), (Ints{2, 2, 5}));
  EXPECT_EQ(ints(plan.seq_lens()), (Ints{100, 2, 8}));
  ASSERT_EQ(plan.parts().size(), 1u);
  EXPECT_EQ(plan.parts()[0], (Part{0, 12, 0, 3}));
  EXPECT_TRUE(plan.chunks().empty());
  EXPECT_TRUE(plan.prefill_requests().empty());
  EXPECT_EQ(plan.schedule().split_starts.size(), 13u);
  EXPECT_TRUE(plan.schedule(1).tiles.empty());
  // Two builders of one batch agree: the public arithmetic gives what the plan holds.
  EXPECT_EQ(plan.split(), split_batch(l.starts, 12, 2, false));
  Ints ids(12, 77);
  request_ids(l.starts, ids);
  EXPECT_EQ(ints(plan.request_ids()), ids);
}

TEST(Plan, SeparateCutsChunks) {
  PlanOptions o = small();
  o.mode = Mode::kSeparate;
  o.workspace_rows = 30;
  Plan plan(o);
  const Lengths l({1, 1, 10, 5, 20, 2}, {40, 7, 10, 15, 30, 2});
  plan.refill(l.batch(42));
  EXPECT_EQ(plan.split(), (BatchSplit{2, 4, 2, 40, 2}));
  const std::span<const Chunk> chunks = plan.chunks();
  const Ints prefills(l.seq_lens.begin() + 2, l.seq_lens.end());
  EXPECT_EQ(std::vector<Chunk>(chunks.begin(), chunks.end()), prefill_chunks(prefills, 30));
  ASSERT_EQ(plan.parts().size(), 4u);
  EXPECT_EQ(plan.parts()[0], (Part{0, 2, 0, 2}));
  EXPECT_EQ(plan.parts()[1], (Part{2, 17, 2, 4, true}));
  EXPECT_EQ(plan.parts()[2], (Part{17, 37, 4, 5, true}));
  EXPECT_EQ(plan.parts()[3], (Part{37, 42, 5, 6, true}));  // with the padding
  EXPECT_EQ(ints(plan.workspace_starts()), (Ints{0, 10, 0, 0}));
  EXPECT_EQ(ints(plan.gather_rows()), (Ints{0, 10, 0, 0}));
  EXPECT_EQ(ints(plan.gather_starts()), (Ints{0, 0, 0, 0}));
  EXPECT_EQ(ints(plan.gather_lens()), prefills);
  Ints ids(42, 77);
  prefill_request_ids(l.starts, 2, ids);
  EXPECT_EQ(ints(plan.prefill_requests()), ids);
  for (size_t p = 0; p < 4; ++p) {
    const Part& part = plan.parts()[p];
    const Schedule s = plan.schedule(static_cast<int32_t>(p));
    EXPECT_EQ(s.split_starts.size(), static_cast<size_t>(part.last_token - part.first_token + 1));
    EXPECT_EQ(s.tiles.front().token, 0);
  }
  // Prefills alone have no decode part; a batch without prefills has that part alone.
  plan.refill(Lengths({5}, {5}).batch());
  ASSERT_EQ(plan.parts().size(), 1u);
  EXPECT_TRUE(plan.parts()[0].gathered);
  plan.refill(Lengths({1}, {5}).batch());
  ASSERT_EQ(plan.parts().size(), 1u);
  EXPECT_FALSE(plan.parts()[0].gathered);
}

TEST(Plan, SeparateV4) {
  Plan plan({.model = kV4,
             .format = CacheFormat::kV4Fp8,
             .topk = 8,
             .extra_topk = 16,
             .pages = 10,
             .max_requests = 8,
             .max_tokens = 16,
             .max_context = 64,
             .mode = Mode::kSeparate});
  const Ints query = {1, 6, 4, 2}, seq = {9, 64, 4, 11};
  plan.refill(Lengths(query, seq).batch());
  EXPECT_EQ(ints(plan.key_ends()), (Ints{2, 14, 15, 15, 15, 15, 16, 0, 0, 0, 1, 2, 2}));
  EXPECT_EQ(ints(plan.state_starts()), (Ints{5, 55, 56, 57, 58, 59, 60, -3, -2, -1, 0, 6, 7}));
  const auto want =
      v4_prefill_chunks({std::span(query).subspan(1), std::span(seq).subspan(1), 4, 8, 64, 16});
  ASSERT_EQ(want, (std::vector<V4Chunk>{{0, 3, 16, 29}}));
  ASSERT_EQ(plan.parts().size(), 2u);
  EXPECT_EQ(plan.parts()[1], (Part{1, 13, 1, 4, true, 16, 29}));
  EXPECT_EQ(ints(plan.workspace_starts()), (Ints{0, 29, 58}));
  EXPECT_EQ(ints(plan.compressed_lens()), (Ints{16, 1, 2}));
  EXPECT_EQ(ints(plan.gather_lens()), (Ints{13, 4, 9}));
  EXPECT_EQ(ints(plan.gather_starts()), (Ints{51, 0, 2}));
  EXPECT_EQ(ints(plan.gather_rows()), (Ints{16, 45, 74}));
  EXPECT_EQ(plan.schedule(0).tiles.back().end, 24);
  EXPECT_EQ(plan.schedule(1).tiles.back().end, 128);  // combined lists are padded
}

TEST(Plan, PaddedRequestsHaveNoPositions) {
  // A captured graph's batch: requests of two tokens, the last two of them padding. Positions
  // computed from their length 0 would be -2 and -1.
  Plan plan(small());
  plan.refill(Lengths({2, 2, 2}, {50, 0, 0}).batch(8));
  EXPECT_EQ(ints(plan.positions()), (Ints{48, 49, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(ints(plan.key_ends()), (Ints{49, 50, 0, 0, 0, 0, 0, 0}));
  EXPECT_TRUE(plan.state_starts().empty());  // no compressed states
  EXPECT_EQ(ints(plan.request_ids()), (Ints{0, 0, 1, 1, 2, 2, 0, 0}));
  plan.refill({Ints{0}, {}, 5});  // no request at all
  EXPECT_EQ(ints(plan.positions()), Ints(5, -1));
  EXPECT_EQ(ints(plan.request_ids()), Ints(5, 0));
}

TEST(Plan, RefillLeavesNothingOfTheLastBatch) {
  PlanOptions o = small();
  o.mode = Mode::kSeparate;
  Plan used(o), fresh(o);
  used.refill(Lengths({1, 1, 30, 20}, {200, 60, 90, 500}).batch(60));
  const int32_t* positions = used.positions().data();
  const int32_t* ids = used.request_ids().data();
  const Tile* tiles = used.schedule().tiles.data();
  const Lengths next({1, 3}, {61, 3});
  used.refill(next.batch(10));
  fresh.refill(next.batch(10));
  EXPECT_EQ(used.positions().data(), positions);
  EXPECT_EQ(used.request_ids().data(), ids);
  EXPECT_EQ(used.schedule().tiles.data(), tiles);
  EXPECT_EQ(ints(used.positions()), ints(fresh.positions()));
  EXPECT_EQ(ints(used.request_ids()), ints(fresh.request_ids()));
  EXPECT_EQ(ints(used.key_ends()), ints(fresh.key_ends()));
  EXPECT_EQ(ints(used.prefill_requests()), ints(fresh.prefill_requests()));
  EXPECT_EQ(ints(used.workspace_starts()), ints(fresh.workspace_starts()));
  ASSERT_EQ(used.parts().size(), fresh.parts().size());
  for (size_t p = 0; p < used.parts().size(); ++p) {
    EXPECT_EQ(used.parts()[p], fresh.parts()[p]);
    const Schedule a = used.schedule(p), b = fresh.schedule(p);
    EXPECT_TRUE(std::equal(a.tiles.begin(), a.tiles.end(), b.tiles.begin(), b.tiles.end()));
    EXPECT_EQ(ints(a.worker_starts), ints(b.worker_starts));
    EXPECT_EQ(ints(a.split_starts), ints(b.split_starts));
  }
}

TEST(Plan, LengthsThatGrewChangeThePlan) {
  Plan plan(small());
  plan.refill(Lengths({1}, {10}).batch());
  EXPECT_EQ(ints(plan.positions()), Ints{9});
  plan.refill(Lengths({1}, {11}).batch());
  EXPECT_EQ(ints(plan.positions()), Ints{10});
  EXPECT_EQ(ints(plan.seq_lens()), Ints{11});
}

TEST(Plan, RefusedBatchChangesNothing) {
  PlanOptions o = small();
  o.mode = Mode::kSeparate;
  o.workspace_rows = 100;
  Plan plan(o);
  plan.refill(Lengths({1, 4}, {9, 4}).batch());
  const auto expect = [&](const Batch& batch, std::initializer_list<const char*> words) {
    expect_invalid([&] { plan.refill(batch); }, words);
    EXPECT_EQ(plan.tokens(), 5);
    EXPECT_EQ(ints(plan.positions()), (Ints{8, 0, 1, 2, 3}));
    EXPECT_EQ(ints(plan.seq_lens()), (Ints{9, 4}));
    EXPECT_EQ(plan.parts().size(), 2u);
  };
  expect({Ints{0, 3, 2}, Ints{5, 5}}, {"plan", "query_starts", "descend", "2 after 3"});
  expect({Ints{1, 2}, Ints{5}}, {"query_starts", "0 first"});
  expect({{}, {}}, {"query_starts", "at least one"});
  expect({Ints{0, 1}, Ints{5, 5}}, {"seq_lens", "1 entries", "2"});
  expect({Ints{0, 1}, Ints{-5}}, {"seq_lens", "0 to 1024", "-5 at entry 0"});
  expect({Ints{0, 4}, Ints{3}}, {"seq_lens", "query length, 4", "3 at entry 0"});
  expect({Ints{0, 1}, Ints{1025}}, {"seq_lens", "max_context", "1025"});
  expect({Ints{0, 1, 11}, Ints{1000, 101}}, {"seq_lens", "100 workspace rows", "101 at entry 1"});
  expect({Ints{0, 65}, Ints{65}}, {"query_starts (tokens)", "0 to 64", "found 65"});
  expect({Ints{0, 2}, Ints{2}, 1}, {"tokens", "2 to 64", "found 1"});
  expect({Ints{0, 2}, Ints{2}, 65}, {"tokens", "2 to 64", "found 65"});
  expect({Ints(10, 0), Ints(9, 0)}, {"query_starts", "requests", "0 to 8", "9"});
}

TEST(Plan, OptionErrorsNameTheOption) {
  const auto expect = [](auto change, std::initializer_list<const char*> words) {
    PlanOptions o = small();
    change(o);
    expect_invalid([&] { Plan plan(o); }, words);
  };
  expect([](auto& o) { o.heads = 0; }, {"plan", "heads", "1 to 128", "0"});
  expect([](auto& o) { o.heads = 129; }, {"heads", "129"});
  expect([](auto& o) { o.index_heads = 0; }, {"index_heads"});
  expect([](auto& o) { o.format = CacheFormat::kV4Fp8; }, {"format", "v32_fp8", "v4_fp8"});
  expect([](auto& o) { o.format = CacheFormat::kIndexKeys; }, {"format", "index_keys"});
  expect([](auto& o) { o.topk = -1; }, {"topk", "-1"});
  expect([](auto& o) { o.topk = INT32_MAX; }, {"topk", "2147483647"});
  expect([](auto& o) { o.extra_topk = 1; }, {"extra_topk", "0 to 0", "1"});
  expect([](auto& o) { o.ratio = 4; }, {"ratio", "1 to 1", "4"});
  expect([](auto& o) { o.ratio = -1; }, {"ratio", "1 to 1", "-1"});
  expect([](auto& o) { o.page = 0; }, {"page", "0"});
  expect([](auto& o) { o.pages = int64_t{1} << 31; }, {"pages"});
  expect([](auto& o) { o.pages = 0; }, {"plan: pages", "max_context", "found 0"});
  expect([](auto& o) { o.max_requests = 0; }, {"max_requests"});
  expect([](auto& o) { o.max_tokens = 0; }, {"max_tokens"});
  expect([](auto& o) { o.max_context = -1; }, {"max_context", "-1"});
  expect([](auto& o) { o.decode_threshold = -1; }, {"decode_threshold"});
  expect([](auto& o) { o.split_size = 0; }, {"split_size"});
  expect([](auto& o) { o.mode = Mode::kBf16; }, {"mode", "fp8"});
  expect([](auto& o) { o.format = CacheFormat::kV32Bf16, o.mode = Mode::kDirect; },
         {"mode", "kBf16"});
  expect([](auto& o) { o.workspace_rows = int64_t{1} << 31; }, {"workspace_rows"});
  expect([](auto& o) { o.target.kernel = "fastest"; }, {"target.kernel", "fastest"});
  expect([](auto& o) { o.mode = Mode(99); }, {"plan", "mode", "0 to 4", "99"});
  expect([](auto& o) { o.split = SplitPolicy(99); }, {"plan", "split", "0 to 1", "99"});
  expect([](auto& o) { o.target.device.kind = DeviceKind(9); }, {"target.device.kind", "9"});
  expect([](auto& o) { o.model = Model{}; }, {"plan", "model", "v32 or v4"});
  expect([](auto& o) { o.model.d_qk = 100; }, {"model.d_qk", "576", "100"});
  expect([](auto& o) { o.model.name = "v4"; }, {"model.d_qk", "512", "576"});
  expect([](auto& o) { o.model.bf16 = CacheFormat(77); }, {"model.bf16", "v32_bf16", "unknown"});
  expect([](auto& o) { o.model.lists = 2; }, {"model.lists", "1", "2"});
  expect([](auto& o) { o.max_tokens = 1 << 24, o.split = SplitPolicy::kFixed, o.split_size = 1; },
         {"max_tokens", "tiles"});
}

TEST(Plan, KernelsAreChosenOnce) {
  PlanOptions o = small();
  std::string name = "reference";
  o.target.kernel = name.c_str();
  Plan asked(o);
  name = "xxxxxxxxx";  // the plan keeps a copy
  EXPECT_STREQ(asked.options().target.kernel, "reference");
  Plan moved = std::move(asked);
  for (int s = 0; s < kStages; ++s) {
    const Stage stage = static_cast<Stage>(s);
    ASSERT_EQ(moved.usable(stage).rows.size(), 1u);
    EXPECT_STREQ(moved.kernel(stage), "reference");
    EXPECT_NE(moved.reasons(stage).find("was asked for"), std::string::npos);
    EXPECT_STRNE(Plan(small()).kernel(stage), "reference");
  }
}

TEST(Plan, MovedFromThrows) {
  Plan plan(small());
  const Plan moved = std::move(plan);
  expect_invalid([&] { plan.refill(Lengths({1}, {9}).batch()); }, {"plan", "moved from"});
  expect_invalid([&] { plan.tokens(); }, {"plan", "moved from"});
  expect_invalid([&] { plan.kernel(Stage::kAttend); }, {"plan", "moved from"});
  expect_invalid([&] { plan.device({}); }, {"plan", "moved from"});
}

TEST(Plan, RefusesAnotherDeviceAndUnknownStages) {
  const Plan plan(small());
  expect_invalid([&] { plan.device({.device = cuda()}); }, {"target.device.kind", "the CPU"});
  expect_invalid([&] { plan.kernel(Stage(99)); }, {"plan", "stage", "0 to 6", "99"});
  expect_invalid([&] { plan.reasons(Stage(99)); }, {"plan", "stage", "99"});
  expect_invalid([&] { plan.usable(Stage(99)); }, {"plan", "stage", "99"});
}

TEST(Plan, FixedSplitDoesNotSeeTheBatch) {
  PlanOptions o = small();
  o.split = SplitPolicy::kFixed;
  o.split_size = 100;
  Plan plan(o);
  const auto cuts = [&](int32_t token) {
    std::vector<std::pair<int32_t, int32_t>> r;
    for (const Tile& t : plan.schedule().tiles)
      if (t.token == token) r.push_back({t.begin, t.end});
    return r;
  };
  plan.refill(Lengths({1}, {900}).batch());
  const auto alone = cuts(0);
  EXPECT_EQ(alone, (std::vector<std::pair<int32_t, int32_t>>{{0, 100}, {100, 200}, {200, 256}}));
  plan.refill(Lengths({1, 1, 1, 7}, {20, 1, 900, 7}).batch(20));
  EXPECT_EQ(cuts(2), alone);
}

}  // namespace
}  // namespace winnow
