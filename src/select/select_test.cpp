// select: every kernel x every case against a full sort; nothing outside the ranges is read or
// given.
#include "winnow/select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "select/select_cases.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using internal::select::Case;
using internal::select::Fill;
using testing::draw;
using testing::Guarded;

// Whether a sample of 2^log2 logits on CUDA (cuda/topk_parts.cuh) has this column.
bool sampled(int64_t column, int64_t columns, int log2) {
  const int64_t k = (column << log2) / columns;  // the part that it begins in
  for (const int64_t part : {k, k + 1})
    if (((part << 16 | (part * 40503 & 0xffff)) * columns >> (16 + log2)) == column) return true;
  return false;
}

float value(Fill fill, testing::Rng& rng, int64_t column, int64_t columns) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = NAN;
  switch (fill) {
    case Fill::kNormal: return testing::normal(rng);
    case Fill::kRelu: {
      const float x = testing::normal(rng);
      return x > 0.5f ? x : draw(rng, 0, 3) ? 0.0f : -0.0f;
    }
    case Fill::kEqual: return -3.25f;
    case Fill::kNan: return draw(rng, 0, 1) ? kNan : -kNan;
    case Fill::kSpecial: {
      const float pick[] = {kNan,    -kNan,  kInf,    -kInf, 0.0f,   -0.0f, 1e-45f,
                            -1e-45f, 1e-39f, -1e-39f, 3e38f, -3e38f, 1.0f,  -1.0f};
      return pick[draw(rng, 0, std::size(pick) - 1)];
    }
    case Fill::kRising: return static_cast<float>(column) - 500.0f;
    case Fill::kFalling: return 500.0f - static_cast<float>(column);
    case Fill::kTwo: return draw(rng, 0, 1) ? 1.0f : std::nextafter(1.0f, 2.0f);
    case Fill::kSpike: {
      const bool huge = columns > 100000
                            ? sampled(column, columns, 12)
                            : sampled(column, columns, 9) || sampled(column, columns, 11);
      return huge ? 1e30f : testing::normal(rng);
    }
    case Fill::kMissing: return draw(rng, 0, 99) ? -kInf : testing::normal(rng);
    case Fill::kHeavy: return std::exp(6 * testing::normal(rng));
    case Fill::kNarrow: return 1000.0f + 0.002f * testing::normal(rng);
    case Fill::kRepeat: {
      testing::Rng own(column % 4096);
      return testing::normal(own);
    }
  }
  return 0;
}

struct Problem {
  Case c;
  Guarded<float> logits;
  Guarded<int32_t> starts, ends;
  int64_t stride;

  explicit Problem(const Case& c_)
      : c(c_),
        logits(c.tokens * (c.columns + c.padding)),
        starts(c.tokens),
        ends(c.tokens),
        stride(c.columns + c.padding) {
    testing::Rng rng(c.columns * 7 + c.topk);
    for (int64_t t = 0; t < c.tokens; ++t)
      for (int64_t j = 0; j < stride; ++j)
        logits[t * stride + j] = j < c.columns ? value(c.fill, rng, j, c.columns) : 1e38f;
    const auto bad = testing::hostile(c.columns);
    for (int64_t t = 0; t < c.tokens; ++t) {
      starts[t] = static_cast<int32_t>(t % 3 == 2 ? bad[draw(rng, 0, 6)] : draw(rng, 0, 20));
      ends[t] = static_cast<int32_t>(t % 4 == 3 ? bad[draw(rng, 0, 6)] : draw(rng, 0, c.columns));
    }
    if (c.tokens == 1) ends[0] = static_cast<int32_t>(c.columns - 3);
  }

  SelectArgs args() {
    SelectArgs a{.logits = tensor(logits.data(), {c.tokens, c.columns}, {stride, 1}),
                 .relative = c.relative};
    if (c.starts) a.starts = tensor(starts.data(), {c.tokens});
    if (c.ends) a.ends = tensor(ends.data(), {c.tokens});
    return a;
  }

  std::vector<int32_t> expected(int64_t t) const {
    const int64_t first = std::clamp<int64_t>(c.starts ? starts[t] : 0, 0, c.columns);
    const int64_t last = std::clamp<int64_t>(c.ends ? ends[t] : c.columns, 0, c.columns);
    std::vector<std::pair<double, int32_t>> all;  // (-value, column), NaN behind everything
    for (int64_t j = first; j < last; ++j) {
      const float x = logits[t * stride + j];
      all.push_back({std::isnan(x)   ? std::numeric_limits<double>::infinity()
                     : std::isinf(x) ? (x > 0 ? -1e300 : 1e300)
                                     : -static_cast<double>(x) + 0.0,
                     static_cast<int32_t>(j)});
    }
    std::sort(all.begin(), all.end());
    all.resize(std::min<size_t>(all.size(), c.topk));
    std::vector<int32_t> ids;
    for (const auto& [v, j] : all) ids.push_back(c.relative ? j - static_cast<int32_t>(first) : j);
    std::sort(ids.begin(), ids.end());
    ids.resize(c.topk, -1);
    return ids;
  }
};

