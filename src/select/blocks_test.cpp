// Blocks of columns: what select() finds and what it takes from them, against a full sort; hostile
// lists name nothing that is not theirs.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "testing.h"
#include "winnow/error.h"
#include "winnow/select.h"

namespace winnow {
namespace {

using testing::draw;
using testing::Guarded;

struct Case {
  std::string name;
  int64_t tokens, columns, topk, blocks;
  int32_t size = 8;
  bool special = false;  // NaN, infinities and ties instead of normal logits
  bool relative = false;
};

std::vector<Case> cases() {
  return {
      {"small", 3, 70, 5, 4},
      {"v41", 2, 20000, 512, 2048},
      {"all_blocks", 3, 500, 64, 100},
      {"special", 20, 333, 40, 12, 8, true, true},
      {"size_1", 5, 90, 7, 20, 1, true},
      {"size_5_relative", 9, 201, 30, 9, 5, false, true},
      {"one_block", 4, 100, 12, 1, 16, true},
      {"huge_blocks", 3, 100, 9, 3, INT32_MAX},
      {"no_blocks", 3, 40, 6, 0},
      {"no_columns", 3, 0, 6, 4},
      {"no_topk", 3, 40, 0, 4},
      {"no_tokens", 0, 40, 6, 4},
  };
}

struct Problem {
  Case c;
  Guarded<float> logits;
  Guarded<int32_t> starts, ends, within;

