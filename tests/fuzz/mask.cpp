// topk_mask: every byte.
#include "winnow/mask.h"

#include "target.h"

namespace winnow::testing {
namespace {

void run(Source& s) {
  const int64_t T = draw(s, 0, 6), K = draw(s, 0, 120), M = draw(s, 0, 30);
  auto lengths = indices(s, T, 8 * M + 2, 20);
  TopkMaskArgs a;
  if (chance(s, 60)) a.lengths = tensor(lengths.data(), {T});
  auto ids = indices(s, T * K, 8 * M + 9);
  a.ids = tensor(ids.data(), {T, K});
  Guarded<uint8_t> mask(T * M);
  a.mask = tensor(mask.data(), {T, M});
  expect_exact("mask", topk_mask, a, mask);
}

const FuzzTarget mask_target{"mask", 20, run};

}  // namespace
}  // namespace winnow::testing
