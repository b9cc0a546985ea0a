// e4m3 to bf16, exactly, by table look-up (AVX-512 VBMI). Include only from files compiled for it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace winnow::internal::cpu {
namespace {

// bf16 of every e4m3 magnitude, as low and high bytes; 0x7f is NaN.
struct Bf16Bytes {
  alignas(64) uint8_t low[128], high[128];
};

constexpr Bf16Bytes bf16_bytes() {
  Bf16Bytes t{};
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    int bits = (exponent + 120) << 7 | mantissa << 4;
    if (exponent == 0) {
      bits = 0;
      for (int shift = 0; shift < 3 && bits == 0;
           ++shift)  // m * 2^-9 = (1 + rest) * 2^(-7 - shift)
        if (mantissa << shift & 4) bits = (120 - shift) << 7 | (mantissa << (shift + 1) & 7) << 4;
    }
    if (code == 127) bits = 0x7fc0;
    t.low[code] = static_cast<uint8_t>(bits);
    t.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return t;
}
inline constexpr Bf16Bytes kBf16Bytes = bf16_bytes();

// Four registers of tables; 64 codes take two look-ups, a sign and two interleavings.
class Bf16Codes {
 public:
  // 64 values as bf16. Byte i of 16-byte lane n goes to a[8 n + i] if i < 8, else to b[8 n + i -
  // 8]: an order that costs nothing where both sides of a dot product share it.
  struct Values {
    __m512i a, b;
  };

  Bf16Codes()
      : low0_(_mm512_load_si512(kBf16Bytes.low)),
        low1_(_mm512_load_si512(kBf16Bytes.low + 64)),
        high0_(_mm512_load_si512(kBf16Bytes.high)),
        high1_(_mm512_load_si512(kBf16Bytes.high + 64)) {}

  [[gnu::always_inline]] Values load(const void* codes) const {
    const __m512i x = _mm512_loadu_si512(codes);
    const __m512i low = _mm512_permutex2var_epi8(low0_, x, low1_);
    const __m512i magnitude = _mm512_permutex2var_epi8(high0_, x, high1_);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i high = _mm512_ternarylogic_epi32(x, sign, magnitude, 0xea);  // (x & sign) | m
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }

 private:
  __m512i low0_, low1_, high0_, high1_;
};

}  // namespace
}  // namespace winnow::internal::cpu
