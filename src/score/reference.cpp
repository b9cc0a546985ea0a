// score, as specified; sums in fp64, heads and dimensions in ascending order.
#include <array>
#include <limits>

#include "core/formats.h"
#include "score/kernel.h"

namespace winnow::internal::score {

namespace {

// The value of every e4m3 code.
const std::array<double, 256>& values() {
  static const std::array<double, 256> table = [] {
    std::array<double, 256> v{};
    for (int i = 0; i < 256; ++i) v[i] = to_float(e4m3{static_cast<uint8_t>(i)});
    return v;
  }();
  return table;
}

float logit(const Params& p, int64_t token, int64_t j) {
  const Run key = keys_of(p, request_of(p, token), j, 1);
  if (!key.rows) return -std::numeric_limits<float>::infinity();
  const auto& value = values();
  const auto at = [&](const uint8_t* row, int i) {
    return p.is_bf16 ? to_float(reinterpret_cast<const bf16*>(row)[i]) : value[row[i]];
  };
  double sum = 0;
  for (int32_t h = 0; h < p.heads; ++h) {
    const uint8_t* q = p.q + token * p.q_token_stride + h * p.q_head_stride;
    double dot = 0;
    for (int i = 0; i < kDim; ++i) dot += at(q, i) * at(key.rows, i);
    // Not a number counts as not positive, as fmax(0, dot) would have it.
    sum += p.weights[token * p.weight_stride + h] * (dot > 0 ? dot : 0);
  }
  return static_cast<float>(key.scales ? *key.scales * sum : sum);
}

}  // namespace

void reference(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const auto [first, last] = p.ranges.of(t);
    float* row = p.logits + t * p.logit_stride - (p.from_start ? first : 0);
    if (p.clean)
      for (int64_t j = 0; j < p.ranges.limit; ++j)
        if (j < first || j >= last) row[j] = -std::numeric_limits<float>::infinity();
    for (int64_t j = first; j < last; ++j) row[j] = logit(p, t, j);
  }
}

}  // namespace winnow::internal::score
