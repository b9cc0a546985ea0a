// The FMA roof, for the vectors of one instruction set: `Ops` gives the vector type and its fma.
#pragma once

#include <cstdint>

namespace winnow::bench {

// kSums independent sums cover latency times throughput (4 cycles on two units) with room to spare.
template <class Ops, int kSums>
double fma_roof(int64_t rounds) noexcept {
  typename Ops::Vector sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = Ops::set(static_cast<float>(i));
  const auto factor = Ops::set(0.99f), addend = Ops::set(0.01f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = Ops::fma(sums[i], factor, addend);
  }
  for (int i = 1; i < kSums; ++i) sums[0] = Ops::fma(sums[i], factor, sums[0]);
  volatile float sink = Ops::first(sums[0]);
  (void)sink;
  return 2.0 * kSums * Ops::kLanes * static_cast<double>(rounds);
}

}  // namespace winnow::bench
