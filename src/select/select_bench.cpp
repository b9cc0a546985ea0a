// select: the top-k of rows of logits. Bytes: each logit once, the ids.
#include <fmt/format.h>

#include "harness.h"
#include "problems.h"

namespace winnow::select_bench {
namespace {

void measure(bench::Runner& runner, bench::Sizes sizes) {
  sizes.device = runner.device();
  bench::Case c{.name = fmt::format("topk {} of {}k {} token{}", sizes.topk, sizes.context / 1024,
                                    sizes.tokens(), sizes.tokens() == 1 ? "" : "s")};
  c.topk = sizes.topk;
  c.batch = sizes.batch;
  c.s_q = sizes.s_q;
  c.context = sizes.context;
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
  const auto run = [&](int64_t batch, int64_t s_q, int64_t context) {
    measure(runner, {.topk = 2048, .batch = batch, .s_q = s_q, .context = context});
  };
  if (runner.on_cuda()) {  // the shapes beside DeepGEMM's logits
    run(1, 1, 32768), run(1, 1, 131072), run(8, 1, 131072), run(32, 1, 32768);
    run(32, 1, 131072), run(128, 1, 32768), run(128, 2, 32768);
    run(1, 2048, 8192), run(1, 2048, 65536), run(1, 4096, 131072);
    // Few of many, rows longer than a cluster holds, a large K of many rows.
    measure(runner, {.topk = 512, .batch = 16, .context = 262144});
    measure(runner, {.topk = 2048, .context = 1048576});
    measure(runner, {.topk = 4096, .batch = 200, .context = 65536});
    return;
  }
  for (const int64_t tokens : {1, 16})
    for (const int64_t context : {8192, 32768, 131072}) run(tokens, 1, context);
  measure(runner, {.topk = 512, .context = 32768});
});

// What cut() over eight ranks is held against: as many logits as eight times 2,048 candidates.
const bench::Suite ranks("select", "ranks", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return;
  for (const int64_t tokens : {1, 8, 32, 128})
    measure(runner, {.topk = 2048, .batch = tokens, .context = 16384});
});

}  // namespace
}  // namespace winnow::select_bench
