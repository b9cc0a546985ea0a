// Argument structs of the C ABI: the sizes of every published version are taken, others are not.
// And the macros that set up such structs give them the defaults of the C++ structs.
#include "c_api/common.h"

#include <gtest/gtest.h>

#include "c_api/layers.h"
#include "winnow/pipeline.h"

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

void expect_same(const winnow_norm_step& given, const Norm& expected) {
  const Norm norm = norm_of(given, In("defaults"));
  EXPECT_EQ(norm.kind, expected.kind);
  EXPECT_EQ(norm.eps, expected.eps);
}

TEST(Defaults, Norms) {
  const winnow_norm_args norm = WINNOW_NORM_ARGS_INIT;
  for (int i = 0; i < 2; ++i) expect_same(norm.rows[i].norm, NormArgs{}.rows[i].norm);
  const winnow_prepare_query_args query = WINNOW_PREPARE_QUERY_ARGS_INIT;
  expect_same(query.norm, PrepareQueryArgs{}.norm);
  const winnow_write_args write = WINNOW_WRITE_ARGS_INIT;
  expect_same(write.prologue.norm, WriteArgs{}.prologue.norm);
  const winnow_compress_args compress = WINNOW_COMPRESS_ARGS_INIT;
  expect_same(compress.norm, CompressArgs{}.norm);
}

TEST(Defaults, StepsOfAPipeline) {
  const winnow_pipeline_args c = WINNOW_PIPELINE_ARGS_INIT;
  const LayerSteps expected = PipelineArgs{}.steps;
  expect_same(c.steps.kv_norm, expected.kv_norm);
  expect_same(c.steps.q_norm, expected.q_norm);
  expect_same(c.steps.states.norm, expected.states.norm);
  expect_same(c.steps.index.norm, expected.index.norm);
  EXPECT_EQ(c.steps.states.gate, expected.states.gate);
  EXPECT_EQ(c.steps.index.gate, expected.index.gate);
  EXPECT_EQ(c.steps.index_factor, expected.index_query.factor);
}

}  // namespace
}  // namespace winnow::internal::c_api
