// Number formats: bf16, fp8 e4m3fn, ue8m0. Scalar and exact; the fast kernels are tested against
// these.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/hd.h"
#include "core/namespaces.h"
#include "winnow/tensor.h"

namespace winnow::internal::core {

WINNOW_HD inline float to_float(float x) { return x; }  // for code over any of the types
WINNOW_HD inline float to_float(bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// Round to nearest even; NaN stays NaN (quieted), overflow becomes infinity.
WINNOW_HD inline bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40)};
  return {static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

inline constexpr float kE4m3Max = 448.0f;

WINNOW_HD inline float to_float(e4m3 x) {
  const int sign = x.bits >> 7, exponent = (x.bits >> 3) & 15, mantissa = x.bits & 7;
  if (exponent == 15 && mantissa == 7)
    return std::bit_cast<float>(0x7fc00000u | uint32_t(sign) << 31);
  const float v = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return sign ? -v : v;
}

// Round to nearest even, saturating to +-448 (infinities too); NaN keeps its sign: 0x7f or 0xff.
WINNOW_HD inline e4m3 to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float a = std::fabs(x);
  if (std::isnan(x)) return {static_cast<uint8_t>(sign | 0x7f)};
  if (a >= kE4m3Max) return {static_cast<uint8_t>(sign | 0x7e)};
  // Below 2^-6 the spacing is 2^-9; above, 2^(exponent - 3).
  int exponent = a < 0x1p-6f ? -6 : std::ilogb(a);
  int steps = static_cast<int>(std::nearbyint(std::ldexp(a, 3 - exponent)));  // 0..16
  if (steps == 16) steps = 8, ++exponent;
  const int code = steps < 8 ? steps : ((exponent + 7) << 3) + (steps - 8);
  return {static_cast<uint8_t>(sign | code)};
}

// ue8m0: 2^(byte - 127); 255 is NaN. 2^-127 is a subnormal float and exact.
WINNOW_HD inline float from_ue8m0(uint8_t byte) {
  const uint32_t bits = byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : uint32_t(byte) << 23;
  return std::bit_cast<float>(bits);
}

// The ue8m0 byte of a power of two between 2^-126 and 2^127.
WINNOW_HD inline uint8_t to_ue8m0(float power_of_two) {
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(power_of_two) >> 23);
}

// Exponent of the smallest power of two >= x, for finite x > 0, exactly (no logarithm).
WINNOW_HD inline int ceil_log2(float x) {
  const bool subnormal = x < 0x1p-126f;
  const uint32_t u = std::bit_cast<uint32_t>(subnormal ? x * 0x1p64f : x);  // normal, exactly
  return static_cast<int>(u >> 23) - 127 + ((u & 0x7fffff) != 0) - (subnormal ? 64 : 0);
}

// The larger of a magnitude and that of x: NaN does not count, an infinity counts as the largest
// finite float, so that a scale made from it is finite.
WINNOW_HD inline float max_magnitude(float so_far, float x) {
  const float a = std::fabs(x);
  return a > so_far ? std::fmin(a, 0x1.fffffep127f) : so_far;
}

}  // namespace winnow::internal::core
