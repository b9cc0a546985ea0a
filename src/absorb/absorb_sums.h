// What the projections are compared with: sums in double, with the bound of an fp32 sum.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "core/formats.h"

namespace winnow::internal::absorb {

inline float at(const Tensor& t, int64_t i, int64_t j, int64_t k) {
  return to_float(
      static_cast<const bf16*>(t.data)[i * t.stride[0] + j * t.stride[1] + k * t.stride[2]]);
}

// sum_k a(k) b(k) with the bound of an fp32 sum of `depth` terms: each of the depth additions and
// products rounds by at most 2^-24 of what has been added up, |a||b| in all; the result rounds to
// bf16, by 2^-9 of itself (2^-8 leaves room for the sum's own error to tip the rounding).
struct Sum {
  double value = 0, bound = 0;
  template <class A, class B>
  Sum(int64_t depth, A&& a, B&& b) {
    double magnitude = 0;
    for (int64_t k = 0; k < depth; ++k) {
      const double term = static_cast<double>(a(k)) * b(k);
      value += term;
      magnitude += std::fabs(term);
    }
    bound = 2 * depth * 0x1p-24 * magnitude + 0x1p-8 * std::fabs(value);
  }
};

// Compares an output with sum(i, j, k) and prints the worst element if one is off.
template <class F>
void expect_sums(const Tensor& out, int64_t width, const char* name, F&& sum) {
  double worst = 0;
  std::string where;
  for (int64_t i = 0; i < out.shape[0]; ++i)
    for (int64_t j = 0; j < out.shape[1]; ++j)
      for (int64_t k = 0; k < width; ++k) {
        const Sum s = sum(i, j, k);
        const double off = std::fabs(at(out, i, j, k) - s.value);
        const double share = off == 0 ? 0 : off / s.bound;
        if (!(share <= worst)) {
          worst = std::isnan(share) ? INFINITY : share;
          where = std::to_string(i) + ", " + std::to_string(j) + ", " + std::to_string(k) + ": " +
                  std::to_string(at(out, i, j, k)) + ", expected " + std::to_string(s.value) +
                  " within " + std::to_string(s.bound);
        }
      }
  EXPECT_LE(worst, 1) << name << " at " << where;
}

}  // namespace winnow::internal::absorb
