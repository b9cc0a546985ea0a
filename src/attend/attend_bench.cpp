// attend: decode over selected records. One token and 16, every head count of a tensor-parallel
// shard. FLOP: 2 H K (d_qk + d_v) a token; bytes: each selected record once.
#include <fmt/format.h>

#include "harness.h"
#include "problems.h"

namespace winnow {
namespace {

// The tokens of a batch read the same pages: 16 of them would otherwise need 16 caches of 32k.
bench::Sizes decode(const Model& model, int64_t heads, int64_t topk, int64_t extra) {
  return {.model = model, .heads = heads, .topk = topk, .extra = extra, .shared = true};
}

void measure(bench::Runner& runner, const bench::Sizes& sizes) {
  bench::Case c{.model = std::string(sizes.model.name)};
  c.name = fmt::format("{} h{} topk {}", sizes.model.name, sizes.heads, sizes.topk);
  if (sizes.extra > 0) c.name += fmt::format("+{}", sizes.extra);
  c.name += fmt::format(" {} token{}", sizes.batch, sizes.batch == 1 ? "" : "s");
  c.heads = sizes.heads, c.topk = sizes.topk, c.extra = sizes.extra;
  c.batch = sizes.batch, c.s_q = sizes.s_q, c.context = sizes.context;
  if (!runner.wants(c)) return;
  bench::AttendProblem problem(sizes);
  c.flops = problem.flops(), c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.use(kernel.c_str());
    runner.measure(c, [&] { attend(problem.args); });
  }
}

const bench::Suite suite("attend", "default", [](bench::Runner& runner) {
  for (const int64_t tokens : {1, 16}) {
    const auto run = [&](bench::Sizes sizes) {
      sizes.batch = tokens;
      measure(runner, sizes);
    };
    for (const int64_t topk : {2048, 512})
      for (const int64_t heads : {128, 64, 32, 16, 8}) run(decode(kV32, heads, topk, 0));
    for (const int64_t extra : {512, 1024})
      for (const int64_t heads : {128, 64}) run(decode(kV4, heads, 128, extra));
  }
});

}  // namespace
}  // namespace winnow
