// The FMA roof with 256-bit vectors: 12 sums, the factor and the addend fit its 16 registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include "roof_fma-inl.h"
#include "roofs.h"

namespace winnow::bench {

namespace {

struct Ops256 {
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static Vector set(float x) { return _mm256_set1_ps(x); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static float first(Vector v) { return _mm256_cvtss_f32(v); }
};

}  // namespace

double fma_avx2(int64_t rounds) noexcept { return fma_roof<Ops256, 12>(rounds); }

}  // namespace winnow::bench
#endif
