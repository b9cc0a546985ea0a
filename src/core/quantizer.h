// How a tile of values becomes e4m3 codes and a scale.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/check.h"
#include "core/formats.h"
#include "winnow/write.h"

namespace winnow::internal::core {

// ScaleMode and format, resolved.
struct Quantizer {
  float floor = 0;          // of amax / 448, or of amax itself
  bool floor_amax = false;  // ... if this is set
  bool power_of_two = false;
};

WINNOW_HD inline float scale_of(const Quantizer& q, float amax) {
  const float floored = q.floor_amax && amax < q.floor ? q.floor : amax;
  float s = floored / kE4m3Max;
  if (!q.floor_amax && s < q.floor) s = q.floor;
  return q.power_of_two ? from_ue8m0(static_cast<uint8_t>(ceil_log2(s) + 127)) : s;
}

// x / by for bf16 x above 2^-80, with the inverse of `by` at hand: where `by` is 448, one
// correction by what the first quotient leaves over gives the quotient itself (quantizer_test tries
// all mantissas).
WINNOW_HD inline float corrected_quotient(float x, float by, float inverse) {
  const float quotient = x * inverse;
  return std::fma(std::fma(-quotient, by, x), inverse, quotient);
}

// 1 / by in two parts, for x / by of many bf16 x: a product with each and one rounding of their sum
// are the quotient itself where `by` is the scale of a tile (quantizer_test tries all mantissas).
// For scales from 2^-80 to 2^100.
struct TwoPartInverse {
  explicit TwoPartInverse(float by) : high(1 / by), low(std::fma(-high, by, 1.0f) * high) {}
  float quotient(float x) const { return std::fma(x, high, x * low); }
  float high, low;
};

// A product instead: x times a float a little below 1 / scale, cut to 16 bits and then rounded to
// four of mantissa with ties up, has the mantissa of x / scale rounded to even, where scale is that
// of a tile with this largest magnitude (bits of bf16). Quotients that tie lie above an even code,
// but for eight mantissas of that magnitude (quantizer_test tries all).
inline float factor_below(float scale) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(1 / scale) - 2);
}
inline bool ties_round_down(uint16_t most) {
  // A bit for each of the eight: a branch for each would be guessed wrong too often.
  constexpr uint64_t kLow = 1ull << 12 | 1ull << 26 | 1ull << 40 | 1ull << 54;
  constexpr uint64_t kHigh = 1ull << 4 | 1ull << 32 | 1ull << 56 | 1ull << 60;  // from 64 on
  const uint64_t bits = most & 64 ? kHigh : kLow;
  return (bits >> (most & 63) & 1) == 0;
}

// The quantiser of a format in a mode; throws if the format does not have the mode.
Quantizer quantizer_of(const Check& check, CacheFormat format, ScaleMode mode);

// A scale as a record stores it: fp32, or ue8m0 (s is a power of two then).
WINNOW_HD inline void put_scale(float* to, float s) { *to = s; }
WINNOW_HD inline void put_scale(uint8_t* to, float s) { *to = to_ue8m0(s); }
WINNOW_HD inline float get_scale(const float* from) { return *from; }
WINNOW_HD inline float get_scale(const uint8_t* from) { return from_ue8m0(*from); }

// Finds the scale of a tile and encodes it.
inline float write_tile(const Quantizer& quantizer, const bf16* x, int count, e4m3* codes) {
  float amax = 0;
  for (int i = 0; i < count; ++i) amax = max_magnitude(amax, to_float(x[i]));
  const float s = scale_of(quantizer, amax);
  for (int i = 0; i < count; ++i) codes[i] = to_e4m3(to_float(x[i]) / s);
  return s;
}

// The pages that records are written to.
struct Pages {
  std::byte* data = nullptr;
  int64_t stride = 0;  // bytes
  int64_t pages = 0;
  int32_t page = 1;
  CacheFormat format = CacheFormat::kV32Fp8;
};

// The pages of a checked cache.
inline Pages pages_of(const Cache& cache) {
  return {static_cast<std::byte*>(cache.data), cache.page_stride, cache.pages, cache.page,
          cache.format};
}

// Host slots: throws if one lies behind the cache; negative ones skip their token.
void check_slots(const Check& check, const Tensor& slots, const Pages& pages);

}  // namespace winnow::internal::core
