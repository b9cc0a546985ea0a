// write: checks the call, chooses the kernel.
#include "winnow/write.h"

#include <cfloat>

#include "core/check.h"
#include "model/records.h"
#include "winnow/plan.h"
#include "write/kernel.h"

namespace winnow {

namespace internal::write {

std::span<const WriteKernel> kernels() {
  static constexpr WriteKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90::write},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd::write},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference::write},
  };
  return table;
}

namespace {

Quantizer quantizer_of(const Check& check, CacheFormat format, ScaleMode mode) {
  constexpr float kFloor = 1e-4f;
  const bool amax = mode == ScaleMode::kAmax, pow2 = mode == ScaleMode::kPow2;
  const bool standard = mode == ScaleMode::kDefault;
  switch (format) {
    case CacheFormat::kV32Fp8:
      check.that(standard || amax || pow2, "scale", "kDefault, kAmax or kPow2 for v32_fp8",
                 "another mode");
      return pow2 ? Quantizer{kFloor, false, true} : Quantizer{FLT_MIN, false, false};
    case CacheFormat::kV4Fp8:
      check.that(standard || pow2 || mode == ScaleMode::kPow2FloorAmax, "scale",
                 "kDefault, kPow2 or kPow2FloorAmax for v4_fp8", "another mode");
      return {kFloor, mode == ScaleMode::kPow2FloorAmax, true};
    case CacheFormat::kIndexKeys:
      check.that(standard || amax || pow2, "scale", "kDefault, kAmax or kPow2 for index_keys",
                 "another mode");
      return {kFloor, true, !amax};
    default: return {};  // bf16 records have no scale
  }
}

Params checked(const WriteArgs& a) {
  const Check check("write");
  const Device device = a.plan ? a.plan->device(a.target) : a.target.device;
  const Cache cache = check.cache(a.cache, "cache", {device.kind, false});
  check.tensor(a.slots, "slots", DType::kI64, {Check::kAny});
  const int64_t tokens = a.slots.shape[0];
  const auto [nope, rope] = with_record(cache.format, [](auto r) {
    return std::pair<int64_t, int64_t>(decltype(r)::kNope, decltype(r)::kRope);
  });
  const auto rows = [&](const Tensor& t, const char* argument) {
    check.that(t.shape[0] >= tokens, argument, cat("at least ", tokens, " rows, one for each slot"),
               cat(t.shape[0]));
  };
  if (a.rope) {
    if (rope == 0) check.fail("rope", "nothing: index keys have no RoPE part", shape_of(a.rope));
    check.tensor(a.rope, "rope", DType::kBf16, {Check::kAny, rope});
    rows(a.rope, "rope");
  }
  check.tensor(a.kv, "kv", DType::kBf16, {Check::kAny, a.rope ? nope : nope + rope});
  rows(a.kv, "kv");

  Params p;
  p.kv = static_cast<const bf16*>(a.kv.data);
  p.kv_stride = a.kv.stride[0];
  p.rope = a.rope ? static_cast<const bf16*>(a.rope.data) : p.kv + (p.kv ? nope : 0);
  p.rope_stride = a.rope ? a.rope.stride[0] : p.kv_stride;
  p.slots = static_cast<const int64_t*>(a.slots.data);
  p.slot_stride = a.slots.stride[0];
  p.tokens = tokens;
  p.cache = {static_cast<std::byte*>(cache.data), cache.page_stride, cache.pages, cache.page,
             cache.format};
  p.quantizer = quantizer_of(check, cache.format, a.scale);
  p.device = device;
  if (device.kind == DeviceKind::kCpu) {
    const int64_t capacity = cache.pages * cache.page;
    for (int64_t t = 0; t < tokens; ++t)
      if (const int64_t slot = p.slots[t * p.slot_stride]; slot >= capacity)
        check.fail("slots", cat("slots below ", capacity), cat(slot, " at token ", t));
  }
  return p;
}

}  // namespace
}  // namespace internal::write

void write(const WriteArgs& args) try {
  const internal::write::Params params = internal::write::checked(args);
  const auto& kernel =
      args.plan
          ? *pick<internal::write::WriteKernel>(args.plan->usable(Stage::kWrite), {})
          : choose("write", internal::write::kernels(), internal::write::Shape{}, args.target);
  run("write", kernel, params);
} catch (const std::bad_alloc&) {
  out_of_memory("write");
}

}  // namespace winnow
