// write: new tokens of a step into each kind of record; on a device also gather, records into rows.
// With a prologue: a projection's rows. Bytes: what is read and what is written.
#include <fmt/format.h>

#include "layer_bench.h"

namespace winnow::write_bench {
namespace {

// Slots are drawn, or in order, as those of a prefill are.
void measure(bench::Runner& runner, CacheFormat format, int64_t tokens, bool in_order = false) {
  const bench::Sizes sizes{
      .batch = tokens, .context = 32768, .in_order = in_order, .device = runner.device()};
  bench::Case c{
      .name = fmt::format("{} {} tokens{}", name_of(format), tokens, in_order ? " in order" : "")};
  c.batch = tokens;
  c.s_q = 1;
  c.context = sizes.context;
  if (!runner.wants(c)) return;
  bench::WriteProblem problem(sizes, format);
  c.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { write(problem.args); });
  }
}

void measure_projection(bench::Runner& runner, CacheFormat format, bool in_order) {
  const auto problem = [=](bench::Sizes sizes) {
    sizes.in_order = in_order;
    return bench::WriteProjectionsProblem(sizes, format);
  };
  const char* order = in_order ? " in order" : "";
  bench::measure_tokens(runner, fmt::format("of a projection, {}{}", name_of(format), order), 1,
                        problem, write);
}

void measure_gather(bench::Runner& runner, const Model& model, int64_t tokens) {
  const bench::Sizes sizes{.model = model, .context = tokens, .device = runner.device()};
  bench::Case c{.name = fmt::format("gather {} {} tokens", model.name, tokens)};
  c.batch = c.s_q = 1;
  c.context = tokens;
  if (!runner.wants(c)) return;
  bench::Placement placement(runner.device());
  tools::Buffer<bf16> rows;
  bench::GatherProblem problem(sizes, placement.room(rows, {tokens, model.d_qk}).data);
  const int64_t record = page_bytes_used(problem.args.cache.format, 1);
  c.bytes = static_cast<double>(tokens * (record + 2 * model.d_qk));
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    problem.args.target.kernel = kernel.c_str();
    runner.measure(c, [&] { gather(problem.args); });
  }
}

const bench::Suite suite("write", "default", [](bench::Runner& runner) {
  for (const CacheFormat format : cache_formats())
    for (const int64_t tokens : {1, 16, 4096}) measure(runner, format, tokens);
  constexpr CacheFormat kProjected[] = {CacheFormat::kV32Fp8, CacheFormat::kV4Fp8,
                                        CacheFormat::kIndexKeys};
  for (const CacheFormat format : kProjected) measure_projection(runner, format, false);
  if (!runner.on_cuda()) {
    for (const CacheFormat format : cache_formats()) measure(runner, format, 4096, true);
    for (const CacheFormat format : kProjected) measure_projection(runner, format, true);
    return;
  }
  for (const Model& model : {kV32, kV4})
    for (const int64_t tokens : {1024, 65536}) measure_gather(runner, model, tokens);
});

}  // namespace
}  // namespace winnow::write_bench
