// The pool: each task once, any nesting, any number of callers, across fork(), and WINNOW_THREADS.
#include "cpu/threads.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <vector>

#include "winnow/support.h"

namespace winnow::internal::cpu {
namespace {

// Four workers even on one core, so that there is something to race. Runs before main; tests that
// start the program again with a value of their own keep it.
const int four = setenv("WINNOW_THREADS", "4", 0);

// Runs `tasks` tasks and counts how often each ran.
std::vector<int> count(int64_t tasks) {
  std::vector<std::atomic<int>> hits(tasks);
  parallel_for(tasks, [&](int64_t task, int worker) {
    if (worker < 0 || worker >= threads()) std::abort();
    hits[task].fetch_add(1, std::memory_order_relaxed);
  });
  return {hits.begin(), hits.end()};
}

TEST(Threads, EachTaskOnce) {
  ASSERT_EQ(four, 0);
  for (int64_t tasks : {0, 1, 2, 3, 4, 5, 100, 10000})
    EXPECT_EQ(count(tasks), std::vector<int>(tasks, 1)) << tasks;
  parallel_for(-1, [](int64_t, int) { std::abort(); });
  parallel_for(INT64_MIN, [](int64_t, int) { std::abort(); });
}

TEST(Threads, ShortCallsInARow) {
  int64_t sum = 0;
  for (int call = 0; call < 3000; ++call) {
    std::atomic<int64_t> part{0};
    parallel_for(7, [&](int64_t task, int) { part += task; });
    sum += part;
  }
  EXPECT_EQ(sum, 3000 * 21);
}

// What the tasks wrote is there when the call returns, without atomics.
TEST(Threads, ReturnsWhenAllIsDone) {
  std::vector<int64_t> out(500);
  for (int call = 0; call < 200; ++call) {
    parallel_for(500, [&](int64_t task, int) { out[task] = task * call; });
    for (int64_t i = 0; i < 500; ++i) ASSERT_EQ(out[i], i * call);
  }
}

// A worker runs one task at a time: scratch by worker needs no lock.
TEST(Threads, WorkersAreExclusive) {
  std::vector<std::atomic<int>> inside(threads());
  std::atomic<bool> shared{false};
  parallel_for(2000, [&](int64_t, int worker) {
    if (inside[worker].fetch_add(1) != 0) shared = true;
    inside[worker].fetch_sub(1);
  });
  EXPECT_FALSE(shared);
}

TEST(Threads, NestedCallsRunInPlace) {
  std::atomic<int64_t> total{0};
  std::atomic<bool> moved{false};
  parallel_for(20, [&](int64_t, int) {
    const auto me = std::this_thread::get_id();
    parallel_for(30, [&](int64_t, int worker) {
      if (std::this_thread::get_id() != me || worker != 0) moved = true;
      total += 1;
    });
  });
  EXPECT_EQ(total, 600);
  EXPECT_FALSE(moved);
}

TEST(Threads, ConcurrentCallers) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&, c] {
      for (int call = 0; call < 200; ++call)
        if (count(10 + c) != std::vector<int>(10 + c, 1)) ++wrong;
    });
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Threads, ChildOfForkHasItsOwnPool) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not follow threads started after fork()";
#endif
  ASSERT_EQ(count(100), std::vector<int>(100, 1));  // the parent's pool exists
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(count(1000) == std::vector<int>(1000, 1) ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(count(100), std::vector<int>(100, 1));  // and the parent's goes on
}

// Calls share the work among the threads that there are.
TEST(Threads, FewerThanAskedFor) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers map memory of their own";
#endif
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::ifstream statm("/proc/self/statm");
    size_t pages = 0;
    statm >> pages;
    const rlim_t bytes = pages * static_cast<size_t>(getpagesize()) + (size_t{4} << 20);
    const rlimit limit{bytes, bytes};  // no room for a stack
    _exit(setrlimit(RLIMIT_AS, &limit) == 0 && count(1000) == std::vector<int>(1000, 1) ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// The number is read once per process, so each value gets a process of its own.
class ThreadsDeathTest : public ::testing::TestWithParam<std::pair<const char*, int>> {};

TEST_P(ThreadsDeathTest, Environment) {
  const auto& [value, expected] = GetParam();
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("WINNOW_THREADS", value, 1);
  const int want = expected;
  EXPECT_EXIT(
      {
        const int n = winnow::threads();
        cpu_set_t set;
        sched_getaffinity(0, sizeof(set), &set);
        const bool right = n == (want > 0 ? want : CPU_COUNT(&set));
        _exit(right && count(50) == std::vector<int>(50, 1) ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
  setenv("WINNOW_THREADS", "4", 1);
}

// 0 stands for "the cores of the process".
INSTANTIATE_TEST_SUITE_P(Values, ThreadsDeathTest,
                         ::testing::Values(std::pair{"1", 1}, std::pair{"3", 3}, std::pair{"0", 0},
                                           std::pair{"-2", 0}, std::pair{"many", 0},
                                           std::pair{"", 0}, std::pair{"7x", 0}, std::pair{" 7", 0},
                                           std::pair{"+7", 0}));

}  // namespace
}  // namespace winnow::internal::cpu
