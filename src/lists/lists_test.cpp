// V4's index lists: the cases of the specification, then every kernel against the formulas written
// out, over drawn positions, requests, tables and lengths, hostile ones included.
#include "winnow/lists.h"

#include <algorithm>

#include "core/arithmetic.h"
#include "testing.h"

namespace winnow {
namespace {

using testing::draw;
using testing::expect_error;
using testing::expect_invalid;
using testing::Guarded;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

Tensor vec(Guarded<int32_t>& g) { return tensor(g.data(), {static_cast<int64_t>(g.size())}); }

class Lists : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = testing::why_not("lists", GetParam()); !why.empty())
      GTEST_SKIP() << why;
    target = testing::target("lists", kernel);
  }
  std::string kernel = GetParam();
  Target target;
};

TEST_P(Lists, CompressedSlotsOfTheSpecification) {
  // Sequence of 280, the last 40 of them new: 10 states, across the page boundary at state 64.
  Ints positions(40);
  for (int32_t i = 0; i < 40; ++i) positions[i] = 240 + i;
  Guarded<int32_t> p(positions), requests(Ints(40, 0)), table(Ints{5, 7});
  Guarded<int64_t> slots(45);
  compressed_slots({.positions = vec(p),
                    .requests = vec(requests),
                    .block_table = tensor(table.data(), {1, 2}),
                    .ratio = 4,
                    .page = 64,
                    .pages = 8,
                    .slots = tensor(slots.data(), {45}),
                    .target = target});
  ASSERT_TRUE(testing::device_finished());
  Longs found;
  for (int64_t s : slots)
    if (s >= 0) found.push_back(s);
  EXPECT_EQ(found, (Longs{5 * 64 + 60, 5 * 64 + 61, 5 * 64 + 62, 5 * 64 + 63, 7 * 64, 7 * 64 + 1,
                          7 * 64 + 2, 7 * 64 + 3, 7 * 64 + 4, 7 * 64 + 5}));
  for (int32_t i = 0; i < 45; ++i)  // everything else, behind the tokens too, is -1
    EXPECT_EQ(slots[i] >= 0, i < 40 && i % 4 == 3) << i;
}

TEST_P(Lists, C128aOfTheSpecification) {
  Guarded<int32_t> positions(Ints{255, 511, 383, 639}), requests(Ints{0, 1, 0, 1});
  Guarded<int32_t> table(Ints{3, 5}), lists(4 * 128), lengths(4);
  c128a_lists({.positions = vec(positions),
               .requests = vec(requests),
               .block_table = tensor(table.data(), {2, 1}),
               .page = 512,
               .pages = 6,
               .decode_tokens = 2,
               .lists = tensor(lists.data(), {4, 128}),
               .lengths = vec(lengths),
               .target = target});
  ASSERT_TRUE(testing::device_finished());
  EXPECT_EQ(lengths.values(), (Ints{2, 4, 3, 5}));
  const Ints want[] = {{1536, 1537}, {2560, 2561, 2562, 2563}, {0, 1, 2}, {0, 1, 2, 3, 4}};
  for (int64_t t = 0; t < 4; ++t) {
    Ints row = want[t];
    row.resize(128, -1);
    EXPECT_EQ(Ints(&lists[t * 128], &lists[t * 128] + 128), row) << "token " << t;
  }
  EXPECT_EQ(c128a_width(639), 128);
  EXPECT_EQ(c128a_width(128 * 129 - 1), 256);
  EXPECT_EQ(c128a_width(-1), 0);
}

