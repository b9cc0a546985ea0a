// Prefill over ranks on CUDA, as threads with a stream each on one device: the records of one rank
// byte for byte, over whole and over sharded caches, and its outputs.
#include <gtest/gtest.h>

#ifndef WINNOW_WITH_CUDA

TEST(CudaQueries, AreNotInThisBuild) { GTEST_SKIP() << "built without CUDA (WINNOW_CUDA=OFF)"; }

#else

#include <cmath>
#include <cstring>

#include "cuda/device.h"
#include "device_ranks.h"
#include "machine.h"
#include "ranks_problem.h"
#include "testing.h"

namespace winnow {
namespace {

using testing::DeviceRanks;
using testing::OwnDevice;
using testing::RankProblem;
using tools::ThreadRanks;
using Result = RankProblem::Result;

class CudaQueries : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    const std::string why =
        testing::allowed_skip(internal::cuda::missing(), testing::expects_device());
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

// Outputs of a rank's tokens beside one rank's: how many have its bits; all are near.
int64_t equal_outputs(const Result& got, const Result& whole, const std::vector<int32_t>& tokens) {
  constexpr int64_t kRow = RankProblem::kHeads * RankProblem::kValue;
  EXPECT_EQ(got.out.size(), tokens.size() * kRow);
  int64_t equal = 0;
  for (size_t i = 0; i < got.out.size() && !::testing::Test::HasFailure(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const bf16 x = got.out[i], y = whole.out[tokens[at / kRow] * kRow + at % kRow];
    equal += x.bits == y.bits;
    // Either rounds weights by 2^-9 of the largest value (0.2), then the output to bf16. A wrong id
    // moves an output by far more.
    const float most = 4 * 0x1p-9f * 0.2f + 0x1p-7f * std::abs(to_float(y));
    EXPECT_LE(std::abs(to_float(x) - to_float(y)), most) << "element " << i;
  }
  return equal;
}

TEST_P(CudaQueries, AgreeWithOneRank) {
  const int32_t ranks = GetParam();
  const std::vector<std::vector<testing::RankRequest>> batches = {
      {{40, 150}, {2, 70}, {9, 9}, {1, 33}, {0, 20}}, {{1, 61}}, {{7, 7}}};
  const OwnDevice device(DeviceKind::kCuda);
  for (const auto& batch : batches)
    for (const int32_t interleave : {1, 7, 64})
      for (const bool sharded : {false, true}) {
        RankProblem problem(batch);
        problem.device = device.get();
        const Result whole = problem.run(Parallel{});
        DeviceRanks group(ranks);
        std::vector<Result> results(ranks);
        const auto errors = group.run([&](Communicator& comm) {
          const OwnDevice own(DeviceKind::kCuda);
          RankProblem mine = problem;
          mine.device = own.get();
          results[comm.rank()] = mine.run({.comm = &comm,
                                           .spread = Spread::kQueries,
                                           .interleave = interleave,
                                           .sharded = sharded});
        });
        ASSERT_EQ(errors, std::vector<std::string>(ranks));
        int64_t equal = 0;
        for (int32_t r = 0; r < ranks; ++r) {
          const Shard shard{ranks, r, interleave};
          equal += equal_outputs(results[r], whole, shard_batch(problem.batch(), shard).tokens);
          if (!sharded || ranks == 1) {
            EXPECT_EQ(results[r].records, whole.records) << "rank " << r;
          }
        }
        ASSERT_FALSE(HasFailure()) << "interleave " << interleave << ", sharded " << sharded;
        // The same kernel over the same pages gives the same bits.
        const auto all = static_cast<int64_t>(whole.out.size());
        if (!sharded) {
          EXPECT_EQ(equal, all) << "interleave " << interleave;
        }
        printf("ranks %d, interleave %2d, sharded %d: %.4f of the outputs have one rank's bits\n",
               ranks, interleave, sharded, static_cast<double>(equal) / static_cast<double>(all));
      }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaQueries, ::testing::Values(1, 2, 3, 8));

}  // namespace
}  // namespace winnow

#endif
