// index_query: every kernel x every case. Rotated rows are those of rotate(), codes and scales
// those that write() gives index keys; the Hadamard rotation against its matrix in double.
#include "winnow/index_query.h"

#include <bit>
#include <cmath>

#include "core/formats.h"
#include "index_query/index_query_cases.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using internal::index_query::Case;
using testing::Guarded;

constexpr int64_t kPositions = 40;
constexpr float kFactor = 0.011f;

struct Problem {
  Case c;
  int64_t stride;
  Guarded<bf16> q, bf16_weights;
  Guarded<float> weights, angles;
  Guarded<int32_t> positions;
  // Outputs.
  Guarded<bf16> rows;
  Guarded<e4m3> codes;
  Guarded<float> out_weights;

  explicit Problem(const Case& c_)
      : c(c_),
        stride(128 + c.padding),
        q(c.tokens * c.heads * stride),
        bf16_weights(c.tokens * c.heads),
        weights(c.tokens * c.heads),
        angles(kPositions * 64),
        positions(c.tokens),
        rows(c.tokens * c.heads * 128),
        codes(c.tokens * c.heads * 128),
        out_weights(c.tokens * c.heads) {
    testing::Rng rng(c.tokens * 100 + c.heads);
    for (size_t i = 0; i < q.size(); ++i) {
      const int exponent = static_cast<int>(i / stride % 5) * 6 - 18;  // some below the floor
      q[i] = to_bf16(std::ldexp(testing::normal(rng), exponent));
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      bf16_weights[i] = to_bf16(testing::normal(rng));
      weights[i] = to_float(bf16_weights[i]);
    }
    const auto hostile = testing::hostile(kPositions);
    for (int64_t t = 0; t < c.tokens; ++t)
      positions[t] = static_cast<int32_t>(t % 3 == 2 ? hostile[t % hostile.size()] : 5 * t);
    rope_table({.table = tensor(angles.data(), {kPositions, 2, 32})});
  }
  bool valid(int64_t token) const { return positions[token] >= 0 && positions[token] < kPositions; }

  IndexQueryArgs args() {
    return {.q = tensor(q.data(), {c.tokens, c.heads, 128}, {c.heads * stride, stride, 1}),
            .weights = c.bf16_weights ? tensor(bf16_weights.data(), {c.tokens, c.heads})
                                      : tensor(weights.data(), {c.tokens, c.heads}),
            .positions = tensor(positions.data(), {c.tokens}),
            .rope = {tensor(angles.data(), {kPositions, 2, 32}), c.pairs, c.slice},
            .hadamard = c.hadamard,
            .scale = c.scale,
            .factor = kFactor,
            .out = c.bf16_out ? tensor(rows.data(), {c.tokens, c.heads, 128})
                              : tensor(codes.data(), {c.tokens, c.heads, 128}),
            .out_weights = tensor(out_weights.data(), {c.tokens, c.heads})};
  }
};

// Rows times the Hadamard matrix, in double; each kernel's own bf16 rows must be near.
void expect_hadamard(const bf16* x, const bf16* got) {
  for (int i = 0; i < 128; ++i) {
    double want = 0, magnitude = 0;
    for (int j = 0; j < 128; ++j) {
      const double term = to_float(x[j]) / std::sqrt(128.0);
      want += std::popcount(static_cast<unsigned>(i & j)) % 2 ? -term : term;
      magnitude += std::fabs(term);
    }
    // Seven sums and a product in fp32, each 2^-24 of the magnitudes; then bf16, 2^-8.
    const double fp32 = 8 * 0x1p-24 * magnitude;
    ASSERT_LE(std::fabs(to_float(got[i]) - want), fp32 + 0x1p-8 * (std::fabs(want) + fp32)) << i;
  }
}

class IndexQueryTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(IndexQueryTest, IsTheCompositionOfItsSteps) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("index_query", kernel); !why.empty())
    GTEST_SKIP() << why;
  Problem p(c);
  IndexQueryArgs a = p.args();
  a.target = testing::target("index_query", kernel);
  index_query(a);
  ASSERT_TRUE(testing::device_finished());

  Guarded<bf16> rotated(p.rows.size(), 0), rows(p.rows.size(), 0);
  const Tensor view = tensor(rotated.data(), {c.tokens, c.heads, 128});
  rotate({.x = a.q,
          .positions = a.positions,
          .rope = a.rope,
          .out = view,
          .target = testing::target("rotate", kernel)});
  ASSERT_TRUE(testing::device_finished());
  std::copy_n(rotated.data(), rotated.size(), rows.data());
  if (c.hadamard) {  // the same kernel's rows in bf16, which are held to the matrix
    Case in_bf16 = c;
    in_bf16.bf16_out = true;
    Problem other(in_bf16);
    IndexQueryArgs b = other.args();
    b.target = a.target;
    index_query(b);
    ASSERT_TRUE(testing::device_finished());
    for (int64_t t = 0; t < c.tokens; ++t)
      for (int64_t at = t * c.heads; at < (t + 1) * c.heads && p.valid(t); ++at)
        ASSERT_NO_FATAL_FAILURE(
            expect_hadamard(rotated.data() + at * 128, other.rows.data() + at * 128));
    std::copy_n(other.rows.data(), rows.size(), rows.data());
  }
  const int64_t heads = c.tokens * c.heads;
  Guarded<int64_t> slots(heads);
  for (int64_t i = 0; i < heads; ++i) slots[i] = i;
  Guarded<std::byte> keys(heads * 132);  // pages of one key: 128 codes, a scale
  write({.kv = tensor(rows.data(), {heads, 128}),
         .slots = tensor(slots.data(), {heads}),
         .cache = {keys.data(), CacheFormat::kIndexKeys, heads, 1},
         .scale = c.scale,
         .target = testing::target("write", kernel)});
  ASSERT_TRUE(testing::device_finished());
  for (int64_t at = 0; at < heads; ++at) {
    const int64_t t = at / c.heads;
    const std::byte* key = keys.data() + at * 132;
    float scale = 1;
    if (!c.bf16_out) std::memcpy(&scale, key + 128, 4);
    const float weight = p.valid(t) ? p.weights[at] * scale * kFactor : 0;
    if (p.valid(t)) ASSERT_EQ(p.out_weights[at], weight) << "token " << t;
    else ASSERT_EQ(std::bit_cast<uint32_t>(p.out_weights[at]), 0xcdcdcdcdu) << "token " << t;
    for (int64_t i = 0; i < 128; ++i) {
      const int64_t j = at * 128 + i;
      if (c.bf16_out)
        ASSERT_EQ(p.rows[j].bits, p.valid(t) ? rows[j].bits : 0xcdcd) << "token " << t;
      else
        ASSERT_EQ(p.codes[j].bits, p.valid(t) ? static_cast<uint8_t>(key[i]) : 0xcd)
            << "token " << t << " value " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, IndexQueryTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("index_query")),
                                            ::testing::ValuesIn(internal::index_query::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

TEST(IndexQueryErrors, NameTheArgument) {
  Problem p({"", 3, 2});
  const IndexQueryArgs good = p.args();
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    IndexQueryArgs a = good;
    change(a);
    testing::expect_error([&] { index_query(a); }, code, words);
  };
  expect([](IndexQueryArgs& a) { a.q = {}; }, {"index_query", "q", "nothing"});
  expect([](IndexQueryArgs& a) { a.q.shape[2] = 64; }, {"q", "128", "64"});
  expect([](IndexQueryArgs& a) { a.weights = {}; }, {"weights", "nothing"});
  expect([](IndexQueryArgs& a) { a.weights.dtype = DType::kI32; }, {"weights", "f32", "int32"});
  expect([](IndexQueryArgs& a) { a.positions.shape[0] = 1; }, {"positions", "[3]", "[1]"});
  expect([](IndexQueryArgs& a) { a.rope.table = {}; }, {"rope.table", "nothing"});
  expect([](IndexQueryArgs& a) { a.factor = NAN; }, {"factor"});
  expect([](IndexQueryArgs& a) { a.scale = ScaleMode::kPow2FloorAmax; }, {"scale", "index_keys"});
  expect([](IndexQueryArgs& a) { a.out.dtype = DType::kF32; }, {"out", "e4m3", "f32"});
  expect([](IndexQueryArgs& a) { a.out_weights.shape[1] = 1; }, {"out_weights", "[3, 2]"});
  expect([](IndexQueryArgs& a) { a.target.kernel = "fastest"; }, {"no kernel fits"},
         ErrorCode::kUnsupported);
  for (const e4m3 v : p.codes) EXPECT_EQ(v.bits, 0xcd);  // nothing was written
}

}  // namespace
}  // namespace winnow
