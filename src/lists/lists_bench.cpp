// V4's index lists, 8k of context. Bytes: the entries that are written.
#include <fmt/format.h>

#include "harness.h"
#include "side_problems.h"

namespace winnow::lists_bench {
namespace {

const bench::Suite suite("lists", "default", [](bench::Runner& runner) {
  for (const std::string_view kind : bench::kListKinds)
    for (const int64_t tokens : {16, 4096}) {
      const bench::Sizes sizes{.batch = tokens > 128 ? 1 : tokens,
                               .s_q = tokens > 128 ? tokens : 1,
                               .context = 8192,
                               .device = runner.device()};
      bench::Case c{.name = fmt::format("{} {} tokens", kind, tokens)};
      c.model = "v4";
      c.batch = sizes.batch;
      c.s_q = sizes.s_q;
      c.context = sizes.context;
      if (!runner.wants(c)) continue;
      bench::ListsProblem problem(sizes, kind);
      c.bytes = problem.bytes();
      for (const std::string& kernel : runner.kernels()) {
        c.kernel = kernel;
        runner.measure(c, [&] { problem.run(kernel.c_str()); });
      }
    }
});

}  // namespace
}  // namespace winnow::lists_bench
