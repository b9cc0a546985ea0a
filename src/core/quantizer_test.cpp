// The quotients that device code makes of products: those of a division, for every mantissa.
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

// Every value of a tile, down to those that become 0.
void expect_codes(float scale, float amax) {
  const float inverse = 1 / scale;
  int top = 0;
  std::frexp(amax, &top);
  for (int exponent = top; exponent > top - 24; --exponent)
    for (int m = 0; m < 128; ++m) {
      const float x = bf16_value(m, exponent);
      if (x > amax) continue;
      for (const float v : {x, -x})
        ASSERT_EQ(to_e4m3(corrected_quotient(v, scale, inverse)).bits, to_e4m3(v / scale).bits)
            << v << " / " << scale;
    }
}

TEST(CorrectedQuotient, HasTheCodesOfADivision) {
  for (const int exponent : {-70, -13, -1, 0, 1, 8, 90})
    for (int m = 0; m < 128; ++m) {
      const float amax = bf16_value(m, exponent);
      ASSERT_NO_FATAL_FAILURE(expect_codes(scale_of({0, false, false}, amax), amax));
    }
  expect_codes(scale_of({1e-4f, true, false}, 0), 1e-4f);  // floors
  expect_codes(scale_of({1e-4f, false, false}, 0), 0.0448f);
}

}  // namespace
}  // namespace winnow::internal::core
