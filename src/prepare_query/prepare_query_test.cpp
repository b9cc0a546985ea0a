// prepare_query: every kernel x every case gives the bits of norm() and rotate(), hostile positions
// included.
#include "winnow/prepare_query.h"

#include <cmath>

#include "core/formats.h"
#include "prepare_query/prepare_query_cases.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using internal::prepare_query::Case;
using testing::Guarded;

constexpr int64_t kPositions = 40;

struct Problem {
  Case c;
  int64_t stride;
  Guarded<bf16> q;
  Guarded<float> weight, angles;
  Guarded<int32_t> positions;

  explicit Problem(const Case& c_)
      : c(c_),
        stride(c.width + c.padding),
        q(c.tokens * c.heads * stride),
        weight(c.width),
        angles(kPositions * 64),
        positions(c.tokens) {
    testing::Rng rng(c.tokens * 100 + c.width);
    for (bf16& v : q) v = to_bf16(testing::normal(rng));
    for (float& w : weight) w = 1 + 0.2f * testing::normal(rng);
    const auto hostile = testing::hostile(kPositions);
    for (int64_t t = 0; t < c.tokens; ++t)
      positions[t] = static_cast<int32_t>(t % 3 == 2 ? hostile[t % hostile.size()] : 7 * t);
    c.rope.table = tensor(angles.data(), {kPositions, 2, 32});
    rope_table({.table = c.rope.table});
  }
  Tensor view(bf16* data) const {
    return tensor(data, {c.tokens, c.heads, c.width}, {c.heads * stride, stride, 1});
  }
  Norm norm() {
    Norm n{.kind = c.norm, .eps = c.eps};
    if (c.weight) n.weight = tensor(weight.data(), {c.width});
    return n;
  }
  PrepareQueryArgs args(bf16* out) {
    return {.q = view(q.data()),
            .norm = norm(),
            .positions = tensor(positions.data(), {c.tokens}),
            .rope = c.rope,
            .out = view(out)};
  }
};

class PrepareQueryTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(PrepareQueryTest, IsNormAndRotate) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("prepare_query", kernel); !why.empty())
    GTEST_SKIP() << why;
  Problem p(c);
  Guarded<bf16> out(p.q.size()), want(p.q.size());
  if (c.in_place) std::copy_n(p.q.data(), p.q.size(), want.data());
  Guarded<bf16> rows(p.q);
  // The two calls: all heads are rows of one view.
  const int64_t heads = c.tokens * c.heads;
  if (c.norm != NormKind::kNone) {
    const Tensor flat = tensor(rows.data(), {heads, c.width}, {p.stride, 1});
    norm({.rows = {{.x = flat, .out = flat, .norm = p.norm()}},
          .target = testing::target("norm", kernel)});
  }
  rotate({.x = p.view(rows.data()),
          .positions = tensor(p.positions.data(), {c.tokens}),
          .rope = p.c.rope,
          .out = p.view(want.data()),
          .target = testing::target("rotate", kernel)});
  PrepareQueryArgs a = p.args(c.in_place ? p.q.data() : out.data());
  a.target = testing::target("prepare_query", kernel);
  prepare_query(a);
  ASSERT_TRUE(testing::device_finished());
  const bf16* got = c.in_place ? p.q.data() : out.data();
  for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i].bits, want[i].bits) << i;
}

INSTANTIATE_TEST_SUITE_P(Kernels, PrepareQueryTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("prepare_query")),
                                            ::testing::ValuesIn(internal::prepare_query::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

TEST(PrepareQueryErrors, NameTheArgument) {
  Problem p({"", 3, 2, 128, NormKind::kRms, true});
  Guarded<bf16> out(p.q.size());
  const PrepareQueryArgs good = p.args(out.data());
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    PrepareQueryArgs a = good;
    change(a);
    testing::expect_error([&] { prepare_query(a); }, code, words);
  };
  expect([](PrepareQueryArgs& a) { a.q = {}; }, {"prepare_query", "q", "nothing"});
  expect([](PrepareQueryArgs& a) { a.q.shape[2] = 32; }, {"q.shape[2]", "64", "32"});
  expect([](PrepareQueryArgs& a) { a.norm.weight.shape[0] = 64; }, {"norm.weight", "128", "64"});
  expect([](PrepareQueryArgs& a) { a.norm.eps = 0; }, {"norm.eps", "above 0"});
  expect([](PrepareQueryArgs& a) { a.positions = {}; }, {"positions", "nothing"});
  expect([](PrepareQueryArgs& a) { a.rope.table = {}; }, {"rope.table", "nothing"});
  expect([](PrepareQueryArgs& a) { a.out.shape[0] = 2; }, {"out", "[3, 2, 128]"});
  expect([](PrepareQueryArgs& a) { a.out.stride[1] = 0; }, {"out", "overlap"});
  expect([](PrepareQueryArgs& a) { a.target.kernel = "fastest"; }, {"no kernel fits"},
         ErrorCode::kUnsupported);
  for (const bf16 v : out) EXPECT_EQ(v.bits, 0xcdcd);  // nothing was written
}

}  // namespace
}  // namespace winnow
