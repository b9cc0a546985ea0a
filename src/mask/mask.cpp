// topk_mask: checks the call, chooses the kernel.
#include "winnow/mask.h"
#include "core/check.h"
#include "mask/kernel.h"

namespace winnow {

namespace internal::mask {

std::span<const MaskKernel> kernels() {
  static constexpr MaskKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
  };
  return table;
}

namespace {

Params checked(const TopkMaskArgs& a) {
  const Check check("topk_mask");
  check.tensor(a.ids, "ids", DType::kI32, {Check::kAny, Check::kAny});
  const int64_t tokens = a.ids.shape[0];
  if (a.lengths) check.strided(a.lengths, "lengths", DType::kI32, {tokens});
  check.output_rows(a.mask, "mask", DType::kU8, {tokens, Check::kAny});
  check.range(a.mask.shape[1], "mask (bytes of a row)", 0, INT64_MAX / 16);
  check.apart({{a.mask, "mask"}}, {{a.ids, "ids"}, {a.lengths, "lengths"}});

  Params p;
  p.ids = static_cast<const int32_t*>(a.ids.data);
  p.id_stride = a.ids.stride[0];
  p.tokens = tokens;
  p.topk = a.ids.shape[1];
  p.lengths = static_cast<const int32_t*>(a.lengths.data);
  p.length_stride = a.lengths.stride[0];
  p.mask = static_cast<uint8_t*>(a.mask.data);
  p.mask_stride = a.mask.stride[0];
  p.bytes = a.mask.shape[1];
  p.device = a.target.device;
  return p;
}

}  // namespace
}  // namespace internal::mask

void topk_mask(const TopkMaskArgs& args) try {
  const internal::mask::Params params = internal::mask::checked(args);
  run("topk_mask", choose("mask", internal::mask::kernels(), internal::mask::Shape{}, args.target),
      params);
} catch (const std::bad_alloc&) {
  out_of_memory("topk_mask");
}

}  // namespace winnow
