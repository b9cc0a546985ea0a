// merge of two parts on a device. Bytes: what is read and what is written.
#include <fmt/format.h>

#include "harness.h"
#include "random.h"
#include "side_problems.h"

namespace winnow::merge_bench {
namespace {

void measure_merge(bench::Runner& runner, int64_t tokens) {
  constexpr int64_t kHeads = 128, kParts = 2;
  bench::Case c{.name = fmt::format("{} parts {} tokens", kParts, tokens)};
  c.heads = kHeads;
  c.batch = 1;
  c.s_q = tokens;
  if (!runner.wants(c)) return;
  bench::MergeProblem problem({.heads = kHeads, .s_q = tokens, .device = runner.device()}, kParts);
  c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { merge(problem.args); });
  }
}

// A rank's share of the heads from eight ranks, in fp32.
void measure_ranks(bench::Runner& runner, int64_t tokens) {
  constexpr int64_t kHeads = 16, kRanks = 8, kValue = 512;
  bench::Case c{.name = fmt::format("{} ranks {} tokens", kRanks, tokens)};
  c.heads = kHeads;
  c.batch = tokens;
  c.s_q = 1;
  if (!runner.wants(c)) return;
  bench::MergeProblem problem({.heads = kHeads, .s_q = tokens, .device = runner.device()}, kRanks);
  tools::Buffer<float> parts;
  tools::Random random(2);
  problem.args.partial_out =
      problem.placement.normals(parts, {kRanks, tokens, kHeads, kValue}, random);
  c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { merge(problem.args); });
  }
}

const bench::Suite ranks("merge", "ranks", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return;
  for (const int64_t tokens : {1, 8, 32, 128}) measure_ranks(runner, tokens);
});

const bench::Suite merges("merge", "default", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return;
  for (const int64_t tokens : {128, 4096}) measure_merge(runner, tokens);
});

}  // namespace
}  // namespace winnow::merge_bench
