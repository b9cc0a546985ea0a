// locate: slots and counts bit for bit.
#include "winnow/locate.h"
#include "target.h"

namespace winnow::testing {
namespace {

void run(Source& s) {
  const int64_t T = draw(s, 0, 9), K = draw(s, 0, 200), R = draw(s, 0, 4);
  const int64_t W = draw(s, 0, 12), P = draw(s, 0, 3);
  const int32_t page = page_size(s), world = draw32(s, 1, 4);
  const int64_t pages = draw(s, 1, 40);
  auto requests = indices(s, T, R), table = indices(s, R * W, pages);
  auto prefills = indices(s, T, P, 50), starts = indices(s, P, 500);
  LocateArgs a{.requests = tensor(requests.data(), {T}),
               .block_table = tensor(table.data(), {R, W}),
               .page = page,
               .pages = pages,
               .rows_per_page = chance(s, 50) ? 0 : page + draw32(s, 0, 9)};
  if (chance(s, 30)) a.parallel = {world, draw32(s, 0, world - 1), draw32(s, 1, 9), chance(s, 50)};
  if (chance(s, 40)) {
    a.prefill_requests = tensor(prefills.data(), {T});
    a.workspace_starts = tensor(starts.data(), {P});
    a.workspace_rows = draw(s, 0, 600);
  }
  auto ids = indices(s, T * K, W * page);
  a.ids = tensor(ids.data(), {T, K});
  Guarded<int32_t> slots(T * K), counts(T);
  a.slots = tensor(slots.data(), {T, K});
  a.counts = tensor(counts.data(), {T});
  expect_exact("locate", locate, a, slots, counts);
}

const FuzzTarget locate_target{"locate", 20, run};

}  // namespace
}  // namespace winnow::testing
