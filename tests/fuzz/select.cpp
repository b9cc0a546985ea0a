// select: ids bit for bit.
#include "winnow/select.h"

#include "target.h"

namespace winnow::testing {
namespace {

// Few distinct values, so that ties are common; NaN, infinities and both zeros among them.
float logit(Source& s) {
  static const float special[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-40f};
  if (chance(s, 10)) return special[draw(s, 0, 6)];
  return chance(s, 50) ? static_cast<float>(draw(s, -4, 4)) : s.normal();
}

void run(Source& s) {
  const int64_t T = draw(s, 0, 6), N = chance(s, 80) ? draw(s, 0, 200) : draw(s, 0, 3000);
  const int64_t K = chance(s, 80) ? draw(s, 0, 64) : draw(s, 0, 300);
  auto starts = indices(s, T, N / 3 + 1, 20), ends = indices(s, T, N + 1, 20);
  SelectArgs a{.relative = chance(s, 50)};
  if (chance(s, 70)) a.starts = tensor(starts.data(), {T});
  if (chance(s, 70)) a.ends = tensor(ends.data(), {T});
  Guarded<float> logits(T * N);
  for (float& x : logits) x = logit(s);
  a.logits = tensor(logits.data(), {T, N});
  Guarded<int32_t> ids(T * K);
  a.ids = tensor(ids.data(), {T, K});
  // Lists of blocks ascend for the most part; what does not names nothing.
  const int64_t B = draw(s, 0, 20);
  a.blocks.size = draw32(s, 1, 12);
  auto within = indices(s, T * B, N / a.blocks.size + 1, 10);
  for (int64_t t = 0; t < T && chance(s, 80); ++t)
    std::sort(within.begin() + t * B, within.begin() + (t + 1) * B);
  Guarded<int32_t> best(T * B);
  if (chance(s, 40)) a.blocks.within = tensor(within.data(), {T, B});
  if (chance(s, 40)) a.blocks.best = tensor(best.data(), {T, B});
  Guarded<float> values(T * K);
  if (chance(s, 40)) a.values = tensor(values.data(), {T, K});
  expect_exact("select", select, a, ids, best, values);
}

const FuzzTarget select_target{"select", 5, run};

}  // namespace
}  // namespace winnow::testing
