// winnow bench: times of the stages, with the machine's roofs and the peers' figures beside them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

#include "commands.h"
#include "harness.h"
#include "numbers.h"
#include "report.h"
#include "start_ranks.h"
#include "store.h"
#include "winnow/error.h"

namespace winnow::cli {

namespace {

struct BenchOptions {
  std::vector<std::string> stages;
  bench::Options options;
  std::string cache = "both", after = "nothing", json, save, render, commit;
  bool quick = false;
  std::vector<int32_t> ranks = {1, 2, 4, 8, 16};
};

// Not one of a stage's suites: it starts programs of its own.
constexpr const char* kParallel = "parallel";

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path))
    throw Error(ErrorCode::kRuntime, "bench: " + path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// x.json -> x.md
std::string beside(const std::string& path) {
  return (path.ends_with(".json") ? path.substr(0, path.size() - 5) : path) + ".md";
}

// Options that would change nothing.
void refuse_options(const CLI::App& cmd, std::initializer_list<const char*> options,
                    const char* why) {
  for (const char* option : options)
    if (cmd.count(option) > 0)
      throw Error(ErrorCode::kInvalidArgument, fmt::format("bench: {}: {}", option, why));
}

// A variable of a script that is not set would throw minutes of timing away.
std::string named_file(const std::string& text) {
  return text.empty() ? "expected a file's name, found none" : "";
}

// Range() lets what is no number pass.
std::string a_number(const std::string& text) {
  return std::isnan(std::strtod(text.c_str(), nullptr)) ? "expected a number, found " + text : "";
}

void run_bench(const CLI::App& cmd, BenchOptions o) {
  if (!o.render.empty()) {
    store(beside(o.render), bench::markdown_of(read_file(o.render), o.render));
    fmt::print("{}\n", beside(o.render));
    return;
  }
  if (!o.json.empty()) check_place(o.json);
  if (!o.save.empty()) check_place(o.save), check_place(beside(o.save));
  if (std::find(o.stages.begin(), o.stages.end(), kParallel) != o.stages.end()) {
    if (o.stages.size() > 1)
      throw Error(ErrorCode::kInvalidArgument, "bench: parallel runs alone, not with other stages");
    refuse_options(cmd,
                   {"--device", "--set", "--cache", "--after", "--runs", "--seconds", "--rounds"},
                   "not of parallel, which has --ranks, --filter, --kernel and --quick");
    bench_over_ranks({.ranks = o.ranks,
                      .filter = o.options.filter,
                      .kernel = o.options.kernel,
                      .json = o.json,
                      .save = o.save,
                      .commit = o.commit,
                      .quick = o.quick});
    return;
  }
  refuse_options(cmd, {"--ranks"}, "of parallel alone: winnow bench parallel --ranks 1,2,4");
  o.options.cold = o.cache != "warm";
  o.options.warm = o.cache != "cold";
  if (o.quick) o.options.method = {.min_runs = 1, .max_runs = 10, .seconds = 0.05};
  o.options.method.after_code = o.after == "code";
  if (o.quick && o.options.rounds == 0) o.options.rounds = 1;
  bench::Machine machine = bench::describe_machine();
  if (!o.commit.empty()) machine.commit = o.commit;
  bench::Runner runner(o.options);
  const std::vector<bench::Result> results = bench::run_suites(runner, o.stages);
  if (results.empty())
    throw Error(ErrorCode::kUnsupported,
                fmt::format("bench: no case of set '{}' on --device {} matches what was asked for",
                            o.options.set, o.options.device));
  fmt::print("{}\n{}", bench::header_text(machine, runner.roofs()),
             bench::table_text(machine, results));
  if (!o.json.empty()) store(o.json, bench::json_text(results));
  if (!o.save.empty()) {
    const std::string stored = bench::stored_text(machine, runner.roofs(), results);
    store(o.save, stored);
    store(beside(o.save), bench::markdown_of(stored, o.save));
  }
}

}  // namespace

void add_bench(CLI::App& app, Outcome&) {
  CLI::App* cmd =
      app.add_subcommand("bench", "Time the stages: µs, TFLOP/s, GB/s, share of the roof");
  cmd->footer(
      "Best of many runs on the CPU, median on a device; roofs are measured in the same run.\n"
      "A case is timed in every round, and its roof between its runs: a machine has bad moments.\n"
      "Examples:\n"
      "  winnow bench                             every stage\n"
      "  winnow bench attend --filter h128        some cases of one\n"
      "  winnow bench attend --json out.json      an array for programs\n"
      "  winnow bench --save bench/results/x.json with machine header, and x.md beside it\n"
      "  winnow bench parallel --ranks 1,2,4      a layer over MPI ranks, and the prediction");
  auto o = std::make_shared<BenchOptions>();
  std::vector<std::string> stages = bench::stages();
  stages.emplace_back(kParallel);
  cmd->add_option("stage", o->stages, "Stages to time (all); parallel: a layer over MPI ranks")
      ->check(CLI::IsMember(stages));
  add_numbers(*cmd, "--ranks", o->ranks, "Of parallel: ranks, one thread each", {1, 1024});
  cmd->add_option("--json", o->json, "Write the results as a JSON array")->check(named_file);
  cmd->add_option("--save", o->save, "Write results and machine header, .json and .md")
      ->check(named_file);
  cmd->add_option("--render", o->render, "Only render a saved .json as .md")->check(named_file);
  cmd->add_option("--device", o->options.device, "Where to run")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  cmd->add_option("--set", o->options.set, "Which set of cases")
      ->check(CLI::IsMember(bench::sets()))
      ->capture_default_str();
  cmd->add_option("--kernel", o->options.kernel, "This kernel only (every available one)");
  cmd->add_option("--filter", o->options.filter, "Only cases whose name contains this");
  cmd->add_option("--cache", o->cache, "State of the caches before a run")
      ->check(CLI::IsMember({"cold", "warm", "both"}))
      ->capture_default_str();
  cmd->add_option("--after", o->after,
                  "What a CUDA device runs before each run: another kernel's code")
      ->check(CLI::IsMember({"nothing", "code"}))
      ->capture_default_str();
  cmd->add_option("--runs", o->options.method.max_runs, "At most this many runs a case and round")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  cmd->add_option("--seconds", o->options.method.seconds,
                  "At most about this long a case and round, on the CPU")
      ->check(CLI::Range(1e-6, 1e6))
      ->check(a_number)
      ->capture_default_str();
  cmd->add_option("--rounds", o->options.rounds, "Rounds over all cases (4 on the CPU, else 1)")
      ->check(CLI::Range(1, 1000));
  cmd->add_option("--commit", o->commit, "Commit to name, where the build could not know it");
  cmd->add_flag("--quick", o->quick, "Few runs: to see that everything works");
  cmd->callback([o, cmd] { run_bench(*cmd, *o); });
}

}  // namespace winnow::cli
