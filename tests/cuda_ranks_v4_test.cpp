// V4 over ranks on CUDA, as threads with a stream each on one device: its context and its heads,
// with one set of bits, within a bound of one rank.
#include <gtest/gtest.h>

#ifndef WINNOW_WITH_CUDA

TEST(CudaRanksV4, AreNotInThisBuild) { GTEST_SKIP() << "built without CUDA (WINNOW_CUDA=OFF)"; }

#else

#include "cuda/device.h"
#include "device_ranks.h"
#include "machine.h"
#include "near_ranks.h"
#include "ranks_v4_problem.h"
#include "testing.h"

namespace winnow {
namespace {

using testing::DeviceRanks;
using testing::OwnDevice;
using testing::RankProblemV4;
using testing::same_bits;
using Kind = RankProblemV4::Kind;
using Result = RankProblemV4::Result;

// C4A; C128A, whose states are all attended to; a layer with a window alone.
constexpr Kind kKinds[] = {{4, 16, true}, {8, 32, false}, {4, 0, false}};

Result run_on(RankProblemV4 problem, const OwnDevice& device, const Parallel& parallel) {
  problem.kernel = nullptr;
  problem.device = device.get();
  return problem.run(parallel);
}

std::vector<Result> over_ranks(const RankProblemV4& problem, int32_t ranks, Parallel parallel) {
  std::vector<Result> results(ranks);
  DeviceRanks group(ranks);
  const auto errors = group.run([&](Communicator& comm) {
    const OwnDevice device(DeviceKind::kCuda);
    Parallel own = parallel;
    own.comm = &comm;
    results[comm.rank()] = run_on(problem, device, own);
  });
  EXPECT_EQ(errors, std::vector<std::string>(ranks));
  return results;
}

double expect_near(const RankProblemV4& problem, const Result& got, const Result& whole,
                   int32_t rank, int32_t ranks) {
  return testing::expect_near(
      {problem.tokens, RankProblemV4::kHeads, RankProblemV4::kDim, rank, ranks}, got, whole);
}

class CudaRanksV4 : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    const std::string why =
        testing::allowed_skip(internal::cuda::missing(), testing::expects_device());
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(CudaRanksV4, ContextAgreesWithOneRank) {
  const int32_t ranks = GetParam();
  const OwnDevice device(DeviceKind::kCuda);
  for (const Kind& kind : kKinds) {
    const RankProblemV4 problem(testing::rank_batch(), kind);
    const Result whole = run_on(problem, device, {});
    for (const int32_t interleave : {1, 7, 64}) {
      const Parallel parallel{.spread = Spread::kContext, .interleave = interleave};
      const auto results = over_ranks(problem, ranks, parallel);
      const auto again = over_ranks(problem, ranks, parallel);
      double share = 0;
      for (int32_t r = 0; r < ranks; ++r) {
        share += expect_near(problem, results[r], whole, r, ranks) / ranks;
        EXPECT_TRUE(same_bits(results[r].out, again[r].out)) << "rank " << r;
        EXPECT_TRUE(same_bits(results[r].lse, again[r].lse)) << "rank " << r;
      }
      if (HasFailure())
        FAIL() << "ratio " << kind.ratio << ", " << kind.picked << " states, interleave "
               << interleave;
      printf("ranks %d, %d states, interleave %2d: %.4f of the outputs have one rank's bits\n",
             ranks, kind.picked, interleave, share);
      EXPECT_GE(share, testing::kOneRanksBits);
    }
  }
}

// With as many tokens as ranks the rows of the score are shared out, with fewer its keys.
TEST_P(CudaRanksV4, HeadsAgreeWithOneRank) {
  const int32_t ranks = GetParam();
  const OwnDevice device(DeviceKind::kCuda);
  for (const Kind& kind : kKinds)
    for (const auto& batch : {testing::rank_batch(), std::vector<testing::RankRequest>{{1, 150}}}) {
      const RankProblemV4 problem(batch, kind);
      const Result whole = run_on(problem, device, {});
      const auto results = over_ranks(problem, ranks, {.spread = Spread::kHeads});
      double share = 0;
      for (int32_t r = 0; r < ranks; ++r)
        share += expect_near(problem, results[r], whole, r, ranks) / ranks;
      if (HasFailure()) FAIL() << "ratio " << kind.ratio << ", " << kind.picked << " states";
      printf("ranks %d, %d states, heads: %.4f of the outputs have one rank's bits\n", ranks,
             kind.picked, share);
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaRanksV4, ::testing::Values(1, 2, 3, 4, 8));

}  // namespace
}  // namespace winnow

#endif