// The logits at the ids, bit for bit.
void expect_values(const Problem& p, const Guarded<int32_t>& ids, const Guarded<float>& values) {
  const Case& c = p.c;
  for (int64_t t = 0; t < c.tokens; ++t) {
    const int64_t start = std::clamp<int64_t>(c.starts ? p.starts[t] : 0, 0, c.columns);
    for (int64_t i = t * c.topk; i < (t + 1) * c.topk; ++i) {
      const int64_t column = ids[i] + (c.relative ? start : 0);
      const float want =
          ids[i] < 0 ? -std::numeric_limits<float>::infinity() : p.logits[t * p.stride + column];
      ASSERT_EQ(std::memcmp(&values[i], &want, sizeof want), 0)
          << "token " << t << ", id " << ids[i] << ": " << values[i] << ", expected " << want;
    }
  }
}

class SelectTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(SelectTest, MatchesAFullSort) {
  auto [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("select", kernel); !why.empty()) GTEST_SKIP() << why;
  const Target target = testing::target("select", kernel);
  if (target.device.kind == DeviceKind::kCuda && c.device_tokens > 0) c.tokens = c.device_tokens;
  Problem p(c);
  Guarded<int32_t> ids(c.tokens * c.topk);
  SelectArgs a = p.args();
  a.ids = tensor(ids.data(), {c.tokens, c.topk});
  a.target = target;
  Guarded<float> values(c.tokens * c.topk);
  a.values = tensor(values.data(), {c.tokens, c.topk});
  select(a);
  ASSERT_TRUE(testing::device_finished());
  expect_values(p, ids, values);
  const std::vector<int32_t> with_values = ids.values();
  a.values = {};
  ids.poison();
  select(a);
  ASSERT_TRUE(testing::device_finished());
  ASSERT_EQ(ids.values(), with_values);
  for (int64_t t = 0; t < c.tokens; ++t) {
    const std::vector<int32_t> got(ids.data() + t * c.topk, ids.data() + (t + 1) * c.topk);
    const auto want = p.expected(t);
    const auto [g, w] = std::mismatch(got.begin(), got.end(), want.begin());
    ASSERT_TRUE(g == got.end()) << "token " << t << ", place " << g - got.begin() << ": " << *g
                                << ", expected " << *w;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, SelectTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("select")),
                                            ::testing::ValuesIn(internal::select::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

// Rows of one view may share their memory: an input of stride 0 is fine.
TEST(Select, AcceptsRowsOfStrideZero) {
  std::vector<float> row = {1, 5, 3, 5};
  Guarded<int32_t> ids(6);
  select({.logits = tensor(row.data(), {3, 4}, {0, 1}), .ids = tensor(ids.data(), {3, 2})});
  EXPECT_EQ(ids.values(), (std::vector<int32_t>{1, 3, 1, 3, 1, 3}));
}

TEST(SelectErrors, NameTheArgument) {
  Problem p({"", 3, 20, 5, Fill::kNormal, true, true});
  Guarded<int32_t> ids(15);
  SelectArgs good = p.args();
  good.ids = tensor(ids.data(), {3, 5});
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    SelectArgs a = good;
    change(a);
    testing::expect_error([&] { select(a); }, code, words);
  };
  expect([](SelectArgs& a) { a.logits = {}; }, {"select", "logits", "nothing"});
  expect([](SelectArgs& a) { a.logits.dtype = DType::kI32; }, {"logits", "f32", "int32"});
  expect([](SelectArgs& a) { a.logits.stride[1] = 2; }, {"logits", "contiguous"});
  expect([](SelectArgs& a) { a.logits.data = nullptr; }, {"logits", "null"});
  expect([](SelectArgs& a) { a.logits.shape[1] = int64_t{1} << 31, a.logits.stride[0] = 0; },
         {"logits", "2147483648"});
  expect([](SelectArgs& a) { a.starts.shape[0] = 4; }, {"starts", "[3]", "[4]"});
  expect([](SelectArgs& a) { a.ends.dtype = DType::kI64; }, {"ends", "int32", "int64"});
  expect([](SelectArgs& a) { a.ids = {}; }, {"ids", "nothing"});
  expect([](SelectArgs& a) { a.ids.shape[0] = 2; }, {"ids", "[3", "[2"});
  expect([](SelectArgs& a) { a.ids.stride[0] = 4; }, {"ids", "overlap"});
  expect([](SelectArgs& a) { a.target.kernel = "fastest"; }, {"select", "no kernel fits", "simd"},
         ErrorCode::kUnsupported);
  for (int32_t s : ids) EXPECT_EQ(s, static_cast<int32_t>(0xcdcdcdcd));  // nothing was written
}

}  // namespace
}  // namespace winnow
