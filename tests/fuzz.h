// What the fuzz tests share: rounds from fixed seeds, and random sizes.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "testing.h"

namespace winnow::testing {

// WINNOW_FUZZ_ROUNDS, else 100.
inline int rounds() {
  const char* env = std::getenv("WINNOW_FUZZ_ROUNDS");
  return env ? std::max(1, std::atoi(env)) : 100;
}

// Runs body(rng) `times` a round (cheap problems, more of them); a failure names its seed.
template <class F>
void fuzz(int times, F&& body) {
  for (int round = 0; round < rounds() * times; ++round) {
    SCOPED_TRACE(::testing::Message() << "seed " << round);
    Rng rng(round);
    body(rng);
    if (::testing::Test::HasFailure()) return;
  }
}

inline bool chance(Rng& rng, int percent) { return draw(rng, 0, 99) < percent; }

// Power-of-two pages take the vector paths, others the general ones.
inline int32_t page_size(Rng& rng) {
  return static_cast<int32_t>(chance(rng, 70) ? int64_t{1} << draw(rng, 0, 6) : draw(rng, 1, 70));
}

}  // namespace winnow::testing
