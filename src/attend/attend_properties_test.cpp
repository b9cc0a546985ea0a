// attend: what must hold between calls (splitting, permuting, repeating, batches), and logits at
// the ends of their range.
#include <cmath>
#include <limits>

#include "attend/attend_problem.h"
#include "attend/kernel.h"
#include "core/formats.h"
#include "testing.h"
#include "winnow/attend.h"

namespace winnow {
namespace {

using internal::attend::Answer;
using internal::attend::attend_with_workspace;
using internal::attend::Case;
using internal::attend::expect_close;
using internal::attend::kInf;
using internal::attend::kValueDim;
using internal::attend::Problem;
using internal::attend::Results;
using testing::Guarded;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Columns [begin, end) of an index tensor.
Tensor columns(Tensor t, int64_t begin, int64_t end) {
  t.data = static_cast<int32_t*>(t.data) + begin;
  t.shape[1] = end - begin;
  return t;
}

template <class T>
void expect_same_bits(Guarded<T>& a, Guarded<T>& b) {
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(T)), 0);
}

class AttendProperties : public internal::attend::KernelTest {
 protected:
  static Case plain() {
    return {.name = "",
            .tokens = 3,
            .heads = 9,
            .list = {{CacheFormat::kV4Fp8, 64, 3, 150}},
            .sink = true};
  }
};

TEST_P(AttendProperties, TwoPartsMergeToTheWhole) {
  Problem p(plain());
  const Case& c = p.c;
  Answer want = p.expected();
  Results whole(c), part(c);
  Guarded<bf16> outs(2 * whole.out.size());
  Guarded<float> sums(2 * whole.lse.size());
  for (int i = 0; i < 2; ++i) {
    AttendArgs a = args(p, part);
    a.sink = {};
    a.empty_lse_negative = true;
    a.lists[0].indices = columns(a.lists[0].indices, i ? 67 : 0, i ? 150 : 67);
    a.out = tensor(outs.data() + i * whole.out.size(), {c.tokens, c.heads, kValueDim});
    a.lse = tensor(sums.data() + i * whole.lse.size(), {c.tokens, c.heads});
    attend_with_workspace(a);
  }
  AttendArgs a = args(p, whole);
  merge({.partial_out = tensor(outs.data(), {2, c.tokens, c.heads, kValueDim}),
         .partial_lse = tensor(sums.data(), {2, c.tokens, c.heads}),
         .sink = a.sink,
         .out = a.out,
         .lse = a.lse,
         .target = {.kernel = "reference"}});
  const auto rows = static_cast<int64_t>(whole.lse.size());
  for (int64_t r = 0; r < rows; ++r) {
    EXPECT_NEAR(whole.lse[r], want.lse[r], 1e-6 + 8.01 / 65536 * std::abs(want.lse[r]));
    for (int64_t i = r * kValueDim; i < (r + 1) * kValueDim; ++i) {
      // P, each part and the sum may be rounded to bf16, by 2^-8 of what they hold at most.
      const double bound = (2 * want.magnitude[i] + std::abs(want.out[i])) / 256;
      ASSERT_NEAR(to_float(whole.out[i]), want.out[i], bound) << "row " << r << ", " << i;
    }
  }
}

TEST_P(AttendProperties, OrderDoesNotMatter) {
  Problem p(plain());
  Answer want = p.expected();
  for (int64_t t = 0; t < p.c.tokens; ++t) {
    int32_t* row = p.lists[0]->indices->data() + t * 150;
    std::shuffle(row, row + 150, p.rng);
  }
  Results r(p.c);
  AttendArgs a = args(p, r);
  attend_with_workspace(a);
  expect_close(a, want);
}

