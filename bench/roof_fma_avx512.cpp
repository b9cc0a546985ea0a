// The FMA roof with 512-bit vectors: two units of latency 4 need 8 sums in flight; 16 leave room.
#if defined(__x86_64__)
#include <immintrin.h>

#include "roofs.h"

namespace winnow::bench {

double fma_avx512(int64_t rounds) noexcept {
  constexpr int kSums = 16, kLanes = 16;
  __m512 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 factor = _mm512_set1_ps(0.99f), addend = _mm512_set1_ps(0.01f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_fmadd_ps(sums[i], factor, addend);
  }
  float out[kLanes];
  for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  _mm512_storeu_ps(out, sums[0]);
  volatile float sink = out[0];
  (void)sink;
  return 2.0 * kSums * kLanes * static_cast<double>(rounds);
}

}  // namespace winnow::bench
#endif
