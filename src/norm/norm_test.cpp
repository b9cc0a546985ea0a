// norm: every kernel x every case against the formula in double.
#include "winnow/norm.h"

#include <bit>
#include <cmath>

#include "core/formats.h"
#include "norm/norm_cases.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using internal::norm::Case;
using testing::Guarded;

// One set of rows with its weights.
struct Problem {
  Case c;
  int64_t width, stride;
  Guarded<bf16> x;
  Guarded<float> weight, bias;

  Problem(const Case& c_, int64_t width_)
      : c(c_),
        width(width_),
        stride(width + c.padding),
        x(c.rows * stride, 0xff),  // NaN where nothing is read
        weight(width),
        bias(width) {
    testing::Rng rng(c.rows * 1000 + width);
    for (int64_t t = 0; t < c.rows; ++t)
      for (int64_t i = 0; i < width; ++i) {
        const float offset = c.kind == NormKind::kLayer ? c.offset : 0.0f;
        const int exponent = static_cast<int>(t % 9) - 4 + c.exponent;
        const float value = std::ldexp(testing::normal(rng) + offset, exponent);
        x[t * stride + i] = to_bf16(t % 7 == 6 ? 0.0f : value);  // some rows are all zeros
      }
    for (float& w : weight) w = std::ldexp(1 + 0.2f * testing::normal(rng), c.weight_exponent);
    for (float& b : bias) b = testing::normal(rng);
  }

  NormRows args(bf16* out) {
    Norm norm{.kind = c.kind, .eps = c.eps};
    if (c.weight) norm.weight = tensor(weight.data(), {width});
    if (c.bias) norm.bias = tensor(bias.data(), {width});
    return {.x = tensor(x.data(), {c.rows, width}, {stride, 1}),
            .out = tensor(out, {c.rows, width}, {stride, 1}),
            .norm = norm};
  }

  // Checks row t of what a kernel gave, x being what it read.
  void expect(const bf16* x, const bf16* got, int64_t t) const {
    double sum = 0, magnitudes = 0, squares = 0;
    for (int64_t i = 0; i < width; ++i) sum += to_float(x[i]);
    for (int64_t i = 0; i < width; ++i) magnitudes += std::fabs(to_float(x[i]));
    const double mean = c.kind == NormKind::kLayer ? sum / width : 0;
    for (int64_t i = 0; i < width; ++i) squares += std::pow(to_float(x[i]) - mean, 2);
    const double inverse = 1 / std::sqrt(squares / width + c.eps);
    // fp32, u = 2^-24: the mean is off by width * u of the mean magnitude, the sum of squares by
    // width * u plus twice that, relative to a value; four more operations; then bf16, 2^-8.
    const double u = 0x1p-24;
    const double off = c.kind == NormKind::kLayer ? (width + 2) * u * magnitudes / width : 0;
    for (int64_t i = 0; i < width; ++i) {
      const double w = c.weight ? weight[i] : 1;
      const double scaled = (to_float(x[i]) - mean) * inverse * w;
      const double want = scaled + (c.bias ? bias[i] : 0);
      const double fp32 = std::fabs(scaled) * (width + 8) * u + 2 * off * inverse * std::fabs(w) +
                          std::fabs(want) * u;
      const double bound = fp32 + (std::fabs(want) + fp32) * 0x1p-8 + 0x1p-133;
      ASSERT_LE(std::fabs(to_float(got[i]) - want), bound)
          << "row " << t << " value " << i << ": got " << to_float(got[i]) << ", expected " << want;
    }
  }
};

class NormTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

void expect_formula(const std::string& kernel, const Case& c) {
  Problem first(c, c.width), second(c, c.second_width ? c.second_width : 1);
  const Guarded<bf16> before(first.x);
  Guarded<bf16> out(first.x.size()), second_out(second.x.size());
  NormArgs a{.target = testing::target("norm", kernel)};
  a.rows[0] = first.args(c.in_place ? first.x.data() : out.data());
  if (c.second_width) a.rows[1] = second.args(second_out.data());
  norm(a);
  ASSERT_TRUE(testing::device_finished());
  const bf16* got = c.in_place ? first.x.data() : out.data();
  for (int64_t t = 0; t < c.rows; ++t) {
    first.expect(before.data() + t * first.stride, got + t * first.stride, t);
    if (c.second_width)
      second.expect(second.x.data() + t * second.stride, second_out.data() + t * second.stride, t);
    for (int64_t i = first.width; i < first.stride; ++i)  // between the rows nothing changes
      ASSERT_EQ(got[t * first.stride + i].bits, c.in_place ? 0xffff : 0xcdcd);
  }
}

TEST_P(NormTest, MatchesTheFormula) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("norm", kernel); !why.empty()) GTEST_SKIP() << why;
  expect_formula(kernel, c);
}

class NormOnCpu : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Kernels, NormOnCpu, ::testing::ValuesIn(testing::cpu_kernels("norm")));

TEST_P(NormOnCpu, MatchesTheFormulaOnEveryWay) {
  for (const Case& c : internal::norm::cpu_cases()) {
    SCOPED_TRACE(c.name);
    ASSERT_NO_FATAL_FAILURE(expect_formula(GetParam(), c));
  }
}

// A row gives the same bits alone and in a batch.
TEST_P(NormTest, RowsDoNotMeet) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("norm", kernel); !why.empty()) GTEST_SKIP() << why;
  if (c.rows == 0 || c.in_place) return;
  Problem p(c, c.width);
  Guarded<bf16> out(p.x.size()), alone(p.width);
  NormArgs a{.target = testing::target("norm", kernel)};
  a.rows[0] = p.args(out.data());
  norm(a);
  const int64_t t = c.rows - 1;
  a.rows[0].x = tensor(p.x.data() + t * p.stride, {1, p.width});
  a.rows[0].out = tensor(alone.data(), {1, p.width});
  norm(a);
  ASSERT_TRUE(testing::device_finished());
  for (int64_t i = 0; i < p.width; ++i) ASSERT_EQ(alone[i].bits, out[t * p.stride + i].bits) << i;
}