TEST_P(AttendProperties, EveryEntryTwice) {
  Case c = plain();
  c.sink = false;
  Problem p(c);
  Answer want = p.expected();
  std::vector<int32_t> twice;
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int repeat = 0; repeat < 2; ++repeat)
      for (int64_t k = 0; k < 150; ++k) twice.push_back((*p.lists[0]->indices)[t * 150 + k]);
  Guarded<int32_t> indices(twice);
  Results r(c);
  AttendArgs a = args(p, r);
  a.lists[0].indices = tensor(indices.data(), {c.tokens, 300});
  attend_with_workspace(a);
  for (float& lse : want.lse) lse += std::log(2.0f);
  expect_close(a, want);
}

TEST_P(AttendProperties, TwoListsAreOneList) {
  Problem p(plain());
  Answer want = p.expected();
  Results r(p.c);
  AttendArgs a = args(p, r);
  a.lists[1] = a.lists[0];
  a.lists[0].indices = columns(a.lists[0].indices, 0, 41);
  a.lists[1].indices = columns(a.lists[1].indices, 41, 150);
  attend_with_workspace(a);
  expect_close(a, want);
}

// The output is the key's value whatever its scales are: rounding has nothing to average over, so
// each token is held against the bar alone. On a device keys are rounded to bf16, so that it holds
// on CPUs alone.
class AttendOnCpu : public AttendProperties {};
TEST_P(AttendOnCpu, OneKey) {
  const Case c{.name = "", .tokens = 24, .heads = 3, .list = {{CacheFormat::kV32Fp8, 64, 3, 1}}};
  Problem p(c);
  Results r(c);
  const AttendArgs a = args(p, r);
  attend_with_workspace(a);
  Answer want = p.expected();
  for (int64_t t = 0; t < c.tokens; ++t) {
    const auto token = [&](auto* all) {
      return tensor(all + t * c.heads * kValueDim, {1, c.heads, kValueDim});
    };
    const Tensor got = token(static_cast<bf16*>(a.out.data));
    const tools::Deviation d = tools::compare(got, token(want.out.data()), tools::kDecodeOut);
    EXPECT_TRUE(d.ok) << "token " << t << ": " << d.text(got);
  }
}

TEST_P(AttendProperties, RepeatsBitForBit) {
  Case c = plain();
  c.tokens = 1;
  c.list[0].width = 700;
  Problem p(c);
  Results first(c), second(c);
  attend_with_workspace(args(p, first));
  attend_with_workspace(args(p, second));
  expect_same_bits(first.out, second.out);
  expect_same_bits(first.lse, second.lse);
}

// More tokens than workers or multiprocessors: what one leaves behind is nothing to the next.
TEST_P(AttendProperties, TokensDoNotMeet) {
  constexpr int kKinds = 7, kWidth = 20;
  Case c{.name = "", .tokens = 280, .heads = 9, .list = {{CacheFormat::kV32Fp8, 64, 3, kWidth}}};
  c.scale = 0x1p-17f;
  Problem p(c);
  auto& indices = *p.lists[0]->indices;
  const auto scaled = [&](int64_t t, float by) {
    for (int64_t i = 0; i < p.q_token; ++i) {
      bf16& x = p.q[t * p.q_token + i];
      x = to_bf16(to_float(x) * by);
    }
  };
  scaled(1, 0x1p-20f);
  scaled(2, 0x1p15f);
  scaled(4, 0x1p-5f);
  scaled(5, 0x1p10f);
  scaled(6, 0x1p-12f);
  const auto repeat = [&] {
    for (int64_t t = kKinds; t < c.tokens; ++t) {
      std::copy_n(p.q.data() + t % kKinds * p.q_token, p.q_token, p.q.data() + t * p.q_token);
      std::copy_n(indices.data() + t % kKinds * kWidth, kWidth, indices.data() + t * kWidth);
    }
  };
  std::fill_n(indices.data() + 3 * kWidth, kWidth, -1);  // nothing to attend to
  repeat();
  Answer want = p.expected();
  Results r(c);
  AttendArgs a = args(p, r);
  attend_with_workspace(a);
  expect_close(a, want);
  for (const float strange : {1.f, kNan, kInf}) {
    p.q[4 * p.q_token + 5] = to_bf16(strange);
    p.q[5 * p.q_token + p.q_head + 5] = to_bf16(-strange);
    repeat();
    attend_with_workspace(a);
    const int64_t row = c.heads * kValueDim;
    for (int64_t t = kKinds; t < c.tokens; ++t) {
      const int64_t of = t % kKinds;
      ASSERT_EQ(0, std::memcmp(r.out.data() + t * row, r.out.data() + of * row, row * sizeof(bf16)))
          << "token " << t << ", a value of " << strange;
      ASSERT_EQ(0, std::memcmp(r.lse.data() + t * c.heads, r.lse.data() + of * c.heads,
                               c.heads * sizeof(float)));
    }
  }
}

