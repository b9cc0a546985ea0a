// rotate: every kernel x every case against the formula in double, hostile positions included;
// rope_table against its formula.
#include "winnow/rotate.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

#include "core/formats.h"
#include "rotate/rotate_cases.h"
#include "testing.h"
#include "winnow/error.h"
#include "winnow/write.h"

namespace winnow {
namespace {

using internal::rotate::Case;
using testing::draw;
using testing::Guarded;

constexpr int64_t kPositions = 50;

struct Problem {
  Case c;
  int64_t stride, token_stride;
  Guarded<bf16> x;
  Guarded<int32_t> positions;
  Guarded<float> angles;

  explicit Problem(const Case& c_)
      : c(c_),
        stride(c.width + c.padding),
        token_stride(c.heads * stride),
        x(c.tokens * token_stride),
        positions(c.tokens),
        angles(kPositions * 64) {
    testing::Rng rng(c.tokens * 100 + c.width);
    for (bf16& v : x)
      v = to_bf16(std::ldexp(testing::normal(rng), static_cast<int>(draw(rng, -6, 6))));
    const auto hostile = testing::hostile(kPositions);
    for (int64_t t = 0; t < c.tokens; ++t)
      positions[t] = static_cast<int32_t>(t % 3 == 2 ? hostile[t % hostile.size()]
                                                     : draw(rng, 0, kPositions - 1));
    rope_table({.table = table()});
  }

  Tensor table() {
    return c.paired_table ? tensor(angles.data(), {kPositions, 2, 32}, {64, 1, 2})
                          : tensor(angles.data(), {kPositions, 2, 32});
  }
  RotateArgs args(bf16* out) {
    return {.x = view(x.data()),
            .positions = tensor(positions.data(), {c.tokens}),
            .rope = {table(), c.pairs, c.slice, c.inverse},
            .out = view(out)};
  }
  Tensor view(bf16* data) {
    return tensor(data, {c.tokens, c.heads, c.width}, {token_stride, stride, 1});
  }
};

class RotateTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(RotateTest, MatchesTheFormula) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("rotate", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  const Guarded<bf16> before(p.x);
  Guarded<bf16> out(p.x.size());
  RotateArgs a = p.args(c.in_place ? p.x.data() : out.data());
  a.target = testing::target("rotate", kernel);
  rotate(a);
  ASSERT_TRUE(testing::device_finished());
  const bf16* got = c.in_place ? p.x.data() : out.data();
  const int64_t begin = c.slice == RopeSlice::kFirst ? 0 : c.width - 64;
  const Tensor table = p.table();
  for (int64_t at = 0; at < static_cast<int64_t>(before.size()); ++at) {
    const int64_t t = at / p.token_stride, i = at % p.stride;
    const bool valid = p.positions[t] >= 0 && p.positions[t] < kPositions && i < c.width;
    if (!valid || i < begin || i >= begin + 64) {  // skipped, between rows, or copied
      const bool stays = !valid && !c.in_place;
      ASSERT_EQ(got[at].bits, stays ? 0xcdcd : before[at].bits) << "token " << t << " value " << i;
      continue;
    }
    const int64_t k = i - begin;
    const bool half = c.pairs == RopePairs::kHalf;
    const int64_t pair = half ? k % 32 : k / 2;
    const bool second = half ? k >= 32 : k % 2 == 1;
    const int64_t partner = half ? (second ? k - 32 : k + 32) : k ^ 1;
    const float* row = p.angles.data() + p.positions[t] * 64 + pair * table.stride[2];
    const double cosine = row[0], sine = (c.inverse ? -1 : 1) * double{row[table.stride[1]]};
    const double own = to_float(before[at]) * cosine;
    const double other = to_float(before[at - k + partner]) * (second ? sine : -sine);
    // Two products and a sum in fp32, 2^-24 of a term each and of the sum; then bf16, 2^-8.
    const double fp32 = 0x1p-23 * (std::fabs(own) + std::fabs(other));
    const double bound = fp32 + 0x1p-8 * (std::fabs(own + other) + fp32);
    ASSERT_LE(std::fabs(to_float(got[at]) - (own + other)), bound)
        << "token " << t << " value " << i << ": got " << to_float(got[at]) << ", expected "
        << own + other;
  }
}

// A NaN whose bits are all set would become a zero if rounding carried into its sign.
TEST_P(RotateTest, NansOfTheTableStay) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("rotate", kernel); !why.empty()) GTEST_SKIP() << why;
  if (c.heads == 0) return;
  Problem p(c);
  for (float& angle : p.angles) angle = std::bit_cast<float>(0x7fffffffu);
  Guarded<bf16> out(p.x.size());
  RotateArgs a = p.args(out.data());
  a.target = testing::target("rotate", kernel);
  rotate(a);
  ASSERT_TRUE(testing::device_finished());
  const int64_t begin = c.slice == RopeSlice::kFirst ? 0 : c.width - 64;
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int64_t i = begin; i < begin + 64 && p.positions[t] >= 0 && p.positions[t] < kPositions;
         ++i)
      ASSERT_TRUE(std::isnan(to_float(out[t * p.token_stride + i]))) << t << ' ' << i;
}

