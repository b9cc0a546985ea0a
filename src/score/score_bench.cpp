// score: indexer logits over paged keys, alone and with top-k (score_select, the cases with a
// topk). FLOP: 2 * 128 H_I a token and key; bytes: 132 a key, logits where they are written.
#include <fmt/format.h>

#include "buffer.h"
#include "harness.h"
#include "problems.h"

namespace winnow {
namespace {

// The tokens of a batch read the same pages: 16 of them would otherwise need 16 caches.
void measure(bench::Runner& runner, int64_t heads, int64_t tokens, int64_t context) {
  const bench::Sizes sizes{
      .index_heads = heads, .topk = 2048, .batch = tokens, .context = context, .shared = true};
  const std::string shape =
      fmt::format("h{} {}k keys {} token{}", heads, context / 1024, tokens, tokens == 1 ? "" : "s");
  bench::Case logits{.name = "logits " + shape};
  logits.heads = heads, logits.batch = tokens, logits.s_q = 1, logits.context = context;
  bench::Case fused = logits;
  fused.name = fmt::format("topk {} {}", sizes.topk, shape), fused.topk = sizes.topk;
  if (!runner.wants(logits) && !runner.wants(fused)) return;

  bench::ScoreProblem problem(sizes);
  logits.flops = fused.flops = problem.flops();
  logits.bytes = problem.bytes();
  fused.bytes = static_cast<double>(context) * 132;
  tools::Buffer<std::byte> workspace;
  for (const std::string& kernel : runner.kernels()) {
    logits.kernel = fused.kernel = kernel;
    problem.args.target.kernel = problem.select_args.score.target.kernel = kernel.c_str();
    runner.measure(logits, [&] { score(problem.args); });
    workspace = tools::Buffer<std::byte>(
        static_cast<int64_t>(score_select_workspace_bytes(problem.select_args)));
    problem.select_args.workspace = workspace.span();
    runner.measure(fused, [&] { score_select(problem.select_args); });
  }
}

const bench::Suite suite("score", "default", [](bench::Runner& runner) {
  for (const int64_t tokens : {1, 16})
    for (const int64_t context : {8192, 32768, 131072}) measure(runner, 64, tokens, context);
  for (const int64_t heads : {32, 8}) measure(runner, heads, 1, 32768);
});

}  // namespace
}  // namespace winnow
