// rotate: checks the call, chooses the kernel.
#include "winnow/rotate.h"

#include "core/check.h"
#include "rotate/kernel.h"

namespace winnow {

namespace internal::rotate {

std::span<const RotateKernel> kernels() {
  static constexpr RotateKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90::rotate},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd::rotate},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference::rotate},
  };
  return table;
}

namespace {

Params checked(const RotateArgs& a) {
  const Check check("rotate");
  check.tensor(a.x, "x", DType::kBf16, {Check::kAny, Check::kAny, Check::kAny});
  const int64_t tokens = a.x.shape[0];
  const int64_t heads = a.x.shape[1];
  const int64_t width = a.x.shape[2];
  check.range(width, "x.shape[2]", kRopeDim, INT32_MAX);
  check.tensor(a.positions, "positions", DType::kI32, {tokens});
  check.output_rows(a.out, "out", DType::kBf16, {tokens, heads, width});
  Params p;
  p.rope = core::checked_rope(check, a.rope);
  p.x = static_cast<const bf16*>(a.x.data);
  p.x_token = a.x.stride[0];
  p.x_head = a.x.stride[1];
  p.out = static_cast<bf16*>(a.out.data);
  p.out_token = a.out.stride[0];
  p.out_head = a.out.stride[1];
  p.tokens = tokens;
  p.heads = heads;
  p.width = width;
  p.positions = static_cast<const int32_t*>(a.positions.data);
  p.position_stride = a.positions.stride[0];
  p.device = a.target.device;
  return p;
}

}  // namespace
}  // namespace internal::rotate

void rotate(const RotateArgs& args) try {
  using namespace internal::rotate;
  const Params params = checked(args);
  run("rotate", choose("rotate", kernels(), Shape{}, args.target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("rotate");
}

}  // namespace winnow
