// attend: decode over selected records. One token and 16, every head count of a tensor-parallel
// shard. FLOP: 2 H K (d_qk + d_v) a token; bytes: each selected record once. The set "flashmla" has
// the shapes that FlashMLA's figures (bench/peers) were taken with.
#include <fmt/format.h>

#include "harness.h"
#include "problems.h"

namespace winnow {
namespace {

// The tokens of a batch read the same pages: 16 of them would otherwise need 16 caches of 32k.
bench::Sizes decode(const Model& model, int64_t heads, int64_t topk, int64_t extra) {
  return {.model = model, .heads = heads, .topk = topk, .extra = extra, .shared = true};
}

std::string name_of_case(const bench::Sizes& s) {
  std::string name = fmt::format("{} h{} topk {}", s.model.name, s.heads, s.topk);
  if (s.extra > 0) name += fmt::format("+{}", s.extra);
  if (s.s_q >= 1024) return fmt::format("prefill {} {} x {}k", name, s.s_q, s.context / 1024);
  if (s.s_q > 1) return fmt::format("{} b{} s_q {}", name, s.batch, s.s_q);
  return name + fmt::format(" {} token{}", s.batch, s.batch == 1 ? "" : "s");
}

void measure(bench::Runner& runner, bench::Sizes sizes) {
  sizes.device = runner.device();
  bench::Case c{.name = name_of_case(sizes), .model = std::string(sizes.model.name)};
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

const bench::Suite flashmla("attend", "flashmla", [](bench::Runner& runner) {
  // Random slots of caches of 16k tokens, one for each request.
  const auto run = [&](bench::Sizes s) {
    s.shuffled = true;
    measure(runner, s);
  };
  const auto decode = [&](int64_t heads, int64_t batch, int64_t s_q) {
    run({.heads = heads, .topk = 2048, .batch = batch, .s_q = s_q, .context = 16384});
  };
  for (const int64_t heads : {128, 64, 32, 16, 12, 8}) {
    for (const int64_t batch : {1, 2, 8, 32, 64, 128}) decode(heads, batch, 1);
    decode(heads, 128, 2);
  }
  run({.heads = 128, .topk = 16384, .batch = 148, .s_q = 2, .context = 32768});
  for (const int64_t batch : {2, 32, 128}) {
    const auto v4 = [&](int64_t heads, int64_t extra) {
      run({.model = kV4,
           .heads = heads,
           .topk = 128,
           .extra = extra,
           .batch = batch,
           .s_q = 2,
           .context = 16384});
    };
    v4(64, 512), v4(128, 1024);
  }
  // Prefill from contiguous bf16 rows: a cache of one page.
  const auto prefill = [&](const Model& model, int64_t heads, int64_t topk, int64_t context) {
    run({.model = model,
         .heads = heads,
         .topk = topk,
         .s_q = 4096,
         .context = context,
         .page = static_cast<int32_t>(context),
         .bf16_cache = true});
  };
  for (const int64_t context : {8192, 65536, 131072}) prefill(kV32, 128, 2048, context);
  prefill(kV32, 64, 2048, 65536);
  prefill(kV4, 64, 512, 32768), prefill(kV4, 128, 1024, 32768);
});

}  // namespace
}  // namespace winnow
