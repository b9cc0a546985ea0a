// attend_mha: causal attention over decompressed keys, and the same over 2,048 chosen ones a token.
// FLOP: 2 (d_qk + d_v) a head, token and key of its set; bytes: queries, keys, values and outputs
// once.
#include <fmt/format.h>

#include <algorithm>

#include "harness.h"
#include "winnow/mha.h"

namespace winnow {
namespace {

void measure(bench::Runner& runner, int64_t heads, int64_t rows, int64_t topk) {
  constexpr int64_t kKey = 192, kValue = 128;
  bench::Case c{.name = fmt::format("{} h{} {} tokens", topk > 0 ? "topk" : "causal", heads, rows)};
  c.heads = heads;
  c.topk = topk;
  c.batch = 1;
  c.s_q = c.context = rows;
  if (!runner.wants(c)) return;
  bench::Placement placement(runner.device());
  tools::Random random(1);
  tools::Buffer<bf16> q, k, v, out;
  tools::Buffer<int32_t> ids(rows * topk), lengths(rows);
  double keys = 0;
  for (int64_t t = 0; t < rows; ++t) {
    lengths[t] = static_cast<int32_t>(t + 1);
    if (topk > 0) random.choose(ids.span(t * topk, topk), t + 1);
    keys += static_cast<double>(topk > 0 ? std::min(topk, t + 1) : t + 1);
  }
  MhaArgs args{.q = placement.normals(q, {rows, heads, kKey}, random),
               .k = placement.normals(k, {rows, heads, kKey}, random),
               .v = placement.normals(v, {rows, heads, kValue}, random),
               .lengths = placement.copied(lengths, {rows}),
               .scale = 0.072f,  // 192^-1/2
               .out = placement.room(out, {rows, heads, kValue})};
  if (topk > 0) args.ids = placement.copied(ids, {rows, topk});
  c.flops = 2.0 * static_cast<double>(heads * (kKey + kValue)) * keys;
  c.bytes = 2.0 * static_cast<double>(rows * heads * 2 * (kKey + kValue));
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    args.target = {runner.device(), kernel.c_str()};
    runner.measure(c, [&] { attend_mha(args); });
  }
}

const bench::Suite suite("mha", "default", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return measure(runner, 2, 512, 0), measure(runner, 2, 512, 64);
  measure(runner, 16, 4096, 0), measure(runner, 16, 16384, 0), measure(runner, 16, 4096, 2048);
  measure(runner, 16, 16384, 2048);
});

}  // namespace
}  // namespace winnow