  explicit Problem(const Case& c_)
      : c(c_),
        logits(c.tokens * c.columns),
        starts(c.tokens),
        ends(c.tokens),
        within(c.tokens * c.blocks) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    testing::Rng rng(c.columns + c.size);
    const float pick[] = {NAN, kInf, -kInf, 0.0f, -0.0f, 1.0f, -1.0f, 2.0f};
    for (float& x : logits)
      x = c.special ? pick[draw(rng, 0, std::size(pick) - 1)] : testing::normal(rng);
    const auto bad = testing::hostile(c.columns);
    for (int64_t t = 0; t < c.tokens; ++t) {
      starts[t] = t % 5 == 4 ? bad[t % bad.size()] : static_cast<int32_t>(draw(rng, 0, 9));
      ends[t] = static_cast<int32_t>(t % 7 == 6 ? bad[(t + 3) % bad.size()]
                                                : draw(rng, c.columns / 2, c.columns));
      // Ascending for the most part; some step back, are twice there, or lie outside.
      int64_t block = 0;
      for (int64_t i = 0; i < c.blocks; ++i) {
        const bool odd = draw(rng, 0, 9) == 0;
        const auto hostile = testing::hostile(c.columns / c.size + 1);
        within[t * c.blocks + i] =
            odd ? hostile[draw(rng, 0, 6)] : static_cast<int32_t>(block += draw(rng, 0, 2));
      }
    }
  }
  SelectArgs args(int32_t* ids) {
    return {.logits = tensor(logits.data(), {c.tokens, c.columns}),
            .starts = tensor(starts.data(), {c.tokens}),
            .ends = tensor(ends.data(), {c.tokens}),
            .ids = tensor(ids, {c.tokens, c.topk}),
            .relative = c.relative,
            .blocks = {.size = c.size}};
  }
  std::pair<int64_t, int64_t> range(int64_t t) const {
    const int64_t first = std::max(starts[t], 0), last = std::min<int64_t>(ends[t], c.columns);
    return first < last ? std::pair{first, last} : std::pair{int64_t{0}, int64_t{0}};
  }
  // The logit of an id that select() gave.
  float value_at(int64_t t, int32_t id) const {
    if (id < 0) return -std::numeric_limits<float>::infinity();
    return logits[t * c.columns + id + (c.relative ? range(t).first : 0)];
  }
  // The first k of `all` when the larger logits come first, in ascending order, then -1.
  template <class Value>
  std::vector<int32_t> best(std::vector<int64_t> all, int64_t k, Value&& value) const {
    std::stable_sort(all.begin(), all.end(), [&](int64_t a, int64_t b) {
      const double x = value(a), y = value(b);
      if (std::isnan(x) || std::isnan(y)) return !std::isnan(x) && std::isnan(y);
      return x > y;
    });
    if (std::ssize(all) > k) all.resize(k);
    std::sort(all.begin(), all.end());
    std::vector<int32_t> ids(all.begin(), all.end());
    ids.resize(k, -1);
    return ids;
  }
  std::vector<int32_t> expected_ids(int64_t t) const {
    const auto [first, last] = range(t);
    std::vector<bool> named(c.columns / c.size + 1);
    int64_t largest = -1;
    for (int64_t i = 0; i < c.blocks; ++i) {
      const int64_t b = within[t * c.blocks + i];
      if (b > largest && b < std::ssize(named)) named[b] = true;
      largest = std::max(largest, b);
    }
    std::vector<int64_t> columns;
    for (int64_t j = first; j < last; ++j)
      if (named[j / c.size]) columns.push_back(j);
    const float* row = logits.data() + t * c.columns;
    std::vector<int32_t> ids = best(columns, c.topk, [&](int64_t j) { return row[j]; });
    for (int32_t& id : ids)
      if (c.relative && id >= 0) id -= static_cast<int32_t>(first);
    return ids;
  }
  std::vector<int32_t> expected_blocks(int64_t t) const {
    const auto [first, last] = range(t);
    std::vector<int64_t> blocks;
    std::vector<double> values(c.columns / c.size + 1, NAN);
    const float* row = logits.data() + t * c.columns;
    for (int64_t j = first; j < last; ++j) {
      if (blocks.empty() || blocks.back() != j / c.size) blocks.push_back(j / c.size);
      double& value = values[j / c.size];
      value = j / c.size == (last - 1) / c.size ? 1e300 : std::fmax(value, row[j]);
    }
    return best(blocks, c.blocks, [&](int64_t b) {
      return std::isinf(values[b]) ? std::copysign(1e299, values[b]) : values[b];
    });
  }
};

class SelectBlocksTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(SelectBlocksTest, MatchesAFullSort) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("select", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  Guarded<int32_t> ids(c.tokens * c.topk), best(c.tokens * c.blocks);
  Guarded<float> values(c.tokens * c.topk);
  SelectArgs a = p.args(ids.data());
  a.values = tensor(values.data(), {c.tokens, c.topk});
  a.target = testing::target("select", kernel);
  a.blocks.within = tensor(p.within.data(), {c.tokens, c.blocks});
  a.blocks.best = tensor(best.data(), {c.tokens, c.blocks});
  select(a);
  ASSERT_TRUE(testing::device_finished());
  for (int64_t t = 0; t < c.tokens; ++t) {
    const auto row = [&](const Guarded<int32_t>& of, int64_t width) {
      return std::vector<int32_t>(of.data() + t * width, of.data() + (t + 1) * width);
    };
    EXPECT_EQ(row(ids, c.topk), p.expected_ids(t)) << "token " << t;
    EXPECT_EQ(row(best, c.blocks), p.expected_blocks(t)) << "token " << t;
    for (int64_t i = 0; i < c.topk; ++i)
      EXPECT_EQ(std::bit_cast<uint32_t>(values[t * c.topk + i]),
                std::bit_cast<uint32_t>(p.value_at(t, ids[t * c.topk + i])))
          << "token " << t << ", place " << i;
  }
  a.values = {};
  // A layer selects inside the blocks that it found: with all of them, from the whole range.
  const int64_t all = c.columns / c.size + 1;
  Guarded<int32_t> every(c.tokens * all), whole(c.tokens * c.topk);
  a.blocks = {.size = c.size, .best = tensor(every.data(), {c.tokens, all})};
  a.ids = tensor(whole.data(), {c.tokens, c.topk});
  select(a);
  a.blocks = {.size = c.size, .within = tensor(every.data(), {c.tokens, all})};
  a.ids = tensor(ids.data(), {c.tokens, c.topk});
  select(a);
  ASSERT_TRUE(testing::device_finished());
  EXPECT_EQ(ids.values(), whole.values());
}

INSTANTIATE_TEST_SUITE_P(Kernels, SelectBlocksTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("select")),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

TEST(SelectBlocksErrors, NameTheArgument) {
  Problem p({"", 3, 40, 4, 2});
  Guarded<int32_t> ids(12), best(6);
  SelectArgs good = p.args(ids.data());
  good.blocks.within = tensor(p.within.data(), {3, 2});
  good.blocks.best = tensor(best.data(), {3, 2});
  const auto expect = [&](auto change, std::initializer_list<const char*> words) {
    SelectArgs a = good;
    change(a);
    testing::expect_invalid([&] { select(a); }, words);
  };
  expect([](SelectArgs& a) { a.blocks.size = 0; }, {"select", "blocks.size", "found 0"});
  expect([](SelectArgs& a) { a.blocks.size = INT32_MIN; }, {"blocks.size"});
  expect([](SelectArgs& a) { a.blocks.within.shape[0] = 2; }, {"blocks.within", "[3", "[2"});
  expect([](SelectArgs& a) { a.blocks.within.dtype = DType::kI64; }, {"blocks.within", "int64"});
  expect([](SelectArgs& a) { a.blocks.best.shape[0] = 4; }, {"blocks.best", "[3", "[4"});
  expect([](SelectArgs& a) { a.blocks.best.stride[0] = 0; }, {"blocks.best", "overlap"});
  for (const int32_t x : ids) EXPECT_EQ(static_cast<uint32_t>(x), 0xcdcdcdcd);
  for (const int32_t x : best) EXPECT_EQ(static_cast<uint32_t>(x), 0xcdcdcdcd);
}

}  // namespace
}  // namespace winnow
