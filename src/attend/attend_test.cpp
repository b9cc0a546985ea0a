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

class AttendTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(AttendTest, MatchesTheFormula) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("attend", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  Results r(c);
  AttendArgs a = p.args();
  r.attach(a);
  a.target = testing::target("attend", kernel);
  try {
    internal::attend::attend_with_workspace(a);
  } catch (const Error& e) {
    // Kernels of the CPU serve every case; a device kernel may say which it leaves out.
    if (e.code() != ErrorCode::kUnsupported || a.target.device.kind == DeviceKind::kCpu) throw;
    GTEST_SKIP() << e.what();
  }
  Answer want = p.expected();
  internal::attend::expect_close(a, want);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttendTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("attend")),
                                            ::testing::ValuesIn(internal::attend::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace winnow
