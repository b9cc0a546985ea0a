// winnow soak: random batches through pipeline() for as long as one likes, checked against the
// reference; memory and handles must stay flat.
#include <fmt/format.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "commands.h"
#include "cpu/threads.h"
#include "progress.h"
#include "soak_lane.h"
#include "table.h"
#include "winnow/error.h"

namespace winnow::cli {

namespace {

struct SoakOptions {
  std::string device = "cpu";
  int64_t steps = 10000, check_every = 64, graph_replays = 0, damage_step = 0;
  int32_t threads = 2;
  uint64_t seed = 1;
};

// What a process holds. Linux only; elsewhere all zero, and flat.
struct Held {
  // Bytes. `heap`: allocated and not given back, without what the allocator keeps; 0 where it does
  // not tell.
  int64_t resident = 0, device = 0, heap = 0;
  int64_t files = 0, threads = 0;

  // Device memory is counted for all processes: of a run that uses none, it says nothing.
  static Held now(bool cuda) {
    Held h;
    if (cuda) h.device = device_bytes_used();
#ifdef __GLIBC__
    malloc_trim(0);  // what is free in the arenas of threads that have ended is no leak
#if __GLIBC_PREREQ(2, 33)
    const struct mallinfo2 info = mallinfo2();
    h.heap = static_cast<int64_t>(info.uordblks + info.hblkhd);
#endif
#endif
    std::ifstream statm("/proc/self/statm");
    int64_t total = 0, pages = 0;
    if (statm >> total >> pages) h.resident = pages * sysconf(_SC_PAGESIZE);
    const auto entries = [](const char* folder) {
      std::error_code none;
      int64_t n = 0;
      for (std::filesystem::directory_iterator it(folder, none), end; it != end; it.increment(none))
        ++n;
      return n;
    };
    h.files = entries("/proc/self/fd");
    h.threads = entries("/proc/self/task");
    return h;
  }
};

// The allocator keeps what threads gave back, so resident memory may grow a little and then stops;
// a leak of one small object a step is more than this after 10^5 steps.
constexpr int64_t kSlack = int64_t{8} << 20;
// The heap holds the lanes' requests, whose number changes, but nothing that grows with the steps.
// On CUDA the driver's own is among it.
constexpr int64_t kHeapSlack = int64_t{2} << 20;

std::string leak(const Held& before, const Held& after) {
  if (after.resident > before.resident + kSlack)
    return fmt::format("resident memory grew by {:.1f} MiB",
                       static_cast<double>(after.resident - before.resident) / (1 << 20));
  if (after.heap > before.heap + (after.device > 0 ? kSlack : kHeapSlack))
    return fmt::format("the heap grew by {:.1f} MiB",
                       static_cast<double>(after.heap - before.heap) / (1 << 20));
  if (after.device > before.device + kSlack)
    return fmt::format("device memory grew by {:.1f} MiB",
                       static_cast<double>(after.device - before.device) / (1 << 20));
  if (after.files > before.files)
    return fmt::format("open files grew from {} to {}", before.files, after.files);
  if (after.threads > before.threads)
    return fmt::format("threads grew from {} to {}", before.threads, after.threads);
  return {};
}

// A thread that was joined may be listed for a moment longer.
Held held_at_the_end(const Held& before, bool cuda) {
  Held after = Held::now(cuda);
  for (int i = 0; i < 100 && after.threads > before.threads; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    after = Held::now(cuda);
  }
  return after;
}

struct Soak {
  SoakOptions options;
  std::vector<std::unique_ptr<SoakLane>> lanes;
  std::vector<std::string> failures;  // one per lane
  std::atomic<int64_t> steps{0}, replays{0};
  std::atomic<bool> stop{false};

  explicit Soak(const SoakOptions& o) : options(o), failures(static_cast<size_t>(o.threads)) {
    for (int32_t i = 0; i < o.threads; ++i)
      lanes.push_back(std::make_unique<SoakLane>(
          LaneOptions{.model = i % 2 == 0 ? kV32 : kV4,
                      .cuda = o.device == "cuda",
                      .check_every = o.check_every,
                      .damage_step = o.damage_step,
                      .seed = o.seed * 1000 + static_cast<uint64_t>(i)}));
  }

