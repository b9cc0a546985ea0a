#include "cpu/threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#include "winnow/support.h"

namespace winnow::internal::cpu {

namespace {

// A number above 0 and nothing else, at most 1,024; else 0.
int asked_threads(const char* text) {
  if (!text || *text < '0' || *text > '9') return 0;
  char* end = nullptr;
  const unsigned long n = std::strtoul(text, &end, 10);  // ULONG_MAX where it has too many digits
  return *end == '\0' ? static_cast<int>(std::min(n, 1024ul)) : 0;
}

int default_threads() {
  if (const int n = asked_threads(std::getenv("WINNOW_THREADS")); n > 0) return n;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Keeps the code of the workers mapped: where a plugin that holds this library is unloaded by
// dlclose(), the workers would run on in memory that is gone. Waiting for them instead could hang a
// process that exits while one of its threads is in a call.
void pin_library() {
  Dl_info self;
  if (dladdr(reinterpret_cast<const void*>(&pin_library), &self) != 0 && self.dli_fname)
    dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

thread_local bool inside_pool = false;

class Pool {
 public:
  explicit Pool(int workers) noexcept {
    try {
      threads_.reserve(static_cast<size_t>(workers));
      for (int w = 1; w < workers; ++w) threads_.emplace_back([this, w] { work(w); });
      // A limit of the system, or no memory: the threads that there are do the work.
      // NOLINTNEXTLINE(bugprone-empty-catch)
    } catch (const std::exception&) {
    }
  }
  ~Pool() {
    stop_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  // False if another thread is using the pool.
  bool run(int64_t tasks, detail::Body body, void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    body_ = body;
    context_ = context;
    tasks_ = tasks;
    claimed_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    gate_.fetch_or(kOpen, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    inside_pool = true;
    drain(0);
    inside_pool = false;
    // Close the gate: who is not in yet is not waited for, however late it wakes.
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; gate_.load(std::memory_order_acquire) != 0;)
      if (++spins < kSpins) pause();
      else std::this_thread::yield();
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31;
  // Calls of one decode step follow each other closely. Whoever sleeps misses the next call: others
  // do its share after their own, the call takes twice as long, and those who wait for its end fall
  // asleep in turn. So workers wait for longer than a call takes: first some 50 us by themselves,
  // then as long as no other thread wants the core.
  static constexpr int kSpins = 4000;
  static constexpr std::chrono::milliseconds kAwake{1};

  void drain(int worker) {
    if (tasks_ <= std::min<int64_t>(std::ssize(threads_) + 1, 64)) return drain_few(worker);
    for (int64_t t; (t = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;)
      body_(context_, t, worker);
  }
  // A task for each worker: it begins with the one of its number, as in the last call of this
  // shape, so that what that read and wrote may still be in its cache; then any that is left.
  void drain_few(int worker) {
    uint64_t taken = ~uint64_t{0} << (tasks_ - 1) << 1;
    for (int task = std::min(worker, 63); ~taken != 0; task = std::countr_one(taken)) {
      const uint64_t bit = uint64_t{1} << task;
      if (!((taken | claimed_.fetch_or(bit, std::memory_order_relaxed)) & bit))
        body_(context_, task, worker);
      taken |= claimed_.load(std::memory_order_relaxed);
    }
  }

  // The next generation, or the last one again after kAwake.
  uint32_t wait(uint32_t seen) const {
    uint32_t now;
    for (int spins = 0; (now = generation_.load(std::memory_order_acquire)) == seen; ++spins) {
      if (spins >= kSpins) break;
      pause();
    }
    const auto until = std::chrono::steady_clock::now() + kAwake;
    while (now == seen && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
      now = generation_.load(std::memory_order_acquire);
    }
    return now;
  }

  void work(int worker) {
    inside_pool = true;
    for (uint32_t seen = 0;;) {
      uint32_t now = wait(seen);
      if (now == seen) {
        generation_.wait(seen, std::memory_order_acquire);
        now = generation_.load(std::memory_order_acquire);
      }
      seen = now;
      if (stop_) return;
      if (gate_.fetch_add(1, std::memory_order_acquire) & kOpen) drain(worker);
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> threads_;
  // Each on lines of its own: what waiting workers read is not what working ones write.
  alignas(128) std::atomic<uint32_t> generation_{0};
  alignas(128) std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> claimed_{0};            // few tasks: a bit for each
  alignas(128) std::atomic<uint32_t> gate_{0};  // kOpen, and the number of workers inside
  alignas(128) std::atomic<bool> busy_{false};
  std::atomic<bool> stop_{false};
  detail::Body body_ = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
};

std::atomic<Pool*> pool{nullptr};

// Before there is a pool. Without a lock, which the child of a fork() at this moment would find
// closed: threads that come here together all prepare, and nothing is wrong with twice.
void prepare() {
  static std::atomic<bool> prepared{false};
  if (prepared.load(std::memory_order_acquire)) return;
  pin_library();
  pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
  prepared.store(true, std::memory_order_release);
}

// Worker threads do not survive fork(): the child starts a pool of its own when it first needs one.
// Null when there is no memory for one.
Pool* the_pool() {
  Pool* p = pool.load(std::memory_order_acquire);
  if (!p) {
    prepare();
    Pool* fresh = new (std::nothrow) Pool(threads());
    if (!fresh) return nullptr;
    if (pool.compare_exchange_strong(p, fresh)) return fresh;  // lives until the process ends
    delete fresh;
  }
  return p;
}

}  // namespace

int threads() {
  static std::atomic<int> known{0};
  int n = known.load(std::memory_order_acquire);
  if (n > 0) return n;
  const int found = default_threads();
  return known.compare_exchange_strong(n, found) ? found : n;
}

namespace detail {

void run(int64_t tasks, Body body, void* context) {
  if (tasks <= 0) return;
  if (tasks > 1 && threads() > 1 && !inside_pool)
    if (Pool* const p = the_pool(); p && p->run(tasks, body, context)) return;
  for (int64_t t = 0; t < tasks; ++t) body(context, t, 0);
}

}  // namespace detail

}  // namespace winnow::internal::cpu

namespace winnow {
int threads() { return internal::cpu::threads(); }
}  // namespace winnow
