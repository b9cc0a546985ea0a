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

// Of an output in e4m3.
void check_scales(const Check& check, const RotateArgs& a, Params& p) {
  const int64_t width = a.x.shape[2];
  check.that(width % kTile == 0, "x.shape[2]", "a multiple of 128 with out in e4m3", cat(width));
  check.output(a.scales, "scales", DType::kF32, {a.x.shape[0], a.x.shape[1], width / kTile});
  p.scales = static_cast<float*>(a.scales.data);
  p.scale_token = a.scales.stride[0];
  p.scale_head = a.scales.stride[1];
  p.scale_tile = a.scales.stride[2];
  p.quantizer = core::quantizer_of(check, CacheFormat::kIndexKeys, a.scale);
}

Params checked(const RotateArgs& a) {
  const Check check("rotate");
  check.tensor(a.x, "x", DType::kBf16, {Check::kAny, Check::kAny, Check::kAny});
  const int64_t tokens = a.x.shape[0];
  const int64_t heads = a.x.shape[1];
  const int64_t width = a.x.shape[2];
  check.range(width, "x.shape[2]", kRopeDim, INT32_MAX);
  check.tensor(a.positions, "positions", DType::kI32, {tokens});
  Params p;
  const bool quantized = a.out.dtype == DType::kE4m3;
  const DType dtype = quantized ? DType::kE4m3 : DType::kBf16;
  check.output_rows(a.out, "out", dtype, {tokens, heads, width});
  if (quantized) check_scales(check, a, p);
  else check.that(!a.scales, "scales", "none with out in bf16", shape_of(a.scales));
  p.rope = core::checked_rope(check, a.rope);
  check.apart({{a.out, "out"}, {a.scales, "scales"}},
              {{a.x, "x", &a.out}, {a.positions, "positions"}, {a.rope.table, "rope.table"}});
  p.x = static_cast<const bf16*>(a.x.data);
  p.x_token = a.x.stride[0];
  p.x_head = a.x.stride[1];
  if (quantized) p.codes = static_cast<e4m3*>(a.out.data);
  else p.out = static_cast<bf16*>(a.out.data);
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
  const Shape shape{.quantized = args.out.dtype == DType::kE4m3};
  run("rotate", choose("rotate", kernels(), shape, args.target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("rotate");
}

}  // namespace winnow
