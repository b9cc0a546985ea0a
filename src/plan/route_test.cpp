// The route of a prefill: what the measured points say, and the parts that a plan makes of it.
#include "cpu/isa.h"
#include "plan/plan_cases.h"
#include "testing.h"
#include "winnow/error.h"
#include "winnow/plan.h"

namespace winnow {
namespace {

using internal::plan::Ints;
using internal::plan::ints;
using internal::plan::Lengths;

Route hopper(int32_t heads, int32_t tokens, int32_t context, bool mha) {
  return prefill_route({.heads = heads, .tokens = tokens, .context = context, .mha = mha});
}

TEST(Route, FewTokensReadThePages) {
  for (const int32_t heads : {8, 16, 32, 64, 128})
    for (const int32_t context : {64, 256, 2048, 8192, 65536, 1 << 20})
      for (const bool mha : {false, true})
        EXPECT_EQ(hopper(heads, 16, context, mha), Route::kDirect) << heads << " " << context;
}

TEST(Route, ManyTokensGather) {
  for (const int32_t context : {4096, 8192, 16384, 65536})
    EXPECT_EQ(hopper(128, 4096, context, false), Route::kGathered) << context;
  EXPECT_EQ(hopper(128, 1024, 65536, false), Route::kGathered);
  // With fewer heads it is won back later, with 32 and 16 never.
  EXPECT_EQ(hopper(128, 300, 65536, false), Route::kGathered);
  EXPECT_EQ(hopper(64, 300, 65536, false), Route::kDirect);
  EXPECT_EQ(hopper(64, 4096, 65536, false), Route::kGathered);
  EXPECT_EQ(hopper(46, 1024, 8192, false), Route::kGathered);
  for (const int32_t heads : {16, 32, 45})
    for (const int32_t context : {4096, 16384, 65536})
      EXPECT_EQ(hopper(heads, 4096, context, false), Route::kDirect) << heads << " " << context;
  // What gathering costs grows with the context, between the measured ones and beyond.
  EXPECT_EQ(hopper(128, 100, 16384, false), Route::kGathered);
  EXPECT_EQ(hopper(128, 100, 24576, false), Route::kGathered);  // from 84
  EXPECT_EQ(hopper(128, 100, 32768, false), Route::kDirect);    // from 108
  EXPECT_EQ(hopper(128, 1024, 1 << 20, false), Route::kDirect);
  EXPECT_EQ(hopper(128, 16384, 1 << 20, false), Route::kGathered);
  EXPECT_EQ(hopper(128, INT32_MAX, INT32_MAX, false), Route::kGathered);
}

TEST(Route, AnyNumbers) {
  for (const int32_t tokens : {INT32_MIN, -1, 0})
    for (const int32_t context : {INT32_MIN, -1, 0, INT32_MAX})
      EXPECT_EQ(hopper(128, tokens, context, true), Route::kDirect) << tokens << " " << context;
  // A route that is never faster is not taken for any number of tokens.
  EXPECT_EQ(hopper(128, INT32_MAX, 8192, true), Route::kGathered);
  EXPECT_EQ(hopper(16, INT32_MAX, 8192, false), Route::kDirect);
  EXPECT_EQ(hopper(16, INT32_MAX, INT32_MAX, true), Route::kDirect);
  EXPECT_EQ(prefill_route({.model = kV4, .tokens = INT32_MAX, .context = 4096, .mha = true}),
            Route::kGathered);
}

TEST(Route, ShortContextsDecompress) {
  EXPECT_EQ(hopper(128, 256, 256, true), Route::kMha);
  for (const int32_t heads : {16, 128}) {
    for (const int32_t context : {1024, 2048, 4096})
      EXPECT_EQ(hopper(heads, context, context, true), Route::kMha) << context;
    EXPECT_EQ(hopper(heads, 1024, 2048, true), Route::kMha);
    EXPECT_NE(hopper(heads, 1024, 2048, false), Route::kMha);
    EXPECT_NE(hopper(heads, 4096, 65536, true), Route::kMha);
  }
  EXPECT_EQ(hopper(128, 512, 4096, true), Route::kGathered);
  EXPECT_EQ(hopper(128, 512, 2500, true), Route::kMha);  // from 265
  EXPECT_EQ(hopper(16, 512, 4096, true), Route::kMha);   // a key's products weigh less
  EXPECT_EQ(hopper(128, 1024, 8192, true), Route::kGathered);
  EXPECT_EQ(hopper(16, 1024, 8192, true), Route::kMha);
}

TEST(Route, V4) {
  for (const int32_t heads : {64, 128})
    for (const int32_t context : {128, 4096, 65536}) {
      const auto route = [&](int32_t tokens) {
        return prefill_route(
            {.model = kV4, .heads = heads, .tokens = tokens, .context = context, .mha = true});
      };
      EXPECT_EQ(route(16), Route::kDirect);
      EXPECT_EQ(route(1024), Route::kGathered);
    }
  EXPECT_EQ(prefill_route({.model = kV4, .tokens = 4096, .device = DeviceKind::kCpu}),
            Route::kDirect);
}

TEST(Route, OnTheCpu) {
  const auto cpu = [](int32_t tokens, int32_t context) {
    return prefill_route({.heads = 16,
                          .tokens = tokens,
                          .context = context,
                          .mha = true,
                          .device = DeviceKind::kCpu});
  };
  EXPECT_EQ(cpu(1024, 1024), internal::cpu::isa().amx_bf16 ? Route::kDirect : Route::kMha);
  EXPECT_EQ(cpu(256, 1024), Route::kDirect);
  EXPECT_EQ(cpu(4096, 8192), Route::kDirect);
}

// Below 10 tokens from the pages, from 20 on decompressed.
Route by_tokens(const RouteArgs& a) noexcept {
  return a.tokens < 10 ? Route::kDirect : a.tokens < 20 ? Route::kGathered : Route::kMha;
}

PlanOptions options() {
  return {.heads = 16,
          .topk = 64,
          .page = 16,
          .pages = 64,
          .max_requests = 8,
          .max_tokens = 128,
          .route = by_tokens,
          .mha = true,
          .workspace_rows = 60};
}

TEST(RoutedPlan, PartsAreRunsOfOneWay) {
  Plan plan(options());
  EXPECT_EQ(plan.mode(), Mode::kSeparate);
  // A decode, pages, two that are gathered and do not fit together, decompressed, padding, pages.
  const Lengths l({1, 4, 10, 11, 20, 2, 3}, {50, 9, 40, 30, 20, 0, 44});
  plan.refill(l.batch(53));
  ASSERT_EQ(plan.parts().size(), 5u);
  EXPECT_EQ(plan.parts()[0], (Part{0, 5, 0, 2}));
  EXPECT_EQ(plan.parts()[1], (Part{5, 15, 2, 3, true}));
  EXPECT_EQ(plan.parts()[2], (Part{15, 26, 3, 4, true}));
  EXPECT_EQ(plan.parts()[3], (Part{26, 48, 4, 6, true, 0, 0, true}));
  EXPECT_EQ(plan.parts()[4], (Part{48, 53, 6, 7}));
  const std::vector<Chunk> chunks(plan.chunks().begin(), plan.chunks().end());
  EXPECT_EQ(chunks, (std::vector<Chunk>{{1, 2}, {2, 3}, {3, 5}}));
  EXPECT_EQ(ints(plan.gather_lens()), (Ints{0, 40, 30, 20, 0, 0}));
  for (int32_t t = 0; t < 53; ++t) {
    const int32_t want = t < 5 ? -1 : t < 15 ? 1 : t < 26 ? 2 : t < 46 ? 3 : -1;
    EXPECT_EQ(plan.prefill_requests()[t], want) << t;
  }
  // Prefills alone, the first of them from the pages; then decodes alone.
  plan.refill(Lengths({4, 10}, {9, 40}).batch());
  ASSERT_EQ(plan.parts().size(), 2u);
  EXPECT_EQ(plan.parts()[0], (Part{0, 4, 0, 1}));
  EXPECT_EQ(plan.parts()[1], (Part{4, 14, 1, 2, true}));
  plan.refill(Lengths({1, 1}, {9, 40}).batch());
  ASSERT_EQ(plan.parts().size(), 1u);
  EXPECT_EQ(plan.parts()[0], (Part{0, 2, 0, 2}));
}

TEST(RoutedPlan, EachPartNamesItsKernel) {
  Plan plan(options());
  EXPECT_STRNE(plan.kernel(Stage::kAttend), "");  // before a batch: of the capacity
  plan.refill(Lengths({1, 10, 20}, {50, 40, 20}).batch());
  ASSERT_EQ(plan.parts().size(), 3u);
  EXPECT_STRNE(plan.kernel(Stage::kAttend, 0), "");
  EXPECT_STRNE(plan.kernel(Stage::kAttend, 1), "");
  EXPECT_STREQ(plan.kernel(Stage::kAttend, 2), "");  // the caller runs attend_mha()
  EXPECT_STREQ(plan.kernel(Stage::kScore, 2), plan.kernel(Stage::kScore));
}

TEST(RoutedPlan, TooLongForTheWorkspaceReadsThePages) {
  Plan plan(options());
  plan.refill(Lengths({20, 20}, {61, 60}).batch());
  ASSERT_EQ(plan.parts().size(), 2u);
  EXPECT_FALSE(plan.parts()[0].gathered);
  EXPECT_TRUE(plan.parts()[1].mha);
}

TEST(RoutedPlan, V4ReadsPagesBeforeAllElse) {
  PlanOptions o = options();
  o.model = kV4;
  o.format = CacheFormat::kV4Fp8;
  o.topk = 8;
  o.extra_topk = 16;
  o.mha = false;
  Plan plan(o);
  plan.refill(Lengths({1, 4, 3, 10, 5}, {50, 9, 0, 40, 30}).batch());
  ASSERT_EQ(plan.parts().size(), 2u);
  EXPECT_EQ(plan.parts()[0], (Part{0, 8, 0, 3}));
  // The last has few tokens, but one that is gathered before it.
  EXPECT_TRUE(plan.parts()[1].gathered);
  EXPECT_EQ(plan.parts()[1].last_request, 5);
  EXPECT_EQ(plan.prefill_requests()[18], 3);
  testing::expect_invalid([&] { plan.refill(Lengths({4}, {400}).batch()); }, {"workspace rows"});
  o.mha = true;
  testing::expect_invalid([&] { Plan wrong(o); }, {"plan", "mha", "V4"});
}

TEST(RoutedPlan, MhaOnlyWhereItMay) {
  PlanOptions o = options();
  o.mha = false;
  Plan plan(o);
  plan.refill(Lengths({20}, {20}).batch());
  EXPECT_EQ(plan.parts()[0], (Part{0, 20, 0, 1, true}));
}

TEST(RoutedPlan, AskedModesStay) {
  PlanOptions o = options();
  o.mode = Mode::kSeparate;
  Plan separate(o);
  separate.refill(Lengths({4, 20}, {9, 20}).batch());
  ASSERT_EQ(separate.parts().size(), 1u);
  EXPECT_EQ(separate.parts()[0], (Part{0, 24, 0, 2, true}));
  o.mode = Mode::kDirect;
  EXPECT_EQ(Plan(o).parts().size(), 1u);
  o.mode = Mode::kAuto;
  o.format = CacheFormat::kV32Bf16;
  EXPECT_EQ(Plan(o).mode(), Mode::kBf16);
  o = options();
  o.mha = false;
  o.route = prefill_route;
  EXPECT_EQ(Plan(o).mode(), Mode::kMixed);  // the CPU, 16 heads
  o.mha = true;
  EXPECT_EQ(Plan(o).mode(), Mode::kSeparate);
  EXPECT_TRUE(Plan(o).options().mha);
  o.route = nullptr;
  testing::expect_invalid([&] { Plan plan(o); }, {"plan", "route", "function"});
}

// A token's bits may not depend on how many come with it, nor on the requests before its own.
TEST(RoutedPlan, FixedSplitsGoOneWay) {
  PlanOptions o = options();
  o.split = SplitPolicy::kFixed;
  Plan plan(o);
  EXPECT_EQ(plan.mode(), Mode::kMixed);
  plan.refill(Lengths({1, 4, 10, 20}, {50, 9, 40, 20}).batch());
  ASSERT_EQ(plan.parts().size(), 1u);
  EXPECT_EQ(plan.parts()[0], (Part{0, 35, 0, 4}));
  o.heads = 128;
  EXPECT_EQ(Plan(o).mode(), Mode::kDirect);
  o.model = kV4;
  o.format = CacheFormat::kV4Fp8;
  o.topk = 8;
  o.extra_topk = 16;
  o.mha = false;
  EXPECT_EQ(Plan(o).mode(), Mode::kDirect);
  o.mode = Mode::kSeparate;
  EXPECT_EQ(Plan(o).mode(), Mode::kSeparate);
}

}  // namespace
}  // namespace winnow
