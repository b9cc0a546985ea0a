// Starts winnow-ranks under mpirun and reads what rank 0 prints.
#include "start_ranks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "core/kernel_table.h"
#include "table.h"
#include "winnow/error.h"

extern char** environ;

namespace winnow::cli {

namespace {

namespace fs = std::filesystem;

bool runnable(const fs::path& path) { return ::access(path.c_str(), X_OK) == 0; }

std::string helper_of(const std::string& command) {
  std::error_code unreadable;
  const fs::path self = fs::read_symlink("/proc/self/exe", unreadable);
  const fs::path beside = self.parent_path() / "winnow-ranks";
  if (!unreadable && runnable(beside)) return beside;
  throw Error(ErrorCode::kUnsupported,
              command +
                  ": this build has no winnow-ranks, the program that links MPI; configure "
                  "winnow where an MPI is installed (Debian: libopenmpi-dev, openmpi-bin)");
}

std::string launcher_of(const std::string& command, const std::string& by_hand) {
  if (const char* named = std::getenv("WINNOW_MPIRUN"); named && *named) {
    if (runnable(named)) return named;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: WINNOW_MPIRUN: expected a program, found {}", command, named));
  }
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    for (const char* name : {"mpirun", "mpiexec"})
      if (!folder.empty() && runnable(fs::path(folder) / name)) return fs::path(folder) / name;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: no mpirun in PATH; install one (Debian: openmpi-bin), name one by "
                          "WINNOW_MPIRUN, or start the ranks with your own launcher: {}",
                          command, by_hand));
}

struct Ended {
  int status = 0;
  std::string out;
};

// The launcher at work. Without it ranks would go on where only this program is told to end, as by
// `kill`: a terminal's Ctrl-C reaches all of them.
volatile std::sig_atomic_t launched = 0;

void end_ranks(int signal) {
  if (launched > 0) ::kill(static_cast<pid_t>(launched), SIGTERM);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

class EndingRanks {
 public:
  explicit EndingRanks(pid_t child) {
    launched = child;
    for (const int signal : {SIGINT, SIGTERM, SIGHUP})
      if (std::signal(signal, end_ranks) == SIG_IGN) std::signal(signal, SIG_IGN);  // nohup
  }
  ~EndingRanks() { launched = 0; }
  EndingRanks(const EndingRanks&) = delete;
  EndingRanks& operator=(const EndingRanks&) = delete;
};

// Runs a program to its end with its standard output read here.
Ended run_program(const std::vector<std::string>& words, const std::vector<std::string>& extra) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw Error(ErrorCode::kRuntime, "cannot make a pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  std::vector<char*> arguments, environment;
  for (const std::string& w : words) arguments.push_back(const_cast<char*>(w.c_str()));
  arguments.push_back(nullptr);
  // Ours come first: a name that stands twice counts once.
  for (const std::string& e : extra) environment.push_back(const_cast<char*>(e.c_str()));
  for (char** e = environ; *e; ++e) environment.push_back(*e);
  environment.push_back(nullptr);
  pid_t child = 0;
  const int refused =
      ::posix_spawn(&child, arguments[0], &actions, nullptr, arguments.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  Ended ended;
  if (refused != 0) {
    ::close(ends[0]);
    throw Error(ErrorCode::kRuntime, words[0] + ": cannot be started");
  }
  const EndingRanks ending(child);
  char block[4096];
  for (ssize_t n = 0; (n = ::read(ends[0], block, sizeof block)) > 0;)
    ended.out.append(block, static_cast<size_t>(n));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  ended.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return ended;
}

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& w : words) all += (all.empty() ? "" : " ") + w;
  return all;
}

}  // namespace

