// prepare_queries: the bytes of prepare_query() and index_query(), for every kernel.
#include "winnow/prepare_queries.h"

#include "core/formats.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using testing::Guarded;

constexpr int64_t kPositions = 30;

struct Case {
  const char* name;
  int64_t tokens, heads, width;
  NormKind norm;
  int64_t index_heads;
  int64_t padding = 0;  // elements between heads
  bool in_place = false;
  bool bf16_out = false;
};

std::vector<Case> cases() {
  using N = NormKind;
  return {
      {"v32", 13, 128, 64, N::kNone, 64, 128},
      {"v32_in_place", 5, 16, 192, N::kNone, 64, 0, true},
      {"glm", 3, 64, 64, N::kNone, 32, 192},
      {"v32_odd_heads", 6, 11, 192, N::kNone, 13, 0, true},
      {"v32_prefill", 70, 128, 192, N::kNone, 64, 0, true},
      {"v4", 9, 64, 512, N::kRms, 64},
      {"v4_bf16_keys", 6, 7, 512, N::kRms, 5, 0, true, true},
      {"short_heads", 33, 3, 128, N::kLayer, 9},
      {"odd", 4, 5, 99, N::kRms, 3, 1},
      {"no_index", 7, 4, 512, N::kRms, 0},
      {"no_heads", 7, 0, 512, N::kRms, 8},
      {"one_token", 1, 128, 64, N::kNone, 64},
      {"no_tokens", 0, 4, 512, N::kRms, 4},
  };
}

struct Problem {
  Case c;
  int64_t stride;
  Guarded<bf16> q, index_q;
  Guarded<float> weights, angles{kPositions * 64};
  Guarded<int32_t> positions;
  // Outputs.
  Guarded<bf16> out, rows;
  Guarded<e4m3> codes;
  Guarded<float> out_weights;

  explicit Problem(const Case& c_)
      : c(c_),
        stride(c.width + c.padding),
        q(c.tokens * c.heads * stride),
        index_q(c.tokens * c.index_heads * 128),
        weights(c.tokens * c.index_heads),
        positions(c.tokens),
        out(c.tokens * c.heads * c.width),
        rows(index_q.size()),
        codes(index_q.size()),
        out_weights(weights.size()) {
    testing::Rng rng(23);
    for (bf16& v : q) v = to_bf16(testing::normal(rng));
    for (bf16& v : index_q) v = to_bf16(testing::normal(rng));
    for (float& w : weights) w = testing::normal(rng);
    rope_table({.table = tensor(angles.data(), {kPositions, 2, 32})});
    const auto hostile = testing::hostile(kPositions);
    for (int64_t t = 0; t < c.tokens; ++t)
      positions[t] =
          static_cast<int32_t>(t % 4 == 3 ? hostile[t % hostile.size()] : 3 * t % kPositions);
  }
  PrepareQueriesArgs args() {
    const Tensor at = tensor(positions.data(), {c.tokens});
    const Rope rope{tensor(angles.data(), {kPositions, 2, 32})};
    PrepareQueriesArgs a;
    a.query = {.q = tensor(q.data(), {c.tokens, c.heads, c.width}, {c.heads * stride, stride, 1}),
               .norm = {.kind = c.norm},
               .positions = at,
               .rope = rope,
               .out = tensor(out.data(), {c.tokens, c.heads, c.width})};
    if (c.in_place) a.query.out = a.query.q;
    const std::initializer_list<int64_t> shape = {c.tokens, c.index_heads, 128};
    a.index = {.q = tensor(index_q.data(), shape),
               .weights = tensor(weights.data(), {c.tokens, c.index_heads}),
               .positions = at,
               .rope = rope,
               .hadamard = c.heads % 2 == 1,
               .factor = 0.011f,
               .out = c.bf16_out ? tensor(rows.data(), shape) : tensor(codes.data(), shape),
               .out_weights = tensor(out_weights.data(), {c.tokens, c.index_heads})};
    return a;
  }
  // Everything that a call may write.
  std::vector<uint8_t> results() const {
    std::vector<uint8_t> all;
    const auto add = [&](const auto& values) {
      const auto* begin = reinterpret_cast<const uint8_t*>(values.data());
      all.insert(all.end(), begin, begin + values.size() * sizeof(values[0]));
    };
    add(q);
    add(out);
    add(rows);
    add(codes);
    add(out_weights);
    return all;
  }
};

class PrepareQueriesTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(PrepareQueriesTest, IsTheCompositionOfItsParts) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("prepare_queries", kernel); !why.empty())
    GTEST_SKIP() << why;
  Problem fused(c), single(c);
  PrepareQueriesArgs a = fused.args();
  a.target = testing::target("prepare_queries", kernel);
  prepare_queries(a);
  PrepareQueriesArgs b = single.args();
  b.query.target = testing::target("prepare_query", kernel);
  b.index.target = testing::target("index_query", kernel);
  prepare_query(b.query);
  index_query(b.index);
  ASSERT_TRUE(testing::device_finished());
  ASSERT_EQ(fused.results(), single.results());
}

TEST_P(PrepareQueriesTest, EitherPartMayBeEmpty) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("prepare_queries", kernel); !why.empty())
    GTEST_SKIP() << why;
  for (const bool index : {false, true}) {
    Problem fused(c), single(c);
    PrepareQueriesArgs a = fused.args(), b = single.args();
    a.target = testing::target("prepare_queries", kernel);
    if (index) a.query = {};
    else a.index = {};
    prepare_queries(a);
    b.query.target = testing::target("prepare_query", kernel);
    b.index.target = testing::target("index_query", kernel);
    if (index) index_query(b.index);
    else prepare_query(b.query);
    ASSERT_TRUE(testing::device_finished());
    ASSERT_EQ(fused.results(), single.results()) << index;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, PrepareQueriesTest,
    ::testing::Combine(::testing::ValuesIn(testing::kernels("prepare_queries")),
                       ::testing::ValuesIn(cases())),
    [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param).name; });

TEST(PrepareQueriesErrors, NameThePartAndWriteNothing) {
  Problem p(cases()[0]);
  const std::vector<uint8_t> untouched = p.results();
  const auto expect = [&](auto change, std::initializer_list<const char*> words) {
    PrepareQueriesArgs a = p.args();
    change(a);
    testing::expect_invalid([&] { prepare_queries(a); }, words);
  };
  expect([](PrepareQueriesArgs& a) { a = PrepareQueriesArgs{}; },
         {"prepare_queries", "query", "neither"});
  expect([](PrepareQueriesArgs& a) { a.query.q = {}; }, {"prepare_queries: query.q:", "nothing"});
  expect([](PrepareQueriesArgs& a) { a.index.out = {}; }, {"prepare_queries: index.out:"});
  expect([](PrepareQueriesArgs& a) { a.index.rope = {}; }, {"prepare_queries: index.rope.table:"});
  expect([](PrepareQueriesArgs& a) { a.index.positions.shape[0] = 2; },
         {"prepare_queries: index.positions:"});
  expect([](PrepareQueriesArgs& a) { a.index.out = a.query.out; }, {"prepare_queries: index.out:"});
  expect([](PrepareQueriesArgs& a) { a.index.out.data = a.query.q.data; },
         {"prepare_queries: index.out: expected memory apart from query.q"});
  ASSERT_EQ(p.results(), untouched);
}

}  // namespace
}  // namespace winnow
