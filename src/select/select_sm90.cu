// select on Hopper: the device's top-k (cuda/topk.cu) over the caller's logits.
#include "cuda/topk.h"
#include "select/kernel.h"

namespace winnow::internal::select {

void sm90(const Params& p) noexcept {
  cuda::topk({.logits = p.logits,
              .logit_stride = p.logit_stride,
              .tokens = p.tokens,
              .ranges = p.ranges,
              .ids = p.ids,
              .id_stride = p.id_stride,
              .width = p.width,
              .relative = p.relative,
              .device = p.device});
}

}  // namespace winnow::internal::select
