// Promises of the documents that no stage's test holds: silence, WINNOW_VERBOSE, the stack that a
// caller needs, and what is left where a call writes a place twice (docs/testing.md lists them
// all).
#include <pthread.h>

#include "pipeline_problem.h"
#include "winnow/winnow.h"

namespace winnow::testing {
namespace {

// A batch through every stage, and projections that keep blocks on the stack.
struct Work {
  World world;
  Plan plan;
  std::vector<std::byte> workspace;
  std::vector<bf16> queries = std::vector<bf16>(64 * 8 * 128),
                    weights = std::vector<bf16>(512 * 8 * 128);
  std::vector<bf16> latents = std::vector<bf16>(64 * 8 * 512);

  explicit Work(const Layout& layout)
      : world(layout, mixed_batch(), kPadding),
        plan(world.options(nullptr)),
        workspace(pipeline_workspace_bytes(plan)) {
    plan.refill(world.batch());
  }
  void run() {
    pipeline(world.args(plan, workspace));
    absorb_query({.q_nope = tensor(queries.data(), {64, 8, 128}),
                  .w_uk = tensor(weights.data(), {512, 8, 128}),
                  .out = tensor(latents.data(), {64, 8, 512})});
    project_output({.attn = tensor(latents.data(), {64, 8, 512}),
                    .w_uv = tensor(weights.data(), {512, 8, 128}),
                    .out = tensor(queries.data(), {64, 8, 128})});
  }
};

TEST(Promises, TheLibraryIsSilent) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  for (const char* name : {"v32_mixed", "v4_separate"}) {
    Work work(layout_named(name));
    work.run();
    PipelineArgs wrong = work.world.args(work.plan, {});
    EXPECT_THROW(pipeline(wrong), Error);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
}

TEST(Promises, VerboseNamesTheKernelAndWhyNotAnother) {
  const std::vector<float> logits = {3, 1, 2};
  std::vector<int32_t> ids(2);
  const SelectArgs args{.logits = tensor(logits.data(), {1, 3}), .ids = tensor(ids.data(), {1, 2})};
  setenv("WINNOW_VERBOSE", "1", 1);
  ::testing::internal::CaptureStderr();
  select(args);
  const std::string said = ::testing::internal::GetCapturedStderr();
  unsetenv("WINNOW_VERBOSE");
  EXPECT_NE(said.find("select"), std::string::npos) << said;
  EXPECT_NE(said.find("simd"), std::string::npos) << said;
}

// Instrumented frames are larger than those that the number is given for.
TEST(Promises, AStackOf256KilobytesIsEnough) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "frames under a sanitizer are larger";
#endif
  for (const char* name : {"v32_mixed", "v32_separate", "v4_mixed", "v4_separate"}) {
    Work work(layout_named(name));
    pthread_attr_t small;
    ASSERT_EQ(pthread_attr_init(&small), 0);
    ASSERT_EQ(pthread_attr_setstacksize(&small, size_t{256} << 10), 0);
    pthread_t thread;
    const auto run = [](void* w) -> void* {
      static_cast<Work*>(w)->run();
      return nullptr;
    };
    ASSERT_EQ(pthread_create(&thread, &small, run, &work), 0);
    EXPECT_EQ(pthread_join(thread, nullptr), 0);
    pthread_attr_destroy(&small);
  }
}

// Bytes of one record or of the other, never a mixture.
TEST(Promises, ASlotWrittenTwiceHasEitherRecord) {
  for (const CacheFormat format : cache_formats())
    for (const std::string& kernel : cpu_kernels("write")) {
      const int64_t d = record_dim(format), bytes = page_bytes(format, 1);
      std::vector<bf16> kv(2 * d);
      for (int64_t i = 0; i < 2 * d; ++i)
        kv[i] = to_bf16(static_cast<float>(i % 7) * (i < d ? 0.25f : -3.0f));
      const auto record = [&](std::vector<int64_t> slots) {
        std::vector<uint8_t> page(bytes, 0);
        write({.kv = tensor(kv.data(), {2, d}),
               .slots = tensor(slots.data(), {2}),
               .cache = {.data = page.data(), .format = format, .pages = 1, .page = 1},
               .target = {.kernel = kernel.c_str()}});
        return page;
      };
      const std::vector<uint8_t> both = record({0, 0});
      EXPECT_TRUE(both == record({0, -1}) || both == record({-1, 0}))
          << kernel << " " << name_of(format);
    }
}

TEST(Promises, ARowGatheredTwiceHasEitherToken) {
  const std::vector<int32_t> table = {0, 1}, starts = {0, 0}, lengths = {4, 4};
  std::vector<bf16> pages(2 * 4 * 576);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = to_bf16(static_cast<float>(i / 576));
  for (const std::string& kernel : cpu_kernels("gather")) {
    std::vector<bf16> out(4 * 576);
    gather({.cache = {.data = pages.data(), .format = CacheFormat::kV32Bf16, .pages = 2, .page = 4},
            .block_table = tensor(table.data(), {2, 1}),
            .lengths = tensor(lengths.data(), {2}),
            .out_starts = tensor(starts.data(), {2}),
            .out = tensor(out.data(), {4, 576}),
            .target = {.kernel = kernel.c_str()}});
    for (int64_t row = 0; row < 4; ++row)
      for (int64_t i = 0; i < 576; ++i) {
        const float x = to_float(out[row * 576 + i]);
        EXPECT_TRUE(x == static_cast<float>(row) || x == static_cast<float>(row + 4)) << kernel;
      }
  }
}

}  // namespace
}  // namespace winnow::testing
