// The projections: every kernel x every case against sums in double.
#include "winnow/absorb.h"

#include <cmath>

#include "absorb/absorb_cases.h"
#include "absorb/absorb_sums.h"
#include "core/arithmetic.h"
#include "core/formats.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using internal::absorb::at;
using internal::absorb::Case;
using internal::absorb::expect_sums;
using internal::absorb::Sum;
using testing::draw;
using testing::Guarded;

struct Problem {
  Case c;
  Guarded<bf16> kv_b, q, attn, latent, uk, uv;
  Tensor weight, w_uk, w_uv;

  explicit Problem(const Case& c_)
      : c(c_),
        kv_b(c.latent * c.heads * (c.nope + c.value)),
        q(c.tokens * c.heads * (c.nope + c.padding)),
        attn(c.tokens * c.heads * (c.latent + c.padding)),
        latent(c.tokens * (c.latent + c.rope + c.padding)),
        uk(c.latent * c.heads * c.nope),
        uv(c.latent * c.heads * c.value),
        weight(weights(kv_b, c.nope + c.value)),
        w_uk(weights(uk, c.nope)),
        w_uv(weights(uv, c.value)) {
    testing::Rng rng(c.tokens * 31 + c.latent);
    for (Guarded<bf16>* g : {&kv_b, &q, &attn, &latent, &uk, &uv})
      for (bf16& x : *g) x = to_bf16(testing::normal(rng));
    // What lies between the rows is never used.
    for (const auto& [g, row] : {std::pair{&q, c.nope}, {&attn, c.latent}})
      for (size_t i = 0; i < g->size(); ++i)
        if (static_cast<int64_t>(i) % (row + c.padding) >= row) (*g)[i] = bf16{0x7fc0};
  }

  Tensor weights(Guarded<bf16>& memory, int64_t width) const {
    const int64_t l = c.latent, h = c.heads;
    switch (c.weights) {
      case Case::kLatentFirst: return tensor(memory.data(), {l, h, width});
      case Case::kHeadFirst: return tensor(memory.data(), {l, h, width}, {width, l * width, 1});
      default: return tensor(memory.data(), {l, h, width}, {1, width * l, l});
    }
  }
  // [T, H, width] with gaps between the rows, every other case with the heads outside.
  Tensor rows(Guarded<bf16>& memory, int64_t width) const {
    const int64_t row = width + c.padding;
    return c.tokens % 2
               ? tensor(memory.data(), {c.tokens, c.heads, width}, {row * c.heads, row, 1})
               : tensor(memory.data(), {c.tokens, c.heads, width}, {row, row * c.tokens, 1});
  }
  size_t size(int64_t width) const { return c.tokens * c.heads * (width + c.padding); }
};

class AbsorbTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {
 protected:
  void SetUp() override {
    const std::string why = testing::why_not("absorb", std::get<0>(GetParam()));
    if (!why.empty()) GTEST_SKIP() << why;
  }
  Target target() const { return testing::target("absorb", std::get<0>(GetParam())); }
};

TEST_P(AbsorbTest, Query) {
  Problem p(std::get<1>(GetParam()));
  Guarded<bf16> memory(p.size(p.c.latent));
  const Tensor q = p.rows(p.q, p.c.nope), out = p.rows(memory, p.c.latent);
  absorb_query({.q_nope = q, .w_uk = p.w_uk, .out = out, .target = target()});
  ASSERT_TRUE(testing::device_finished());
  expect_sums(out, p.c.latent, "q_latent", [&](int64_t t, int64_t h, int64_t l) {
    return Sum(
        p.c.nope, [&](int64_t k) { return at(q, t, h, k); },
        [&](int64_t k) { return at(p.w_uk, l, h, k); });
  });
}

TEST_P(AbsorbTest, Output) {
  Problem p(std::get<1>(GetParam()));
  Guarded<bf16> memory(p.size(p.c.value));
  const Tensor attn = p.rows(p.attn, p.c.latent), out = p.rows(memory, p.c.value);
  project_output({.attn = attn, .w_uv = p.w_uv, .out = out, .target = target()});
  ASSERT_TRUE(testing::device_finished());
  expect_sums(out, p.c.value, "o", [&](int64_t t, int64_t h, int64_t v) {
    return Sum(
        p.c.latent, [&](int64_t l) { return at(attn, t, h, l); },
        [&](int64_t l) { return at(p.w_uv, l, h, v); });
  });
}

