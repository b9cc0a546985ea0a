// write: new tokens of a step into each kind of record. Bytes: inputs read, records written.
#include <fmt/format.h>

#include "harness.h"
#include "problems.h"

namespace winnow {
namespace {

void measure(bench::Runner& runner, CacheFormat format, int64_t tokens) {
  const bench::Sizes sizes{.batch = tokens, .context = 32768, .device = runner.device()};
  bench::Case c{.name = fmt::format("{} {} tokens", name_of(format), tokens)};
  c.batch = tokens, c.s_q = 1, c.context = sizes.context;
  if (!runner.wants(c)) return;
  bench::WriteProblem problem(sizes, format);
  c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { write(problem.args); });
  }
}

const bench::Suite suite("write", "default", [](bench::Runner& runner) {
  for (const CacheFormat format : cache_formats())
    for (const int64_t tokens : {1, 16, 4096}) measure(runner, format, tokens);
});

}  // namespace
}  // namespace winnow
