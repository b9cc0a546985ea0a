// V4's index lists, bit for bit.
#include "winnow/lists.h"

#include "core/arithmetic.h"
#include "target.h"

namespace winnow::testing {
namespace {

void run(Source& s) {
  const int64_t T = draw(s, 0, 8), R = draw(s, 0, 4), W = draw(s, 0, 6);
  const int64_t pages = draw(s, 1, 20), K = draw(s, 0, 40);
  const int32_t page = page_size(s), ratio = draw32(s, 1, 9), window = draw32(s, 1, 70);
  const int64_t decode_tokens = draw(s, 0, T), capacity = draw(s, 0, 300);
  const bool logical = chance(s, 50);
  const int32_t compressed = draw32(s, 0, 60), rows = compressed + draw32(s, 0, 200);
  const int32_t first_request = chance(s, 70) ? 0 : draw32(s, 0, 3);
  const int64_t both = round_up(K + window, 128) + draw(s, 0, 5);
  const int64_t wide = window + draw(s, 0, 9);
  auto positions = indices(s, T, 600), requests = indices(s, T, R);
  auto table = indices(s, R * W, pages), seq_lens = indices(s, R, 600);
  auto gather_lens = indices(s, R, 200), topk = indices(s, T * K, 60);
  const Tensor at = tensor(positions.data(), {T}), of = tensor(requests.data(), {T});
  const Tensor tables = tensor(table.data(), {R, W});
  Guarded<int64_t> slots(T + 3);
  Guarded<int32_t> lists(T * std::max({capacity, wide, both})), lengths(T);
  const auto view = [&](int64_t width) { return tensor(lists.data(), {T, width}); };
  const Tensor counts = tensor(lengths.data(), {T});

  CompressedSlotsArgs c{.positions = at,
                        .requests = of,
                        .block_table = tables,
                        .ratio = ratio,
                        .page = page,
                        .pages = pages,
                        .slots = tensor(slots.data(), {T + 3})};
  expect_exact("lists", compressed_slots, c, slots);
  C128aListsArgs all{.positions = at,
                     .requests = of,
                     .block_table = tables,
                     .ratio = ratio,
                     .page = page,
                     .pages = pages,
                     .decode_tokens = decode_tokens,
                     .lists = view(capacity),
                     .lengths = counts};
  expect_exact("lists", c128a_lists, all, lists, lengths);
  WindowListsArgs near{.positions = at,
                       .requests = of,
                       .block_table = logical ? Tensor{} : tables,
                       .window = window,
                       .page = page,
                       .pages = pages,
                       .lists = view(wide),
                       .lengths = counts};
  expect_exact("lists", window_lists, near, lists, lengths);
  CombinedListsArgs combined{.topk = tensor(topk.data(), {T, K}),
                             .positions = at,
                             .requests = of,
                             .first_request = first_request,
                             .seq_lens = tensor(seq_lens.data(), {R}),
                             .gather_lens = tensor(gather_lens.data(), {R}),
                             .ratio = ratio,
                             .window = window,
                             .compressed = compressed,
                             .rows = rows,
                             .lists = view(both),
                             .lengths = counts};
  expect_exact("lists", combined_lists, combined, lists, lengths);
}

const FuzzTarget lists_target{"lists", 10, run};

}  // namespace
}  // namespace winnow::testing
