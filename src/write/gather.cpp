// gather: pages -> contiguous bf16. Checks the call, chooses the kernel.
#include "core/check.h"
#include "model/index.h"
#include "winnow/plan.h"
#include "winnow/write.h"
#include "write/kernel.h"

namespace winnow {

namespace internal::write {

std::span<const GatherKernel> gather_kernels() {
  static constexpr GatherKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90::gather},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd::gather},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference::gather},
  };
  return table;
}

namespace {

GatherParams checked_gather(const GatherArgs& a) {
  const Check check("gather");
  const Device device = a.plan ? a.plan->device(a.target) : a.target.device;
  const Cache cache = check.cache(a.cache, "cache", {device.kind, false});
  check.that(!is_index(cache.format), "cache", "a latent format", cat(name_of(cache.format)));
  check.tensor(a.block_table, "block_table", DType::kI32, {Check::kAny, Check::kAny});
  const int64_t requests = a.block_table.shape[0];
  check.tensor(a.lengths, "lengths", DType::kI32, {requests});
  check.optional(a.starts, "starts", DType::kI32, {requests});
  check.optional(a.out_starts, "out_starts", DType::kI32, {requests});
  check.output_rows(a.out, "out", DType::kBf16, {Check::kAny, record_dim(cache.format)});
  check.apart({{a.out, "out"}}, {{core::pages_view(cache), "cache"},
                                 {a.block_table, "block_table"},
                                 {a.lengths, "lengths"},
                                 {a.starts, "starts"},
                                 {a.out_starts, "out_starts"}});

  GatherParams p;
  p.cache = {static_cast<std::byte*>(cache.data), cache.page_stride, cache.pages, cache.page,
             cache.format};
  p.table = static_cast<const int32_t*>(a.block_table.data);
  p.table_stride = a.block_table.stride[0];
  p.requests = requests;
  p.table_width = a.block_table.shape[1];
  p.starts = static_cast<const int32_t*>(a.starts.data);
  p.start_stride = a.starts.stride[0];
  p.lengths = static_cast<const int32_t*>(a.lengths.data);
  p.length_stride = a.lengths.stride[0];
  p.out_starts = static_cast<const int32_t*>(a.out_starts.data);
  p.out_start_stride = a.out_starts.stride[0];
  p.out = static_cast<bf16*>(a.out.data);
  p.out_stride = a.out.stride[0];
  p.rows = a.out.shape[0];
  p.device = device;
  return p;
}

}  // namespace
}  // namespace internal::write

void gather(const GatherArgs& args) try {
  const internal::write::GatherParams params = internal::write::checked_gather(args);
  const auto& kernel =
      args.plan ? *pick<internal::write::GatherKernel>(args.plan->usable(Stage::kGather), {})
                : choose("gather", internal::write::gather_kernels(), internal::write::Shape{},
                         args.target);
  run("gather", kernel, params);
} catch (const std::bad_alloc&) {
  out_of_memory("gather");
}

}  // namespace winnow
