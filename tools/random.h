// Random inputs for the program and the benchmarks: fast, seeded, the same on every machine.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/tensor.h"

namespace winnow::tools {

// Latent values of synthetic problems. The absolute bar of attention is made for values of this
// size.
inline constexpr float kLatentSigma = 0.1f;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}

  // splitmix64.
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // lo <= result <= hi. The bias of the multiplication is below 2^-32 for the ranges used.
  int64_t draw(int64_t lo, int64_t hi) {
    const auto range = static_cast<uint64_t>(hi - lo) + 1;
    return lo + static_cast<int64_t>((next() >> 32) * range >> 32);
  }
  // About normal with variance 1: the sum of four 16-bit uniforms. No tail beyond 3.5.
  float normal() {
    const uint64_t r = next();
    const int64_t sum =
        static_cast<int64_t>((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48)) -
        2 * 65535;
    return static_cast<float>(sum) * (1.7320508f / 65536.0f);
  }

  void normals(std::span<float> out, float sigma);
  void normals(std::span<bf16> out, float sigma);
  void normals(std::span<e4m3> out, float sigma);
  // Distinct numbers of [0, range) in ascending order; -1 after them when there are fewer.
  void choose(std::span<int32_t> out, int64_t range);

 private:
  uint64_t state_;
};

}  // namespace winnow::tools