TEST_P(AttendProperties, EmptyRowsWithTheSwitch) {
  Case c = plain();
  c.list[0].lengths = true;  // token 1 has length 0
  Problem p(c);
  p.sink[0] = kNan;
  Results r(c);
  AttendArgs a = args(p, r);
  a.empty_lse_negative = true;
  attend_with_workspace(a);
  for (int64_t h = 0; h < c.heads; ++h) {
    EXPECT_EQ(r.lse[c.heads + h], -kInf);
    EXPECT_EQ(r.max_logit[c.heads + h], -kInf);
    for (int i = 0; i < kValueDim; ++i)
      ASSERT_EQ(r.out[(c.heads + h) * kValueDim + i].bits, 0) << "head " << h;
  }
  // A NaN sink is the head's own matter, and not the sum's.
  EXPECT_TRUE(std::isnan(to_float(r.out[0])));
  EXPECT_FALSE(std::isnan(r.lse[0]));
  EXPECT_FALSE(std::isnan(to_float(r.out[kValueDim])));
}

// One token, heads 1 and -1, over bf16 records of V3.2 whose only value is in the RoPE part, which
// is no part of V; V is the record's number.
struct Logits {
  Guarded<bf16> cache, q;
  Guarded<int32_t> indices;
  Guarded<bf16> out;
  Guarded<float> lse, max_logit;

  explicit Logits(const std::vector<float>& logits)
      : cache(logits.size() * 576, 0),
        q(2 * 576, 0),
        indices(logits.size()),
        out(2 * kValueDim),
        lse(2),
        max_logit(2) {
    q[575] = to_bf16(1);
    q[576 + 575] = to_bf16(-1);
    for (size_t i = 0; i < logits.size(); ++i) {
      indices[i] = static_cast<int32_t>(i);
      cache[i * 576] = to_bf16(static_cast<float>(i + 1));
      cache[i * 576 + 575] = to_bf16(logits[i]);
    }
  }
  void run(const std::string& kernel, float scale = 1.0f) {
    const auto n = static_cast<int32_t>(indices.size());
    AttendArgs a{.q = tensor(q.data(), {1, 2, 576}),
                 .scale = scale,
                 .out = tensor(out.data(), {1, 2, kValueDim}),
                 .lse = tensor(lse.data(), {1, 2}),
                 .max_logit = tensor(max_logit.data(), {1, 2}),
                 .target = testing::target("attend", kernel)};
    a.lists[0] = {.cache = {cache.data(), CacheFormat::kV32Bf16, 1, n, 0},
                  .indices = tensor(indices.data(), {1, n})};
    attend_with_workspace(a);
  }
  float value(int h) const { return to_float(out[h * kValueDim]); }
};

// On bf16 rows, which every kernel serves.
class AttendLogits : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = testing::why_not("attend", GetParam()); !why.empty())
      GTEST_SKIP() << why;
  }
};

TEST_P(AttendLogits, InfiniteLogits) {
  Logits one({0, kInf, 0});  // head 0: +inf weighs all; head 1: -inf weighs nothing
  one.run(GetParam());
  EXPECT_EQ(one.value(0), 2);
  EXPECT_EQ(one.lse[0], kInf);
  EXPECT_EQ(one.max_logit[0], kInf);
  EXPECT_EQ(one.value(1), 2);  // the mean of 1 and 3
  EXPECT_NEAR(one.lse[1], std::log(2.0f), 1e-6);
  Logits all({-kInf, -kInf});  // head 0: nothing has weight, as if the row were empty
  all.run(GetParam());
  EXPECT_EQ(all.value(0), 0);
  EXPECT_EQ(all.lse[0], kInf);
  EXPECT_EQ(all.max_logit[0], -kInf);
  EXPECT_EQ(all.value(1), 1.5);
}

