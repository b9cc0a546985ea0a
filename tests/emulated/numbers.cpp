#include "emulated/numbers.h"

namespace winnow::emulated {
namespace {

// A finite magnitude, as bits of a float, in a format of fewer fraction bits whose exponent 1 means
// 2^(1 - bias). Rounded to nearest even; a carry may lead to an exponent that the format lacks.
template <int kFraction, int kBias>
uint32_t rounded(uint32_t magnitude) {
  constexpr uint32_t kLeastNormal = (128 - kBias) << 23;
  constexpr int kDropped = 23 - kFraction;
  if (magnitude < kLeastNormal) {
    // At this power of two the distance of floats is that of the format's subnormals, so that the
    // sum is rounded to one of them.
    constexpr uint32_t kAnchor = kLeastNormal + (kDropped << 23);
    const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kAnchor);
    return std::bit_cast<uint32_t>(sum) - kAnchor;
  }
  const uint32_t odd = magnitude >> kDropped & 1;
  const uint32_t nearest = magnitude + (1u << (kDropped - 1)) - 1 + odd;
  return (nearest - ((127 - kBias) << 23)) >> kDropped;
}

constexpr uint32_t kInfinity = 0xffu << 23;

}  // namespace

uint16_t to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > kInfinity) return 0x7fff;
  // Half a step above the largest finite value rounds to infinity, which is the code above it.
  const bool overflows = magnitude >= std::bit_cast<uint32_t>(65520.f);
  const uint32_t code = overflows ? 0x7c00 : rounded<10, 15>(magnitude);
  return static_cast<uint16_t>(code | (bits >> 31) << 15);
}

uint16_t to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > kInfinity) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint8_t to_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > kInfinity) return 0x7f;
  const bool saturates = magnitude >= std::bit_cast<uint32_t>(448.f);
  const uint32_t code = saturates ? 0x7e : rounded<3, 7>(magnitude);
  return static_cast<uint8_t>(code | (bits >> 31) << 7);
}

}  // namespace winnow::emulated
