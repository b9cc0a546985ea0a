// score and score_select: every kernel x every case against the formula; the fused call against the
// two calls, bit for bit.
#include "winnow/score.h"

#include "score/score_problem.h"
#include "winnow/error.h"
#include "winnow/select.h"

namespace winnow {
namespace {

using internal::score::Case;
using internal::score::Fill;
using internal::score::Problem;
using testing::Guarded;

constexpr uint32_t kPoison = 0xcdcdcdcd;
uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

class ScoreTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {
 protected:
  void SetUp() override {
    const std::string why = testing::why_not("score", std::get<0>(GetParam()));
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

// Every kernel with every case that it serves.
std::vector<std::tuple<std::string, Case>> kernels_and_cases() {
  std::vector<std::tuple<std::string, Case>> all;
  for (const std::string& kernel : testing::kernels("score"))
    for (const Case& c : internal::score::cases())
      if (!c.bf16 || testing::reads_bf16_keys(kernel)) all.emplace_back(kernel, c);
  return all;
}

TEST_P(ScoreTest, IsWithinItsBound) {
  const auto& [kernel, c] = GetParam();
  Problem p(c);
  const int64_t stride = c.keys + c.padding;
  Guarded<float> logits(c.tokens * stride);
  ScoreArgs a = p.args();
  a.logits = tensor(logits.data(), {c.tokens, c.keys}, {stride, 1});
  a.target = testing::target("score", kernel);
  score(a);
  ASSERT_TRUE(testing::device_finished());
  double worst = 0;  // error over bound
  std::string where = "nowhere";
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int64_t j = 0; j < stride; ++j) {
      const float got = logits[t * stride + j];
      if (j >= c.keys || (!p.valid(t, j) && !c.clean)) {
        ASSERT_EQ(bits(got), kPoison) << "written: token " << t << ", column " << j;
      } else if (!p.valid(t, j)) {
        ASSERT_EQ(got, -INFINITY) << "token " << t << ", column " << j;
      } else {
        const auto e = p.expected(t, j);
        const double error = std::isinf(e.value)
                                 ? (got == e.value ? 0 : INFINITY)
                                 : std::fabs(got - e.value) /
                                       (e.bound + (kernel == "sm90" && !c.bf16 ? e.coarse : 0));
        if (error <= worst && !std::isnan(error)) continue;
        worst = std::isnan(error) ? INFINITY : error;
        where = ::testing::PrintToString(
            std::vector<double>{double(t), double(j), got, e.value, e.bound});
      }
    }
  EXPECT_LE(worst, 1) << "token, column, found, expected, bound: " << where;
}

// A logit is the same whatever else the call computes: one token at a time, from another start.
TEST_P(ScoreTest, DoesNotDependOnBlocks) {
  const auto& [kernel, c] = GetParam();
  Problem p(c);
  Guarded<float> together(c.tokens * c.keys), alone(c.keys);
  ScoreArgs a = p.args();
  a.clean = true;
  a.logits = tensor(together.data(), {c.tokens, c.keys});
  a.target = testing::target("score", kernel);
  score(a);
  ASSERT_TRUE(testing::device_finished());
  for (int64_t t = 0; t < c.tokens; t += 2) {
    Guarded<int32_t> start(1);
    start[0] = static_cast<int32_t>((c.starts ? std::max(p.starts[t], 0) : 0) / 2 + t + 3);
    ScoreArgs one = a;
    one.q.shape[0] = one.weights.shape[0] = one.ends.shape[0] = one.logits.shape[0] = 1;
    one.q.data = p.q.data() + t * a.q.stride[0] * p.value;
    one.weights.data = p.weights.data() + t * a.weights.stride[0];
    one.ends.data = p.ends.data() + t;
    if (c.page) one.requests = tensor(p.request_ids.data() + t, {1});
    one.starts = tensor(start.data(), {1});
    one.logits.data = alone.data();
    score(one);
    ASSERT_TRUE(testing::device_finished());
    for (int64_t j = start[0]; j < c.keys; ++j) {
      if (!p.valid(t, j)) continue;
      ASSERT_EQ(bits(alone[j]), bits(together[t * c.keys + j])) << "token " << t << ", key " << j;
    }
  }
}

TEST_P(ScoreTest, FusedWithSelectGivesTheSameIds) {
  const auto& [kernel, c] = GetParam();
  Problem p(c);
  for (const bool relative : {false, true}) {
    ScoreSelectArgs fused{.score = p.args(), .relative = relative};
    fused.score.target = testing::target("score", kernel);
    // score_select()'s columns: all keys that the table can name.
    const int64_t keys = c.page ? p.width * c.page : c.keys;
    Guarded<int32_t> ids(c.tokens * c.topk), want(c.tokens * c.topk), tight(c.tokens * c.topk);
    fused.ids = tensor(ids.data(), {c.tokens, c.topk});
    Guarded<float> values(c.tokens * c.topk), want_values(c.tokens * c.topk);
    fused.values = tensor(values.data(), {c.tokens, c.topk});
    const testing::DeviceWorkspace enough(fused.score.target.device,
                                          score_select_workspace_bytes(fused));
    const bool on_device = fused.score.target.device.kind == DeviceKind::kCuda;
    if (on_device) fused.workspace = {static_cast<std::byte*>(enough.data()), enough.size()};
    score_select(fused);
    // A workspace of one row makes a wave of every token or two; of five, waves of whole requests.
    Guarded<std::byte> workspace(keys * 4 + 2 * 64 + 1);
    const testing::DeviceWorkspace five(fused.score.target.device, (keys + 3) * 5 * 4 + 2 * 64);
    if (on_device) fused.workspace = {static_cast<std::byte*>(five.data()), five.size()};
    else fused.workspace = {workspace.data() + 1, workspace.size() - 1};
    fused.ids = tensor(tight.data(), {c.tokens, c.topk});
    score_select(fused);

    Guarded<float> logits(c.tokens * keys);
    ScoreArgs a = fused.score;
    a.logits = tensor(logits.data(), {c.tokens, keys});
    score(a);
    ASSERT_TRUE(testing::device_finished());
    select({.logits = a.logits,
            .starts = a.starts,
            .ends = a.ends,
            .ids = tensor(want.data(), {c.tokens, c.topk}),
            .values = tensor(want_values.data(), {c.tokens, c.topk}),
            .relative = relative,
            .target = {.kernel = "reference"}});
    EXPECT_EQ(ids.values(), want.values());
    EXPECT_EQ(tight.values(), want.values());
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(bits(values[i]), bits(want_values[i])) << "place " << i;
  }
}

// Blocks too: found by one call, selected from by the next, as score() and select() do it.
TEST_P(ScoreTest, FusedWithBlocksGivesTheSameIds) {
  const auto& [kernel, c] = GetParam();
  Problem p(c);
  constexpr int64_t kBlocks = 7;
  const int64_t keys = c.page ? p.width * c.page : c.keys;
  Guarded<int32_t> ids(c.tokens * c.topk), want(c.tokens * c.topk);
  Guarded<int32_t> best(c.tokens * kBlocks), want_best(c.tokens * kBlocks);
  ScoreSelectArgs fused{.score = p.args(), .ids = tensor(ids.data(), {c.tokens, c.topk})};
  fused.score.target = testing::target("score", kernel);
  fused.blocks.best = tensor(best.data(), {c.tokens, kBlocks});
  const testing::DeviceWorkspace enough(fused.score.target.device,
                                        score_select_workspace_bytes(fused));
  if (fused.score.target.device.kind == DeviceKind::kCuda)
    fused.workspace = {static_cast<std::byte*>(enough.data()), enough.size()};
  score_select(fused);
  Guarded<float> logits(c.tokens * keys);
  ScoreArgs a = fused.score;
  a.logits = tensor(logits.data(), {c.tokens, keys});
  score(a);
  ASSERT_TRUE(testing::device_finished());
  SelectArgs selects{.logits = a.logits,
                     .starts = a.starts,
                     .ends = a.ends,
                     .ids = tensor(want.data(), {c.tokens, c.topk}),
                     .blocks = {.best = tensor(want_best.data(), {c.tokens, kBlocks})},
                     .target = {.kernel = "reference"}};
  select(selects);
  EXPECT_EQ(ids.values(), want.values());
  EXPECT_EQ(best.values(), want_best.values());
  fused.blocks = {.within = tensor(best.data(), {c.tokens, kBlocks})};
  selects.blocks = fused.blocks;
  fused.relative = selects.relative = true;
  score_select(fused);
  ASSERT_TRUE(testing::device_finished());
  select(selects);
  EXPECT_EQ(ids.values(), want.values());
}

INSTANTIATE_TEST_SUITE_P(Kernels, ScoreTest, ::testing::ValuesIn(kernels_and_cases()),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

TEST(ScoreErrors, NameTheArgument) {
  Problem p({"", 3, 4, 20, 8, Fill::kNormal, 1, true}), flat({"", 3, 4, 20});
  Guarded<float> logits(60);
  ScoreArgs paged = p.args(), contiguous = flat.args();
  paged.logits = contiguous.logits = tensor(logits.data(), {3, 20});
  const auto expect = [&](const ScoreArgs& good, auto change,
                          std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    ScoreArgs a = good;
    change(a);
    testing::expect_error([&] { score(a); }, code, words);
  };
  expect(paged, [](ScoreArgs& a) { a.q = {}; }, {"score", "q", "nothing"});
  expect(paged, [](ScoreArgs& a) { a.q.shape[2] = 64; }, {"q", "128", "64"});
  expect(paged, [](ScoreArgs& a) { a.q.shape[1] = 129; }, {"q heads", "1 to 128", "129"});
  expect(paged, [](ScoreArgs& a) { a.q.shape[1] = 0; }, {"q heads", "found 0"});
  expect(paged, [](ScoreArgs& a) { a.weights.shape[1] = 5; }, {"weights", "[3, 4]", "[3, 5]"});
  expect(paged, [](ScoreArgs& a) { a.keys.format = CacheFormat::kV32Fp8; }, {"keys"});
  expect(paged, [](ScoreArgs& a) { a.keys.page_stride = 8; }, {"keys", "page_stride"});
  expect(paged, [](ScoreArgs& a) { a.keys = {}; }, {"keys", "a cache"});
  expect(paged, [](ScoreArgs& a) { a.block_table = {}; }, {"block_table", "nothing"});
  expect(paged, [](ScoreArgs& a) { a.requests.shape[0] = 2; }, {"requests", "[3]", "[2]"});
  expect(paged, [](ScoreArgs& a) { a.ends = {}; }, {"ends", "nothing"});
  expect(paged, [](ScoreArgs& a) { a.starts.shape[0] = 7; }, {"starts", "[3]", "[7]"});
  expect(paged, [](ScoreArgs& a) { a.logits.stride[0] = 19; }, {"logits", "overlap"});
  expect(paged, [&](ScoreArgs& a) { a.key_rows = contiguous.key_rows; }, {"keys", "both"});
  expect(
      paged, [](ScoreArgs& a) { a.target.kernel = "fastest"; }, {"no kernel fits", "simd"},
      ErrorCode::kUnsupported);
  expect(paged,
         [](ScoreArgs& a) { a.keys.format = CacheFormat::kIndexKeysBf16, a.keys.page_stride = 0; },
         {"keys", "index_keys, as q is e4m3", "index_keys_bf16"});
  Problem wide({"", 3, 4, 20, 0, Fill::kNormal, 1, false, false, 5, 0, true});
  expect(contiguous, [&](ScoreArgs& a) { a.q = wide.args().q; }, {"key_rows", "bf16", "e4m3"});
  ScoreArgs wide_args = wide.args();
  wide_args.logits = contiguous.logits;
  expect(wide_args, [&](ScoreArgs& a) { a.key_scales = contiguous.key_scales; },
         {"key_scales", "none with keys in bf16"});
  expect(contiguous, [](ScoreArgs& a) { a.key_scales = {}; }, {"key_scales", "nothing"});
  expect(contiguous, [](ScoreArgs& a) { a.key_rows.dtype = DType::kU8; }, {"key_rows", "e4m3"});
  expect(contiguous, [](ScoreArgs& a) { a.logits.shape[1] = 19; }, {"logits", "20", "19"});
  expect(contiguous, [&](ScoreArgs& a) { a.block_table = paged.block_table; }, {"block_table"});
  for (float x : logits) EXPECT_EQ(bits(x), kPoison);  // nothing was written
}

TEST(ScoreSelectErrors, NameTheArgument) {
  Problem p({"", 3, 4, 20});
  Guarded<int32_t> ids(15);
  Guarded<std::byte> workspace(40);
  ScoreSelectArgs good{.score = p.args(), .ids = tensor(ids.data(), {3, 5})};
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    ScoreSelectArgs a = good;
    change(a);
    testing::expect_error([&] { score_select(a); }, code, words);
  };
  expect(
      [&](ScoreSelectArgs& a) {
        a.workspace = {workspace.data(), 40};
      },
      {"score_select", "workspace", "at least", "found 40"});
  expect(
      [](ScoreSelectArgs& a) {
        a.workspace = {static_cast<std::byte*>(nullptr), size_t{1} << 20};
      },
      {"score_select", "workspace", "data", "null"});
  expect([](ScoreSelectArgs& a) { a.ids = {}; }, {"ids", "nothing"});
  expect([](ScoreSelectArgs& a) { a.ids.shape[0] = 2; }, {"ids", "[3", "[2"});
  expect([](ScoreSelectArgs& a) { a.score.logits = a.score.weights; }, {"logits", "none"});
  expect([](ScoreSelectArgs& a) { a.score.target.kernel = "fastest"; },
         {"score_select", "no kernel fits"}, ErrorCode::kUnsupported);
  for (int32_t id : ids) EXPECT_EQ(static_cast<uint32_t>(id), kPoison);
  EXPECT_GE(score_select_workspace_bytes(good), 3u * 20 * 4);
}

}  // namespace
}  // namespace winnow