TEST_P(AbsorbTest, Decompress) {
  Problem p(std::get<1>(GetParam()));
  const Case& c = p.c;
  Guarded<bf16> k_memory(p.size(c.nope + c.rope)), v_memory(p.size(c.value));
  const Tensor k = p.rows(k_memory, c.nope + c.rope), v = p.rows(v_memory, c.value);
  const int64_t row = c.latent + c.rope + c.padding;
  const Tensor latent = tensor(p.latent.data(), {c.tokens, c.latent + c.rope}, {row, 1});
  decompress(
      {.latent = latent, .w_uk = p.w_uk, .w_uv = p.w_uv, .k = k, .v = v, .target = target()});
  ASSERT_TRUE(testing::device_finished());
  const auto expect = [&](const Tensor& out, const Tensor& w, const char* name) {
    expect_sums(out, w.shape[2], name, [&](int64_t n, int64_t h, int64_t i) {
      return Sum(
          c.latent, [&](int64_t l) { return to_float(p.latent[n * row + l]); },
          [&](int64_t l) { return at(w, l, h, i); });
    });
  };
  expect(k, p.w_uk, "k");
  expect(v, p.w_uv, "v");
  for (int64_t n = 0; n < c.tokens; ++n)
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t r = 0; r < c.rope; ++r)
        ASSERT_EQ(at(k, n, h, c.nope + r), to_float(p.latent[n * row + c.latent + r]));
}

TEST_P(AbsorbTest, Split) {
  Problem p(std::get<1>(GetParam()));
  split_kv_b({.weight = p.weight, .w_uk = p.w_uk, .w_uv = p.w_uv, .target = target()});
  ASSERT_TRUE(testing::device_finished());
  for (int64_t l = 0; l < p.c.latent; ++l)
    for (int64_t h = 0; h < p.c.heads; ++h) {
      for (int64_t i = 0; i < p.c.nope; ++i) ASSERT_EQ(at(p.w_uk, l, h, i), at(p.weight, l, h, i));
      for (int64_t i = 0; i < p.c.value; ++i)
        ASSERT_EQ(at(p.w_uv, l, h, i), at(p.weight, l, h, p.c.nope + i));
    }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AbsorbTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("absorb")),
                                            ::testing::ValuesIn(internal::absorb::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

// Weights that are contiguous in neither of a head's dimensions: every call takes them, and a
// kernel that does not says so when it is asked for by name.
TEST(AbsorbStrides, OfWeightsMayAllBeWide) {
  constexpr int64_t kLatent = 48, kHeads = 3, kNope = 40, kTokens = 5;
  testing::Rng rng(3);
  Guarded<bf16> memory(kLatent * kHeads * kNope * 2), rows(kTokens * kHeads * kNope);
  Guarded<bf16> out(kTokens * kHeads * kLatent);
  for (Guarded<bf16>* g : {&memory, &rows})
    for (bf16& x : *g) x = to_bf16(testing::normal(rng));
  const Tensor w_uk =
      tensor(memory.data(), {kLatent, kHeads, kNope}, {kHeads * kNope * 2, kNope * 2, int64_t{2}});
  const Tensor q = tensor(rows.data(), {kTokens, kHeads, kNope});
  const Tensor latent = tensor(out.data(), {kTokens, kHeads, kLatent});
  AbsorbQueryArgs args{.q_nope = q, .w_uk = w_uk, .out = latent};
  absorb_query(args);
  expect_sums(latent, kLatent, "q_latent", [&](int64_t t, int64_t h, int64_t l) {
    return Sum(
        kNope, [&](int64_t k) { return at(q, t, h, k); },
        [&](int64_t k) { return at(w_uk, l, h, k); });
  });
  if (!testing::why_not("absorb", "avx512bf16").empty()) return;
  args.target.kernel = "avx512bf16";
  testing::expect_error([&] { absorb_query(args); }, ErrorCode::kUnsupported,
                        {"absorb", "contiguous in neither dimension"});
}

// A token's row is the same bits in any batch.
class AbsorbRows : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string why = testing::why_not("absorb", GetParam());
    if (!why.empty()) GTEST_SKIP() << why;
  }
  Target target() const { return testing::target("absorb", GetParam()); }
  // run(first, count, out) puts rows [first, first + count) into out, `width` elements each.
  template <class F>
  void compare(int64_t tokens, int64_t width, F&& run) {
    Guarded<bf16> all(tokens * width), some(70 * width);
    run(0, tokens, all.data());
    ASSERT_TRUE(testing::device_finished());
    for (const int64_t count : {1, 70})
      for (const int64_t t : {0, 11, 12, 63, 64, 69, 300, 450}) {
        run(t, count, some.data());
        ASSERT_TRUE(testing::device_finished());
        for (int64_t i = 0; i < count * width; ++i)
          ASSERT_EQ(some[i].bits, all[t * width + i].bits) << t << " " << i;
      }
  }
};

