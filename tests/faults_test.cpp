// The system refuses: every allocation of making a plan, of refilling it and of every call fails in
// turn, and threads cannot be started. Then there is winnow::Error, code kRuntime, or the result,
// nothing is half-written, and the same objects serve the next call.
#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>
#include <cstdlib>

#include "fuzz/c_calls.h"
#include "pipeline_problem.h"
#include "winnow/error.h"

#if !defined(__SANITIZE_THREAD__) && defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

namespace {

// Of the thread under test alone: workers and the test's own threads go on.
thread_local int64_t allocations_left = INT64_MAX;  // until one fails
thread_local bool one_failed = false;
int threads_left = INT32_MAX;  // that can be started

bool this_one_fails() {
  if (allocations_left == INT64_MAX) return false;
  if (allocations_left-- > 0) return false;
  allocations_left = INT64_MAX;
  one_failed = true;
  return true;
}

}  // namespace

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// All of them: operator new ends here too.
extern "C" void* __libc_malloc(size_t bytes);
extern "C" [[gnu::noinline]] void* malloc(size_t bytes) {
  if (!this_one_fails()) return __libc_malloc(bytes);
  errno = ENOMEM;
  return nullptr;
}
#else
// Sanitizers have a malloc of their own: operator new at least.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return this_one_fails() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (void* p = operator new(bytes, std::nothrow)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
#endif

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_left-- <= 0) return EAGAIN;
  return real(thread, attributes, start, argument);
}

namespace winnow::testing {
namespace {

// Several workers on any machine.
const int four = setenv("WINNOW_THREADS", "4", 1);

// Calls with the n-th allocation failing, n = 0, 1, ..., until a call needs no more of them. Gives
// how many there are, and leaves the number in the test's report.
template <class F>
int64_t fail_each(F&& call) {
  for (int64_t n = 0;; ++n) {
    SCOPED_TRACE(::testing::Message() << "allocation " << n);
    one_failed = false;
    allocations_left = n;
    call();
    allocations_left = INT64_MAX;
    if (one_failed && !::testing::Test::HasFailure()) continue;
    ::testing::Test::RecordProperty("failed_allocations", std::to_string(n));
    return n;
  }
}

// The code of what `call` threw, 0 if nothing. Any exception but winnow::Error is a failure.
template <class F>
int code_of(F&& call) {
  int code = 0;
  const char* other = nullptr;
  try {
    call();
  } catch (const Error& e) {
    code = static_cast<int>(e.code());
  } catch (const std::bad_alloc&) {
    other = "std::bad_alloc";
  } catch (...) {
    other = "another exception";
  }
  allocations_left = INT64_MAX;
  EXPECT_EQ(other, nullptr) << other;
  return code;
}

constexpr int kRuntime = static_cast<int>(ErrorCode::kRuntime);
constexpr int kInvalid = static_cast<int>(ErrorCode::kInvalidArgument);

// A batch through a plan, and its output.
struct Done {
  World world;
  Plan plan;
  std::vector<std::byte> workspace;