TEST_P(Lists, RowsStayInTheirWidth) {
  // Lists are 8 wide in a buffer of 16 columns: the other half of each row is someone else's.
  Guarded<int32_t> positions(Ints{2, 40, -1, -5}), requests(Ints{0, 0, 0, 0});
  Guarded<int32_t> lists(4 * 16), lengths(4);
  window_lists({.positions = vec(positions),
                .window = 8,
                .lists = tensor(lists.data(), {4, 8}, {16, 1}),
                .lengths = vec(lengths),
                .target = target});
  ASSERT_TRUE(testing::device_finished());
  EXPECT_EQ(lengths.values(), (Ints{3, 8, 0, 0}));
  const Ints want[] = {
      {0, 1, 2, -1, -1, -1, -1, -1}, {33, 34, 35, 36, 37, 38, 39, 40}, Ints(8, -1), Ints(8, -1)};
  for (int64_t t = 0; t < 4; ++t) {
    EXPECT_EQ(Ints(&lists[t * 16], &lists[t * 16] + 8), want[t]);
    EXPECT_EQ(Ints(&lists[t * 16 + 8], &lists[t * 16 + 8] + 8), Ints(8, int32_t(0xcdcdcdcd)));
  }
  // The same buffer for shorter lists: nothing of the longer ones stays.
  positions[1] = 0;
  window_lists({.positions = vec(positions),
                .window = 8,
                .lists = tensor(lists.data(), {4, 8}, {16, 1}),
                .lengths = vec(lengths),
                .target = target});
  ASSERT_TRUE(testing::device_finished());
  EXPECT_EQ(Ints(&lists[16], &lists[16] + 8), (Ints{0, -1, -1, -1, -1, -1, -1, -1}));
}

TEST_P(Lists, CombinedByHand) {
  // Two requests of M = 12 rows, N = 5 of them compressed; window 4, ratio 4. Request 1 has 22
  // tokens, of which the last 6 (16..21) were gathered.
  Guarded<int32_t> topk(Ints{0, 3, 4, 1, 2, -1}), positions(Ints{21, 9}), requests(Ints{8, 7});
  Guarded<int32_t> seq(Ints{10, 22}), gathered(Ints{6, 6}), lists(2 * 128), lengths(2);
  combined_lists({.topk = tensor(topk.data(), {2, 3}),
                  .positions = vec(positions),
                  .requests = vec(requests),
                  .first_request = 7,
                  .seq_lens = vec(seq),
                  .gather_lens = vec(gathered),
                  .ratio = 4,
                  .window = 4,
                  .compressed = 5,
                  .rows = 12,
                  .lists = tensor(lists.data(), {2, 128}),
                  .lengths = vec(lengths),
                  .target = target});
  ASSERT_TRUE(testing::device_finished());
  Ints first = {12, 15, 16, 19, 20, 21, 22}, second = {1, 2, 7, 8, 9, 10};
  EXPECT_EQ(lengths.values(), (Ints{7, 6}));
  first.resize(128, -1);
  second.resize(128, -1);
  EXPECT_EQ(Ints(&lists[0], &lists[0] + 128), first);
  EXPECT_EQ(Ints(&lists[128], &lists[128] + 128), second);
}

// One drawn problem: positions up to `context`, with padding; requests and pages partly hostile.
struct Drawn {
  int64_t tokens, requests, table_width, pages;
  int32_t page, ratio;
  Guarded<int32_t> positions, ids, table;

  Drawn(testing::Rng& rng)
      : tokens(draw(rng, 0, 40)),
        requests(draw(rng, 0, 5)),
        table_width(draw(rng, 0, 6)),
        pages(draw(rng, 1, 20)),
        page(static_cast<int32_t>(draw(rng, 0, 1) ? 64 : draw(rng, 1, 70))),
        ratio(draw(rng, 0, 1) ? 4 : 128),
        positions(tokens),
        ids(tokens),
        table(requests * table_width) {
    const auto bad_pages = testing::hostile(pages), bad = testing::hostile(requests);
    for (int32_t& p : positions)
      p = static_cast<int32_t>(draw(rng, 0, 9) == 0 ? draw(rng, -3, -1) : draw(rng, 0, 1500));
    if (tokens > 0 && draw(rng, 0, 5) == 0) positions[0] = INT32_MAX;
    if (tokens > 1 && draw(rng, 0, 5) == 0) positions[1] = INT32_MIN;
    for (int32_t& r : ids)
      r = draw(rng, 0, 9) == 0 || requests == 0 ? bad[draw(rng, 0, bad.size() - 1)]
                                                : static_cast<int32_t>(draw(rng, 0, requests - 1));
    for (int32_t& t : table)
      t = draw(rng, 0, 9) == 0 ? bad_pages[draw(rng, 0, bad_pages.size() - 1)]
                               : static_cast<int32_t>(draw(rng, 0, pages - 1));
  }
  Tensor table_view() { return tensor(table.data(), {requests, table_width}); }
  int64_t slot(int64_t t, int64_t index) const {
    if (ids[t] < 0 || ids[t] >= requests || index / page >= table_width) return -1;
    const int64_t found = table[ids[t] * table_width + index / page];
    return found < 0 || found >= pages ? -1 : found * page + index % page;
  }
};

