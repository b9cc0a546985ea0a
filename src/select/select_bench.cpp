// select: the top-k of rows of logits. Bytes: each logit once, the ids.
#include <fmt/format.h>

#include "harness.h"
#include "problems.h"

namespace winnow {
namespace {

void measure(bench::Runner& runner, int64_t tokens, int64_t context, int64_t topk) {
  const bench::Sizes sizes{.topk = topk, .batch = tokens, .context = context};
  bench::Case c{.name = fmt::format("topk {} of {}k {} token{}", topk, context / 1024, tokens,
                                    tokens == 1 ? "" : "s")};
  c.topk = topk, c.batch = tokens, c.s_q = 1, c.context = context;
  if (!runner.wants(c)) return;
  bench::SelectProblem problem(sizes);
  c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { select(problem.args); });
  }
}

const bench::Suite suite("select", "default", [](bench::Runner& runner) {
  for (const int64_t tokens : {1, 16})
    for (const int64_t context : {8192, 32768, 131072}) measure(runner, tokens, context, 2048);
  measure(runner, 1, 32768, 512);
});

}  // namespace
}  // namespace winnow
