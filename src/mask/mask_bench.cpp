// topk_mask of 2,048 ids a token on a device. Bytes: what is read and what is written.
#include <fmt/format.h>

#include "harness.h"
#include "side_problems.h"

namespace winnow::mask_bench {
namespace {

void measure_mask(bench::Runner& runner, int64_t tokens, int64_t keys) {
  constexpr int64_t kTopk = 2048;
  bench::Case c{.name = fmt::format("{} tokens of {}k", tokens, keys / 1024)};
  c.topk = kTopk;
  c.batch = 1;
  c.s_q = tokens;
  c.context = keys;
  if (!runner.wants(c)) return;
  bench::MaskProblem problem(
      {.topk = kTopk, .s_q = tokens, .context = keys, .device = runner.device()});
  c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { topk_mask(problem.args); });
  }
}

const bench::Suite masks("mask", "default", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return;
  for (const int64_t keys : {4096, 262144}) measure_mask(runner, 4096, keys);
});

}  // namespace
}  // namespace winnow::mask_bench
