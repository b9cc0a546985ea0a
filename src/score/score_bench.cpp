// score: indexer logits over paged keys, alone and with top-k (score_select, the cases with a
// topk). FLOP: 2 * 128 H_I a token and key; bytes: the record of a key, logits where they are
// written.
#include <fmt/format.h>

#include "harness.h"
#include "problems.h"

namespace winnow::score_bench {
namespace {

std::string shape_of(const bench::Sizes& s) {
  const std::string tokens =
      s.s_q > 1 ? fmt::format("{} x {}", s.batch, s.s_q) : fmt::format("{}", s.batch);
  return fmt::format("h{} {}k keys{} {} token{}", s.index_heads, s.context / 1024,
                     s.contiguous ? " in rows" : "", tokens, s.tokens() == 1 ? "" : "s");
}

void measure(bench::Runner& runner, bench::Sizes sizes) {
  sizes.topk = 2048;
  sizes.device = runner.device();
  bench::Case logits{.name = "logits " + shape_of(sizes), .fp8 = true};
  logits.heads = sizes.index_heads;
  logits.batch = sizes.batch;
  logits.s_q = sizes.s_q;
  logits.context = sizes.context;
  bench::Case fused = logits;
  fused.name = fmt::format("topk {} {}", sizes.topk, shape_of(sizes));
  fused.topk = sizes.topk;
  if (!runner.wants(logits) && !runner.wants(fused)) return;

  bench::ScoreProblem problem(sizes);
  logits.flops = fused.flops = problem.flops();
  logits.bytes = problem.bytes();
  const int64_t keys = sizes.context * (sizes.shared ? 1 : sizes.batch);
  fused.bytes = static_cast<double>(keys * page_bytes_used(CacheFormat::kIndexKeys, 1));
  for (const std::string& kernel : runner.kernels()) {
    logits.kernel = fused.kernel = kernel;
    problem.use(kernel.c_str());
    runner.measure(logits, [&] { score(problem.args); });
    runner.measure(fused, [&] { score_select(problem.select_args); });
  }
}

// DeepGEMM's shapes: a cache for every request, and keys in rows.
void measure_on_device(bench::Runner& runner) {
  const auto paged = [&](int64_t batch, int64_t s_q, int64_t context) {
    measure(runner, {.batch = batch, .s_q = s_q, .context = context});
  };
  paged(1, 1, 32768), paged(1, 1, 131072), paged(8, 1, 131072), paged(32, 1, 32768);
  paged(32, 1, 131072), paged(128, 1, 32768), paged(128, 2, 32768);
  paged(1, 4, 131072), paged(32, 3, 131072), paged(32, 4, 131072);
  const auto rows = [&](int64_t s_q, int64_t context) {
    measure(runner, {.s_q = s_q, .context = context, .contiguous = true});
  };
  rows(2048, 8192), rows(2048, 65536), rows(4096, 131072);
}

const bench::Suite suite("score", "default", [](bench::Runner& runner) {
  if (runner.on_cuda()) return measure_on_device(runner);
  // The tokens of a batch read the same pages: 16 of them would otherwise need 16 caches.
  for (const int64_t tokens : {1, 16})
    for (const int64_t context : {8192, 32768, 131072})
      measure(runner, {.batch = tokens, .context = context, .shared = true});
  for (const int64_t heads : {32, 8})
    measure(runner, {.index_heads = heads, .context = 32768, .shared = true});
});

// A rank's shard of the keys, with the logits that the ranks' top-k needs.
void measure_shard(bench::Runner& runner, int64_t tokens, int64_t keys) {
  bench::Sizes sizes{.topk = 2048, .batch = tokens, .context = keys, .device = runner.device()};
  bench::Case c{.name = fmt::format("topk {} with values {}", sizes.topk, shape_of(sizes)),
                .fp8 = true};
  c.heads = sizes.index_heads;
  c.topk = sizes.topk;
  c.batch = tokens;
  c.s_q = 1;
  c.context = keys;
  if (!runner.wants(c)) return;
  bench::ScoreProblem problem(sizes);
  c.flops = problem.flops();
  tools::Buffer<float> values;
  problem.select_args.values = problem.placement.room(values, {tokens, sizes.topk});
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.use(kernel.c_str());
    runner.measure(c, [&] { score_select(problem.select_args); });
  }
}

const bench::Suite ranks("score", "ranks", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return;
  for (const int64_t tokens : {1, 8, 32, 128})
    for (const int64_t keys : {4096, 16384, 131072})
      if (tokens * keys <= 32 * 131072) measure_shard(runner, tokens, keys);
});

const bench::Suite batches("score", "batches", [](bench::Runner& runner) {
  for (const int64_t context : {4096, 20480, 32768})
    for (const int64_t batch :
         {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 66, 68, 96, 128, 132, 136, 160, 192, 256})
      measure(runner, {.batch = batch, .context = context});
});

}  // namespace
}  // namespace winnow::score_bench
