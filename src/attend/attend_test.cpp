// attend: every kernel x every case against fp64 sums, by the accuracy bar of decoding.
#include "winnow/attend.h"

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
  // Whether the kernel says of itself that it leaves the call out.
  static bool leaves_out(const std::string& kernel, const AttendArgs& a) {
    try {
      attend_workspace_bytes(a);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kUnsupported) throw;
      return std::string(e.what()).find(kernel + " (") != std::string::npos;
    }
    return false;
  }

  void expect_the_formula(bool whole) {
    const auto& [kernel, c] = GetParam();
    if (const std::string why = testing::why_not("attend", kernel); !why.empty())
      GTEST_SKIP() << why;
    Problem p(c);
    Results r(c);
    AttendArgs a = p.args();
    r.attach(a);
    a.target = testing::target("attend", kernel);
    if (!whole && leaves_out(kernel, a)) GTEST_SKIP() << kernel << " leaves this case out";
    internal::attend::attend_with_workspace(a);
    Answer want = p.expected();
    internal::attend::expect_close(a, want);
  }
};

// CPU kernels and families serve every case.
TEST_P(AttendTest, MatchesTheFormula) { expect_the_formula(true); }

std::string name_of(const ::testing::TestParamInfo<AttendTest::ParamType>& info) {
  return testing::label(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(Kernels, AttendTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("attend")),
                                            ::testing::ValuesIn(internal::attend::cases())),
                         name_of);

// A family's kernels, each by its own name, serve the cases that they say.
class AttendMember : public AttendTest {};
TEST_P(AttendMember, MatchesTheFormula) { expect_the_formula(false); }
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttendMember);
INSTANTIATE_TEST_SUITE_P(Kernels, AttendMember,
                         ::testing::Combine(::testing::ValuesIn(testing::members("attend")),
                                            ::testing::ValuesIn(internal::attend::cases())),
                         name_of);

}  // namespace
}  // namespace winnow
