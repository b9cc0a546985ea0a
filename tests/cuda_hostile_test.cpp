// Random shapes and hostile values of every verb on a CUDA device: the fuzz targets (tests/fuzz)
// with the device's kernels against the reference. Made for compute-sanitizer's memcheck, which
// sees a read behind an allocation's end: every buffer is memory of the device of exactly its size.
// WINNOW_HOSTILE_ROUNDS sets the number of rounds (20); WINNOW_HOSTILE_SEED the first seed (0).
#include <gtest/gtest.h>

#ifndef WINNOW_WITH_CUDA

TEST(CudaHostile, IsNotInThisBuild) { GTEST_SKIP() << "built without CUDA (WINNOW_CUDA=OFF)"; }

#else

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "cuda/device.h"
#include "fuzz/target.h"

namespace winnow::testing {
namespace {

int64_t number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::max<int64_t>(0, std::atoll(text)) : otherwise;
}

class CudaHostile : public ::testing::TestWithParam<FuzzTarget> {
 protected:
  void SetUp() override {
    const std::string why = allowed_skip(internal::cuda::missing(), expects_device());
    if (!why.empty()) GTEST_SKIP() << why;
    exact_allocations = true;
    compared = Compared::kCuda;
  }
  void TearDown() override {
    exact_allocations = false;
    compared = Compared::kCpu;
  }
};

TEST_P(CudaHostile, Sweep) {
  const int64_t first = number("WINNOW_HOSTILE_SEED", 0);
  const int64_t rounds = number("WINNOW_HOSTILE_ROUNDS", 20);
  for (int64_t seed = first; seed < first + rounds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "WINNOW_HOSTILE_SEED=" << seed);
    Source source(static_cast<uint64_t>(seed));
    GetParam().run(source);
    if (HasFailure()) return;
  }
}

// Those that run single kernels. Files, plans and damaged structs end before a device is asked;
// ranks are threads and pipelines plans of the CPU there (cuda_test.cpp has the device's).
std::vector<FuzzTarget> on_a_device() {
  constexpr std::string_view left_out[] = {"files", "plan", "c_api", "ranks", "pipeline"};
  std::vector<FuzzTarget> some;
  for (const FuzzTarget& t : FuzzTarget::all())
    if (std::find(std::begin(left_out), std::end(left_out), t.name) == std::end(left_out))
      some.push_back(t);
  return some;
}
INSTANTIATE_TEST_SUITE_P(Targets, CudaHostile, ::testing::ValuesIn(on_a_device()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace winnow::testing

#endif
