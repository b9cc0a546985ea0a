// Values made on first use: one for all threads, and none that the child of a fork() waits for.
#include "core/made_once.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

namespace winnow::internal::core {
namespace {

TEST(MadeOnce, AllThreadsGetTheFirst) {
  std::atomic<const std::string*> place{nullptr};
  std::vector<const std::string*> seen(8);
  std::vector<std::thread> threads;
  for (const std::string*& mine : seen)
    threads.emplace_back([&] {
      mine =
          &made_once(place, [] { return std::string("a text that does not fit into a string"); });
    });
  for (std::thread& t : threads) t.join();
  for (const std::string* mine : seen) EXPECT_EQ(mine, place.load());
  EXPECT_EQ(*seen[0], "a text that does not fit into a string");
  delete place.load();
}

TEST(MadeOnce, NothingStaysWhereMakingFails) {
  std::atomic<const int*> place{nullptr};
  EXPECT_THROW(made_once(place, []() -> int { throw 1; }), int);
  EXPECT_EQ(made_once(place, [] { return 7; }), 7);
  EXPECT_EQ(made_once(place, [] { return 8; }), 7);
  delete place.load();
}

// A thread is making the value while the process forks: the child does not have that thread.
TEST(MadeOnce, AChildMakesItsOwn) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not follow threads over fork()";
#endif
  std::atomic<const int*> place{nullptr};
  std::atomic<bool> making{false}, forked{false};
  std::thread maker([&] {
    made_once(place, [&] {
      making = true;
      while (!forked) std::this_thread::yield();
      return 1;
    });
  });
  while (!making) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // ends a child that waits
    _exit(made_once(place, [] { return 2; }) == 2 ? 0 : 1);
  }
  forked = true;
  maker.join();
  ASSERT_GT(child, 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(*place.load(), 1);
  delete place.load();
}

}  // namespace
}  // namespace winnow::internal::core
