// join and quantize: every kernel against the formulas of <winnow/write.h>.
#include <cfloat>
#include <cmath>

#include "core/formats.h"
#include "testing.h"
#include "winnow/error.h"
#include "winnow/write.h"

namespace winnow {
namespace {

using testing::draw;
using testing::Guarded;

class JoinTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Kernels, JoinTest, ::testing::ValuesIn(testing::kernels("join")));

// Sizes, and the strides of [token, head, element] in units that keep the three inputs apart.
struct JoinCase {
  int64_t tokens, heads, nope, rope;
  bool heads_first;  // [H, T, D] in memory
  int64_t step;      // innermost stride
};

TEST_P(JoinTest, Concatenates) {
  if (const std::string why = testing::why_not("join", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  for (const JoinCase& c : {JoinCase{3, 2, 512, 64, false, 1},
                            {5, 4, 448, 64, true, 1},
                            {2, 3, 7, 3, false, 2},
                            {0, 4, 8, 8, false, 1},
                            {4, 0, 8, 8, false, 1},
                            {4, 2, 0, 8, false, 1},
                            {4, 2, 8, 0, true, 1},
                            {1, 1, 1, 1, false, 1},
                            {70, 1, 9, 5, true, 3}}) {
    testing::Rng rng(c.tokens * 10 + c.nope);
    const auto view = [&](Guarded<bf16>& buffer, int64_t width) {
      const int64_t row = width * c.step + 1;
      return c.heads_first
                 ? tensor(buffer.data(), {c.tokens, c.heads, width}, {row, row * c.tokens, c.step})
                 : tensor(buffer.data(), {c.tokens, c.heads, width}, {row * c.heads, row, c.step});
    };
    const auto size = [&](int64_t width) { return c.tokens * c.heads * (width * c.step + 1); };
    Guarded<bf16> latent(size(c.nope)), rope(size(c.rope)), out(size(c.nope + c.rope));
    for (bf16& x : latent) x.bits = static_cast<uint16_t>(rng());
    for (bf16& x : rope) x.bits = static_cast<uint16_t>(rng());
    const Tensor a = view(latent, c.nope), b = view(rope, c.rope), o = view(out, c.nope + c.rope);
    join({.latent = a, .rope = b, .out = o, .target = testing::target("join", GetParam())});
    ASSERT_TRUE(testing::device_finished());
    const auto at = [](const Tensor& t, int64_t token, int64_t head, int64_t i) {
      return static_cast<const bf16*>(
          t.data)[token * t.stride[0] + head * t.stride[1] + i * t.stride[2]];
    };
    int64_t untouched = static_cast<int64_t>(out.size());
    for (int64_t t = 0; t < c.tokens; ++t)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t i = 0; i < c.nope + c.rope; ++i, --untouched)
          ASSERT_EQ(at(o, t, h, i).bits,
                    i < c.nope ? at(a, t, h, i).bits : at(b, t, h, i - c.nope).bits)
              << t << " " << h << " " << i;
    int64_t poison = 0;
    for (bf16 v : out) poison += v.bits == 0xcdcd;
    EXPECT_GE(poison, untouched);  // what lies between the rows stays
  }
}

TEST(JoinErrors, NameTheArgument) {
  Guarded<bf16> latent(2 * 3 * 8), rope(2 * 3 * 4), out(2 * 3 * 12);
  const JoinArgs good{.latent = tensor(latent.data(), {2, 3, 8}),
                      .rope = tensor(rope.data(), {2, 3, 4}),
                      .out = tensor(out.data(), {2, 3, 12})};
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    JoinArgs a = good;
    change(a);
    testing::expect_error([&] { join(a); }, code, words);
  };
  expect([](JoinArgs& a) { a.latent = {}; }, {"join", "latent", "nothing"});
  expect([](JoinArgs& a) { a.rope.shape[1] = 2; }, {"rope", "[2, 3, any]", "[2, 2, 4]"});
  expect([](JoinArgs& a) { a.out.shape[2] = 11; }, {"out", "[2, 3, 12]"});
  expect([](JoinArgs& a) { a.out.dtype = DType::kF32; }, {"out", "bf16"});
  expect([](JoinArgs& a) { a.out.stride[1] = 0; }, {"out", "overlap"});
  expect([](JoinArgs& a) { a.target.kernel = "none"; }, {"join", "no kernel fits"},
         ErrorCode::kUnsupported);
  for (bf16 v : out) EXPECT_EQ(v.bits, 0xcdcd);
}

class QuantizeTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Kernels, QuantizeTest, ::testing::ValuesIn(testing::kernels("quantize")));

