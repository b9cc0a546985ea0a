// merge of two parts on a device. Bytes: what is read and what is written.
#include <fmt/format.h>

#include "harness.h"
#include "winnow/merge.h"

namespace winnow {
namespace {

void measure_merge(bench::Runner& runner, int64_t tokens) {
  constexpr int64_t kHeads = 128, kValue = 512;
  bench::Case c{.name = fmt::format("2 parts {} tokens", tokens)};
  c.heads = kHeads;
  c.batch = 1;
  c.s_q = tokens;
  c.bytes = static_cast<double>(tokens * kHeads * (3 * 2 * kValue + 3 * 4));
  if (!runner.wants(c)) return;
  bench::Placement placement(runner.device());
  tools::Random random(1);
  tools::Buffer<bf16> parts, out;
  tools::Buffer<float> part_lses, lse;
  MergeArgs args{
      .partial_out = placement.room(parts, {2, tokens, kHeads, kValue}),  // zeros: soon made
      .partial_lse = placement.normals(part_lses, {2, tokens, kHeads}, random),
      .out = placement.room(out, {tokens, kHeads, kValue}),
      .lse = placement.room(lse, {tokens, kHeads})};
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    args.target = {runner.device(), kernel.c_str()};
    runner.measure(c, [&] { merge(args); });
  }
}

const bench::Suite merges("merge", "default", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return;
  for (const int64_t tokens : {128, 4096}) measure_merge(runner, tokens);
});

}  // namespace
}  // namespace winnow
