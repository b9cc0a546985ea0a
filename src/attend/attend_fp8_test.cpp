// attend with Precision::kFp8: the reference against fp64, kernels against the reference, and who
// says that it does not serve it. attend_test holds the kernel to the bounds of every case.
#include <cmath>

#include "attend/attend_problem.h"
#include "testing.h"
#include "winnow/error.h"
#include "winnow/plan.h"

namespace winnow {
namespace {

using internal::attend::Answer;
using internal::attend::attend_with_workspace;
using internal::attend::Case;
using internal::attend::Problem;
using internal::attend::Results;
using testing::expect_error;

// |got - want| / |want| over all elements.
double relative(const Results& got, const std::vector<float>& want) {
  double off = 0, all = 0;
  for (int64_t t = 0; t < got.tokens; ++t)
    for (int64_t h = 0; h < got.heads; ++h)
      for (int64_t d = 0; d < internal::attend::kValueDim; ++d) {
        const double w = want[(t * got.heads + h) * internal::attend::kValueDim + d];
        const double g = to_float(got.out[t * got.token + h * got.head + d]);
        off += (g - w) * (g - w);
        all += w * w;
      }
  return std::sqrt(off / all);
}

// A target keeps the name of its kernel.
const std::string kKernel = "sm90/fp8", kReference = "reference";

void run(Problem& problem, Results& results, const std::string& kernel, Precision precision) {
  AttendArgs a = problem.args();
  results.attach(a);
  a.target = testing::target("attend", kernel);
  a.precision = precision;
  attend_with_workspace(a);
}

std::vector<float> floats(const Results& r) {
  std::vector<float> all;
  for (int64_t t = 0; t < r.tokens; ++t)
    for (int64_t h = 0; h < r.heads; ++h)
      for (int64_t d = 0; d < internal::attend::kValueDim; ++d)
        all.push_back(to_float(r.out[t * r.token + h * r.head + d]));
  return all;
}

class AttendFp8Cases : public ::testing::TestWithParam<Case> {};

// The reference keeps the bounds that it states.
TEST_P(AttendFp8Cases, ReferenceIsWithinItsBounds) {
  const Case& c = GetParam();
  Problem p(c);
  Results r(c);
  AttendArgs a = p.args();
  r.attach(a);
  a.target.kernel = "reference";
  a.precision = Precision::kFp8;
  attend_with_workspace(a);
  Answer want = p.expected();
  internal::attend::expect_close(a, want);
}

std::vector<Case> fp8_cases() {
  std::vector<Case> some;
  for (const Case& c : internal::attend::cases()) {
    bool fp8 = c.tokens < 10;
    for (int i = 0; i < c.lists; ++i)
      fp8 &= internal::attend::model_of_format(c.list[i].format).fp8 == c.list[i].format;
    if (fp8) some.push_back(c);
  }
  return some;
}
INSTANTIATE_TEST_SUITE_P(Reference, AttendFp8Cases, ::testing::ValuesIn(fp8_cases()),
                         [](const auto& info) { return info.param.name; });

const Case kFlat{.name = "flat",
                 .tokens = 1,
                 .heads = 4,
                 .list = {{CacheFormat::kV32Fp8, 64, 40, 2048}},
                 .scale = 0.01f};

// e4m3 rounds a value by 2^-4 of it at most and by a root mean square of 2.7 %; weights and, with
// these logits, queries do that.
TEST(AttendFp8, ReferenceRoundsByAFewPercent) {
  Problem p(kFlat);
  Results r(kFlat);
  run(p, r, kReference, Precision::kFp8);
  const double off = relative(r, p.expected().out);
  EXPECT_GT(off, 0.015);
  EXPECT_LT(off, 0.045);
}

// Kernels round what the reference rounds: they are much closer to it than to the exact result.
// They differ where a logit that is off by 2^-11 makes a weight the neighbouring code.
TEST(AttendFp8, KernelIsTheReference) {
  if (const std::string why = testing::why_not("attend", kKernel); !why.empty())
    GTEST_SKIP() << why;
  struct Size {
    int64_t heads, tokens, width;
  };
  // In splits, in splits of fewer heads than a CTA has, and one CTA a token.
  for (const auto& [heads, tokens, width] : {Size{128, 1, 2048}, {3, 5, 2048}, {65, 140, 66}}) {
    Case c = kFlat;
    c.heads = heads;
    c.tokens = tokens;
    c.list[0].width = width;
    Problem p(c);
    Results got(c), want(c);
    run(p, got, kKernel, Precision::kFp8);
    run(p, want, kReference, Precision::kFp8);
    EXPECT_LT(relative(got, floats(want)), 0.012) << heads << " heads, " << tokens << " tokens";
    for (int64_t i = 0; i < tokens * heads; ++i)
      ASSERT_NEAR(got.lse[i], want.lse[i], 2e-3) << "row " << i;
  }
}

AttendArgs call(Problem& p, Results& r, const char* kernel) {
  AttendArgs a = p.args();
  r.attach(a);
  a.precision = Precision::kFp8;
  a.target.kernel = kernel;
  return a;
}

TEST(AttendFp8, FastCpuKernelsSayThatTheyDoNot) {
  Problem p(kFlat);
  Results r(kFlat);
  const AttendArgs a = call(p, r, nullptr);
  expect_error([&] { attend(a); }, ErrorCode::kUnsupported,
               {"attend", "simd", "Precision::kFull alone"});
}

TEST(AttendFp8, RefusesBf16RecordsByName) {
  Case c = kFlat;
  c.list[0].format = CacheFormat::kV32Bf16;
  Problem p(c);
  Results r(c);
  const AttendArgs a = call(p, r, "reference");
  expect_error([&] { attend(a); }, ErrorCode::kInvalidArgument,
               {"precision", "fp8 records", "v32_bf16"});
}

TEST(AttendFp8, RefusesAnotherPrecisionThanThePlan) {
  Problem p(kFlat);
  Results r(kFlat);
  AttendArgs a = call(p, r, "reference");
  PlanOptions options{.heads = 4, .pages = 40, .max_requests = 1, .max_tokens = 1};
  options.target.kernel = "reference";
  Plan plan(options);
  const int32_t starts[] = {0, 1}, lens[] = {2048};
  plan.refill({starts, lens});
  std::vector<std::byte> workspace(plan.workspace_bytes());
  a.plan = &plan;
  a.workspace = workspace;
  expect_error([&] { attend(a); }, ErrorCode::kInvalidArgument, {"precision", "as planned"});
  // A plan of that precision needs no word of the call.
  options.precision = Precision::kFp8;
  Plan fp8(options);
  fp8.refill({starts, lens});
  workspace.resize(fp8.workspace_bytes());
  a.plan = &fp8;
  a.workspace = workspace;
  attend(a);
  const std::vector<float> said = floats(r);
  a.precision = Precision::kFull;
  attend(a);
  EXPECT_EQ(said, floats(r));
  EXPECT_LT(relative(r, p.expected().out), 0.045);
}

TEST(AttendFp8, PlansReadPages) {
  PlanOptions options{.heads = 128, .pages = 40, .precision = Precision::kFp8};
  options.target.kernel = "reference";
  EXPECT_EQ(Plan(options).options().mode, Mode::kDirect);
  options.mode = Mode::kSeparate;
  expect_error([&] { Plan plan(options); }, ErrorCode::kInvalidArgument,
               {"precision", "bf16 rows"});
  options.mode = Mode::kAuto;
  options.format = CacheFormat::kV32Bf16;
  expect_error([&] { Plan plan(options); }, ErrorCode::kInvalidArgument,
               {"precision", "bf16 rows"});
  options.format = CacheFormat::kV32Fp8;
  options.target.kernel = nullptr;
  expect_error([&] { Plan plan(options); }, ErrorCode::kUnsupported, {"attend", "kFull alone"});
}

}  // namespace
}  // namespace winnow
