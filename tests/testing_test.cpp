// The tests' own helpers fail where they should.
#include "testing.h"

#include <gtest/gtest-spi.h>

#include <stdexcept>

namespace winnow {
namespace {

// What a call that refuses an argument does.
void refuse(ErrorCode code) { throw Error(code, "stage: argument: expected one, found two"); }

TEST(Testing, ErrorsAreComparedByTypeCodeAndWords) {
  testing::expect_invalid([] { refuse(ErrorCode::kInvalidArgument); }, {"stage", "found two"});
  EXPECT_NONFATAL_FAILURE(testing::expect_invalid([] {}, {}), "expected winnow::Error");
  EXPECT_NONFATAL_FAILURE(
      testing::expect_invalid([] { throw std::runtime_error("stage"); }, {"stage"}),
      "another exception");
  EXPECT_NONFATAL_FAILURE(
      testing::expect_invalid([] { refuse(ErrorCode::kUnsupported); }, {"stage"}), "found two");
  EXPECT_NONFATAL_FAILURE(
      testing::expect_invalid([] { refuse(ErrorCode::kInvalidArgument); }, {"three"}),
      "'three' is not in");
}

TEST(Testing, SkipsNeedAReason) {
  EXPECT_EQ(testing::allowed_skip("", true), "");
  EXPECT_EQ(testing::allowed_skip("no AMX", false), "no AMX");
  EXPECT_NONFATAL_FAILURE(testing::allowed_skip("no AMX", true), "should run on this machine");
}

TEST(Testing, PortableKernelsShouldRunEverywhere) {
  EXPECT_TRUE(testing::should_run("simd"));
  EXPECT_TRUE(testing::should_run("reference"));
  EXPECT_EQ(testing::should_run("sm90"), testing::expects_device());
  EXPECT_NONFATAL_FAILURE(testing::why_not("attend", "smid"), "no such kernel");
}

// What the operating system and the library say of this machine is the same.
TEST(Testing, EveryKernelThatShouldRunDoes) {
  for (const KernelInfo& k : support())
    if (k.stage != kEveryStage) {
      testing::why_not(k.stage, k.kernel);
    }
}

}  // namespace
}  // namespace winnow
