// compress: one token of many requests, and chunks of one request. Bytes: rows read, rows of the
// state and records written.
#include <fmt/format.h>

#include "harness.h"
#include "layer_problems.h"

namespace winnow {
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
    for (const int64_t batch : {1, 16, 128}) measure(runner, of, batch, 1);
    for (const int64_t chunk : {1024, 4096}) measure(runner, of, 1, chunk);
  }
});

}  // namespace
}  // namespace winnow
