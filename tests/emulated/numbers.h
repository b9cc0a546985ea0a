// fp16, bf16 and e4m3 as floats, and back, rounded to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace winnow::emulated {

// The decoders stand here and have no branches, so that loops over a tile vectorise.
inline float from_f16(uint16_t bits) {
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000;
  // A subnormal becomes the fraction of 2^-14, from which 2^-14 is taken away again: subnormal
  // floats, which many CPUs are slow with, do not occur.
  const float fraction = std::bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  const uint32_t special = exponent == 0x0f800000 ? 112u << 23 : 0;
  const uint32_t normal = magnitude + (112u << 23) + special;
  const uint32_t result = exponent == 0 ? std::bit_cast<uint32_t>(fraction) : normal;
  return std::bit_cast<float>(result | (bits & 0x8000u) << 16);
}
inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline float from_e4m3(uint8_t bits) {
  const uint32_t magnitude = (bits & 0x7fu) << 20;
  const float fraction = std::bit_cast<float>(magnitude + (121u << 23)) - 0x1p-6f;
  const uint32_t normal = magnitude == 0x7fu << 20 ? 0x7fffffffu : magnitude + (120u << 23);
  const uint32_t result = magnitude < 8u << 20 ? std::bit_cast<uint32_t>(fraction) : normal;
  return std::bit_cast<float>(result | (bits & 0x80u) << 24);
}
inline float from_e5m2(uint8_t bits) { return from_f16(static_cast<uint16_t>(bits << 8)); }

uint16_t to_f16(float x);   // infinities for what is too large; NaN is 0x7fff, as the device has it
uint16_t to_bf16(float x);  // NaN is 0x7fff
uint8_t to_e4m3(float x);   // saturates at 448; NaN is 0x7f

}  // namespace winnow::emulated