TEST_P(Lists, DrawnSlots) {
  testing::Rng rng(11);
  for (int round = 0; round < 60; ++round) {
    Drawn d(rng);
    const int64_t room = d.tokens + draw(rng, 0, 9);
    Guarded<int64_t> slots(room);
    compressed_slots({.positions = vec(d.positions),
                      .requests = vec(d.ids),
                      .block_table = d.table_view(),
                      .ratio = d.ratio,
                      .page = d.page,
                      .pages = d.pages,
                      .slots = tensor(slots.data(), {room}),
                      .target = target});
    ASSERT_TRUE(testing::device_finished());
    for (int64_t t = 0; t < room; ++t) {
      const int64_t p = t < d.tokens ? d.positions[t] : -1;
      const int64_t want = p >= 0 && (p + 1) % d.ratio == 0 ? d.slot(t, p / d.ratio) : -1;
      EXPECT_EQ(slots[t], want) << "token " << t << " position " << p;
    }
  }
}

TEST_P(Lists, DrawnC128aAndWindow) {
  testing::Rng rng(12);
  for (int round = 0; round < 60; ++round) {
    Drawn d(rng);
    const int64_t width = draw(rng, 1, 400), decodes = draw(rng, 0, d.tokens);
    const int32_t window = static_cast<int32_t>(draw(rng, 1, width));
    Guarded<int32_t> lists(d.tokens * width), lengths(d.tokens);
    const Tensor out = tensor(lists.data(), {d.tokens, width});
    const auto expect = [&](auto&& entry, auto&& length, const char* what) {
      for (int64_t t = 0; t < d.tokens; ++t) {
        Ints want;
        for (int64_t k = 0; k < length(t); ++k) want.push_back(static_cast<int32_t>(entry(t, k)));
        want.resize(width, -1);
        EXPECT_EQ(Ints(lists.data() + t * width, lists.data() + (t + 1) * width), want)
            << what << ", token " << t << " position " << d.positions[t];
        EXPECT_EQ(lengths[t], length(t)) << what << ", token " << t;
      }
    };
    c128a_lists({.positions = vec(d.positions),
                 .requests = vec(d.ids),
                 .block_table = d.table_view(),
                 .ratio = d.ratio,
                 .page = d.page,
                 .pages = d.pages,
                 .decode_tokens = decodes,
                 .lists = out,
                 .lengths = vec(lengths),
                 .target = target});
    ASSERT_TRUE(testing::device_finished());
    const auto states = [&](int64_t t) {
      return d.positions[t] < 0 ? 0 : std::min((int64_t{d.positions[t]} + 1) / d.ratio, width);
    };
    expect([&](int64_t t, int64_t k) { return t < decodes ? d.slot(t, k) : k; }, states, "c128a");
    const auto length = [&](int64_t t) {
      return d.positions[t] < 0 ? 0 : std::min<int64_t>(int64_t{d.positions[t]} + 1, window);
    };
    const auto position = [&](int64_t t, int64_t k) { return d.positions[t] - length(t) + 1 + k; };
    WindowListsArgs args{.positions = vec(d.positions),
                         .window = window,
                         .lists = out,
                         .lengths = vec(lengths),
                         .target = target};
    window_lists(args);
    ASSERT_TRUE(testing::device_finished());
    expect(position, length, "positions");
    args.requests = vec(d.ids);
    args.block_table = d.table_view();
    args.page = d.page;
    args.pages = d.pages;
    window_lists(args);
    ASSERT_TRUE(testing::device_finished());
    expect([&](int64_t t, int64_t k) { return d.slot(t, position(t, k)); }, length, "slots");
  }
}