  // Every lane's share of `count` steps, in threads of their own, each with its share of replays
  // between its steps.
  void run(int64_t count, int64_t replay_count) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < lanes.size(); ++i) {
      const auto share = [&](int64_t all) {
        const auto n = static_cast<int64_t>(lanes.size()), k = static_cast<int64_t>(i);
        return all * (k + 1) / n - all * k / n;
      };
      threads.emplace_back([this, i, a = share(count), b = share(replay_count)] { lane(i, a, b); });
    }
    {
      tools::Progress progress;
      while (steps < count && !stop) {
        progress.at(fmt::format("step {}, {} replays", steps.load(), replays.load()));
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    }
    for (std::thread& t : threads) t.join();
    steps = 0;
  }
  void lane(size_t i, int64_t count, int64_t replay_count) {
    try {
      for (int64_t s = 0; s < count && !stop; ++s) {
        lanes[i]->step();
        const int64_t due = replay_count * (s + 1) / count - replay_count * s / count;
        if (due > 0) lanes[i]->replay(due);
        replays += due;
        ++steps;
      }
    } catch (const std::exception& e) {
      failures[i] = fmt::format("lane {}, step {}: {}", i, lanes[i]->counts().steps, e.what());
      stop = true;
    }
  }
  std::string failure() const {
    for (const std::string& f : failures)
      if (!f.empty()) return f;
    return {};
  }
};

void print(const Soak& soak, const Held& before, const Held& after, double seconds) {
  tools::Table table({"lane", ">steps", ">tokens", ">arrived", ">finished", ">evicted",
                      ">mode changes", ">plans", ">replays", ">checked", ">worst of its bound"});
  for (size_t i = 0; i < soak.lanes.size(); ++i) {
    const LaneCounts& c = soak.lanes[i]->counts();
    table.add({i % 2 == 0 ? "v32" : "v4", std::to_string(c.steps), std::to_string(c.tokens),
               std::to_string(c.arrived), std::to_string(c.finished), std::to_string(c.evicted),
               std::to_string(c.mode_changes), std::to_string(c.plans), std::to_string(c.replays),
               std::to_string(c.checked), fmt::format("{:.3f}", c.worst)});
  }
  fmt::print("{}\n", table.text());
  tools::Table held({"held by the process", ">after a quarter", ">at the end"});
  const auto mib = [](int64_t bytes) {
    return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
  };
  held.add({"resident memory", mib(before.resident), mib(after.resident)});
  if (after.heap > 0) held.add({"heap in use", mib(before.heap), mib(after.heap)});
  if (soak.options.device == "cuda")
    held.add({"device memory", mib(before.device), mib(after.device)});
  held.add({"open files", std::to_string(before.files), std::to_string(after.files)});
  held.add({"threads", std::to_string(before.threads), std::to_string(after.threads)});
  fmt::print("{}\n{:.1f} s on {}\n", held.text(), seconds, soak.options.device);
}

int run_soak(SoakOptions o) {
  if (o.graph_replays > 0 && o.device != "cuda")
    throw Error(ErrorCode::kInvalidArgument, "soak: --graph-replays: needs --device cuda");
  if (o.device == "cuda") expect_cuda();
  // What is allocated once is there after a quarter.
  const int64_t quarter = std::max<int64_t>(o.steps / 4, 1), rest = o.steps - quarter;
  // Every thread compares at least once: "no drift" is said of what was looked at.
  const int64_t of_a_thread = quarter / o.threads + rest / o.threads;
  if (of_a_thread < 1)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("soak: --steps: expected at least {}, some for each of {} threads, "
                            "found {}",
                            2 * o.threads, o.threads, o.steps));
  o.check_every = std::min(o.check_every, of_a_thread);
  const auto start = std::chrono::steady_clock::now();
  // The pool's threads start with the first call that shares its work, which may be as late as the
  // first comparison: they start here.
  internal::cpu::parallel_for(2, [](int64_t, int) {});
  Soak soak(o);
  soak.run(quarter, o.graph_replays / 4);
  const bool cuda = o.device == "cuda";
  const Held before = Held::now(cuda);
  if (!soak.stop) soak.run(rest, o.graph_replays - o.graph_replays / 4);
  const Held after = held_at_the_end(before, cuda);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print(soak, before, after, seconds);
  const std::string drift = soak.failure(), grown = leak(before, after);
  if (!drift.empty()) fmt::print("FAILED: {}\n", drift);
  if (!grown.empty()) fmt::print("FAILED: {}\n", grown);
  if (drift.empty() && grown.empty()) fmt::print("no drift, no leak\n");
  return drift.empty() && grown.empty() ? 0 : 1;
}

}  // namespace

void add_soak(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd =
      app.add_subcommand("soak", "Random batches for hours, checked; memory stays flat");
  cmd->footer(
      "Every thread has a layer of its own (V3.2, V4, V3.2, ...), whose requests arrive, are\n"
      "evicted and finish. A step takes a batch through pipeline() with a plan of another mode;\n"
      "every n-th step is compared with the reference, caches byte for byte. On CUDA each thread\n"
      "has a stream, and batches are captured and replayed. Exit status: 1 on drift or leak.\n"
      "Examples:\n"
      "  winnow soak --steps 100000\n"
      "  winnow soak --device cuda --steps 2000 --graph-replays 1000000");
  auto o = std::make_shared<SoakOptions>();
  cmd->add_option("--device", o->device, "Where the steps run")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  cmd->add_option("--steps", o->steps, "Steps of all threads")
      ->check(CLI::Range(int64_t{8}, int64_t{1} << 40))
      ->capture_default_str();
  cmd->add_option("--seed", o->seed, "Of the batches and their contents")
      ->check(not_negative)
      ->capture_default_str();
  cmd->add_option("--check-every", o->check_every,
                  "Steps from one comparison to the next; at least one is made")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  cmd->add_option("--threads", o->threads, "Threads that call the library at the same time")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  cmd->add_option("--graph-replays", o->graph_replays, "CUDA: replays of captured batches")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str();
  cmd->add_option("--damage-step", o->damage_step, "Flips a byte of each cache then: to be found")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  cmd->callback([o, &outcome] { outcome.code = run_soak(*o); });
}

}  // namespace winnow::cli
