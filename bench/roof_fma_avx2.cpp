// The FMA roof with 256-bit vectors: 16 registers: 12 sums, the factor and the addend.
#if defined(__x86_64__)
#include <immintrin.h>

#include "roofs.h"

namespace winnow::bench {

double fma_avx2(int64_t rounds) noexcept {
  constexpr int kSums = 12, kLanes = 8;
  __m256 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 factor = _mm256_set1_ps(0.99f), addend = _mm256_set1_ps(0.01f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_fmadd_ps(sums[i], factor, addend);
  }
  float out[kLanes];
  for (int i = 1; i < kSums; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  _mm256_storeu_ps(out, sums[0]);
  volatile float sink = out[0];
  (void)sink;
  return 2.0 * kSums * kLanes * static_cast<double>(rounds);
}

}  // namespace winnow::bench
#endif
