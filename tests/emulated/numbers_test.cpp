// Conversions: all codes, and floats against the nearest of all codes.
#include "emulated/numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "emulated/matrix_model.h"

namespace winnow::emulated {
namespace {

using namespace model;

float decoded(Element element, uint32_t code) {
  const auto small = static_cast<uint8_t>(code);
  const auto wide = static_cast<uint16_t>(code);
  switch (element) {
    case Element::kF16: return from_f16(wide);
    case Element::kBf16: return from_bf16(wide);
    case Element::kE4m3: return from_e4m3(small);
    default: return from_e5m2(small);
  }
}

TEST(NumbersTest, AllCodesAreDecoded) {
  for (Element element : {Element::kF16, Element::kBf16, Element::kE4m3, Element::kE5m2})
    for (uint32_t code = 0; code < 1u << 8 * bytes_of(element); ++code) {
      const double expected = value_of(element, code);
      const float found = decoded(element, code);
      if (std::isnan(expected)) ASSERT_TRUE(std::isnan(found)) << code;
      else {
        ASSERT_EQ(found, expected) << code;
        ASSERT_EQ(std::signbit(found), std::signbit(expected)) << code;
      }
    }
}

// A magnitude as the code of the nearest value, the even one of two. `finite`: how many codes are.
// The next code stands for what would follow if exponents did not end.
uint32_t nearest_code(Element element, double magnitude, uint32_t finite) {
  uint32_t first = 0, last = finite;
  const auto value = [&](uint32_t code) {
    return code < finite ? value_of(element, code)
                         : 2 * value_of(element, finite - 1) - value_of(element, finite - 2);
  };
  while (last - first > 1) {
    const uint32_t middle = (first + last) / 2;
    (value(middle) <= magnitude ? first : last) = middle;
  }
  const double down = magnitude - value(first), up = value(last) - magnitude;
  return down < up || (down == up && first % 2 == 0) ? first : last;
}

uint32_t encoded(Element element, float x) {
  return element == Element::kF16 ? to_f16(x) : element == Element::kBf16 ? to_bf16(x) : to_e4m3(x);
}

void check_encoded(Element element, float x) {
  const uint32_t sign = 1u << (8 * bytes_of(element) - 1);
  if (std::isnan(x)) {
    ASSERT_EQ(encoded(element, x), sign - 1);
    return;
  }
  const Format format = format_of(element);
  const bool saturates = element == Element::kE4m3;
  const uint32_t finite =
      saturates ? 0x7f : ((1u << format.exponent_bits) - 1) << format.fraction_bits;
  uint32_t expected = nearest_code(element, std::fabs(double{x}), finite);
  if (saturates) expected = std::min(expected, finite - 1);
  if (std::signbit(x)) expected |= sign;
  ASSERT_EQ(encoded(element, x), expected) << std::hexfloat << x;
}

TEST(NumbersTest, FloatsAreRoundedToNearestEven) {
  Random random(9);
  for (Element element : {Element::kF16, Element::kBf16, Element::kE4m3}) {
    // Every value, every tie between two of them, and the floats beside each.
    const uint32_t codes = 1u << 8 * bytes_of(element);
    for (uint32_t code = 0; code < codes; ++code) {
      const double value = value_of(element, code);
      if (!std::isfinite(value)) continue;
      double next = value_of(element, code + 1);
      if (!std::isfinite(next)) next = 2 * value - value_of(element, code - 1);
      for (double x : {value, (value + next) / 2}) {
        const float middle = static_cast<float>(x);
        check_encoded(element, middle);
        check_encoded(element, std::nextafter(middle, INFINITY));
        check_encoded(element, std::nextafter(middle, -INFINITY));
      }
      if (HasFatalFailure()) return;
    }
    // Any floats, subnormal ones and NaN among them; and exponents that the format has.
    for (int i = 0; i < 200000; ++i) {
      const auto bits = static_cast<uint32_t>(random());
      check_encoded(element, std::bit_cast<float>(bits));
      check_encoded(element, std::bit_cast<float>((bits & 0x807fffff) | (100 + bits % 50) << 23));
      if (HasFatalFailure()) return;
    }
    for (uint32_t bits : {0u, 0x80000000u, 1u, 0x807fffffu, 0x7f7fffffu, 0x7f800000u, 0xff800000u,
                          0x7f800001u, 0xffffffffu})
      check_encoded(element, std::bit_cast<float>(bits));
  }
}

}  // namespace
}  // namespace winnow::emulated
