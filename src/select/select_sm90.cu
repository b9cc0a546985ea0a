// select on Hopper: the device's top-k (cuda/topk.cu) over the caller's logits, a row of the table
// for each of its forms.
#include "cuda/topk.h"
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

template <cuda::TopkForm form>
SelectKernel row() {
  return {{cuda::name_of(form), DeviceKind::kCuda, false, cuda::missing},
          fits<form>,
          run<form>,
          slower<form>};
}

}  // namespace

std::array<SelectKernel, 4> sm90_kernels() {
  using enum cuda::TopkForm;
  return {row<kFilter>(), row<kCluster>(), row<kStream>(), row<kDigits>()};
}

}  // namespace winnow::internal::select
