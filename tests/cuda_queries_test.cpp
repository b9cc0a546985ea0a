// Prefill over ranks on CUDA, as threads with a stream each on one device: the records and the
// outputs of one rank, byte for byte, over whole and over sharded caches.
#include <gtest/gtest.h>

#ifndef WINNOW_WITH_CUDA

TEST(CudaQueries, AreNotInThisBuild) { GTEST_SKIP() << "built without CUDA (WINNOW_CUDA=OFF)"; }

#else

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

// Outputs of a rank's tokens that have one rank's bits.
int64_t equal_outputs(const Result& got, const Result& whole, const std::vector<int32_t>& tokens) {
  constexpr int64_t kRow = RankProblem::kHeads * RankProblem::kValue;
  EXPECT_EQ(got.out.size(), tokens.size() * kRow);
  int64_t equal = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(got.out.size()); ++i)
    equal += got.out[i].bits == whole.out[tokens[i / kRow] * kRow + i % kRow].bits;
  return equal;
}

// The records that a rank's sharded caches hold of one rank's, by request and position.
std::vector<std::byte> held_records(const RankProblem& problem, const Result& whole, Shard shard) {
  constexpr int64_t kBytes = 656 + 132;
  std::vector<std::byte> records;
  int64_t first = 0;  // of the request
  for (const testing::RankRequest& r : problem.requests) {
    for (int64_t p = 0; p < r.seq; ++p) {
      if (!shard.owns(p)) continue;
      const auto from = whole.records.begin() + (first + p) * kBytes;
      records.insert(records.end(), from, from + kBytes);
    }
    first += r.seq;
  }
  return records;
}

TEST_P(CudaQueries, HaveTheBitsOfOneRank) {
  const int32_t ranks = GetParam();
  const std::vector<std::vector<testing::RankRequest> > batches = {
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
          EXPECT_EQ(results[r].records,
                    sharded ? held_records(problem, whole, shard) : whole.records)
              << "rank " << r;
        }
        EXPECT_EQ(equal, static_cast<int64_t>(whole.out.size()))
            << "interleave " << interleave << ", sharded " << sharded;
      }
}

// Lengths decide what travels: a graph would repeat those of one batch.
TEST_P(CudaQueries, CaptureIsRefused) {
  const int32_t ranks = GetParam();
  if (ranks == 1) return;  // the plain path
  RankProblem problem({{7, 7}});
  DeviceRanks group(ranks);
  const auto errors = group.run([&](Communicator& comm) {
    const OwnDevice device(DeviceKind::kCuda);
    const auto stream = static_cast<cudaStream_t>(device.get().stream);
    RankProblem own = problem;
    own.device = device.get();
    Plan plan(own.options({.comm = &comm, .spread = Spread::kQueries}));
    plan.refill(own.batch());
    const auto call = own.prepare(plan);
    testing::expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin");
    std::string why;
    ErrorCode code = ErrorCode::kRuntime;
    try {
      pipeline(call->args);
    } catch (const Error& e) {
      why = e.what();
      code = e.code();
    }
    // Another rank that frees or waits for the device meanwhile has ended the capture: no matter.
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    if (graph) cudaGraphDestroy(graph);
    EXPECT_EQ(code, ErrorCode::kUnsupported);
    EXPECT_NE(why.find("pipeline: plan: expected kHeads or kContext inside a stream capture"),
              std::string::npos)
        << why;
  });
  EXPECT_EQ(errors, std::vector<std::string>(ranks));
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaQueries, ::testing::Values(1, 2, 3, 8));

}  // namespace
}  // namespace winnow

#endif
