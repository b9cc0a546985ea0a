// Argument structs of the C ABI: the sizes of every published version are taken, others are not.
#include "c_api/common.h"

#include <gtest/gtest.h>

extern "C" {
// A struct that got a member after it was published first.
struct test_args_first {
  size_t struct_size;
  int32_t tokens;
};
struct test_args {
  size_t struct_size;
  int32_t tokens;
  int64_t window;
  bool causal;
};
}
#define TEST_ARGS_INIT \
  { .struct_size = sizeof(test_args), .tokens = 1, .window = 128 }

namespace winnow::internal::c_api {
WINNOW_PUBLISHED(test_args, TEST_ARGS_INIT, 16, 32);

namespace {

struct Seen {
  int32_t tokens = 0;
  int64_t window = 0;
  bool causal = false;
};

winnow_status look(const void* args, Seen& seen) {
  return guarded("look", static_cast<const test_args*>(args), [&](const test_args& a, const In&) {
    seen = {a.tokens, a.window, a.causal};
  });
}

TEST(StructSize, MembersBehindAnOldStructTakeTheirDefaults) {
  const test_args_first old{sizeof(test_args_first), 7};
  Seen seen;
  ASSERT_EQ(look(&old, seen), WINNOW_OK);
  EXPECT_EQ(seen.tokens, 7);
  EXPECT_EQ(seen.window, 128);
  EXPECT_FALSE(seen.causal);
}

TEST(StructSize, TheNewestIsTakenWhole) {
  test_args args = TEST_ARGS_INIT;
  args.window = 9;
  args.causal = true;
  Seen seen;
  ASSERT_EQ(look(&args, seen), WINNOW_OK);
  EXPECT_EQ(seen.tokens, 1);
  EXPECT_EQ(seen.window, 9);
  EXPECT_TRUE(seen.causal);
}

TEST(StructSize, OthersAreRefusedWithTheMacrosName) {
  test_args args = TEST_ARGS_INIT;
  Seen seen;
  for (const size_t size : {size_t{0}, size_t{15}, size_t{24}, size_t{33}, SIZE_MAX}) {
    args.struct_size = size;
    ASSERT_EQ(look(&args, seen), WINNOW_INVALID_ARGUMENT) << size;
    EXPECT_NE(std::string(winnow_last_error())
                  .find("look: struct_size: expected 32, which TEST_ARGS_INIT sets, found"),
              std::string::npos)
        << winnow_last_error();
  }
}

}  // namespace
}  // namespace winnow::internal::c_api
