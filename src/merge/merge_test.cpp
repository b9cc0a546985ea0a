// merge: every kernel against fp64 sums; empty parts, sinks, both dtypes.
#include <cmath>
#include <limits>

#include "accuracy.h"
#include "core/formats.h"
#include "testing.h"
#include "winnow/merge.h"

namespace winnow {
namespace {

using testing::Guarded;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  std::string name;
  int64_t parts, tokens, heads, d_v;
  bool bf16_in = false, bf16_out = true, sink = false;
  int64_t gap = 0;  // columns between rows
};

std::vector<Case> cases() {
  return {
      {"two", 2, 3, 4, 512},
      {"one", 1, 2, 3, 512, true},
      {"many_sink", 9, 2, 5, 512, false, true, true},
      {"odd_width", 3, 2, 3, 77, true, false, true},
      {"narrow", 4, 5, 1, 1, false, false},
      {"strided", 3, 4, 5, 100, true, true, true, 3},
      {"strided_by_eight", 3, 4, 5, 96, true, false, true, 8},
      {"strided_by_four", 3, 4, 5, 100, false, true, true, 4},
      {"wide", 2, 2, 3, 1160, true},
      {"wide_odd", 2, 2, 3, 531, false, true, true},
      {"many_parts", 45, 3, 3, 136, true, true, true},
      {"many_rows", 2, 137, 129, 8, true, true, true},  // a warp of a GPU takes several
      {"many_rows_and_parts", 11, 72, 127, 9},
      {"no_parts", 0, 2, 3, 64},
      {"no_tokens", 3, 0, 3, 64},
      {"no_width", 3, 2, 3, 0},
      {"large", 2, 33, 16, 512, false, true, true},
  };
}

struct Problem {
  Case c;
  int64_t row;  // floats between rows of partial_out
  std::vector<float> values;
  Guarded<float> in32, lse, sink;
  Guarded<bf16> in16;

  explicit Problem(const Case& c_)
      : c(c_),
        row(c.d_v + c.gap),
        in32(c.parts * c.tokens * c.heads * row, 0xff),
        lse(c.parts * c.tokens * c.heads),
        sink(c.heads),
        in16(c.parts * c.tokens * c.heads * row, 0xff) {
    testing::Rng rng(c.parts * 100 + c.d_v);
    const int64_t rows = c.tokens * c.heads;
    for (int64_t i = 0; i < c.parts; ++i)
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = i * rows + r;
        // Some parts are empty, in either notation, and every seventh row wholly so; values of
        // empty parts are NaN.
        const bool empty = r % 7 == 6 || testing::draw(rng, 0, 4) == 0;
        lse[at] = empty ? (testing::draw(rng, 0, 1) ? kInf : -kInf) : 20 * testing::normal(rng);
        for (int64_t d = 0; d < c.d_v; ++d) {
          const bf16 x = empty ? bf16{0x7fc0} : to_bf16(testing::normal(rng));
          in16[at * row + d] = x;
          in32[at * row + d] = to_float(x);
        }
      }
    const float sinks[] = {1.5f, -kInf, kInf, -30.0f};
    for (int64_t h = 0; h < c.heads; ++h) sink[h] = sinks[h % 4];
  }

  MergeArgs args() {
    const std::initializer_list<int64_t> shape = {c.parts, c.tokens, c.heads, c.d_v};
    const std::initializer_list<int64_t> stride = {c.tokens * c.heads * row, c.heads * row, row, 1};
    MergeArgs a{.partial_out = c.bf16_in ? tensor(in16.data(), shape, stride)
                                         : tensor(in32.data(), shape, stride),
                .partial_lse = tensor(lse.data(), {c.parts, c.tokens, c.heads})};
    if (c.sink) a.sink = tensor(sink.data(), {c.heads});
    return a;
  }

  void expected(std::vector<float>& out, std::vector<float>& sums) const {
    const int64_t rows = c.tokens * c.heads;
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0, shift = -1e300;
      for (int64_t i = 0; i < c.parts; ++i)
        if (!std::isinf(lse[i * rows + r])) shift = std::max<double>(shift, lse[i * rows + r]);
      std::vector<double> o(c.d_v);
      for (int64_t i = 0; i < c.parts; ++i) {
        if (std::isinf(lse[i * rows + r])) continue;
        const double w = std::exp(lse[i * rows + r] - shift);
        sum += w;
        for (int64_t d = 0; d < c.d_v; ++d) o[d] += w * in32[(i * rows + r) * row + d];
      }
      const double all = shift + std::log(sum);
      double factor = sum > 0 ? 1 / sum : 0;
      if (c.sink && sum > 0) factor /= 1 + std::exp(sink[r % c.heads] - all);
      for (const double x : o) out.push_back(static_cast<float>(x * factor));
      sums.push_back(sum > 0 ? static_cast<float>(all) : -kInf);
    }
  }
};

class MergeTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(MergeTest, MatchesTheFormula) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("merge", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  const int64_t row = c.d_v + c.gap;
  Guarded<float> out32(c.tokens * c.heads * row), lse(c.tokens * c.heads);
  Guarded<bf16> out16(c.tokens * c.heads * row);
  MergeArgs a = p.args();
  const std::initializer_list<int64_t> shape = {c.tokens, c.heads, c.d_v};
  const std::initializer_list<int64_t> stride = {c.heads * row, row, 1};
  a.out = c.bf16_out ? tensor(out16.data(), shape, stride) : tensor(out32.data(), shape, stride);
  a.lse = tensor(lse.data(), {c.tokens, c.heads});
  a.target = testing::target("merge", kernel);
  merge(a);
  ASSERT_TRUE(testing::device_finished());
  std::vector<float> want, want_lse;
  p.expected(want, want_lse);
  // fp32: the weights' exponents (up to 100) round to 2^-24 of themselves, so e^x to 100 * 2^-24,
  // and a sum of P terms to P * 2^-24 of its largest; bf16 adds 2^-9.
  const tools::Bar out_bar{c.bf16_out ? 1e-4 : 4e-5, c.bf16_out ? 1.01 / 256 : 4e-5};
  const tools::Deviation d =
      tools::compare(a.out, tensor(want.data(), {c.tokens, c.heads, c.d_v}), out_bar);
  EXPECT_TRUE(d.ok) << "out: " << d.text(a.out);
  const tools::Deviation l =
      tools::compare(a.lse, tensor(want_lse.data(), {c.tokens, c.heads}), tools::kPrefillLse);
  EXPECT_TRUE(l.ok) << "lse: " << l.text(a.lse);
}

INSTANTIATE_TEST_SUITE_P(Kernels, MergeTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("merge")),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

class MergeEdges : public ::testing::TestWithParam<std::string> {};

TEST_P(MergeEdges, ExtremeSums) {
  if (const std::string why = testing::why_not("merge", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  // Rows: parts far apart; equal parts near the end of the range; a NaN sum.
  Guarded<float> in(std::vector<float>{1, 1, 1, 3, 3, 3}), out(3), sums(3);
  Guarded<float> lse(std::vector<float>{3e38f, 2e38f, 0, -3e38f, 2e38f, kNan});
  merge({.partial_out = tensor(in.data(), {2, 1, 3, 1}),
         .partial_lse = tensor(lse.data(), {2, 1, 3}),
         .out = tensor(out.data(), {1, 3, 1}),
         .lse = tensor(sums.data(), {1, 3}),
         .target = testing::target("merge", GetParam())});
  ASSERT_TRUE(testing::device_finished());
  EXPECT_EQ(out[0], 1);
  EXPECT_EQ(sums[0], 3e38f);
  EXPECT_EQ(out[1], 2);
  EXPECT_EQ(sums[1], 2e38f);
  EXPECT_TRUE(std::isnan(out[2]) && std::isnan(sums[2]));
}

INSTANTIATE_TEST_SUITE_P(Kernels, MergeEdges, ::testing::ValuesIn(testing::kernels("merge")));

TEST(MergeErrors, NameTheArgument) {
  Problem p(cases()[0]);
  Guarded<bf16> out(3 * 4 * 512);
  MergeArgs good = p.args();
  good.out = tensor(out.data(), {3, 4, 512});
  const auto expect = [&](auto change, std::initializer_list<const char*> words) {
    MergeArgs a = good;
    change(a);
    testing::expect_invalid([&] { merge(a); }, words);
  };
  expect([](MergeArgs& a) { a.partial_out = {}; }, {"merge", "partial_out", "nothing"});
  expect([](MergeArgs& a) { a.partial_out.dtype = DType::kI32; },
         {"partial_out", "f32 or bf16", "int32"});
  expect([](MergeArgs& a) { a.partial_out.rank = 3; }, {"partial_out"});
  expect([](MergeArgs& a) { a.partial_lse.shape[0] = 3; },
         {"partial_lse", "[2, 3, 4]", "[3, 3, 4]"});
  expect([](MergeArgs& a) { a.out.shape[2] = 511; }, {"out", "512", "511"});
  expect([](MergeArgs& a) { a.out.stride[1] = 8; }, {"out", "overlap"});
  expect([&](MergeArgs& a) { a.sink = tensor(p.sink.data(), {3}); }, {"sink", "[4]", "[3]"});
  expect([&](MergeArgs& a) { a.lse = tensor(p.lse.data(), {3, 5}); }, {"lse", "[3, 4]"});
  for (const bf16 x : out) EXPECT_EQ(x.bits, 0xcdcd);  // nothing was written
}

}  // namespace
}  // namespace winnow
