// Outputs of ranks on CUDA beside one rank's.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/formats.h"
#include "winnow/tensor.h"

namespace winnow::testing {

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// The heads of all ranks, of which each has as many.
struct RankOutputs {
  int64_t tokens, heads, width;
  int32_t rank, ranks;
};

// The share that several ranks keep whose sums travel in fp32 and whose lists are not split: what
// is left is the order of fp32 sums. Relative differences of 2^-22, six times as much where 32
// values cancel, move one output of 2,700 over a boundary between bf16 numbers, which are 2^-8
// apart.
constexpr double kOneRanksBits = 0.999;

// The share of a rank's outputs that have the bits of one rank's; all must be near. Either rounds
// weights and the sums of splits by 2^-9 of the largest value (0.2), then the output to bf16.
template <class Result>
double expect_near(const RankOutputs& of, const Result& got, const Result& whole) {
  const int64_t own = of.heads / of.ranks;
  int64_t equal = 0;
  for (int64_t t = 0; t < of.tokens; ++t)
    for (int64_t h = 0; h < own; ++h) {
      const int64_t from = t * of.heads + of.rank * own + h, to = t * own + h;
      EXPECT_NEAR(got.lse[to], whole.lse[from], 1e-4f * (1 + std::abs(whole.lse[from])));
      for (int64_t d = 0; d < of.width; ++d) {
        const bf16 x = got.out[to * of.width + d], y = whole.out[from * of.width + d];
        equal += x.bits == y.bits;
        const float most = 4 * 0x1p-9f * 0.2f + 0x1p-7f * std::abs(to_float(y));
        EXPECT_LE(std::abs(to_float(x) - to_float(y)), most) << "token " << t << ", head " << h;
        if (::testing::Test::HasFailure()) return 0;
      }
    }
  return static_cast<double>(equal) / static_cast<double>(got.out.size());
}

}  // namespace winnow::testing
