// compress: one token of many requests, and chunks of one request. Bytes: rows read from
// the call and the state, rows of the state and records written, rows of the table.
#include <fmt/format.h>

#include "layer_bench.h"

namespace winnow::compress_bench {
namespace {

void measure(bench::Runner& runner, const bench::Compressor& of, int64_t batch, int64_t chunk) {
  const bench::Sizes sizes{
      .batch = batch, .s_q = chunk, .context = 8192, .device = runner.device()};
  bench::Case c{.name = fmt::format("{} {} x {} tokens", of.name, batch, chunk)};
  c.batch = batch;
  c.s_q = chunk;
  if (!runner.wants(c)) return;
  bench::CompressProblem problem(sizes, of);
  c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { compress(problem.args); });
  }
}

const bench::Suite suite("compress", "default", [](bench::Runner& runner) {
  for (const bench::Compressor& of : bench::kCompressors) {
    for (const int64_t tokens : bench::token_counts(runner))
      tokens < 1024 ? measure(runner, of, tokens, 1) : measure(runner, of, 1, tokens);
  }
});

// Whether the time is linear in the tokens of a chunk.
const bench::Suite chunks("compress", "chunks", [](bench::Runner& runner) {
  for (const bench::Compressor& of : bench::kCompressors)
    for (const int64_t tokens : {1024, 2048, 4096, 8192}) measure(runner, of, 1, tokens);
});

}  // namespace
}  // namespace winnow::compress_bench
