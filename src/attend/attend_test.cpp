// attend: every kernel x every case against fp64 sums, by the accuracy bar of decoding.
#include "winnow/attend.h"

#include "accuracy.h"
#include "attend/attend_problem.h"
#include "testing.h"

namespace winnow {
namespace {

using attention::Answer;
using attention::Case;
using attention::kInf;
using attention::kValueDim;
using attention::Problem;
using testing::Guarded;

// Outputs of a call, poisoned, with gaps when the case asks for them.
struct Results {
  int64_t tokens, heads, head, token;
  Guarded<bf16> out;
  Guarded<float> lse, max_logit;

  explicit Results(const Case& c)
      : tokens(c.tokens),
        heads(c.heads),
        head(kValueDim + (c.strided ? 16 : 0)),
        token(head * c.heads + (c.strided ? 48 : 0)),
        out(c.tokens * token),
        lse(c.tokens * c.heads),
        max_logit(c.tokens * c.heads) {}

  void attach(AttendArgs& a) {
    a.out = tensor(out.data(), {tokens, heads, kValueDim}, {token, head, 1});
    a.lse = tensor(lse.data(), {tokens, heads});
    a.max_logit = tensor(max_logit.data(), {tokens, heads});
  }
};

void expect_close(const AttendArgs& a, Answer& want) {
  const int64_t t = a.q.shape[0], h = a.q.shape[1];
  const auto check = [](const char* what, const Tensor& got, const Tensor& expected,
                        const tools::Bar& bar) {
    const tools::Deviation d = tools::compare(got, expected, bar);
    EXPECT_TRUE(d.ok) << what << ": " << d.text(got);
  };
  check("out", a.out, tensor(want.out.data(), {t, h, kValueDim}), tools::kDecodeOut);
  check("lse", a.lse, tensor(want.lse.data(), {t, h}), tools::kDecodeLse);
  check("max_logit", a.max_logit, tensor(want.max_logit.data(), {t, h}), tools::kDecodeLse);
}

class AttendTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(AttendTest, MatchesTheFormula) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("attend", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  Results r(c);
  AttendArgs a = p.args();
  r.attach(a);
  a.target = testing::target("attend", kernel);
  testing::DeviceWorkspace workspace(attend_workspace_bytes(a));
  a.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
  attend(a);
  ASSERT_TRUE(testing::device_finished());
  Answer want = p.expected();
  expect_close(a, want);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttendTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("attend")),
                                            ::testing::ValuesIn(attention::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace winnow
