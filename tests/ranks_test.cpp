// pipeline over ranks, as threads: the bits of one rank where heads are shared out, one set of bits
// and a bound where the context is, the bytes that docs/parallel.md names, and faults of one rank.
#include <chrono>
#include <cmath>
#include <cstring>

#include "core/formats.h"
#include "lone_rank.h"
#include "ranks_problem.h"
#include "testing.h"
#include "thread_ranks.h"

namespace winnow {
namespace {

using testing::RankProblem;
using tools::ThreadRanks;
using Result = RankProblem::Result;

std::vector<Result> over_ranks(const RankProblem& problem, ThreadRanks& group, int32_t ranks,
                               Parallel parallel) {
  std::vector<Result> results(ranks);
  const auto errors = group.run([&](Communicator& comm) {
    Parallel own = parallel;
    own.comm = &comm;
    results[comm.rank()] = problem.run(own);
  });
  EXPECT_EQ(errors, std::vector<std::string>(ranks));
  return results;
}

bool same_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0;
}

// The heads of a rank, from a result of all heads.
Result heads_of(const Result& whole, int64_t tokens, int32_t rank, int32_t ranks) {
  const int64_t own = RankProblem::kHeads / ranks;
  Result r;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = rank * own; h < (rank + 1) * own; ++h) {
      const auto row = whole.out.begin() + (t * RankProblem::kHeads + h) * RankProblem::kValue;
      r.out.insert(r.out.end(), row, row + RankProblem::kValue);
      r.lse.push_back(whole.lse[t * RankProblem::kHeads + h]);
    }
  return r;
}

class RanksTest : public ::testing::TestWithParam<int32_t> {};

// With as many tokens as ranks the rows of the score are shared out, with fewer its keys. The
// kernel computes every head by itself; those of AMX do not (docs/parallel.md).
TEST_P(RanksTest, HeadsHaveTheBitsOfOneRank) {
  const int32_t ranks = GetParam();
  for (const auto& batch : {testing::rank_batch(), std::vector<testing::RankRequest>{{1, 150}}}) {
    RankProblem problem(batch);
    problem.kernel = "simd";
    ThreadRanks group(ranks);
    const auto results = over_ranks(problem, group, ranks, {.spread = Spread::kHeads});
    const Result whole = problem.run({});
    for (int32_t r = 0; r < ranks; ++r) {
      const Result want = heads_of(whole, problem.tokens, r, ranks);
      EXPECT_TRUE(same_bits(results[r].out, want.out)) << "rank " << r;
      EXPECT_EQ(results[r].lse, want.lse) << "rank " << r;
    }
    // The volume of docs/parallel.md: ids of every row, or candidates and ids of each rank's rows.
    if (ranks == 1) continue;
    const int64_t each = (problem.tokens + ranks - 1) / ranks, k = RankProblem::kTopk;
    ThreadRanks::Counted want{.gathers = 1, .exchanges = 2};
    want.gathered_bytes =
        problem.tokens >= ranks ? 4 * k * each * (ranks - 1) : 8 * k * problem.tokens * (ranks - 1);
    for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(group.counted(r), want);
  }
}

// With the kernel that sums in fp32; others round weights, to bf16 for instance, which differ where
// the largest logit of a part does.
TEST_P(RanksTest, ContextAgreesWithOneRank) {
  const int32_t ranks = GetParam();
  RankProblem problem(testing::rank_batch());
  problem.kernel = "simd";
  const Result whole = problem.run({});
  for (const int32_t interleave : {1, 7, 64}) {
    ThreadRanks group(ranks);
    const auto results =
        over_ranks(problem, group, ranks, {.spread = Spread::kContext, .interleave = interleave});
    int64_t equal = 0, all = 0;
    for (int32_t r = 0; r < ranks; ++r) {
      const Result want = heads_of(whole, problem.tokens, r, ranks);
      ASSERT_EQ(results[r].out.size(), want.out.size());
      for (size_t i = 0; i < want.out.size(); ++i) {
        const float a = to_float(results[r].out[i]), b = to_float(want.out[i]);
        equal += results[r].out[i].bits == want.out[i].bits;
        // Two fp32 sums differ by 2^-20 of the largest value (0.2). Rounded to bf16 they are equal
        // or neighbours, which lie up to 2^-7 of the value apart.
        ASSERT_LE(std::abs(a - b), 0x1p-7f * std::abs(b) + 0.2f * 0x1p-20f) << "element " << i;
      }
      all += static_cast<int64_t>(want.out.size());
      for (size_t i = 0; i < want.lse.size(); ++i)
        ASSERT_NEAR(results[r].lse[i], want.lse[i], 2e-6f * (1 + std::abs(want.lse[i])));
    }
    const double share = static_cast<double>(equal) / static_cast<double>(all);
    RecordProperty("equal bits, interleave " + std::to_string(interleave), std::to_string(share));
    EXPECT_GE(share, 0.999) << "interleave " << interleave;
    if (ranks == 1) continue;
    // Candidates by owner, 8 bytes a row back, and the heads of every other rank with their lse.
    const int64_t each = (problem.tokens + ranks - 1) / ranks, k = RankProblem::kTopk;
    const int64_t others = ranks - 1, heads = RankProblem::kHeads / ranks;
    const bool gathered = 8 * k * (problem.tokens - each) * others <= 32 << 10;
    ThreadRanks::Counted want{.gathers = 1, .all_to_alls = gathered ? 1 : 2, .exchanges = 2};
    want.gathered_bytes = gathered ? 8 * k * problem.tokens * others : 8 * each * others;
    want.all_to_all_bytes = (gathered ? 0 : 8 * k * each * others) +
                            (problem.tokens * heads * 2052 + 15) / 16 * 16 * others;
    for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(group.counted(r), want);
  }
}