// Without a bias nothing is added: a zero keeps the sign that its factors give it.
TEST_P(NormTest, ZerosKeepTheirSign) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("norm", kernel); !why.empty()) GTEST_SKIP() << why;
  if (c.kind != NormKind::kRms || c.bias || c.in_place) return;
  Problem p(c, c.width);
  for (int64_t t = 0; t < c.rows; ++t)
    for (int64_t i = t % 3; i < p.width; i += 3)
      p.x[t * p.stride + i] = bf16{static_cast<uint16_t>(i % 2 == 0 ? 0x8000 : 0)};
  Guarded<bf16> out(p.x.size());
  NormArgs a{.target = testing::target("norm", kernel)};
  a.rows[0] = p.args(out.data());
  norm(a);
  ASSERT_TRUE(testing::device_finished());
  for (int64_t t = 0; t < c.rows; ++t)
    for (int64_t i = t % 3; i < p.width; i += 3) {
      const bool negative = (i % 2 == 0) != (c.weight && std::signbit(p.weight[i]));
      ASSERT_EQ(out[t * p.stride + i].bits, negative ? 0x8000 : 0) << "row " << t << " value " << i;
    }
}

// A NaN whose bits are all set would become a zero if rounding carried into its sign.
TEST_P(NormTest, NansOfWeightsStay) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("norm", kernel); !why.empty()) GTEST_SKIP() << why;
  if (!c.weight || c.in_place) return;
  Problem p(c, c.width);
  const int64_t at = c.width / 2;
  p.weight[at] = std::bit_cast<float>(0x7fffffffu);
  Guarded<bf16> out(p.x.size());
  NormArgs a{.target = testing::target("norm", kernel)};
  a.rows[0] = p.args(out.data());
  norm(a);
  ASSERT_TRUE(testing::device_finished());
  for (int64_t t = 0; t < c.rows; ++t) {
    ASSERT_TRUE(std::isnan(to_float(out[t * p.stride + at]))) << "row " << t;
    if (at > 0) {
      ASSERT_FALSE(std::isnan(to_float(out[t * p.stride + at - 1]))) << "row " << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, NormTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("norm")),
                                            ::testing::ValuesIn(internal::norm::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

TEST(NormErrors, NameTheArgument) {
  Problem p({"", NormKind::kRms, 3, 16}, 16);
  Guarded<bf16> out(3 * 16);
  NormArgs good;
  good.rows[0] = p.args(out.data());
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    NormArgs a = good;
    change(a, a.rows[0]);
    testing::expect_error([&] { norm(a); }, code, words);
  };
  expect([](NormArgs&, NormRows& r) { r.x = {}; }, {"norm", "x", "nothing"});
  expect([](NormArgs&, NormRows& r) { r.x.dtype = DType::kF32; }, {"x", "bf16", "f32"});
  expect([](NormArgs&, NormRows& r) { r.x.shape[1] = 0; }, {"x.shape[1]", "found 0"});
  expect([](NormArgs&, NormRows& r) { r.out.shape[0] = 2; }, {"out", "[3, 16]", "[2, 16]"});
  expect([](NormArgs&, NormRows& r) { r.out.stride[0] = 0; }, {"out", "overlap"});
  expect([](NormArgs&, NormRows& r) { r.norm.weight.shape[0] = 8; }, {"norm.weight", "16", "8"});
  expect([](NormArgs&, NormRows& r) { r.norm.eps = 0; }, {"norm.eps", "above 0", "0"});
  expect([](NormArgs&, NormRows& r) { r.norm.eps = NAN; }, {"norm.eps", "above 0"});
  expect([](NormArgs&, NormRows& r) { r.norm.kind = NormKind::kNone; }, {"norm.kind", "kRms"});
  expect([](NormArgs&, NormRows& r) { r.norm.kind = NormKind{9}; }, {"norm.kind", "number 9"});
  expect([](NormArgs& a, NormRows& r) { a.rows[1].out = r.out; }, {"rows[1].x", "nothing"});
  expect([](NormArgs& a, NormRows& r) { a.rows[1] = r; },
         {"norm: out: expected memory apart from rows[1].out"});
  std::vector<bf16> second(3 * 16);
  expect(
      [&](NormArgs& a, NormRows& r) {
        a.rows[1] = r;
        a.rows[1].out.data = second.data();
        a.rows[1].norm.weight.shape[0] = 8;
      },
      {"norm: rows[1].norm.weight", "16", "8"});
  const auto shifted = [](Tensor t, int64_t elements) {
    t.data = static_cast<bf16*>(t.data) + elements;
    t.shape[0] = 2;
    return t;
  };
  expect(
      [&](NormArgs&, NormRows& r) {
        r.out = shifted(r.x, 1);
        r.x = shifted(r.x, 0);
      },
      {"norm: out: expected x itself, or memory apart from it, found memory that overlaps it"});
  expect(
      [&](NormArgs&, NormRows& r) {
        r.x = shifted(r.out, 16);
        r.out = shifted(r.out, 0);
      },
      {"norm: out: expected x itself"});
  expect([](NormArgs& a, NormRows&) { a.target.kernel = "fastest"; }, {"norm", "no kernel fits"},
         ErrorCode::kUnsupported);
  for (const bf16 v : out) EXPECT_EQ(v.bits, 0xcdcd);  // nothing was written
}

}  // namespace
}  // namespace winnow