TEST_P(AbsorbRows, OfOutputsDoNotDependOnTheBatch) {
  Problem p({"", 520, 20, 200, 40, 40, 0, Case::kLatentFirst});
  compare(520, 20 * 40, [&](int64_t first, int64_t count, bf16* out) {
    project_output({.attn = tensor(p.attn.data() + first * 4000, {count, 20, 200}),
                    .w_uv = p.w_uv,
                    .out = tensor(out, {count, 20, 40}),
                    .target = target()});
  });
}

TEST_P(AbsorbRows, OfQueriesDoNotDependOnTheBatch) {
  Problem p({"", 520, 20, 136, 128, 8, 0, Case::kLatentFirst});
  compare(520, 20 * 136, [&](int64_t first, int64_t count, bf16* out) {
    absorb_query({.q_nope = tensor(p.q.data() + first * 2560, {count, 20, 128}),
                  .w_uk = p.w_uk,
                  .out = tensor(out, {count, 20, 136}),
                  .target = target()});
  });
}

// Keys and values beside each other. More heads than blocks, which go from one row tile to another.
// Without the reference, which is a loop over rows and too slow.
class AbsorbKeys : public AbsorbRows {};
TEST_P(AbsorbKeys, DoNotDependOnTheBatch) {
  constexpr int64_t kHeads = 34, kLatent = 256, kKey = 72 + 8, kBoth = kKey + 72;
  for (const Case::Weights weights : {Case::kLatentFirst, Case::kCheckpoint}) {
    Problem p({"", 770, kHeads, kLatent, 72, 72, 8, weights});
    compare(770, kHeads * kBoth, [&](int64_t first, int64_t count, bf16* out) {
      const std::initializer_list<int64_t> strides = {kHeads * kBoth, kBoth, 1};
      decompress({.latent = tensor(p.latent.data() + first * 264, {count, 264}),
                  .w_uk = p.w_uk,
                  .w_uv = p.w_uv,
                  .k = tensor(out, {count, kHeads, kKey}, strides),
                  .v = tensor(out + kKey, {count, kHeads, 72}, strides),
                  .target = target()});
    });
  }
}
INSTANTIATE_TEST_SUITE_P(Kernels, AbsorbRows, ::testing::ValuesIn(testing::kernels("absorb")));
INSTANTIATE_TEST_SUITE_P(Kernels, AbsorbKeys, ::testing::ValuesIn([] {
                           std::vector<std::string> names = testing::kernels("absorb");
                           std::erase(names, "reference");
                           return names;
                         }()));

class DequantizeTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Kernels, DequantizeTest,
                         ::testing::ValuesIn(testing::kernels("dequantize_weight")));

