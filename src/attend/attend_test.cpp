// attend: every kernel x every case against fp64 sums, by the accuracy bar of decoding.
#include "winnow/attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attend/attend_problem.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using internal::attend::Answer;
using internal::attend::Case;
using internal::attend::Problem;
using internal::attend::Results;

bool holds_codes(const Case& c) {
  for (int i = 0; i < c.lists; ++i)
    if (internal::attend::model_of_format(c.list[i].format).fp8 != c.list[i].format) return false;
  return true;
}

class AttendTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {
 protected:
  void expect_the_formula() {
    const auto& [kernel, c] = GetParam();
    if (const std::string why = testing::why_not("attend", kernel); !why.empty())
      GTEST_SKIP() << why;
    Problem p(c);
    Results r(c);
    AttendArgs a = p.args();
    r.attach(a);
    a.target = testing::target("attend", kernel);
    a.precision = internal::attend::precision_of(kernel);
    if (const char* reason = internal::attend::left_out(kernel, c)) {
      if (!holds_codes(c) && a.precision == Precision::kFp8) GTEST_SKIP() << "refused by attend()";
      testing::expect_error([&] { attend_workspace_bytes(a); }, ErrorCode::kUnsupported,
                            {"no kernel fits", reason});
      return;
    }
    try {
      internal::attend::attend_with_workspace(a);
    } catch (const Error& e) {
      const char* reason = internal::attend::may_leave_out(kernel);
      if (e.code() != ErrorCode::kUnsupported || !reason || !std::strstr(e.what(), reason)) throw;
      GTEST_SKIP() << e.what();
    }
    Answer want = p.expected();
    internal::attend::expect_close(a, want);
  }
};

// CPU kernels and families serve every case.
TEST_P(AttendTest, MatchesTheFormula) { expect_the_formula(); }

// In fp32 and in blocks of heads, as ranks send them: what the same call gives in bf16, up to its
// rounding. On CUDA another kernel may serve it: then each differs by its own rounding of weights
// and of the sums of splits, 2^-9 of the largest value each.
TEST_P(AttendTest, GivesBlocksOfHeadsInFp32) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("attend", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  Results r(c);
  AttendArgs a = p.args();
  r.attach(a);
  a.target = testing::target("attend", kernel);
  if (internal::attend::left_out(kernel, c)) GTEST_SKIP() << "left out";
  internal::attend::attend_with_workspace(a);
  int64_t blocks = 1;
  for (const int64_t n : {8, 5, 3, 2})
    if (c.heads % n == 0 && blocks == 1) blocks = n;
  const int64_t own = c.heads / blocks, d_v = internal::attend::kValueDim;
  const int64_t block = (c.tokens * own * (d_v + 1) + 7) / 2 * 2;  // a gap, to an even number
  testing::Guarded<float> out(blocks * block);
  AttendArgs b = a;
  b.max_logit = {};
  b.out = {out.data(), DType::kF32, 4, {blocks, c.tokens, own, d_v}, {block, own * d_v, d_v, 1}};
  b.lse = {
      out.data() + c.tokens * own * d_v, DType::kF32, 3, {blocks, c.tokens, own}, {block, own, 1}};
  internal::attend::attend_with_workspace(b);
  const bool on_cpu = a.target.device.kind == DeviceKind::kCpu;
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t row = t * own + h % own;
      const float* const got = out.data() + h / own * block;
      const bf16* const want = r.out.data() + t * r.token + h * r.head;
      const float lse = got[c.tokens * own * d_v + row], want_lse = r.lse[t * c.heads + h];
      if (!(std::isnan(lse) && std::isnan(want_lse)) && lse != want_lse) {
        ASSERT_NEAR(lse, want_lse, 1e-3) << "token " << t << ", head " << h;
      }
      float most = 0;
      for (int64_t d = 0; d < d_v; ++d) most = std::max(most, std::abs(to_float(want[d])));
      for (int64_t d = 0; d < d_v; ++d) {
        const float x = got[row * d_v + d], y = to_float(want[d]);
        if (std::isnan(x) && std::isnan(y)) continue;
        const float room = on_cpu ? 0 : 0x1p-8f * std::abs(y) + 0x1p-7f * most;
        ASSERT_LE(std::abs(to_float(to_bf16(x)) - y), room)
            << "token " << t << ", head " << h << ", column " << d;
      }
    }
}

std::string name_of(const ::testing::TestParamInfo<AttendTest::ParamType>& info) {
  return testing::label(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(Kernels, AttendTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("attend")),
                                            ::testing::ValuesIn(internal::attend::cases())),
                         name_of);

// A family's kernels, each by its own name, serve the cases that left_out() does not name.
class AttendMember : public AttendTest {};
TEST_P(AttendMember, MatchesTheFormula) { expect_the_formula(); }
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttendMember);
INSTANTIATE_TEST_SUITE_P(Kernels, AttendMember,
                         ::testing::Combine(::testing::ValuesIn(testing::members("attend")),
                                            ::testing::ValuesIn(internal::attend::cases())),
                         name_of);

}  // namespace
}  // namespace winnow
