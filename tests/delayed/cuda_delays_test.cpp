// The rings of attend and score on Hopper under random delays. Producers and consumers hand rows on
// through mbarriers in a way that compute-sanitizer's racecheck does not follow, so this test
// provokes the orders that it cannot see: kernels compiled with delays at their barriers
// (barriers.h) must give the same bits for every seed. A ring whose memory is given back too early,
// on purpose, must be noticed.
// WINNOW_DELAY_SEEDS sets the number of seeds (12), WINNOW_DELAY_FIRST the first one (1).
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "attend/attend_problem.h"
#include "delayed/delays.h"
#include "score/score_problem.h"

namespace winnow::testing {
namespace {

uint32_t number(const char* name, uint32_t otherwise) {
  const char* text = std::getenv(name);
  return text ? static_cast<uint32_t>(std::atoll(text)) : otherwise;
}

// Kernels read memory of the device: with the host's, waiting for rows would hide everything else.
class CudaDelays : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = allowed_skip(internal::cuda::missing(), expects_device());
    if (!why.empty()) GTEST_SKIP() << why;
    exact_allocations = true;
    set_delays({});
  }
  void TearDown() override { exact_allocations = false; }
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// ---- attend -------------------------------------------------------------------------------------

using internal::attend::CaseList;
using AttendCase = internal::attend::Case;
using enum CacheFormat;

struct Delayed {
  std::string kernel;
  AttendCase c;
};

// The bytes of all outputs of a call.
std::vector<std::byte> attend_once(const std::string& kernel, internal::attend::Problem& problem,
                                   bool check) {
  internal::attend::Results results(problem.c);
  AttendArgs args = problem.args();
  results.attach(args);
  args.target = target("attend", kernel);
  args.precision = internal::attend::precision_of(kernel);
  internal::attend::attend_with_workspace(args);
  if (check) {
    internal::attend::Answer want = problem.expected();
    internal::attend::expect_close(args, want);
  }
  std::vector<std::byte> bytes;
  const auto add = [&](const void* data, size_t count) {
    const auto* first = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), first, first + count);
  };
  add(results.out.data(), results.out.size() * sizeof(bf16));
  add(results.lse.data(), results.lse.size() * sizeof(float));
  add(results.max_logit.data(), results.max_logit.size() * sizeof(float));
  return bytes;
}

// Shapes whose rings go round several times: a token in splits, CTAs that go from token to token,
// two lists, rows that the L2 does not hold.
std::vector<Delayed> attend_cases() {
  const CaseList v32{kV32Fp8, 64, 40, 2048}, v32_short{kV32Fp8, 64, 12, 700};
  const CaseList window{kV4Fp8, 64, 6, 128}, compressed{kV4Fp8, 64, 20, 512};
  const CaseList v32_rows{kV32Bf16, 64, 12, 700}, v32_far{kV32Bf16, 64, 700, 512};
  const CaseList v4_rows{kV4Bf16, 64, 6, 128}, v4_states{kV4Bf16, 64, 20, 512};
  const auto one = [](const char* name, int64_t tokens, int64_t heads, CaseList list) {
    return AttendCase{.name = name, .tokens = tokens, .heads = heads, .list = {list}};
  };
  const auto two = [](const char* name, int64_t tokens, int64_t heads, CaseList a, CaseList b) {
    return AttendCase{
        .name = name, .tokens = tokens, .heads = heads, .list = {a, b}, .lists = 2, .sink = true};
  };
  return {
      {"sm90/decode", one("v32_fp8_h64_splits", 1, 64, v32)},
      {"sm90/decode", one("v32_fp8_h128_splits", 3, 128, v32)},
      {"sm90/decode", one("v32_fp8_h8_splits", 2, 8, v32)},
      {"sm90/decode", one("v32_fp8_h16_many", 300, 16, v32_short)},
      {"sm90/decode", one("v32_fp8_h32_many", 300, 32, v32_short)},
      {"sm90/decode", one("v32_fp8_h64_alone", 140, 64, v32_short)},
      {"sm90/decode", one("v32_fp8_h128_helped", 36, 128, v32)},
      {"sm90/decode", one("v32_fp8_h128_two_mains", 24, 128, v32)},
      {"sm90/decode", two("v4_fp8_h64_many", 300, 64, window, compressed)},
      {"sm90/decode", two("v4_fp8_h16_splits", 2, 16, window, compressed)},
      {"sm90/decode", one("v32_bf16_h48", 3, 48, v32_rows)},
      {"sm90/decode", two("v4_bf16_h64", 3, 64, v4_rows, v4_states)},
      {"sm90/fp8", one("v32_fp8_h128_splits", 3, 128, v32)},
      {"sm90/fp8", one("v32_fp8_h64_alone", 140, 64, v32_short)},
      {"sm90/wide", one("v32_bf16_h64", 150, 64, v32_rows)},
      {"sm90/wide", one("v32_bf16_h128_far", 150, 128, v32_far)},
      {"sm90/wide", two("v4_bf16_h128", 150, 128, v4_rows, v4_states)},
  };
}

class CudaDelaysAttend : public CudaDelays, public ::testing::WithParamInterface<Delayed> {};

TEST_P(CudaDelaysAttend, BitsDoNotDependOnTheOrder) {
  const auto& [kernel, c] = GetParam();
  internal::attend::Problem problem(c);
  // The formula in fp64, where it takes no longer than the kernels.
  const bool check = c.tokens * c.heads * c.list[0].width < 2'000'000;
  const std::vector<std::byte> want = attend_once(kernel, problem, check);
  ASSERT_TRUE(attend_once(kernel, problem, false) == want) << "without delays";
  const uint32_t first = number("WINNOW_DELAY_FIRST", 1);
  const uint32_t seeds = number("WINNOW_DELAY_SEEDS", 12);
  for (uint32_t seed = first; seed < first + seeds; ++seed) {
    set_delays(delays_of(seed));
    ASSERT_TRUE(attend_once(kernel, problem, false) == want) << "WINNOW_DELAY_FIRST=" << seed;
  }
}
INSTANTIATE_TEST_SUITE_P(Cases, CudaDelaysAttend, ::testing::ValuesIn(attend_cases()),
                         [](const auto& info) {
                           return label(info.param.kernel) + "_" + info.param.c.name;
                         });

