// locate: every kernel x every case against a direct statement of the formula, hostile ids
// included.
#include "winnow/locate.h"

#include <optional>

#include "locate/locate_cases.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using internal::locate::Case;
using testing::draw;
using testing::Guarded;

struct Problem {
  Case c;
  Guarded<int32_t> ids, requests, table, prefill_requests, starts;

  explicit Problem(const Case& c_)
      : c(c_),
        ids(c.tokens * c.width),
        requests(c.tokens),
        table(c.requests * c.table_width),
        prefill_requests(c.tokens),
        starts(3) {
    testing::Rng rng(c.tokens * 1000 + c.width);
    const int64_t length = c.table_width * c.page;
    const auto bad = testing::hostile(length), bad_pages = testing::hostile(c.pages);
    for (int32_t& id : ids)
      id = static_cast<int32_t>(draw(rng, 0, 9) == 0 || length == 0
                                    ? bad[draw(rng, 0, bad.size() - 1)]
                                    : draw(rng, 0, length - 1));
    for (int32_t& r : requests) r = static_cast<int32_t>(draw(rng, -1, c.requests));
    for (int32_t& t : table)
      t = static_cast<int32_t>(draw(rng, 0, 15) == 0 || c.pages == 0
                                   ? bad_pages[draw(rng, 0, bad_pages.size() - 1)]
                                   : draw(rng, 0, c.pages - 1));
    for (int64_t t = 0; t < c.tokens; ++t)
      prefill_requests[t] = static_cast<int32_t>(t % 5) - 1;  // 3 is too large
    starts[0] = 0;
    starts[1] = 100;
    starts[2] = -7;
  }

  LocateArgs args() {
    LocateArgs a{.ids = tensor(ids.data(), {c.tokens, c.width}),
                 .requests = tensor(requests.data(), {c.tokens}),
                 .block_table = tensor(table.data(), {c.requests, c.table_width}),
                 .page = c.page,
                 .pages = c.pages,
                 .rows_per_page = c.rows_per_page,
                 .parallel = {c.world, c.rank, c.interleave, c.compact}};
    if (c.workspace) {
      a.prefill_requests = tensor(prefill_requests.data(), {c.tokens});
      a.workspace_starts = tensor(starts.data(), {3});
      a.workspace_rows = 300;
    }
    return a;
  }

  // The formula of the specification, written out for one id.
  std::optional<int64_t> expected(int64_t t, int64_t id) const {
    if (id < 0) return {};
    if (c.world > 1) {
      if ((id / c.interleave) % c.world != c.rank) return {};
      id = id / (int64_t{c.world} * c.interleave) * c.interleave + id % c.interleave;
    }
    if (c.workspace && prefill_requests[t] >= 0) {
      if (prefill_requests[t] >= 3) return {};
      const int64_t start = starts[prefill_requests[t]];
      if (start < 0 || start + id >= 300) return {};
      return start + id;
    }
    if (requests[t] < 0 || requests[t] >= c.requests || id / c.page >= c.table_width) return {};
    const int64_t found = table[requests[t] * c.table_width + id / c.page];
    if (found < 0 || found >= c.pages) return {};
    return found * (c.rows_per_page ? c.rows_per_page : c.page) + id % c.page;
  }
};

class LocateTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(LocateTest, MatchesTheFormula) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("locate", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  Guarded<int32_t> slots(c.tokens * c.width), counts(c.tokens);
  LocateArgs a = p.args();
  a.slots = tensor(slots.data(), {c.tokens, c.width});
  a.counts = tensor(counts.data(), {c.tokens});
  a.target = testing::target("locate", kernel);
  locate(a);
  ASSERT_TRUE(testing::device_finished());
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::vector<int32_t> want;
    int32_t count = 0;
    for (int64_t k = 0; k < c.width; ++k) {
      const auto e = p.expected(t, p.ids[t * c.width + k]);
      count += e.has_value();
      if (e || !c.compact) want.push_back(static_cast<int32_t>(e.value_or(-1)));
    }
    want.resize(c.width, -1);
    const std::vector<int32_t> got(slots.data() + t * c.width, slots.data() + (t + 1) * c.width);
    EXPECT_EQ(got, want) << "token " << t;
    EXPECT_EQ(counts[t], count) << "token " << t;
  }
  // In place gives the same.
  a.slots = a.ids;
  locate(a);
  ASSERT_TRUE(testing::device_finished());
  EXPECT_EQ(p.ids.values(), slots.values());
}

INSTANTIATE_TEST_SUITE_P(Kernels, LocateTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("locate")),
                                            ::testing::ValuesIn(internal::locate::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

TEST(LocateErrors, NameTheArgument) {
  Problem p(internal::locate::cases()[0]);
  Guarded<int32_t> slots(15);
  LocateArgs good = p.args();
  good.slots = tensor(slots.data(), {3, 5});
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    LocateArgs a = good;
    change(a);
    testing::expect_error([&] { locate(a); }, code, words);
  };
  expect([](LocateArgs& a) { a.requests.shape[0] = 2; }, {"locate", "requests", "[3]", "[2]"});
  expect([](LocateArgs& a) { a.ids.dtype = DType::kI64; }, {"ids", "int32", "int64"});
  expect([](LocateArgs& a) { a.ids.data = nullptr; }, {"ids", "null"});
  expect([](LocateArgs& a) { a.slots = {}; }, {"slots", "nothing"});
  expect([](LocateArgs& a) { a.slots.stride[0] = 0; }, {"slots", "overlap"});
  expect([](LocateArgs& a) { a.page = 0; }, {"page", "found 0"});
  expect([](LocateArgs& a) { a.pages = int64_t{1} << 40; }, {"pages"});
  expect([](LocateArgs& a) { a.pages = 0; }, {"locate", "pages", "1 to", "found 0"});  // forgotten
  expect([](LocateArgs& a) { a.parallel = {.world = 2, .rank = 2}; },
         {"parallel.rank", "0 to 1", "2"});
  expect([](LocateArgs& a) { a.target.kernel = "fastest"; },
         {"locate", "no kernel fits", "simd", "reference"}, ErrorCode::kUnsupported);
  for (int32_t s : slots) EXPECT_EQ(s, static_cast<int32_t>(0xcdcdcdcd));  // nothing was written
}

}  // namespace
}  // namespace winnow
