// Integer division that rounds up, for sizes and counts, and the constants of softmax: on the host,
// in kernels and in constants.
#pragma once

#include <type_traits>

#include "core/hd.h"
#include "core/namespaces.h"

namespace winnow::internal::core {

// The smallest whole number that is not below value / divisor, in the type that both have in
// common. For value >= 0, divisor > 0 and value + divisor - 1 within the type.
template <class A, class B>
WINNOW_HD constexpr auto ceil_div(A value, B divisor) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>((static_cast<T>(value) + static_cast<T>(divisor) - 1) /
                        static_cast<T>(divisor));
}

// The smallest multiple of `step` that is not below `value`, with the limits of ceil_div().
template <class A, class B>
WINNOW_HD constexpr auto round_up(A value, B step) {
  return static_cast<std::common_type_t<A, B>>(ceil_div(value, step) * step);
}

// Softmax is computed with powers of two: logits times log2 e, results times ln 2.
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

static_assert(ceil_div(0, 64) == 0 && ceil_div(1, 64) == 1 && ceil_div(64, 64) == 1);
static_assert(round_up(65, 64) == 128 && round_up(128u, 64u) == 128u);

}  // namespace winnow::internal::core
