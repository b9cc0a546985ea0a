// norm: checks the call, chooses the kernel.
#include "winnow/norm.h"

#include "core/check.h"
#include "norm/kernel.h"

namespace winnow {

namespace internal::norm {

std::span<const NormKernel> kernels() {
  static constexpr NormKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
  };
  return table;
}

namespace {

Rows checked_rows(const Check& check, const NormRows& rows) {
  check.tensor(rows.x, "x", DType::kBf16, {Check::kAny, Check::kAny});
  const int64_t count = rows.x.shape[0];
  const int64_t width = rows.x.shape[1];
  check.range(width, "x.shape[1]", 1, INT32_MAX);
  check.output_rows(rows.out, "out", DType::kBf16, {count, width});
  check.that(rows.norm.kind != NormKind::kNone, "norm.kind", "kRms or kLayer", "kNone");
  Rows r;
  r.norm = core::checked_norm(check, rows.norm, width);
  r.x = static_cast<const bf16*>(rows.x.data);
  r.x_stride = rows.x.stride[0];
  r.out = static_cast<bf16*>(rows.out.data);
  r.out_stride = rows.out.stride[0];
  r.count = count;
  r.width = width;
  return r;
}

}  // namespace

Params checked(const Check& check, const Check& check_second, const NormArgs& a) {
  Params p;
  const auto& [first, second] = a.rows;
  p.rows[0] = checked_rows(check, first);
  const bool both = second.x || second.out;
  if (both) p.rows[1] = checked_rows(check_second, second);
  check.apart({{first.out, "out"}, {second.out, "rows[1].out"}},
              {{first.x, "x", &first.out},
               {second.x, "rows[1].x", &second.out},
               {first.norm.weight, "norm.weight"},
               {first.norm.bias, "norm.bias"},
               {Check::read(both, second.norm.weight), "rows[1].norm.weight"},
               {Check::read(both, second.norm.bias), "rows[1].norm.bias"}});
  p.device = a.target.device;
  return p;
}

}  // namespace internal::norm

void norm(const NormArgs& args) try {
  using namespace internal::norm;
  const Params params = checked(Check("norm"), Check("norm", "rows[1]."), args);
  run("norm", choose("norm", kernels(), Shape{}, args.target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("norm");
}

}  // namespace winnow