RankOutput start_ranks(const std::string& command, const RankJob& job) {
  detail::check_environment();  // which every rank would say, beside its launcher
  std::vector<std::string> ranked = {helper_of(command)};
  ranked.insert(ranked.end(), job.words.begin(), job.words.end());
  const std::string count = std::to_string(job.ranks);
  const std::string launcher =
      launcher_of(command, fmt::format("mpirun -n {} {}", count, joined(ranked)));
  std::vector<std::string> words = {launcher, "-n", count};
  const std::string version = run_program({launcher, "--version"}, {}).out;
  const bool open_mpi =
      version.find("Open MPI") != std::string::npos || version.find("OpenRTE") != std::string::npos;
  const int32_t cores = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  const int32_t share = std::max(1, cores / std::max(job.ranks, 1));
  const int32_t threads = job.threads > 0 ? job.threads : share;
  if (open_mpi) words.emplace_back("--oversubscribe");
  // Threads of a rank must not share one core.
  if (open_mpi && threads > 1) words.insert(words.end(), {"--bind-to", "none"});
  words.insert(words.end(), ranked.begin(), ranked.end());
  std::vector<std::string> extra;
  if (job.threads > 0 || !std::getenv("WINNOW_THREADS"))
    extra.push_back("WINNOW_THREADS=" + std::to_string(threads));
  if (open_mpi && ::geteuid() == 0)  // it refuses root otherwise, in a container as well
    extra.insert(extra.end(), {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"});
  const Ended ended = run_program(words, extra);
  RankOutput output{ended.status, {}};
  std::istringstream lines(ended.out);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with('{')) output.lines.push_back(line);
  if (ended.status != 0 && (output.lines.empty() || ended.status != 1))
    throw Error(ErrorCode::kRuntime,
                fmt::format("{}: {} ended with status {}", command, joined(words), ended.status));
  for (const std::string& line : output.lines) {
    const int32_t found = nlohmann::ordered_json::parse(line).value("ranks", 0);
    if (found != job.ranks)
      throw Error(ErrorCode::kRuntime,
                  fmt::format("{}: expected a group of {} ranks, found {}: {} belongs to another "
                              "MPI than winnow-ranks",
                              command, job.ranks, found, launcher));
  }
  return output;
}

// Why outputs with other bits are no fault, where many have them.
constexpr const char* kWhyNotEqual =
    "  The others round elsewhere, within that bound: kernels with bf16 products round the "
    "softmax's\n"
    "  weights relative to the largest logit, which is another one in a rank's part than in the\n"
    "  whole. --kernel simd rounds no weights.\n";

int run_over_ranks(const RankedRun& run) {
  RankJob job{.ranks = run.ranks, .words = {"run", "--spread", run.spread}};
  job.words.insert(job.words.end(), {"--interleave", std::to_string(run.interleave)});
  job.words.insert(job.words.end(), run.options.begin(), run.options.end());
  const RankOutput output = start_ranks("run", job);
  if (output.lines.empty()) throw Error(ErrorCode::kRuntime, "run: winnow-ranks printed no result");
  const auto r = nlohmann::ordered_json::parse(output.lines.front());
  if (run.json) {
    fmt::print("{}\n", output.lines.front());
    return output.status;
  }
  const auto number = [&](const char* name) { return r.at(name).get<double>(); };
  fmt::print("v32, {} ranks over {}, {} shared out, interleave {}: {:.0f} tokens in {:.0f} steps\n",
             run.ranks, r.at("transport").get<std::string>(), run.spread, run.interleave,
             number("tokens"), number("steps"));
  tools::Table table({"a step and layer", ">value"});
  table.add({"slowest rank, ms", fmt::format("{:.3f}", number("ms_per_step"))});
  table.add({"of rank 0 in collectives, with waiting, ms",
             fmt::format("{:.3f}", number("collectives_ms_per_step"))});
  table.add({"collectives", fmt::format("{:.2f}", number("collectives_per_step"))});
  table.add({"bytes from other ranks", fmt::format("{:.0f}", number("bytes_in_per_step"))});
  table.add(
      {"one rank with everything, ms", fmt::format("{:.3f}", number("one_rank_ms_per_step"))});
  fmt::print("{}", table.text());
  const bool ok = r.at("ok").get<bool>();
  const double equal = number("equal_to_one_rank");
  fmt::print(
      "\nlargest difference from one rank's outputs: {:.3f} of its bound\n"
      "  The bound is what rounding may cost at that place; above 1 is a failure.\n"
      "outputs with one rank's bits: {:.3f} %\n",
      number("worst_of_bound"), 100 * equal);
  if (ok && equal < 0.99) fmt::print("{}", kWhyNotEqual);
  if (!ok) fmt::print("check FAILED\n");
  return ok ? 0 : 1;
}

}  // namespace winnow::cli