  explicit Done(const Layout& layout)
      : world(layout, mixed_batch(), kPadding),
        plan(world.options(nullptr)),
        workspace(pipeline_workspace_bytes(plan)) {
    plan.refill(world.batch());
  }
  std::vector<uint16_t> run() {
    world.out.poison();
    pipeline(world.args(plan, workspace));
    std::vector<uint16_t> bits;
    for (const bf16 x : world.out.values()) bits.push_back(x.bits);
    return bits;
  }
};

class Faults : public ::testing::TestWithParam<Layout> {};

TEST_P(Faults, PlanOrError) {
  ASSERT_EQ(four, 0);
  const World world(GetParam(), mixed_batch(), kPadding);
  const PlanOptions options = world.options(nullptr);
  const int64_t n = fail_each([&] {
    const int code = code_of([&] { Plan plan(options); });
    EXPECT_TRUE(code == 0 || code == kRuntime) << code;
  });
  EXPECT_GT(n, 5);
  Plan plan(options);
  plan.refill(world.batch());
}

TEST_P(Faults, RefillsAndPipelinesNeedNoMemory) {
  Done done(GetParam());
  const std::vector<uint16_t> want = done.run();  // starts the workers
  const Batch batch = done.world.batch();
  const PipelineArgs args = done.world.args(done.plan, done.workspace);
  EXPECT_EQ(fail_each([&] { EXPECT_EQ(code_of([&] { done.plan.refill(batch); }), 0); }), 0);
  EXPECT_EQ(fail_each([&] { EXPECT_EQ(code_of([&] { pipeline(args); }), 0); }), 0);
  EXPECT_TRUE(done.run() == want);
}

// What is refused is refused with or without memory for the message, and the plan stays.
TEST_P(Faults, RefusedRefillsLeaveThePlan) {
  Done done(GetParam());
  const std::vector<uint16_t> want = done.run();
  const std::vector<int32_t> starts = {0, 5}, lens = {2};
  EXPECT_GT(fail_each([&] {
              const int code = code_of([&] { done.plan.refill({starts, lens}); });
              EXPECT_TRUE(code == kInvalid || code == kRuntime) << code;
            }),
            0);
  PipelineArgs wrong = done.world.args(done.plan, done.workspace);
  wrong.q.shape[1] += 1;
  fail_each([&] {
    const int code = code_of([&] { pipeline(wrong); });
    EXPECT_TRUE(code == kInvalid || code == kRuntime) << code;
  });
  EXPECT_TRUE(done.run() == want);
}

INSTANTIATE_TEST_SUITE_P(Layouts, Faults, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return info.param.name; });

// Every function of the C ABI, and so every verb: a status with a message that names the stage (a
// std::bad_alloc that left the C++ call has none), outputs untouched; then the call as always.
class FaultyCalls : public ::testing::TestWithParam<c_calls::NamedCall> {};

TEST_P(FaultyCalls, FailWholeOrNotAtAll) {
  Source source(7);
  DamagedCall call(source, [](DamagedCall& frame, const std::function<winnow_status()>& make) {
    ASSERT_EQ(make(), WINNOW_OK) << winnow_last_error();  // starts the workers
    const std::vector<uint8_t> want = frame.outputs();
    fail_each([&] {
      frame.poison();
      const winnow_status status = make();
      allocations_left = INT64_MAX;
      EXPECT_TRUE(status == WINNOW_OK || status == WINNOW_RUNTIME) << status;
      frame.expect_whole(status);
    });
    frame.poison();
    EXPECT_EQ(make(), WINNOW_OK);
    EXPECT_TRUE(frame.outputs() == want);
  });
  GetParam().run(call);
}

INSTANTIATE_TEST_SUITE_P(Calls, FaultyCalls, ::testing::ValuesIn(c_calls::kCalls),
                         [](const auto& info) { return std::string(info.param.name); });

// Threads that cannot be started: those that there are do the work, with the same bits. The pool is
// made once per process, so each number gets a process of its own.
class ExhaustedThreadsDeathTest : public ::testing::TestWithParam<int> {};

bool right_with_threads(int started) {
  for (const char* name : {"v32_mixed", "v4_separate"}) {
    Layout layout = layout_named(name);
    layout.split = SplitPolicy::kFixed;  // bits that do not depend on the workers
    Done done(layout);
    threads_left = started;
    const std::vector<uint16_t> first = done.run();
    threads_left = INT32_MAX;
    std::vector<float> want, want_lse;
    done.world.expected(done.plan, want, want_lse);
    const Tensor got = done.world.args(done.plan, done.workspace).out;
    Tensor like = got;
    like.data = want.data();
    like.dtype = DType::kF32;
    if (!tools::compare(got, like, tools::kDecodeOut).ok || done.run() != first) return false;
  }
  return true;
}

TEST_P(ExhaustedThreadsDeathTest, GiveTheSameBits) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(_exit(right_with_threads(GetParam()) ? 0 : 1), ::testing::ExitedWithCode(0), "");
}

INSTANTIATE_TEST_SUITE_P(Started, ExhaustedThreadsDeathTest, ::testing::Values(0, 1, 2));

}  // namespace
}  // namespace winnow::testing