// ---- score --------------------------------------------------------------------------------------

using ScoreCase = internal::score::Case;

std::vector<std::byte> score_once(const std::string& kernel, internal::score::Problem& problem) {
  const ScoreCase& c = problem.c;
  Guarded<float> logits(c.tokens * c.keys);
  ScoreArgs args = problem.args();
  args.clean = true;
  args.logits = tensor(logits.data(), {c.tokens, c.keys});
  args.target = target("score", kernel);
  score(args);
  EXPECT_TRUE(device_finished());
  const auto* first = reinterpret_cast<const std::byte*>(logits.data());
  return {first, first + logits.size() * sizeof(float)};
}

class CudaDelaysScore : public CudaDelays,
                        public ::testing::WithParamInterface<std::tuple<const char*, ScoreCase>> {};

TEST_P(CudaDelaysScore, BitsDoNotDependOnTheOrder) {
  const auto& [kernel, c] = GetParam();
  internal::score::Problem problem(c);
  const std::vector<std::byte> want = score_once(kernel, problem);
  const uint32_t first = number("WINNOW_DELAY_FIRST", 1);
  for (uint32_t seed = first; seed < first + number("WINNOW_DELAY_SEEDS", 12); ++seed) {
    set_delays(delays_of(seed));
    ASSERT_TRUE(score_once(kernel, problem) == want) << "WINNOW_DELAY_FIRST=" << seed;
  }
}
INSTANTIATE_TEST_SUITE_P(
    Cases, CudaDelaysScore,
    ::testing::Combine(::testing::Values("sm90/bulk", "sm90/loads"),
                       ::testing::Values(
                           ScoreCase{
                               .name = "h64", .tokens = 4, .heads = 64, .keys = 20000, .page = 64},
                           ScoreCase{.name = "h64_next_4",
                                     .tokens = 8,
                                     .heads = 64,
                                     .keys = 9000,
                                     .page = 64,
                                     .next_n = 4},
                           ScoreCase{.name = "h64_prefill",
                                     .tokens = 64,
                                     .heads = 64,
                                     .keys = 4000,
                                     .page = 64,
                                     .next_n = 64})),
    [](const auto& info) {
      return label(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
    });

// ---- the test itself ----------------------------------------------------------------------------

TEST_F(CudaDelays, SourcesAreDelayed) { EXPECT_GE(delayed_sources(), 8); }

// A launch under delays takes longer: they are there.
TEST_F(CudaDelays, TakeTime) {
  const Delayed of = attend_cases().front();
  internal::attend::Problem problem(of.c);
  internal::attend::Results results(of.c);
  AttendArgs args = problem.args();
  results.attach(args);
  args.target = target("attend", of.kernel);
  DeviceWorkspace workspace(args.target.device, attend_workspace_bytes(args));
  args.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
  const auto time_of = [&](uint32_t seed) {
    set_delays(delays_of(seed));
    attend(args);
    EXPECT_TRUE(device_finished());
    const auto began = Clock::now();
    for (int i = 0; i < 20; ++i) attend(args);
    EXPECT_TRUE(device_finished());
    return seconds_since(began);
  };
  const double alone = time_of(0);
  double longest = 0;
  for (uint32_t seed = 1; seed <= 4; ++seed) longest = std::max(longest, time_of(seed));
  EXPECT_GT(longest, 1.5 * alone);
}

// With such a ring the results differ, or a barrier's phases pass unseen and the kernel traps. That
// leaves the device in no state for other tests, so this runs in a process of its own.
class CudaDelaysDeathTest : public CudaDelays {
 protected:
  void expect_noticed(const Delayed& of, const Delays& defect) {
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
    EXPECT_EXIT(run(of, defect), ::testing::ExitedWithCode(7), "");
  }

 private:
  static void run(const Delayed& of, const Delays& defect) {
    internal::attend::Problem problem(of.c);
    const std::vector<std::byte> want = attend_once(of.kernel, problem, false);
    for (uint32_t seed = 1; seed <= 64; ++seed) {
      set_delays(delays_of(seed, defect));
      internal::attend::Results results(of.c);
      AttendArgs args = problem.args();
      results.attach(args);
      args.target = target("attend", of.kernel);
      DeviceWorkspace workspace(args.target.device, attend_workspace_bytes(args));
      args.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
      attend(args);
      if (cudaDeviceSynchronize() != cudaSuccess) std::_Exit(7);
      if (std::memcmp(results.out.data(), want.data(), results.out.size() * sizeof(bf16)) != 0)
        std::_Exit(7);
    }
    std::_Exit(0);
  }
};

TEST_F(CudaDelaysDeathTest, FindsADecodeRingFreedEarly) {
  expect_noticed(
      {"sm90/decode", {.name = "", .tokens = 140, .heads = 64, .list = {{kV32Fp8, 64, 40, 2048}}}},
      decode_ring_freed_early());
}
TEST_F(CudaDelaysDeathTest, FindsAWideRingFreedEarly) {
  expect_noticed(
      {"sm90/wide", {.name = "", .tokens = 150, .heads = 64, .list = {{kV32Bf16, 64, 12, 700}}}},
      wide_ring_freed_early());
}

}  // namespace
}  // namespace winnow::testing
