// rope_table: checks the call, computes the frequencies, chooses the kernel.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/check.h"
#include "rotate/kernel.h"
#include "winnow/rotate.h"

namespace winnow {

namespace internal::rotate {

// A table is made once, at load: on the CPU the specification itself is fast enough to be what
// runs.
std::span<const TableKernel> table_kernels() {
  static constexpr TableKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90::rope_table},
#endif
      {{"reference", DeviceKind::kCpu, false, detail::any_machine}, nullptr, reference::rope_table},
  };
  return table;
}

namespace {

// Angle of pair i at position 1, with YaRN where a factor is given.
double frequency(const RopeTableArgs& a, int pair) {
  const double plain = std::pow(a.theta, -pair / double{core::kPairs});
  if (a.factor == 1) return plain;
  const auto turns_at = [&](double turns) {
    return core::kPairs *
           std::log(static_cast<double>(a.original) / (turns * 2 * std::numbers::pi)) /
           std::log(a.theta);
  };
  const double low = std::max(std::floor(turns_at(a.beta_fast)), 0.0);
  double high = std::min(std::ceil(turns_at(a.beta_slow)), kRopeDim - 1.0);
  if (high == low) high += 0.001;
  const double ramp = std::clamp((pair - low) / (high - low), 0.0, 1.0);
  return plain * ((1 - ramp) + ramp / a.factor);
}

TableParams checked(const RopeTableArgs& a) {
  const Check check("rope_table");
  const auto above = [&](double value, const char* argument, double bound) {
    check.that(std::isfinite(value) && value > bound, argument, cat("a number above ", bound),
               cat(value));
  };
  above(a.theta, "theta", 1);
  above(a.factor, "factor", 0);
  if (a.factor != 1) {
    check.range(a.original, "original", 1, INT32_MAX);
    above(a.beta_fast, "beta_fast", 0);
    above(a.beta_slow, "beta_slow", 0);
  }
  check.output(a.table, "table", DType::kF32, {Check::kAny, 2, core::kPairs});
  check.range(a.table.shape[0], "table.shape[0]", 0, INT32_MAX);
  TableParams p;
  for (int i = 0; i < core::kPairs; ++i) {
    const double angle = frequency(a, i) * static_cast<double>(a.table.shape[0]);
    check.that(angle <= std::numeric_limits<float>::max(), "factor", "angles that fp32 holds",
               cat(a.factor));
    p.frequencies[i] = static_cast<float>(frequency(a, i));
  }
  p.table = static_cast<float*>(a.table.data);
  p.positions = a.table.shape[0];
  p.position_stride = a.table.stride[0];
  p.sine_stride = a.table.stride[1];
  p.pair_stride = a.table.stride[2];
  p.device = a.target.device;
  return p;
}

}  // namespace
}  // namespace internal::rotate

void rope_table(const RopeTableArgs& args) try {
  using namespace internal::rotate;
  const TableParams params = checked(args);
  run("rope_table", choose("rope_table", table_kernels(), Shape{}, args.target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("rope_table");
}

}  // namespace winnow
