// pipeline over ranks on CUDA, as threads with a stream each on one device: one set of bits, a
// bound against one rank, the bytes that docs/parallel.md names, faults of one rank, and stream
// capture.
#include <gtest/gtest.h>

#ifndef WINNOW_WITH_CUDA

TEST(CudaRanks, AreNotInThisBuild) { GTEST_SKIP() << "built without CUDA (WINNOW_CUDA=OFF)"; }

#else

#include "cuda/device.h"
#include "device_ranks.h"
#include "machine.h"
#include "near_ranks.h"
#include "ranks_problem.h"
#include "testing.h"
#include "winnow/cut.h"

namespace winnow {
namespace {

using testing::DeviceRanks;
using testing::OwnDevice;
using testing::RankProblem;
using testing::same_bits;
using tools::ThreadRanks;
using Result = RankProblem::Result;

// For GTEST_SKIP; where a device was promised the test fails.
std::string why_no_device() {
  return testing::allowed_skip(internal::cuda::missing(), testing::expects_device());
}

Result run_on(RankProblem problem, const OwnDevice& device, const Parallel& parallel,
              SplitPolicy split) {
  problem.device = device.get();
  return problem.run(parallel, split);
}

std::vector<Result> over_ranks(const RankProblem& problem, DeviceRanks& group, int32_t ranks,
                               Parallel parallel, SplitPolicy split = SplitPolicy::kFixed) {
  std::vector<Result> results(ranks);
  const auto errors = group.run([&](Communicator& comm) {
    const OwnDevice device(DeviceKind::kCuda);
    Parallel own = parallel;
    own.comm = &comm;
    results[comm.rank()] = run_on(problem, device, own, split);
  });
  EXPECT_EQ(errors, std::vector<std::string>(ranks));
  return results;
}

double expect_near(const RankProblem& problem, const Result& got, const Result& whole, int32_t rank,
                   int32_t ranks) {
  return testing::expect_near(
      {problem.tokens, RankProblem::kHeads, RankProblem::kValue, rank, ranks}, got, whole);
}

class CudaRanks : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(CudaRanks, ContextAgreesWithOneRank) {
  const int32_t ranks = GetParam();
  const RankProblem problem(testing::rank_batch());
  const OwnDevice device(DeviceKind::kCuda);
  for (const SplitPolicy split : {SplitPolicy::kFixed, SplitPolicy::kBalanced}) {
    const Result whole = run_on(problem, device, {}, split);
    for (const int32_t interleave : {1, 7, 64})
      for (const Wire wire : {Wire::kF32, Wire::kBf16}) {
        const Parallel parallel{.spread = Spread::kContext, .interleave = interleave, .wire = wire};
        DeviceRanks group(ranks), other(ranks);
        const auto results = over_ranks(problem, group, ranks, parallel, split);
        const auto again = over_ranks(problem, other, ranks, parallel, split);
        double share = 0;
        for (int32_t r = 0; r < ranks; ++r) {
          share += expect_near(problem, results[r], whole, r, ranks) / ranks;
          EXPECT_TRUE(same_bits(results[r].out, again[r].out)) << "rank " << r;
          EXPECT_TRUE(same_bits(results[r].lse, again[r].lse)) << "rank " << r;
          EXPECT_TRUE(same_bits(results[r].records, again[r].records)) << "rank " << r;
        }
        if (HasFailure()) FAIL() << "interleave " << interleave;
        printf("ranks %d, interleave %2d, wire %s: %.4f of the outputs have one rank's bits\n",
               ranks, interleave, wire == Wire::kF32 ? "f32" : "bf16", share);
        EXPECT_GE(share, wire == Wire::kF32 ? testing::kOneRanksBits : 0);
        if (ranks == 1) continue;
        const int64_t others = ranks - 1, k = RankProblem::kTopk;
        const int64_t rows = problem.tokens * RankProblem::kHeads / ranks;
        ThreadRanks::Counted want{.gathers = 1, .all_to_alls = 1, .exchanges = 2};
        want.gathered_bytes = 8 * k * problem.tokens * others;
        want.all_to_all_bytes = (rows * (wire == Wire::kF32 ? 2052 : 1028) + 15) / 16 * 16 * others;
        for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(group.counted(r), want);
      }
  }
}

// With as many tokens as ranks the rows of the score are shared out, with fewer its keys. Kernels
// of other numbers of heads sum in another order, so outputs are near and ids are equal: the
// records prove nothing of these, but a wrong id moves an output by far more than the bound.
TEST_P(CudaRanks, HeadsAgreeWithOneRank) {
  const int32_t ranks = GetParam();
  const OwnDevice device(DeviceKind::kCuda);
  for (const auto& batch : {testing::rank_batch(), std::vector<testing::RankRequest>{{1, 150}}}) {
    const RankProblem problem(batch);
    const Result whole = run_on(problem, device, {}, SplitPolicy::kFixed);
    DeviceRanks group(ranks);
    const auto results = over_ranks(problem, group, ranks, {.spread = Spread::kHeads});
    double share = 0;
    for (int32_t r = 0; r < ranks; ++r)
      share += expect_near(problem, results[r], whole, r, ranks) / ranks;
    printf("ranks %d, heads: %.4f of the outputs have one rank's bits\n", ranks, share);
    if (ranks == 1) continue;
    const int64_t each = (problem.tokens + ranks - 1) / ranks, k = RankProblem::kTopk;
    ThreadRanks::Counted want{.gathers = 1, .exchanges = 2};
    want.gathered_bytes =
        problem.tokens >= ranks ? 4 * k * each * (ranks - 1) : 8 * k * problem.tokens * (ranks - 1);
    for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(group.counted(r), want);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaRanks, ::testing::Values(1, 2, 3, 4, 8));

class CudaRanksFaults : public CudaRanks {};

// A rank with another batch, then one that never comes: every other rank throws, and says why.
TEST_P(CudaRanksFaults, EndOnEveryRank) {
  const RankProblem problem(testing::rank_batch());
  for (const int fault : {0, 1, 2, 3}) {
    DeviceRanks group(3, std::chrono::milliseconds(500));
    const auto began = std::chrono::steady_clock::now();
    const auto errors = group.run([&](Communicator& comm) {
      const OwnDevice device(DeviceKind::kCuda);
      RankProblem own = problem;
      own.device = device.get();
      const bool faulty = comm.rank() == 1;
      PlanOptions options = own.options({.comm = &comm, .spread = Spread::kContext});
      if (fault == 0 && faulty) options.page = 0;
      Plan plan(options);
      std::vector<int32_t> lens = own.seq_lens;
      if (fault == 1 && faulty) --lens[0];
      if (fault == 2 && faulty) return;
      plan.refill({own.starts, lens});
      if (fault == 3 && faulty) return;
      own.run(plan);
    });
    const char* const words[] = {"rank 1 refusing", "on rank 1", "refill: threads: exchange",
                                 "cut: threads: all_"};
    for (const int32_t r : {0, 2}) {
      EXPECT_NE(errors[r].find(words[fault]), std::string::npos) << errors[r];
      EXPECT_EQ(fault >= 2, errors[r].find("no answer from rank") != std::string::npos);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(10000));
    ASSERT_TRUE(testing::device_finished());
  }
}

// A transport that waits on the host refuses a stream that is captured, and so does a verb that
// would agree there.
TEST_P(CudaRanksFaults, CaptureIsRefused) {
  const RankProblem problem(testing::rank_batch());
  std::vector<ErrorCode> codes(2, ErrorCode::kInvalidArgument);
  DeviceRanks group(2, std::chrono::milliseconds(500));
  const auto errors = group.run([&](Communicator& comm) {
    const OwnDevice device(DeviceKind::kCuda);
    const auto stream = static_cast<cudaStream_t>(device.get().stream);
    RankProblem own = problem;
    own.device = device.get();
    Plan plan(own.options({.comm = &comm, .spread = Spread::kContext}));
    plan.refill(own.batch());
    const auto call = own.prepare(plan);
    testing::expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin");
    std::string why;
    try {
      CutArgs args{.comm = &comm,
                   .ids = tensor(call->table.data(), {1, 1}),
                   .values = tensor(call->weights.data(), {1, 1}),
                   .counts = tensor(call->table.data(), {1}),
                   .target = {.device = device.get()}};
      cut(args);
    } catch (const Error& e) {
      why = e.what();
    }
    EXPECT_NE(why.find("cut: plan: expected one inside a stream capture"), std::string::npos)
        << why;
    cudaGraph_t graph = nullptr;
    try {
      pipeline(call->args);
    } catch (const Error& e) {
      codes[comm.rank()] = e.code();
    }
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    if (graph) cudaGraphDestroy(graph);
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  for (const ErrorCode code : codes) EXPECT_EQ(code, ErrorCode::kUnsupported);
  ASSERT_TRUE(testing::device_finished());
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaRanksFaults, ::testing::Values(3));

}  // namespace
}  // namespace winnow

#endif
