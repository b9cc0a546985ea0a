// join and quantize, as specified.
#include <algorithm>

#include "write/kernel.h"

namespace winnow::internal::write::reference {

void join(const JoinParams& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < p.out.width; ++i) {
        const View3& from = i < p.latent.width ? p.latent : p.rope;
        const int64_t at = i < p.latent.width ? i : i - p.latent.width;
        p.out.data[t * p.out.token_stride + h * p.out.head_stride + i * p.out.stride] =
            from.data[t * from.token_stride + h * from.head_stride + at * from.stride];
      }
}

void quantize(const QuantizeParams& p) noexcept {
  const auto run = [&](const auto* x) {
    float amax = 0;
    for (int64_t i = 0; i < p.count; ++i) amax = max_magnitude(amax, to_float(x[i]));
    const float s = kE4m3Max / std::max(amax, 1e-10f);
    for (int64_t i = 0; i < p.count; ++i) p.out[i] = to_e4m3(to_float(x[i]) * s);
    *p.scale = 1 / s;
  };
  if (p.is_bf16) run(static_cast<const bf16*>(p.x));
  else run(static_cast<const float*>(p.x));
}

}  // namespace winnow::internal::write::reference
