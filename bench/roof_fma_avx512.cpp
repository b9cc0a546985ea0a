// The FMA roof with 512-bit vectors.
#if defined(__x86_64__)
#include <immintrin.h>

#include "roof_fma-inl.h"
#include "roofs.h"

namespace winnow::bench {

namespace {

struct Ops512 {
  using Vector = __m512;
  static constexpr int kLanes = 16;
  static Vector set(float x) { return _mm512_set1_ps(x); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static float first(Vector v) { return _mm512_cvtss_f32(v); }
};

}  // namespace

double fma_avx512(int64_t rounds) noexcept { return fma_roof<Ops512, 16>(rounds); }

}  // namespace winnow::bench
#endif
