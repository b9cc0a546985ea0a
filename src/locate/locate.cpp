// locate: checks the call, chooses the kernel.
#include "winnow/locate.h"

#include "core/check.h"
#include "locate/kernel.h"
#include "winnow/plan.h"

namespace winnow {

namespace internal::locate {

std::span<const LocateKernel> kernels() {
  static constexpr LocateKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
  };
  return table;
}

namespace {

Params checked(const LocateArgs& a) {
  const Check check("locate");
  const int64_t tokens = a.ids.shape[0];
  check.tensor(a.ids, "ids", DType::kI32, {Check::kAny, Check::kAny});
  check.tensor(a.requests, "requests", DType::kI32, {tokens});
  check.tensor(a.block_table, "block_table", DType::kI32, {Check::kAny, Check::kAny});
  check.output_rows(a.slots, "slots", DType::kI32, {tokens, a.ids.shape[1]});
  check.range(a.page, "page", 1, INT32_MAX);
  const int32_t rows_per_page = a.rows_per_page == 0 ? a.page : a.rows_per_page;
  check.range(rows_per_page, "rows_per_page", a.page, INT32_MAX);
  check.pages(a.pages, a.block_table, INT32_MAX / rows_per_page);
  check.range(a.parallel.world, "parallel.world", 1, INT32_MAX);
  check.range(a.parallel.rank, "parallel.rank", 0, a.parallel.world - 1);
  check.range(a.parallel.interleave, "parallel.interleave", 1, INT32_MAX);
  if (check.optional(a.prefill_requests, "prefill_requests", DType::kI32, {tokens})) {
    check.tensor(a.workspace_starts, "workspace_starts", DType::kI32, {Check::kAny});
    check.range(a.workspace_rows, "workspace_rows", 0, INT32_MAX);
  }
  if (a.counts) check.output(a.counts, "counts", DType::kI32, {tokens});
  check.apart({{a.slots, "slots"}, {a.counts, "counts"}},
              {{a.ids, "ids", &a.slots}, {a.requests, "requests"}, {a.block_table, "block_table"}});
  if (a.plan) {
    check.range(a.part, "part", -1, static_cast<int64_t>(a.plan->parts().size()) - 1);
    const Part part = a.part < 0 ? Part{0, a.plan->tokens()} : a.plan->parts()[a.part];
    const int64_t planned = part.last_token - part.first_token;
    check.that(planned == tokens, "plan", cat("a plan refilled for ", tokens, " tokens"),
               cat("one for ", planned));
  }

  Params p;
  p.ids = static_cast<const int32_t*>(a.ids.data);
  p.id_stride = a.ids.stride[0];
  p.tokens = tokens;
  p.width = a.ids.shape[1];
  p.requests = static_cast<const int32_t*>(a.requests.data);
  p.request_stride = a.requests.stride[0];
  p.table = static_cast<const int32_t*>(a.block_table.data);
  p.table_stride = a.block_table.stride[0];
  p.table_rows = a.block_table.shape[0];
  p.table_width = a.block_table.shape[1];
  p.page = a.page;
  p.rows_per_page = rows_per_page;
  p.pages = a.pages;
  p.prefill_requests = static_cast<const int32_t*>(a.prefill_requests.data);
  p.prefill_stride = a.prefill_requests.stride[0];
  p.workspace_starts = static_cast<const int32_t*>(a.workspace_starts.data);
  p.starts_stride = a.workspace_starts.stride[0];
  p.prefills = a.workspace_starts.shape[0];
  p.workspace_rows = a.workspace_rows;
  p.parallel = a.parallel;
  p.slots = static_cast<int32_t*>(a.slots.data);
  p.slot_stride = a.slots.stride[0];
  p.counts = static_cast<int32_t*>(a.counts.data);
  p.count_stride = a.counts.stride[0];
  p.device = a.plan ? a.plan->device(a.target) : a.target.device;
  return p;
}

}  // namespace
}  // namespace internal::locate

void locate(const LocateArgs& args) try {
  const internal::locate::Params params = internal::locate::checked(args);
  const auto& kernel =
      args.plan
          ? *pick<internal::locate::LocateKernel>(args.plan->usable(Stage::kLocate), {})
          : choose("locate", internal::locate::kernels(), internal::locate::Shape{}, args.target);
  run("locate", kernel, params);
} catch (const std::bad_alloc&) {
  out_of_memory("locate");
}

}  // namespace winnow