INSTANTIATE_TEST_SUITE_P(Kernels, RotateTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("rotate")),
                                            ::testing::ValuesIn(internal::rotate::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

// In e4m3: the codes and scales that write() makes of rotate()'s bf16, as index keys of 128 values.
TEST_P(RotateTest, InE4m3IsTheComposition) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("rotate", kernel); !why.empty()) GTEST_SKIP() << why;
  if (c.width % 128 != 0) return;
  Problem p(c);
  const int64_t tiles = c.width / 128;
  Guarded<bf16> turned(p.x.size());
  Guarded<e4m3> codes(p.x.size());
  Guarded<float> scales(c.tokens * c.heads * (tiles + 1));
  RotateArgs a = p.args(turned.data());
  a.target = testing::target("rotate", kernel);
  rotate(a);
  for (const ScaleMode mode : {ScaleMode::kDefault, ScaleMode::kAmax}) {
    a.out = tensor(codes.data(), {c.tokens, c.heads, c.width}, {p.token_stride, p.stride, 1});
    a.scales =
        tensor(scales.data(), {c.tokens, c.heads, tiles}, {c.heads * (tiles + 1), tiles + 1, 1});
    a.scale = mode;
    codes.poison();
    scales.poison();
    rotate(a);
    ASSERT_TRUE(testing::device_finished());
    for (int64_t t = 0; t < c.tokens; ++t)
      for (int64_t h = 0; h < c.heads; ++h) {
        const e4m3* got = codes.data() + t * p.token_stride + h * p.stride;
        const float* got_scales = scales.data() + (t * c.heads + h) * (tiles + 1);
        std::vector<uint8_t> page(tiles * 132, 0xcd);
        Guarded<int64_t> slots(tiles);
        const bool valid = p.positions[t] >= 0 && p.positions[t] < kPositions;
        for (int64_t i = 0; i < tiles; ++i) slots[i] = valid ? i : -1;
        write({.kv = tensor(turned.data() + t * p.token_stride + h * p.stride, {tiles, 128}),
               .slots = tensor(slots.data(), {tiles}),
               .cache = {page.data(), CacheFormat::kIndexKeys, 1, static_cast<int32_t>(tiles)},
               .scale = mode,
               .target = {.kernel = "reference"}});
        ASSERT_EQ(std::memcmp(got, page.data(), c.width), 0) << "token " << t << " head " << h;
        ASSERT_EQ(std::memcmp(got_scales, page.data() + c.width, tiles * 4), 0) << "token " << t;
      }
  }
}

TEST(RotateErrors, NameTheArgument) {
  Problem p({"", 3, 2, 128});
  Guarded<bf16> out(p.x.size());
  const RotateArgs good = p.args(out.data());
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    RotateArgs a = good;
    change(a);
    testing::expect_error([&] { rotate(a); }, code, words);
  };
  expect([](RotateArgs& a) { a.x = {}; }, {"rotate", "x", "nothing"});
  expect([](RotateArgs& a) { a.x.dtype = DType::kF32; }, {"x", "bf16", "f32"});
  expect([](RotateArgs& a) { a.x.shape[2] = a.out.shape[2] = 63; }, {"x.shape[2]", "64", "63"});
  expect([](RotateArgs& a) { a.x.stride[2] = 2; }, {"x", "contiguous"});
  expect([](RotateArgs& a) { a.positions.shape[0] = 2; }, {"positions", "[3]", "[2]"});
  expect([](RotateArgs& a) { a.positions.dtype = DType::kI64; }, {"positions", "int32", "int64"});
  expect([](RotateArgs& a) { a.rope.table = {}; }, {"rope.table", "nothing"});
  expect([](RotateArgs& a) { a.rope.table.shape[2] = 16; }, {"rope.table", "32", "16"});
  expect([](RotateArgs& a) { a.rope.table.dtype = DType::kBf16; }, {"rope.table", "f32", "bf16"});
  expect([](RotateArgs& a) { a.rope.pairs = RopePairs{5}; }, {"rope.pairs", "number 5"});
  expect([](RotateArgs& a) { a.rope.slice = RopeSlice{5}; }, {"rope.slice", "number 5"});
  expect([](RotateArgs& a) { a.out.shape[1] = 1; }, {"out", "[3, 2, 128]", "[3, 1, 128]"});
  expect([](RotateArgs& a) { a.out.stride[0] = 0; }, {"out", "overlap"});
  Guarded<e4m3> codes(p.x.size());
  Guarded<float> scales(6);
  const auto quantized = [&](RotateArgs& a) {
    a.out.data = codes.data();
    a.out.dtype = DType::kE4m3;
    a.scales = tensor(scales.data(), {3, 2, 1});
  };
  expect([&](RotateArgs& a) { quantized(a), a.scales = {}; }, {"scales", "[3, 2, 1]", "nothing"});
  expect([&](RotateArgs& a) { quantized(a), a.scales.stride[0] = 0; }, {"scales", "overlap"});
  expect([&](RotateArgs& a) { quantized(a), a.scale = ScaleMode::kPow2FloorAmax; }, {"scale"});
  expect([&](RotateArgs& a) { quantized(a), a.x.shape[2] = a.out.shape[2] = 64; },
         {"x.shape[2]", "multiple of 128", "64"});
  expect(
      [&](RotateArgs& a) {
        a.scales = tensor(scales.data(), {3, 2, 1});
      },
      {"scales", "none with out in bf16"});
  expect([](RotateArgs& a) { a.target.kernel = "fastest"; }, {"rotate", "no kernel fits"},
         ErrorCode::kUnsupported);
  for (const bf16 v : out) EXPECT_EQ(v.bits, 0xcdcd);  // nothing was written
}

class RopeTableTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Kernels, RopeTableTest,
                         ::testing::ValuesIn(testing::kernels("rope_table")));

// Known frequencies: pair 0 turns by 1 a position, pair 16 by theta^-1/2; YaRN divides the slow
// pairs by its factor and leaves the fast ones.
TEST_P(RopeTableTest, KnownAngles) {
  if (const std::string why = testing::why_not("rope_table", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  Guarded<float> plain(100 * 64), yarn(100 * 64);
  const Target target = testing::target("rope_table", GetParam());
  rope_table({.table = tensor(plain.data(), {100, 2, 32}), .target = target});
  rope_table({.factor = 40,
              .original = 4096,
              .table = tensor(yarn.data(), {100, 2, 32}, {64, 1, 2}),
              .target = target});
  ASSERT_TRUE(testing::device_finished());
  for (int p = 0; p < 100; ++p) {
    const float* row = plain.data() + p * 64;
    EXPECT_EQ(row[0], static_cast<float>(std::cos(double(p))));
    EXPECT_EQ(row[32], static_cast<float>(std::sin(double(p))));
    EXPECT_EQ(row[16], static_cast<float>(std::cos(double(p * 0.01f))));
    const float* slow = yarn.data() + p * 64;
    for (int i = 0; i <= 10; ++i) EXPECT_EQ(slow[2 * i], row[i]) << i;  // lo is 10
    for (int i = 23; i < 32; ++i) {                                     // hi is 23
      const float f = static_cast<float>(std::pow(10000.0, -i / 32.0) / 40);
      EXPECT_EQ(slow[2 * i + 1], static_cast<float>(std::sin(double(p * f)))) << i;
    }
  }
}

TEST(RopeTableErrors, NameTheArgument) {
  Guarded<float> memory(64);
  const RopeTableArgs good{.table = tensor(memory.data(), {1, 2, 32})};
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    RopeTableArgs a = good;
    change(a);
    testing::expect_error([&] { rope_table(a); }, code, words);
  };
  expect([](RopeTableArgs& a) { a.theta = 1; }, {"rope_table", "theta", "above 1", "found 1"});
  expect([](RopeTableArgs& a) { a.factor = NAN; }, {"factor", "above 0"});
  expect([](RopeTableArgs& a) { a.factor = 4; }, {"original", "found 0"});
  expect([](RopeTableArgs& a) { a.factor = 1e-300, a.original = 9; }, {"factor", "fp32"});
  expect([](RopeTableArgs& a) { a.factor = 4, a.original = 9, a.beta_slow = 0; }, {"beta_slow"});
  expect([](RopeTableArgs& a) { a.table = {}; }, {"table", "nothing"});
  expect([](RopeTableArgs& a) { a.table.stride[1] = 0; }, {"table", "overlap"});
  expect([](RopeTableArgs& a) { a.table.dtype = DType::kBf16; }, {"table", "f32", "bf16"});
  EXPECT_TRUE(std::isnan(memory[0]) || memory[0] != 1);  // nothing was written
}

}  // namespace
}  // namespace winnow
