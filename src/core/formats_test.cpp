// Number formats: every e4m3 code, every rounding boundary, and the edges of bf16 and ue8m0.
#include "core/formats.h"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <random>

namespace winnow {
namespace {

// The value of an e4m3 code by definition: sign, four bits of exponent (bias 7), three of mantissa.
double by_definition(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double v =
      exponent ? (1 + mantissa / 8.0) * std::exp2(exponent - 7) : mantissa / 8.0 * std::exp2(-6);
  return code & 0x80 ? -v : v;
}

bool is_nan_code(int code) { return (code & 0x7f) == 0x7f; }

TEST(E4m3, AllCodesDecodeAndComeBack) {
  for (int code = 0; code < 256; ++code) {
    const float v = to_float(e4m3{static_cast<uint8_t>(code)});
    if (is_nan_code(code)) {
      EXPECT_TRUE(std::isnan(v)) << code;
      EXPECT_EQ(std::signbit(v), code >= 128) << code;
    } else {
      EXPECT_EQ(v, by_definition(code)) << code;
      EXPECT_EQ(std::signbit(v), code >= 128) << code;
    }
    EXPECT_EQ(to_e4m3(v).bits, code);
  }
  EXPECT_EQ(to_float(e4m3{0x7e}), 448.0f);
  EXPECT_EQ(to_float(e4m3{0x01}), 0x1p-9f);
  EXPECT_EQ(to_float(e4m3{0x08}), 0x1p-6f);
}

TEST(E4m3, EveryRoundingBoundary) {
  for (int code = 0; code < 0x7e; ++code)
    for (int sign : {0, 0x80}) {
      const auto low = static_cast<uint8_t>(sign | code), high = static_cast<uint8_t>(low + 1);
      const float middle = static_cast<float>((by_definition(low) + by_definition(high)) / 2);
      const float in = std::nextafter(middle, 0.0f);
      const float out = std::nextafter(middle, sign ? -INFINITY : INFINITY);
      EXPECT_EQ(to_e4m3(middle).bits, code % 2 == 0 ? low : high) << "the tie above " << code;
      EXPECT_EQ(to_e4m3(in).bits, low) << "just below the tie above " << code;
      EXPECT_EQ(to_e4m3(out).bits, high) << "just above the tie above " << code;
    }
}

TEST(E4m3, Saturates) {
  // 464 would be the tie between 448 and the 480 that the format lacks.
  for (float x : {448.0f, std::nextafter(448.0f, INFINITY), 464.0f, 480.0f, 1e10f, FLT_MAX,
                  static_cast<float>(INFINITY)}) {
    EXPECT_EQ(to_e4m3(x).bits, 0x7e) << x;
    EXPECT_EQ(to_e4m3(-x).bits, 0xfe) << x;
  }
}

TEST(E4m3, NanKeepsItsSign) {
  for (uint32_t payload : {0x7fc00000u, 0x7f800001u, 0x7fffffffu}) {
    EXPECT_EQ(to_e4m3(std::bit_cast<float>(payload)).bits, 0x7f);
    EXPECT_EQ(to_e4m3(std::bit_cast<float>(payload | 0x80000000u)).bits, 0xff);
  }
}

TEST(E4m3, SmallValues) {
  EXPECT_EQ(to_e4m3(0.0f).bits, 0x00);
  EXPECT_EQ(to_e4m3(-0.0f).bits, 0x80);
  EXPECT_EQ(to_e4m3(FLT_TRUE_MIN).bits, 0x00);
  EXPECT_EQ(to_e4m3(-FLT_MIN).bits, 0x80);
  EXPECT_EQ(to_e4m3(0x1p-10f).bits, 0x00);  // half of the smallest: a tie, to zero
  EXPECT_EQ(to_e4m3(0x1.8p-9f).bits, 0x02);
  EXPECT_EQ(to_e4m3(0x1.fffffep-7f).bits, 0x08);  // up into the normal numbers
}

// For any float in range, the result is at most half a step away, and monotone.
TEST(E4m3, NearestAndMonotone) {
  std::mt19937 rng(1);
  for (int i = 0; i < 200000; ++i) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(rng() % 0x43e00000u));  // [0, 448)
    const uint8_t code = to_e4m3(x).bits;
    ASSERT_LT(code, 0x7f);
    const double error = std::fabs(by_definition(code) - x);
    if (code > 0) {
      ASSERT_LE(error, std::fabs(by_definition(code - 1) - x)) << x;
    }
    if (code < 0x7e) {
      ASSERT_LE(error, std::fabs(by_definition(code + 1) - x)) << x;
    }
  }
}