TEST_P(AttendLogits, NanReachesItsRow) {
  Logits nan({0, kNan, 1});
  nan.run(GetParam());
  for (int h = 0; h < 2; ++h)
    EXPECT_TRUE(std::isnan(nan.value(h)) && std::isnan(nan.lse[h]) && std::isnan(nan.max_logit[h]));
  nan.indices[1] = -1;
  nan.run(GetParam());
  EXPECT_NEAR(nan.lse[0], 1.3132617f, 1e-6);
  EXPECT_FALSE(std::isnan(nan.value(0)));
}

TEST_P(AttendLogits, LogitsAtTheEndOfTheRange) {
  // 2^126 and its neighbours times 1 and 2: differences beyond fp32 are weights of 0, not NaN.
  const float big = 0x1p126f;
  Logits l({big, -big, 0, big});
  for (const float scale : {1.0f, 2.0f, -2.0f}) {
    l.run(GetParam(), scale);
    const bool positive = scale > 0;
    EXPECT_EQ(l.value(positive ? 0 : 1), 2.5);  // the mean of 1 and 4
    EXPECT_EQ(l.value(positive ? 1 : 0), 2);
    EXPECT_EQ(l.max_logit[0], big * std::abs(scale));
  }
}

// Many tokens whose positions lie far apart: a device takes them in an order of its own (Hopper,
// where CTAs have more than two each). Ids beyond the few pages there are mean the same records
// over and over.
TEST_P(AttendLogits, FarPositions) {
  constexpr int64_t kTable = 2048, kPage = 64;
  struct {
    int64_t tokens, heads, width;
    bool lengths;
  } const sizes[] = {{300, 2, 150, true}, {280, 1, 2047, true}, {270, 1, 2048, false}};
  const Target target = testing::target("attend", GetParam());
  for (const auto& s : sizes) {
    if (target.device.kind == DeviceKind::kCpu && s.width > 1000) continue;  // the reference's time
    Problem p({.name = "",
               .tokens = s.tokens,
               .heads = s.heads,
               .list = {{CacheFormat::kV32Bf16, kPage, 3, s.width, s.lengths, true}}});
    Answer want = p.expected();
    internal::attend::ProblemList& l = *p.lists[0];
    Guarded<int32_t> table(2 * kTable);
    for (int64_t i = 0; i < 2 * kTable; ++i)
      table[i] = (*l.table)[i / kTable * l.table_width + i % kTable % l.c.pages];
    const int64_t slots = l.c.pages * kPage, most = kTable / l.c.pages - 1;
    for (int32_t& id : *l.indices)
      if (id >= slots) id = std::max<int32_t>(id, kTable * kPage);
      else if (id >= 0) id += static_cast<int32_t>(slots * testing::draw(p.rng, 0, most));
    Results r(p.c), again(p.c);
    AttendArgs a = p.args();
    a.lists[0].block_table = tensor(table.data(), {2, kTable});
    a.target = target;
    again.attach(a);
    attend_with_workspace(a);
    r.attach(a);
    attend_with_workspace(a);
    expect_close(a, want);
    expect_same_bits(r.out, again.out);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttendProperties,
                         ::testing::ValuesIn(testing::kernels("attend")));
INSTANTIATE_TEST_SUITE_P(Kernels, AttendOnCpu, ::testing::ValuesIn(testing::cpu_kernels("attend")));
INSTANTIATE_TEST_SUITE_P(Kernels, AttendLogits, ::testing::ValuesIn(testing::kernels("attend")));

}  // namespace
}  // namespace winnow