template <class T>
void check_quantize(const std::vector<T>& values, const std::string& kernel, const char* what) {
  const auto n = static_cast<int64_t>(values.size());
  Guarded<T> x(values);
  Guarded<e4m3> out(x.size());
  Guarded<float> scale(1);
  quantize({.x = tensor(x.data(), {n}),
            .out = tensor(out.data(), {n}),
            .scale = tensor(scale.data(), {1}),
            .target = testing::target("quantize", kernel)});
  ASSERT_TRUE(testing::device_finished());
  float amax = 0;
  for (T v : x)
    if (const float a = std::fabs(to_float(v)); a > amax) amax = a;
  const float s = 448 / std::clamp(amax, 1e-10f, FLT_MAX);
  EXPECT_EQ(scale[0], 1 / s) << what;
  for (int64_t i = 0; i < n; ++i)
    ASSERT_EQ(out[i].bits, to_e4m3(to_float(x[i]) * s).bits) << what << ", element " << i;
}

TEST_P(QuantizeTest, MatchesTheFormula) {
  if (const std::string why = testing::why_not("quantize", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  testing::Rng rng(11);
  for (int64_t n : {0, 1, 7, 16, 33, 1000, 70001}) {
    std::vector<float> x(n);
    std::vector<bf16> h(n);
    for (int64_t i = 0; i < n; ++i) {
      x[i] = std::ldexp(testing::normal(rng), static_cast<int>(draw(rng, -20, 3)));
      h[i] = to_bf16(x[i]);
    }
    check_quantize(x, GetParam(), "f32");
    check_quantize(h, GetParam(), "bf16");
    if (n < 7) continue;
    x[3] = NAN;
    x[5] = -NAN;
    check_quantize(x, GetParam(), "with NaN");
    x[n - 1] = -INFINITY;
    check_quantize(x, GetParam(), "with an infinity");
  }
  check_quantize(std::vector<float>(50, 0.0f), GetParam(), "zeros");
  check_quantize(std::vector<float>(50, 1e-20f), GetParam(), "below the floor");
  check_quantize(std::vector<float>(50, FLT_MAX), GetParam(), "largest");
  check_quantize(std::vector<float>(50, NAN), GetParam(), "all NaN");
}

// With 448 among the values the factor is 1: every code and every rounding boundary, as they are.
TEST_P(QuantizeTest, EveryRoundingBoundary) {
  if (const std::string why = testing::why_not("quantize", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  std::vector<float> x = {448.0f, 0x1p-10f, 0x1.8p-10f, FLT_MIN, FLT_TRUE_MIN};
  for (uint8_t code = 0; code < 0x7e; ++code) {
    const float low = to_float(e4m3{code}), high = to_float(e4m3{static_cast<uint8_t>(code + 1)});
    const float tie = low + (high - low) / 2;
    for (float v : {low, tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 500.0f)}) {
      x.push_back(v);
      x.push_back(-v);
    }
  }
  check_quantize(x, GetParam(), "boundaries");
}

TEST(QuantizeErrors, NameTheArgument) {
  Guarded<float> x(24), scale(1);
  Guarded<e4m3> out(24);
  const QuantizeArgs good{.x = tensor(x.data(), {2, 3, 4}),
                          .out = tensor(out.data(), {2, 3, 4}),
                          .scale = tensor(scale.data(), {1})};
  quantize(good);
  out.begin()->bits = 0xcd;
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    QuantizeArgs a = good;
    change(a);
    testing::expect_error([&] { quantize(a); }, code, words);
  };
  expect([](QuantizeArgs& a) { a.x = {}; }, {"quantize", "x", "nothing"});
  expect([](QuantizeArgs& a) { a.x.dtype = DType::kI32; }, {"x", "bf16 or f32", "int32"});
  expect([](QuantizeArgs& a) { a.x.rank = 5; }, {"x", "1 to 4"});
  expect([](QuantizeArgs& a) { a.x.stride[1] = 5; }, {"x", "contiguous", "dimension 1"});
  expect([](QuantizeArgs& a) { a.out.shape[2] = 3; }, {"out", "[2, 3, 4]", "[2, 3, 3]"});
  expect([](QuantizeArgs& a) { a.out.dtype = DType::kU8; }, {"out", "e4m3"});
  expect([](QuantizeArgs& a) { a.out.stride[0] = 13; }, {"out", "contiguous"});
  expect([](QuantizeArgs& a) { a.scale.shape[0] = 2; }, {"scale", "[1]", "[2]"});
  expect([](QuantizeArgs& a) { a.target.kernel = "none"; }, {"quantize", "no kernel fits"},
         ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace winnow
