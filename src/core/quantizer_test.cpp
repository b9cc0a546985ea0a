// The quotients that kernels make of products: those of a division, for every mantissa.
#include "core/quantizer.h"

#include <gtest/gtest.h>

namespace winnow::internal::core {
namespace {

// Mantissa of 8 bits and exponent.
float bf16_value(int mantissa, int exponent) {
  return std::ldexp(static_cast<float>(128 + mantissa), exponent - 7);
}

TEST(CorrectedQuotient, By448IsTheDivision) {
  for (int exponent = -80; exponent <= 127; ++exponent)
    for (int m = 0; m < 128; ++m) {
      const float x = bf16_value(m, exponent);
      ASSERT_EQ(corrected_quotient(x, kE4m3Max, 1 / kE4m3Max), x / kE4m3Max) << x;
    }
  constexpr float kLargest = 0x1.fffffep127f;
  ASSERT_EQ(corrected_quotient(kLargest, kE4m3Max, 1 / kE4m3Max), kLargest / kE4m3Max);
  ASSERT_EQ(corrected_quotient(1e-4f, kE4m3Max, 1 / kE4m3Max), 1e-4f / kE4m3Max);
}

// check(value) of every value of a tile, down to 2^-24 of the largest.
template <class F>
void for_each_value(float amax, F&& check) {
  int top = 0;
  std::frexp(amax, &top);
  for (int exponent = top; exponent > top - 24; --exponent)
    for (int m = 0; m < 128; ++m) {
      const float x = bf16_value(m, exponent);
      if (x > amax) continue;
      check(x);
      check(-x);
    }
}

void expect_quotients(float scale, float amax) {
  const TwoPartInverse inverse(scale);
  for_each_value(
      amax, [&](float x) { ASSERT_EQ(inverse.quotient(x), x / scale) << x << " / " << scale; });
}

TEST(TwoPartInverse, GivesQuotients) {
  for (const int exponent : {-70, -13, -1, 0, 1, 8, 90})
    for (int m = 0; m < 128; ++m) {
      const float amax = bf16_value(m, exponent);
      ASSERT_NO_FATAL_FAILURE(expect_quotients(scale_of({0, false, false}, amax), amax));
    }
  expect_quotients(scale_of({1e-4f, true, false}, 0), 1e-4f);  // floors
  expect_quotients(scale_of({1e-4f, false, false}, 0), 0.0448f);
  // A tile with an infinity, brought nearer to 1.
  constexpr float kLargest = 0x1.fffffep127f, kNearer = 0x1p-64f;
  expect_quotients(scale_of({0, false, false}, kLargest) * kNearer, kLargest * kNearer);
}

// Every value that has a normal code. Exponents do not matter.
TEST(FactorBelow, RoundsAsTheQuotientDoes) {
  int left_out = 0;
  for (int m = 0; m < 128; ++m) {
    const float amax = bf16_value(m, 0);
    const float scale = scale_of({0, false, false}, amax);
    if (!ties_round_down(static_cast<uint16_t>(std::bit_cast<uint32_t>(amax) >> 16))) {
      ++left_out;
      continue;
    }
    for (int exponent = 0; exponent > -14; --exponent)
      for (int n = 0; n < 128; ++n) {
        const float x = bf16_value(n, exponent);
        if (x > amax || x / scale < 0x1p-6f) continue;
        const uint32_t product = std::bit_cast<uint32_t>(x * factor_below(scale)) >> 16;
        const uint32_t code = (product + 8 - (120u << 7)) >> 4;
        ASSERT_EQ(code, to_e4m3(x / scale).bits) << x << " / " << scale;
      }
  }
  EXPECT_EQ(left_out, 8);
}

}  // namespace
}  // namespace winnow::internal::core
