// The VDPBF16PS roof: 16 lanes of two products each, 16 sums in flight (latency 6 on two units).
#if defined(__x86_64__)
#include <immintrin.h>

#include "roofs.h"

namespace winnow::bench {

double bf16_dot_avx512bf16(int64_t rounds) noexcept {
  constexpr int kSums = 16, kLanes = 16;
  __m512 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_setzero_ps();
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(-0.25f));
  __m512bh b = a;
  for (int64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+v"(b));  // or the compiler sees that nothing changes between rounds
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
  }
  for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  float out[kLanes];
  _mm512_storeu_ps(out, sums[0]);
  volatile float sink = out[0];
  (void)sink;
  return 4.0 * kSums * kLanes * static_cast<double>(rounds);
}

}  // namespace winnow::bench
#endif
