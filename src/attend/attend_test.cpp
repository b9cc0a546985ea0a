// attend: every kernel x every case against fp64 sums, by the accuracy bar of decoding.
#include "winnow/attend.h"

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
    if (const char* reason = internal::attend::left_out(kernel, c)) {
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