TEST_P(RanksTest, TheWireMayBeBf16) {
  const int32_t ranks = GetParam();
  RankProblem problem(testing::rank_batch());
  problem.kernel = "simd";
  const Result whole = problem.run({});
  ThreadRanks group(ranks);
  const auto results =
      over_ranks(problem, group, ranks, {.spread = Spread::kContext, .wire = Wire::kBf16});
  for (int32_t r = 0; r < ranks; ++r) {
    const Result want = heads_of(whole, problem.tokens, r, ranks);
    // Every part is rounded by 2^-9 of itself; parts are at most 0.2 and weigh 1 together.
    for (size_t i = 0; i < want.out.size(); ++i)
      ASSERT_LE(std::abs(to_float(results[r].out[i]) - to_float(want.out[i])),
                0.2f * 0x1p-8f + 0x1p-7f * std::abs(to_float(want.out[i])));
  }
}

// Rows of a whole result that a rank's share of the batch has.
Result tokens_of(const Result& whole, const std::vector<int32_t>& tokens) {
  constexpr int64_t kRow = RankProblem::kHeads * RankProblem::kValue;
  Result r;
  for (const int32_t t : tokens) {
    r.out.insert(r.out.end(), whole.out.begin() + t * kRow, whole.out.begin() + (t + 1) * kRow);
    const auto lse = whole.lse.begin() + t * RankProblem::kHeads;
    r.lse.insert(r.lse.end(), lse, lse + RankProblem::kHeads);
  }
  return r;
}

// A long prefill behind a prefix, one with fewer tokens than most groups have ranks, one that
// begins, decodes: some ranks have no token of some requests, and with one token all but one none
// at all.
std::vector<std::vector<testing::RankRequest>> prefills() {
  return {{{40, 150}, {2, 70}, {9, 9}, {1, 33}, {0, 20}}, {{1, 61}}, {{33, 90}}, {{7, 7}}};
}

// The most tokens of a rank: what every rank's block holds.
int64_t most_tokens(const RankProblem& problem, int32_t ranks, int32_t interleave) {
  size_t most = 0;
  for (int32_t r = 0; r < ranks; ++r)
    most = std::max(most, shard_batch(problem.batch(), {ranks, r, interleave}).tokens.size());
  return static_cast<int64_t>(most);
}

TEST_P(RanksTest, QueriesHaveTheBitsOfOneRank) {
  const int32_t ranks = GetParam();
  for (const auto& batch : prefills())
    for (const int32_t interleave : {1, 7, 64}) {
      const RankProblem problem(batch);
      ThreadRanks group(ranks);
      const auto results =
          over_ranks(problem, group, ranks, {.spread = Spread::kQueries, .interleave = interleave});
      const Result whole = problem.run({});
      for (int32_t r = 0; r < ranks; ++r) {
        const BatchShare share = shard_batch(problem.batch(), {ranks, r, interleave});
        const Result want = tokens_of(whole, share.tokens);
        EXPECT_TRUE(same_bits(results[r].out, want.out)) << "rank " << r;
        EXPECT_EQ(results[r].lse, want.lse) << "rank " << r;
        EXPECT_EQ(results[r].records, whole.records) << "rank " << r;
      }
      if (ranks == 1) continue;
      // 788 B of every new token, in blocks of one size.
      const int64_t most = most_tokens(problem, ranks, interleave);
      const ThreadRanks::Counted want{
          .gathers = 1, .exchanges = 2, .gathered_bytes = 788 * most * (ranks - 1)};
      for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(group.counted(r), want);
    }
}

