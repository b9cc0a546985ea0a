// locate: ids of a step's tokens to slots. Bytes: ids read, table read, slots written.
#include <fmt/format.h>

#include "harness.h"
#include "problems.h"

namespace winnow::locate_bench {
namespace {

void measure(bench::Runner& runner, int64_t tokens) {
  const bench::Sizes sizes{
      .topk = 2048, .batch = tokens, .context = 32768, .device = runner.device()};
  bench::Case c{.name = fmt::format("{} tokens topk {}", tokens, sizes.topk)};
  c.topk = sizes.topk;
  c.batch = tokens;
  c.s_q = 1;
  c.context = sizes.context;
  if (!runner.wants(c)) return;
  bench::LocateProblem problem(sizes);
  c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { locate(problem.args); });
  }
}

const bench::Suite suite("locate", "default", [](bench::Runner& runner) {
  for (const int64_t tokens : {1, 16, 128}) measure(runner, tokens);
});

}  // namespace
}  // namespace winnow::locate_bench
