// The golden vectors by every kernel of this machine, through the checks that `winnow verify` runs.
#include "golden.h"

#include <gtest/gtest.h>

#include <set>

#include "testing.h"

namespace winnow {
namespace {

std::string path_of(const std::string& name) {
  return WINNOW_TEST_DATA "/golden/" + name + ".safetensors";
}

class GoldenTest : public ::testing::TestWithParam<const char*> {};

TEST_P(GoldenTest, EveryKernelAgrees) {
  std::set<std::string> checks;
  for (const tools::Verdict& v : tools::check_golden(path_of(GetParam()))) {
    EXPECT_TRUE(v.ok) << v.check << " by " << v.kernel << ": " << v.deviation;
    checks.insert(v.check + " " + v.kernel);
  }
  for (const char* stage : {"write", "locate", "attend"})
    for (const std::string& kernel : testing::kernels(stage)) {
      if (!testing::why_not(stage, kernel).empty()) continue;
      EXPECT_TRUE(checks.count(std::string(stage) + " " + kernel)) << stage << " " << kernel;
    }
}

INSTANTIATE_TEST_SUITE_P(Files, GoldenTest,
                         ::testing::Values("decode_v32_h128", "decode_v32_h64_mtp_sink",
                                           "decode_v4_h128_block256", "decode_v4_h64_swa_extra",
                                           "prefill_v32_h64", "prefill_v4_h64_sink_len"),
                         [](const auto& info) { return std::string(info.param); });

TEST(GoldenErrors, NotAGoldenFile) {
  testing::expect_error([] { tools::check_golden(path_of("nothing")); }, ErrorCode::kRuntime,
                        {"nothing.safetensors"});
}

}  // namespace
}  // namespace winnow
