// select: checks the call, chooses the kernel.
#include "winnow/select.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "core/check.h"
#include "core/made_once.h"
#include "select/kernel.h"
#include "winnow/plan.h"

namespace winnow {

namespace internal::select {

std::span<const SelectKernel> kernels() {
  static std::atomic<const std::vector<SelectKernel>*> table{nullptr};
  return made_once(table, [] {
    std::vector<SelectKernel> rows;
#ifdef WINNOW_WITH_CUDA
    for (const SelectKernel& row : sm90_kernels()) rows.push_back(row);
#endif
    rows.push_back({{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd});
    rows.push_back(
        {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference});
    return rows;
  });
}

namespace {

Params checked(const SelectArgs& a) {
  const Check check("select");
  check.tensor(a.logits, "logits", DType::kF32, {Check::kAny, Check::kAny});
  const int64_t tokens = a.logits.shape[0];
  const Device device = a.plan ? a.plan->device(a.target) : a.target.device;
  check.range(a.logits.shape[1], "logits columns", 0, INT32_MAX);
  check.optional(a.starts, "starts", DType::kI32, {tokens});
  check.optional(a.ends, "ends", DType::kI32, {tokens});
  check.output_rows(a.ids, "ids", DType::kI32, {tokens, Check::kAny});
  if (a.values) check.output_rows(a.values, "values", DType::kF32, {tokens, a.ids.shape[1]});
  if (a.plan)
    check.that(a.plan->tokens() == tokens, "plan", cat("a plan refilled for ", tokens, " tokens"),
               cat("one for ", a.plan->tokens()));

  Params p;
  p.logits = static_cast<const float*>(a.logits.data);
  p.logit_stride = a.logits.stride[0];
  p.tokens = tokens;
  p.ranges = {static_cast<const int32_t*>(a.starts.data), a.starts.stride[0],
              static_cast<const int32_t*>(a.ends.data), a.ends.stride[0], a.logits.shape[1]};
  p.ids = static_cast<int32_t*>(a.ids.data);
  p.id_stride = a.ids.stride[0];
  p.width = a.ids.shape[1];
  p.values = static_cast<float*>(a.values.data);
  p.value_stride = a.values.stride[0];
  p.relative = a.relative;
  p.blocks = core::checked_blocks(check, a.blocks, tokens);
  check.apart({{a.ids, "ids"}, {a.values, "values"}, {a.blocks.best, "blocks.best"}},
              {{a.logits, "logits"},
               {a.starts, "starts"},
               {a.ends, "ends"},
               {a.blocks.within, "blocks.within"}});
  p.device = device;
  return p;
}

}  // namespace
}  // namespace internal::select

void select(const SelectArgs& args) try {
  using namespace internal::select;
  const Params params = checked(args);
  const Shape shape{.tokens = params.tokens,
                    .columns = params.ranges.limit,
                    .topk = static_cast<int32_t>(std::min<int64_t>(params.width, INT32_MAX)),
                    .aligned = reinterpret_cast<uintptr_t>(params.logits) % 16 == 0 &&
                               params.logit_stride % 4 == 0 && !params.ranges.starts,
                    .device = params.device.index,
                    .blocks = params.blocks.given()};
  const SelectKernel* planned =
      args.plan ? pick<SelectKernel>(args.plan->usable(Stage::kSelect), shape) : nullptr;
  // None that the plan may use serves the call: say why.
  const Target& target = args.plan ? args.plan->options().target : args.target;
  run("select", planned ? *planned : choose("select", kernels(), shape, target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("select");
}

}  // namespace winnow
