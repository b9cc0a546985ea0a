// V4 over ranks, as threads, against one rank. Context: windows and compressed states attended to
// once over all ranks, one softmax and one sink. Heads: one rank's bits.
#include <cmath>
#include <cstring>

#include "ranks_v4_problem.h"
#include "testing.h"
#include "thread_ranks.h"

namespace winnow {
namespace {

using testing::RankProblemV4;
using tools::ThreadRanks;
using Kind = RankProblemV4::Kind;

// C4A; C128A, whose states are all attended to; a layer with a window alone.
constexpr Kind kKinds[] = {{4, 16, true}, {8, 32, false}, {4, 0, false}};

class RanksV4 : public ::testing::TestWithParam<int32_t> {};

TEST_P(RanksV4, ContextAgreesWithOneRank) {
  const int32_t ranks = GetParam();
  for (const Kind& kind : kKinds)
    for (const int32_t interleave : {1, 7, 64}) {
      SCOPED_TRACE(::testing::Message() << "ratio " << kind.ratio << ", " << kind.picked
                                        << " states, interleave " << interleave);
      const RankProblemV4 problem(testing::rank_batch(), kind);
      const RankProblemV4::Result whole = problem.run({});
      ThreadRanks group(ranks);
      int64_t equal = 0, all = 0;
      std::vector<RankProblemV4::Result> results(ranks);
      const auto errors = group.run([&](Communicator& comm) {
        results[comm.rank()] =
            problem.run({.comm = &comm, .spread = Spread::kContext, .interleave = interleave});
      });
      ASSERT_EQ(errors, std::vector<std::string>(ranks));
      const int64_t own = RankProblemV4::kHeads / ranks, d = RankProblemV4::kDim;
      for (int32_t r = 0; r < ranks; ++r)
        for (int64_t t = 0; t < problem.tokens; ++t)
          for (int64_t h = 0; h < own; ++h) {
            const int64_t at = t * own + h, from = t * RankProblemV4::kHeads + r * own + h;
            ASSERT_NEAR(results[r].lse[at], whole.lse[from],
                        2e-6f * (1 + std::abs(whole.lse[from])));
            for (int64_t j = 0; j < d; ++j) {
              const bf16 x = results[r].out[at * d + j], y = whole.out[from * d + j];
              equal += x.bits == y.bits;
              ++all;
              // As in RanksTest: fp32 sums 2^-20 of the largest value (0.2) apart, then rounded.
              ASSERT_LE(std::abs(to_float(x) - to_float(y)),
                        0x1p-7f * std::abs(to_float(y)) + 0.2f * 0x1p-20f);
            }
          }
      const double share = static_cast<double>(equal) / static_cast<double>(all);
      EXPECT_GE(share, 0.999);
      if (ranks == 1) continue;
      // Candidates of C4A, and one combine.
      const int64_t others = ranks - 1, each = (problem.tokens + ranks - 1) / ranks;
      const int64_t k = kind.indexed ? kind.picked : 0;
      const bool owner = 8 * k * (problem.tokens - each) * others > 32 << 10;
      ASSERT_FALSE(owner);
      const ThreadRanks::Counted want{
          .gathers = kind.indexed ? 1 : 0,
          .all_to_alls = 1,
          .exchanges = 2,
          .gathered_bytes = 8 * k * problem.tokens * others,
          .all_to_all_bytes = (problem.tokens * own * 2052 + 15) / 16 * 16 * others};
      for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(group.counted(r), want);
    }
}

// With as many tokens as ranks the rows of the score are shared out, with fewer its keys.
TEST_P(RanksV4, HeadsHaveTheBitsOfOneRank) {
  const int32_t ranks = GetParam();
  for (const Kind& kind : kKinds)
    for (const auto& batch : {testing::rank_batch(), std::vector<testing::RankRequest>{{1, 150}}}) {
      const RankProblemV4 problem(batch, kind);
      const RankProblemV4::Result whole = problem.run({});
      ThreadRanks group(ranks);
      std::vector<RankProblemV4::Result> results(ranks);
      const auto errors = group.run([&](Communicator& comm) {
        results[comm.rank()] = problem.run({.comm = &comm, .spread = Spread::kHeads});
      });
      ASSERT_EQ(errors, std::vector<std::string>(ranks));
      const int64_t own = RankProblemV4::kHeads / ranks, row = own * RankProblemV4::kDim;
      for (int32_t r = 0; r < ranks; ++r)
        for (int64_t t = 0; t < problem.tokens; ++t) {
          const bf16* const want = whole.out.data() + (t * ranks + r) * row;
          const bf16* const got = results[r].out.data() + t * row;
          EXPECT_EQ(std::memcmp(got, want, row * sizeof(bf16)), 0) << "token " << t;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, RanksV4, ::testing::Values(1, 2, 3, 4, 8));

// Every list entry over all ranks once: what one rank lists, shared out.
TEST(RanksV4Lists, PartitionThoseOfOneRank) {
  constexpr int32_t kTokens = 5, kWindow = 12, kWide = 64;
  std::vector<int32_t> positions = {0, 5, 63, 200, -1}, requests = {0, 0, 0, 0, 0};
  std::vector<int32_t> table(60);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  const auto lists_of = [&](const Shard& shard, bool window) {
    std::vector<int32_t> lists(kTokens * kWide), lengths(kTokens);
    const Tensor where = tensor(lists.data(), {kTokens, kWide});
    const Tensor at = tensor(positions.data(), {kTokens}), of = tensor(requests.data(), {kTokens});
    const Tensor pages = tensor(table.data(), {1, 60}), counts = tensor(lengths.data(), {kTokens});
    if (window)
      window_lists({.positions = at,
                    .requests = of,
                    .block_table = pages,
                    .window = kWindow,
                    .page = 4,
                    .pages = 60,
                    .lists = where,
                    .lengths = counts,
                    .shard = shard});
    else
      c128a_lists({.positions = at,
                   .requests = of,
                   .block_table = pages,
                   .ratio = 4,
                   .page = 4,
                   .pages = 60,
                   .decode_tokens = kTokens,
                   .lists = where,
                   .lengths = counts,
                   .shard = shard});
    std::vector<std::vector<int32_t>> rows(kTokens);
    for (int32_t t = 0; t < kTokens; ++t)
      for (int32_t k = 0; k < kWide; ++k) {
        const int32_t entry = lists[t * kWide + k];
        EXPECT_EQ(entry >= 0, k < lengths[t]);
        // States are local, with an identity for a table: back to their numbers.
        if (entry >= 0)
          rows[t].push_back(window ? entry : static_cast<int32_t>(shard.global(entry)));
      }
    return rows;
  };
  for (const bool window : {false, true}) {
    const auto whole = lists_of({}, window);
    for (const int32_t world : {2, 3, 8})
      for (const int32_t interleave : {1, 7, 64}) {
        std::vector<std::vector<int32_t>> merged(kTokens);
        for (int32_t r = 0; r < world; ++r) {
          const auto part = lists_of({world, r, interleave}, window);
          for (int32_t t = 0; t < kTokens; ++t) {
            EXPECT_TRUE(std::is_sorted(part[t].begin(), part[t].end()));
            merged[t].insert(merged[t].end(), part[t].begin(), part[t].end());
          }
        }
        for (auto& row : merged) std::sort(row.begin(), row.end());
        EXPECT_EQ(merged, whole) << world << " ranks, interleave " << interleave;
      }
  }
}

}  // namespace
}  // namespace winnow
