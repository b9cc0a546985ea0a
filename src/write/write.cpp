// write: checks the call, chooses the kernel.
#include "winnow/write.h"

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

// The steps before a row of `dim` values is stored.
void check_prologue(const Check& check, const WriteArgs& a, int64_t dim, Params& p) {
  const Prologue& prologue = a.prologue;
  p.norm_width = norm_width(dim);
  p.norm = checked_norm(check, prologue.norm, p.norm_width);
  if (prologue.rope.table) {
    p.rope = checked_rope(check, prologue.rope);
    check.tensor(prologue.positions, "prologue.positions", DType::kI32, {p.tokens});
    p.positions = static_cast<const int32_t*>(prologue.positions.data);
    p.position_stride = prologue.positions.stride[0];
  }
  p.hadamard = prologue.hadamard;
  check.that(!p.hadamard || dim == kIndexDim, "prologue.hadamard", "rows of 128 values", cat(dim));
  p.prologue = p.norm.kind != NormKind::kNone || p.rope.table != nullptr || p.hadamard;
}

}  // namespace

Params checked(const Check& check, const WriteArgs& a) {
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
  p.rope_part = a.rope ? static_cast<const bf16*>(a.rope.data) : p.kv + (p.kv ? nope : 0);
  p.rope_stride = a.rope ? a.rope.stride[0] : p.kv_stride;
  p.slots = static_cast<const int64_t*>(a.slots.data);
  p.slot_stride = a.slots.stride[0];
  p.tokens = tokens;
  p.cache = pages_of(cache);
  p.quantizer = quantizer_of(check, cache.format, a.scale);
  check_prologue(check, a, nope + rope, p);
  const bool normed = p.norm.kind != NormKind::kNone;
  const bool turned = p.rope.table != nullptr;
  const Prologue& prologue = a.prologue;
  check.apart({{core::pages_view(cache), "cache"}},
              {{a.kv, "kv"},
               {a.rope, "rope"},
               {a.slots, "slots"},
               {Check::read(normed, prologue.norm.weight), "norm.weight"},
               {Check::read(normed, prologue.norm.bias), "norm.bias"},
               {Check::read(turned, prologue.rope.table), "rope.table"},
               {Check::read(turned, prologue.positions), "prologue.positions"}});
  p.device = device;
  if (device.kind == DeviceKind::kCpu) check_slots(check, a.slots, p.cache);
  return p;
}

}  // namespace internal::write

void write(const WriteArgs& args) try {
  const internal::write::Params params = internal::write::checked(Check("write"), args);
  const auto& kernel =
      args.plan
          ? *pick<internal::write::WriteKernel>(args.plan->usable(Stage::kWrite), {})
          : choose("write", internal::write::kernels(), internal::write::Shape{}, args.target);
  run("write", kernel, params);
} catch (const std::bad_alloc&) {
  out_of_memory("write");
}

}  // namespace winnow
