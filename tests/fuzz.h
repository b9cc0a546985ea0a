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

// Mostly values of [0, length), some that must never be dereferenced.
inline int32_t index_for(Rng& rng, int64_t length, int hostile_percent) {
  if (length > 0 && !chance(rng, hostile_percent))
    return static_cast<int32_t>(draw(rng, 0, length - 1));
  const std::vector<int32_t> bad = hostile(length);
  return bad[draw(rng, 0, static_cast<int64_t>(bad.size()) - 1)];
}

inline Guarded<int32_t> indices(Rng& rng, int64_t count, int64_t length, int hostile_percent = 10) {
  Guarded<int32_t> values(count);
  for (int32_t& v : values) v = index_for(rng, length, hostile_percent);
  return values;
}

// Power-of-two pages take the vector paths, others the general ones.
inline int32_t page_size(Rng& rng) {
  return static_cast<int32_t>(chance(rng, 70) ? int64_t{1} << draw(rng, 0, 6) : draw(rng, 1, 70));
}

// The kernels that run here, the reference first.
inline std::vector<std::string> runnable(const std::string& stage) {
  std::vector<std::string> names = cpu_kernels(stage);
  std::erase_if(names, [&](const auto& k) { return !why_not(stage, k).empty(); });
  std::reverse(names.begin(), names.end());
  return names;
}

}  // namespace winnow::testing