TEST(Bf16, AllBitsDecodeAndComeBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const bf16 b{static_cast<uint16_t>(bits)};
    const float v = to_float(b);
    ASSERT_EQ(std::bit_cast<uint32_t>(v), bits << 16);
    // A signalling NaN comes back quiet; all else as it was.
    ASSERT_EQ(to_bf16(v).bits, std::isnan(v) ? bits | 0x40 : bits) << bits;
  }
}

TEST(Bf16, RoundsToNearestEven) {
  for (uint32_t bits : {0x0000u, 0x0001u, 0x3f80u, 0x3f81u, 0x7f7eu, 0x4000u, 0x007fu, 0x3fffu})
    for (uint32_t sign : {0u, 0x8000u}) {
      const uint32_t low = bits | sign, tie = low << 16 | 0x8000;
      EXPECT_EQ(to_bf16(std::bit_cast<float>(tie)).bits, low + (low & 1)) << bits;
      EXPECT_EQ(to_bf16(std::bit_cast<float>(tie - 1)).bits, low) << bits;
      EXPECT_EQ(to_bf16(std::bit_cast<float>(tie + 1)).bits, low + 1) << bits;
    }
}

TEST(Bf16, NanInfinityOverflow) {
  EXPECT_EQ(to_bf16(INFINITY).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-INFINITY).bits, 0xff80);
  EXPECT_EQ(to_bf16(FLT_MAX).bits, 0x7f80);  // rounds up past the largest finite
  EXPECT_EQ(to_bf16(-FLT_MAX).bits, 0xff80);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x7f7f7fffu)).bits, 0x7f7f);
  // A NaN whose payload lies in the lower half only must not become an infinity.
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x7f800001u)).bits, 0x7fc0);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0xff80ffffu)).bits, 0xffc0);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x7fffffffu)).bits, 0x7fff);  // no carry into the sign
}

TEST(Ue8m0, AllBytes) {
  for (int byte = 0; byte < 255; ++byte) {
    const float v = from_ue8m0(static_cast<uint8_t>(byte));
    EXPECT_EQ(v, std::ldexp(1.0, byte - 127)) << byte;
    if (byte > 0) {
      EXPECT_EQ(to_ue8m0(v), byte);
    }
  }
  EXPECT_TRUE(std::isnan(from_ue8m0(255)));
}

TEST(CeilLog2, PowersOfTwoAndNeighbours) {
  for (int e = -149; e <= 127; ++e) {
    const float power = std::ldexp(1.0f, e);
    EXPECT_EQ(ceil_log2(power), e);
    if (e > -149) {
      EXPECT_EQ(ceil_log2(std::nextafter(power, INFINITY)), e + 1) << e;
    }
    // Below 2^e lie only values whose ceiling is e, but for the step down to 2^-149 itself.
    if (e > -148) {
      EXPECT_EQ(ceil_log2(std::nextafter(power, 0.0f)), e) << e;
    }
  }
  EXPECT_EQ(ceil_log2(FLT_MAX), 128);
  EXPECT_EQ(ceil_log2(1e-4f), -13);
  EXPECT_EQ(ceil_log2(1e-4f / 448), -22);
}

}  // namespace
}  // namespace winnow