TEST_P(DequantizeTest, MatchesTheFormula) {
  if (const std::string why = testing::why_not("dequantize_weight", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  testing::Rng rng(5);
  const int64_t sizes[][2] = {{1, 1},    {128, 128}, {129, 257}, {300, 100},
                              {5, 1000}, {0, 5},     {5, 0}};
  for (const auto& [rows, cols] : sizes)
    for (bool blocks : {true, false}) {
      const int64_t row = cols + 3, sr = ceil_div(rows, 128), sc = ceil_div(cols, 128);
      Guarded<e4m3> weight(rows * row);
      Guarded<float> scale(blocks ? sr * sc : 1);
      Guarded<bf16> out(rows * row);
      for (e4m3& w : weight) w.bits = static_cast<uint8_t>(rng());
      for (float& s : scale) s = std::ldexp(testing::normal(rng), -6);
      const auto scales = blocks ? tensor(scale.data(), {sr, sc}) : tensor(scale.data(), {1});
      dequantize_weight({.weight = tensor(weight.data(), {rows, cols}, {row, 1}),
                         .scale = scales,
                         .out = tensor(out.data(), {rows, cols}, {row, 1}),
                         .target = testing::target("dequantize_weight", GetParam())});
      ASSERT_TRUE(testing::device_finished());
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < row; ++c) {
          const bf16 got = out[r * row + c];
          if (c >= cols) {
            ASSERT_EQ(got.bits, 0xcdcd) << "between the rows";
            continue;
          }
          const float s = blocks ? scale[r / 128 * sc + c / 128] : scale[0];
          const bf16 want = to_bf16(to_float(weight[r * row + c]) * s);
          ASSERT_TRUE(got.bits == want.bits ||
                      (std::isnan(to_float(got)) && std::isnan(to_float(want))))
              << r << ", " << c << ": " << got.bits << ", expected " << want.bits;
        }
    }
}

TEST(AbsorbErrors, NameTheArgument) {
  Problem p({"", 3, 2, 16, 8, 12, 4, Case::kLatentFirst});
  Guarded<bf16> big(3 * 2 * 16);
  const Tensor q = p.rows(p.q, 8), attn = p.rows(p.attn, 16);
  const Tensor out16 = tensor(big.data(), {3, 2, 16}), out12 = tensor(big.data(), {3, 2, 12});
  const auto query = [&](auto change, std::initializer_list<const char*> words,
                         ErrorCode code = ErrorCode::kInvalidArgument) {
    AbsorbQueryArgs a{.q_nope = q, .w_uk = p.w_uk, .out = out16};
    change(a);
    testing::expect_error([&] { absorb_query(a); }, code, words);
  };
  query([](auto& a) { a.w_uk = {}; }, {"absorb_query", "w_uk", "nothing"});
  query([](auto& a) { a.q_nope.shape[2] = 7; }, {"q_nope", "[any, 2, 8]", "[3, 2, 7]"});
  query([](auto& a) { a.q_nope.stride[2] = 2; }, {"q_nope", "contiguous"});
  query([](auto& a) { a.out.shape[0] = 2; }, {"out", "[3, 2, 16]"});
  query([](auto& a) { a.out.stride[1] = 8; }, {"out", "overlap"});
  query([](auto& a) { a.out.dtype = DType::kF32; }, {"out", "bf16", "f32"});
  query([](auto& a) { a.target.kernel = "none"; }, {"absorb", "no kernel fits"},
        ErrorCode::kUnsupported);
  testing::expect_invalid([&] { project_output({.attn = q, .w_uv = p.w_uv, .out = out12}); },
                          {"project_output", "attn", "[any, 2, 16]"});
  testing::expect_invalid([&] { project_output({.attn = attn, .w_uv = p.w_uv, .out = out16}); },
                          {"project_output", "out", "[3, 2, 12]"});
  const auto split = [&](auto change, std::initializer_list<const char*> words) {
    SplitKvBArgs a{.weight = p.weight, .w_uk = p.w_uk, .w_uv = p.w_uv};
    change(a);
    testing::expect_invalid([&] { split_kv_b(a); }, words);
  };
  split([](auto& a) { a.weight = {}; }, {"split_kv_b", "weight"});
  split([](auto& a) { a.w_uk.shape[2] = 21; }, {"w_uk"});
  split([](auto& a) { a.w_uv.shape[2] = 11; }, {"w_uv", "[16, 2, 12]"});
  Guarded<bf16> k(3 * 2 * 12), v(3 * 2 * 12);
  const auto expand = [&](auto change, std::initializer_list<const char*> words) {
    DecompressArgs a{.latent = tensor(p.latent.data(), {3, 20}),
                     .w_uk = p.w_uk,
                     .w_uv = p.w_uv,
                     .k = tensor(k.data(), {3, 2, 12}),
                     .v = tensor(v.data(), {3, 2, 12})};
    change(a);
    testing::expect_invalid([&] { decompress(a); }, words);
  };
  expand([](auto& a) { a.latent.shape[1] = 15; }, {"decompress", "latent", "at least 16"});
  expand([](auto& a) { a.w_uv.shape[1] = 1; }, {"w_uv", "[16, 2, any]"});
  expand([](auto& a) { a.k.shape[2] = 8; }, {"k", "[3, 2, 12]"});
  expand([](auto& a) { a.v = {}; }, {"v", "nothing"});
  for (const auto* g : {&big, &k, &v})
    for (bf16 x : g->values()) EXPECT_EQ(x.bits, 0xcdcd);  // nothing was written
}

TEST(DequantizeErrors, NameTheArgument) {
  Guarded<e4m3> weight(130 * 20);
  Guarded<float> scale(2);
  Guarded<bf16> out(130 * 20);
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    DequantizeWeightArgs a{.weight = tensor(weight.data(), {130, 20}),
                           .scale = tensor(scale.data(), {2, 1}),
                           .out = tensor(out.data(), {130, 20})};
    change(a);
    testing::expect_error([&] { dequantize_weight(a); }, code, words);
  };
  expect([](auto& a) { a.weight.dtype = DType::kU8; }, {"dequantize_weight", "weight", "e4m3"});
  expect([](auto& a) { a.scale.shape[0] = 1; }, {"scale", "[2, 1]", "[1, 1]"});
  expect([&](auto& a) { a.scale = tensor(scale.data(), {2}); }, {"scale", "[1]", "[2]"});
  expect([](auto& a) { a.scale = {}; }, {"scale", "nothing"});
  expect([](auto& a) { a.out.shape[1] = 19; }, {"out", "[130, 20]"});
  expect([](auto& a) { a.target.kernel = "none"; }, {"no kernel fits"}, ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace winnow