// Where the positions divide evenly the volume is 788 f a token exactly.
TEST_P(RanksTest, RecordsTravelQuantised) {
  const int32_t ranks = GetParam();
  const RankProblem problem({{48, 144}});
  ThreadRanks group(ranks);
  over_ranks(problem, group, ranks, {.spread = Spread::kQueries, .interleave = 2});
  const int64_t want = ranks == 1 ? 0 : 788 * problem.tokens * (ranks - 1) / ranks;
  for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(group.counted(r).gathered_bytes, want);
}

// Caches hold a shard each; what they hold of the batch's sequences is gathered first.
TEST_P(RanksTest, QueriesOverShardedCachesHaveTheBitsOfOneRank) {
  const int32_t ranks = GetParam();
  for (const auto& batch : prefills())
    for (const int32_t interleave : {1, 7, 64}) {
      const RankProblem problem(batch);
      ThreadRanks group(ranks);
      const auto results =
          over_ranks(problem, group, ranks,
                     {.spread = Spread::kQueries, .interleave = interleave, .sharded = true});
      const Result whole = problem.run({});
      for (int32_t r = 0; r < ranks; ++r) {
        const BatchShare share = shard_batch(problem.batch(), {ranks, r, interleave});
        const Result want = tokens_of(whole, share.tokens);
        EXPECT_TRUE(same_bits(results[r].out, want.out)) << "rank " << r;
        EXPECT_EQ(results[r].lse, want.lse) << "rank " << r;
      }
      if (ranks == 1) continue;
      int64_t prefix = 0;
      for (const testing::RankRequest& r : problem.requests)
        if (r.query > 0) prefix += Shard{ranks, 0, interleave}.local_length(r.seq - r.query);
      const int64_t most = most_tokens(problem, ranks, interleave);
      const ThreadRanks::Counted want{.gathers = prefix > 0 ? 2 : 1,
                                      .exchanges = 2,
                                      .gathered_bytes = 788 * (most + prefix) * (ranks - 1)};
      for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(group.counted(r), want);
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, RanksTest, ::testing::Values(1, 2, 3, 4, 8));

TEST(Ranks, OneRankIsThePlainPath) {
  const RankProblem problem(testing::rank_batch());
  const Result whole = problem.run({});
  for (const Spread spread : {Spread::kHeads, Spread::kContext, Spread::kQueries}) {
    ThreadRanks group(1);
    const Result alone = over_ranks(problem, group, 1, {.spread = spread})[0];
    EXPECT_TRUE(same_bits(alone.out, whole.out));
    EXPECT_EQ(alone.lse, whole.lse);
    EXPECT_EQ(group.counted(0), ThreadRanks::Counted());
  }
}

TEST(Ranks, BatchesWithoutTokensSendNothing) {
  const RankProblem problem({{0, 40}, {0, 7}});
  ThreadRanks group(2);
  over_ranks(problem, group, 2, {.spread = Spread::kContext});
  EXPECT_EQ(group.counted(0), (ThreadRanks::Counted{.exchanges = 2}));
}

// What one rank of three does otherwise in a plan's constructor.
TEST(RanksFaults, PlansThatDiffer) {
  struct Fault {
    void (*change)(PlanOptions&);
    std::vector<std::string> words;
  };
  const Fault faults[] = {
      {[](PlanOptions& o) { o.topk = 16; }, {"plan: topk", "32 as rank 0 has", "16 on rank 1"}},
      {[](PlanOptions& o) { o.heads = 12; }, {"plan: heads", "24 as rank 0 has", "12 on rank 1"}},
      {[](PlanOptions& o) { o.split = SplitPolicy::kBalanced; }, {"plan: split", "rank 1"}},
      {[](PlanOptions& o) { o.parallel.interleave = 2; }, {"parallel.interleave", "rank 1"}},
      {[](PlanOptions& o) { o.parallel.wire = Wire::kBf16; }, {"parallel.wire", "rank 1"}},
      {[](PlanOptions& o) { o.target.kernel = "reference"; },
       {"every rank to run write=", "found reference on rank 1"}},
      {[](PlanOptions& o) { o.page = 0; }, {"page"}},
      {[](PlanOptions& o) { o.heads = 23; }, {"heads", "23"}},
  };
  const RankProblem problem(testing::rank_batch());
  for (const Fault& fault : faults) {
    ThreadRanks group(3);
    const auto errors = group.run([&](Communicator& comm) {
      PlanOptions o = problem.options({.comm = &comm, .spread = Spread::kContext});
      if (comm.rank() == 1) fault.change(o);
      Plan plan(o);
    });
    for (const std::string& e : errors)
      for (const std::string& word : fault.words)
        EXPECT_NE(e.find(word), std::string::npos) << "'" << word << "' is not in: " << e;
    EXPECT_EQ(errors[0], errors[2]);
    EXPECT_NE(errors[0].find("rank 1"), std::string::npos) << errors[0];
  }
}

// In refill(): other tokens, other lengths, a batch that one rank refuses. All may go on after it.
// Nothing is allocated for ranks that cannot be, nor are they told.
TEST(RanksFaults, ImpossibleNumbersOfRanksAreNamed) {
  const RankProblem problem(testing::rank_batch());
  for (const int32_t ranks : {kMaxRanks + 1, INT32_MAX, 0, -1, INT32_MIN}) {
    tools::LoneRank comm(ranks);
    for (const Spread spread : {Spread::kHeads, Spread::kContext, Spread::kQueries}) {
      PlanOptions o = problem.options({});
      o.parallel = {.comm = &comm, .spread = spread};
      std::string why;
      try {
        Plan plan(o);
      } catch (const Error& e) {
        why = e.what();
      }
      EXPECT_NE(why.find("plan: comm (ranks): expected 1 to 16384, found " + std::to_string(ranks)),
                std::string::npos)
          << why;
    }
  }
}

TEST(RanksFaults, BatchesThatDiffer) {
  const RankProblem problem(testing::rank_batch());
  ThreadRanks group(3);
  std::vector<std::vector<std::string>> texts(3);
  const auto errors = group.run([&](Communicator& comm) {
    Plan plan(problem.options({.comm = &comm, .spread = Spread::kContext}));
    const std::vector<int32_t> starts = {0, 1, 2}, lens = {9, 30};
    const std::vector<int32_t> others[] = {{9, 31}, {9, 30, 4}, {9, -1}};
    for (int i = 0; i < 4; ++i) {
      Batch batch{starts, lens};
      if (comm.rank() == 2 && i < 3) batch.seq_lens = others[i];
      if (comm.rank() == 2 && i == 3) batch.tokens = 5;
      try {
        plan.refill(batch);
        texts[comm.rank()].push_back("");
      } catch (const Error& e) {
        texts[comm.rank()].push_back(e.what());
      }
      EXPECT_EQ(plan.tokens(), 0);  // as it was
    }
    plan.refill({starts, lens});
    EXPECT_EQ(plan.tokens(), 2);
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
  const std::vector<const char*> words[] = {{"refill: batch (hash of its lengths)", "on rank 2"},
                                            {"rank 2 refusing", "seq_lens"},
                                            {"rank 2 refusing", "seq_lens"},
                                            {"refill: batch", "2 tokens as rank 0", "5 on rank 2"}};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(texts[0][i], texts[1][i]);
    for (const char* word : words[i])
      EXPECT_NE(texts[0][i].find(word), std::string::npos) << word << " is not in " << texts[0][i];
  }
}

// A rank that never comes, or throws between the collectives: the others give up by the deadline.
TEST(RanksFaults, MissingRanksAreNamed) {
  const RankProblem problem(testing::rank_batch());
  for (const int stage : {0, 1, 2}) {
    ThreadRanks group(3, std::chrono::milliseconds(300));
    const auto began = std::chrono::steady_clock::now();
    const auto errors = group.run([&](Communicator& comm) {
      if (stage == 0 && comm.rank() == 1) return;
      Plan plan(problem.options({.comm = &comm, .spread = Spread::kContext}));
      if (stage == 1 && comm.rank() == 1) return;
      plan.refill(problem.batch());
      if (stage == 2 && comm.rank() == 1) return;
      problem.run(plan);
    });
    const char* const stages[] = {"plan: ", "refill: ", "cut: "};
    for (const int r : {0, 2}) {
      EXPECT_NE(errors[r].find(stages[stage]), std::string::npos) << errors[r];
      EXPECT_NE(errors[r].find("no answer from rank 1"), std::string::npos) << errors[r];
    }
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
  }
}

// Every position has one place, and local order is global order.
TEST(Shard, IsAPartitionInOrder) {
  for (const int32_t world : {1, 2, 3, 8})
    for (const int32_t interleave : {1, 7, 64}) {
      std::vector<int64_t> next(world);
      for (int64_t p = 0; p < 700; ++p) {
        for (int32_t r = 0; r < world; ++r)
          ASSERT_EQ((Shard{world, r, interleave}.local_length(p)), next[r]) << p;
        const int32_t owner = Shard{world, 0, interleave}.owner(p);
        const Shard own{world, owner, interleave};
        ASSERT_EQ(own.local(p), next[owner]++);
        ASSERT_EQ(own.global(own.local(p)), p);
        ASSERT_TRUE(own.owns(p));
      }
    }
  // Far beyond 32 bits.
  const Shard far{1 << 20, 5, 1 << 10};
  const int64_t p = (int64_t{1} << 40) + 5 * 1024 + 3;
  EXPECT_EQ(far.owner(p), 5);
  EXPECT_EQ(far.global(far.local(p)), p);
}

}  // namespace
}  // namespace winnow
