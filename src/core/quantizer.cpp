#include "core/quantizer.h"

#include <cfloat>

namespace winnow::internal::core {

namespace {
const char* name_of(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kDefault: return "kDefault";
    case ScaleMode::kAmax: return "kAmax";
    case ScaleMode::kPow2: return "kPow2";
    case ScaleMode::kPow2FloorAmax: return "kPow2FloorAmax";
  }
  return "another mode";
}
}  // namespace

Quantizer quantizer_of(const Check& check, CacheFormat format, ScaleMode mode) {
  constexpr float kFloor = 1e-4f;
  const bool amax = mode == ScaleMode::kAmax;
  const bool pow2 = mode == ScaleMode::kPow2;
  const bool standard = mode == ScaleMode::kDefault;
  switch (format) {
    case CacheFormat::kV32Fp8:
      check.that(standard || amax || pow2, "scale", "kDefault, kAmax or kPow2 for v32_fp8",
                 name_of(mode));
      return pow2 ? Quantizer{kFloor, false, true} : Quantizer{FLT_MIN, false, false};
    case CacheFormat::kV4Fp8:
      check.that(standard || pow2 || mode == ScaleMode::kPow2FloorAmax, "scale",
                 "kDefault, kPow2 or kPow2FloorAmax for v4_fp8", name_of(mode));
      return {kFloor, mode == ScaleMode::kPow2FloorAmax, true};
    case CacheFormat::kIndexKeys:
      check.that(standard || amax || pow2, "scale", "kDefault, kAmax or kPow2 for index_keys",
                 name_of(mode));
      return {kFloor, true, !amax};
    default: return {};  // bf16 records have no scale
  }
}

void check_slots(const Check& check, const Tensor& slots, const Pages& pages) {
  const int64_t capacity = pages.pages * pages.page;
  const auto* values = static_cast<const int64_t*>(slots.data);
  // Most calls have none: differences in vectors first. Those of slots far below 0 wrap around.
  if (slots.stride[0] == 1) {
    uint64_t signs = 0;
    for (int64_t t = 0; t < slots.shape[0]; ++t)
      signs |= static_cast<uint64_t>(capacity - 1) - static_cast<uint64_t>(values[t]);
    if (signs >> 63 == 0) return;
  }
  for (int64_t t = 0; t < slots.shape[0]; ++t)
    if (const int64_t slot = values[t * slots.stride[0]]; slot >= capacity)
      check.fail("slots", cat("slots below ", capacity), cat(slot, " at token ", t));
}

}  // namespace winnow::internal::core