TEST_P(Lists, DrawnCombined) {
  testing::Rng rng(13);
  for (int round = 0; round < 60; ++round) {
    Drawn d(rng);
    const int64_t width = draw(rng, 0, 300);
    const int32_t window = static_cast<int32_t>(draw(rng, 0, 130));
    const int32_t n = static_cast<int32_t>(draw(rng, 0, 400));
    // Now and then rows so large that the later requests leave int32.
    const int32_t m =
        draw(rng, 0, 4) == 0 ? INT32_MAX - 100 : static_cast<int32_t>(n + draw(rng, 0, 300));
    Guarded<int32_t> topk(d.tokens * width), seq(d.requests), gathered(d.requests);
    const auto bad = testing::hostile(n);
    for (int32_t& id : topk)
      id = draw(rng, 0, 9) == 0 ? bad[draw(rng, 0, bad.size() - 1)]
                                : static_cast<int32_t>(draw(rng, 0, std::max(n, 1)));
    for (int64_t r = 0; r < d.requests; ++r) {
      seq[r] = static_cast<int32_t>(draw(rng, 0, 9) == 0 ? INT32_MIN : draw(rng, 0, 1500));
      gathered[r] = static_cast<int32_t>(draw(rng, 0, 9) == 0 ? INT32_MAX : draw(rng, -2, 300));
    }
    const int64_t columns = round_up(width + window, 128) + draw(rng, 0, 5);
    Guarded<int32_t> lists(d.tokens * columns), lengths(d.tokens);
    combined_lists({.topk = tensor(topk.data(), {d.tokens, width}),
                    .positions = vec(d.positions),
                    .requests = vec(d.ids),
                    .seq_lens = vec(seq),
                    .gather_lens = vec(gathered),
                    .ratio = d.ratio,
                    .window = window,
                    .compressed = n,
                    .rows = m,
                    .lists = tensor(lists.data(), {d.tokens, columns}),
                    .lengths = vec(lengths),
                    .target = target});
    ASSERT_TRUE(testing::device_finished());
    for (int64_t t = 0; t < d.tokens; ++t) {
      const int64_t pos = d.positions[t], r = d.ids[t];
      Ints want;
      if (pos >= 0 && r >= 0 && r < d.requests) {
        const auto put = [&](int64_t local, int64_t lo, int64_t hi) {
          const int64_t row = r * m + local;
          const bool ok = local >= lo && local < std::min<int64_t>(hi, m) && row <= INT32_MAX;
          want.push_back(ok ? static_cast<int32_t>(row) : -1);
        };
        for (int64_t k = 0; k < std::min((pos + 1) / d.ratio, width); ++k)
          put(topk[t * width + k], 0, n);
        for (int64_t p = std::max<int64_t>(pos - window + 1, 0); p <= pos; ++p)
          put(n + p - (int64_t{seq[r]} - gathered[r]), n, int64_t{n} + gathered[r]);
      }
      EXPECT_EQ(lengths[t], static_cast<int32_t>(want.size())) << "token " << t;
      want.resize(columns, -1);
      EXPECT_EQ(Ints(lists.data() + t * columns, lists.data() + (t + 1) * columns), want)
          << "token " << t << " position " << pos << " request " << r << " rows " << m;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Lists, ::testing::ValuesIn(testing::kernels("lists")),
                         [](const auto& info) { return info.param; });

TEST(ListErrors, NameTheArgument) {
  Guarded<int32_t> three(Ints{1, 2, 3}), two(Ints{1, 2}), table(Ints{0, 1}), lists(3 * 256);
  Guarded<int32_t> lengths(3), topk(3 * 4);
  Guarded<int64_t> slots(4);
  const Tensor t = tensor(table.data(), {1, 2}), out = tensor(lists.data(), {3, 256});

  const CompressedSlotsArgs s{.positions = vec(three),
                              .requests = vec(three),
                              .block_table = t,
                              .pages = 4,
                              .slots = tensor(slots.data(), {4})};
  const auto slot_error = [&](auto change, std::initializer_list<const char*> words,
                              ErrorCode code = ErrorCode::kInvalidArgument) {
    CompressedSlotsArgs a = s;
    change(a);
    expect_error([&] { compressed_slots(a); }, code, words);
  };
  slot_error([&](auto& a) { a.requests = vec(two); }, {"compressed_slots", "requests", "[3]"});
  slot_error([&](auto& a) { a.requests = {}; }, {"requests", "nothing"});
  slot_error([&](auto& a) { a.ratio = 0; }, {"ratio", "0"});
  slot_error([&](auto& a) { a.page = 0; }, {"page", "0"});
  slot_error([&](auto& a) { a.pages = -1; }, {"pages", "-1"});
  slot_error([&](auto& a) { a.pages = 0; }, {"compressed_slots", "pages", "1 to", "found 0"});
  slot_error([&](auto& a) { a.slots = tensor(slots.data(), {2}); }, {"slots", "at least 3", "2"});
  slot_error([&](auto& a) { a.slots.dtype = DType::kI32; }, {"slots", "int64", "int32"});
  slot_error([&](auto& a) { a.block_table = {}; }, {"block_table", "nothing"});
  slot_error([&](auto& a) { a.target.kernel = "none"; }, {"lists", "no kernel fits", "reference"},
             ErrorCode::kUnsupported);

  const auto c128a_error = [&](auto change, std::initializer_list<const char*> words) {
    C128aListsArgs a{.positions = vec(three),
                     .requests = vec(three),
                     .block_table = t,
                     .pages = 4,
                     .lists = out,
                     .lengths = vec(lengths)};
    change(a);
    expect_invalid([&] { c128a_lists(a); }, words);
  };
  c128a_error([&](auto& a) { a.decode_tokens = 4; }, {"c128a_lists", "decode_tokens", "0 to 3"});
  c128a_error([&](auto& a) { a.lists.shape[0] = 2; }, {"lists", "[3, any]", "[2, 256]"});
  c128a_error([&](auto& a) { a.lists.stride[0] = 255; }, {"lists", "overlap"});
  c128a_error([&](auto& a) { a.lengths = vec(two); }, {"lengths", "[3]", "[2]"});
  c128a_error([&](auto& a) { a.pages = INT32_MAX; }, {"pages"});
  c128a_error([&](auto& a) { a.pages = 0; }, {"c128a_lists", "pages", "1 to", "found 0"});
  expect_invalid([] { c128a_width(-2); }, {"c128a_width", "max_position", "-2"});
  expect_invalid([] { c128a_width(5, 0); }, {"ratio"});
  expect_invalid([] { c128a_width(INT32_MAX, 1); }, {"max_position", "2147483647"});

  const auto window_error = [&](auto change, std::initializer_list<const char*> words) {
    WindowListsArgs a{.positions = vec(three), .lists = out, .lengths = vec(lengths)};
    change(a);
    expect_invalid([&] { window_lists(a); }, words);
  };
  window_error([&](auto& a) { a.window = 257; }, {"window_lists", "lists", "257 to", "256"});
  window_error([&](auto& a) { a.window = 0; }, {"window", "0"});
  window_error([&](auto& a) { a.block_table = t; }, {"requests", "nothing"});
  window_error([&](auto& a) { a.block_table = t, a.requests = vec(three); },
               {"window_lists", "pages", "1 to", "found 0"});

  const auto combined_error = [&](auto change, std::initializer_list<const char*> words) {
    CombinedListsArgs a{.topk = tensor(topk.data(), {3, 4}),
                        .positions = vec(three),
                        .requests = vec(three),
                        .seq_lens = vec(two),
                        .gather_lens = vec(two),
                        .compressed = 4,
                        .rows = 9,
                        .lists = out,
                        .lengths = vec(lengths)};
    change(a);
    expect_invalid([&] { combined_lists(a); }, words);
  };
  combined_error(
      [&](auto& a) {
        a.lists = tensor(lists.data(), {3, 132});
      },
      {"combined_lists", "lists", "256 to", "132"});
  combined_error([&](auto& a) { a.gather_lens = vec(three); }, {"gather_lens", "[2]", "[3]"});
  combined_error([&](auto& a) { a.topk.shape[0] = 2; }, {"topk", "[3, any]"});
  combined_error([&](auto& a) { a.compressed = 10; }, {"compressed", "0 to 9", "10"});
  combined_error([&](auto& a) { a.rows = -1; }, {"rows", "-1"});
  combined_error([&](auto& a) { a.ratio = 0; }, {"ratio"});
  combined_error([&](auto& a) { a.window = -1; }, {"window", "-1"});
  for (int32_t x : lists) ASSERT_EQ(x, static_cast<int32_t>(0xcdcdcdcd));  // nothing was written
  for (int64_t x : slots) ASSERT_EQ(x, static_cast<int64_t>(0xcdcdcdcdcdcdcdcd));
}

}  // namespace
}  // namespace winnow
