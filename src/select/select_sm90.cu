// select on Hopper: the device's top-k (cuda/topk.cu) over the caller's logits, a row of the table
// for each of its forms.
#include "cuda/topk.h"
#include "cuda/topk_blocks.h"
#include "select/kernel.h"

namespace winnow::internal::select {

namespace {

cuda::TopkShape topk_shape(const Shape& s) {
  return {s.tokens, s.columns, s.topk, s.aligned, s.device};
}

cuda::TopkParams topk_params(const Params& p) {
  return {.logits = p.logits,
          .logit_stride = p.logit_stride,
          .tokens = p.tokens,
          .ranges = p.ranges,
          .ids = p.ids,
          .id_stride = p.id_stride,
          .width = p.width,
          .values = p.values,
          .value_stride = p.value_stride,
          .relative = p.relative,
          .device = p.device};
}

template <cuda::TopkForm form>
const char* fits(const Shape& s) {
  if (s.blocks) return "selects from whole rows, not from blocks";
  return cuda::topk_fits(form, topk_shape(s)) ? nullptr : "rows longer than it holds";
}

template <cuda::TopkForm form>
const char* slower(const Shape& s) {
  return cuda::fastest_topk(topk_shape(s)) == form ? nullptr : "another is faster for these rows";
}

template <cuda::TopkForm form>
void run(const Params& p) noexcept {
  cuda::topk(topk_params(p), form);
}

// Without blocks it is the fastest of the others.
void run_blocks(const Params& p) noexcept {
  const core::Blocks& b = p.blocks;
  cuda::topk_in_blocks(topk_params(p), {.size = b.size,
                                        .within = b.within,
                                        .within_stride = b.within_stride,
                                        .within_count = b.within_count,
                                        .best = b.best,
                                        .best_stride = b.best_stride,
                                        .best_count = b.best_count,
                                        .restricts = b.restricts,
                                        .finds = b.finds});
}

template <cuda::TopkForm form>
SelectKernel row() {
  return {{cuda::name_of(form), DeviceKind::kCuda, false, cuda::missing},
          fits<form>,
          run<form>,
          slower<form>};
}

}  // namespace

std::array<SelectKernel, 5> sm90_kernels() {
  using enum cuda::TopkForm;
  const SelectKernel blocks{
      {"sm90/blocks", DeviceKind::kCuda, false, cuda::missing}, nullptr, run_blocks};
  return {row<kFilter>(), row<kCluster>(), row<kStream>(), row<kDigits>(), blocks};
}

}  // namespace winnow::internal::select
