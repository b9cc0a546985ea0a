// attend_mha: causal attention over decompressed keys, and the same over 2,048 chosen ones a token.
// FLOP: 2 (d_qk + d_v) a head, token and key of its set; bytes: queries, keys, values and outputs
// once.
#include <fmt/format.h>

#include "harness.h"
#include "side_problems.h"

namespace winnow::mha_bench {
namespace {

void measure(bench::Runner& runner, int64_t heads, int64_t rows, int64_t topk) {
  bench::Case c{.name = fmt::format("{} h{} {} tokens", topk > 0 ? "topk" : "causal", heads, rows)};
  c.heads = heads;
  c.topk = topk;
  c.batch = 1;
  c.s_q = c.context = rows;
  if (!runner.wants(c)) return;
  bench::MhaProblem problem(
      {.heads = heads, .topk = topk, .s_q = rows, .context = rows, .device = runner.device()});
  c.flops = problem.flops();
  c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { attend_mha(problem.args); });
  }
}

const bench::Suite suite("mha", "default", [](bench::Runner& runner) {
  if (!runner.on_cuda()) {
    measure(runner, 2, 512, 0);
    measure(runner, 2, 512, 64);
    return;
  }
  for (const int64_t topk : {0, 2048})
    for (const int64_t rows : {4096, 16384}) measure(runner, 16, rows, topk);
});

}  // namespace
}  // namespace winnow::mha_bench
