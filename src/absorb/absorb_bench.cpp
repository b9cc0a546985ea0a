// absorb: queries into the latent space and outputs out of it, 128 x 512 a head; on a device also
// latents into keys and values. FLOP: 2 * 128 * 512 a token and head, twice that for keys and
// values; bytes: weights, inputs and outputs once.
#include <fmt/format.h>

#include "harness.h"
#include "side_problems.h"

namespace winnow::absorb_bench {
namespace {

constexpr int64_t kLatent = 512, kNope = 128, kRope = 64;

void measure(bench::Runner& runner, int64_t heads, int64_t tokens) {
  bench::Case query{.name = fmt::format("query h{} {} tokens", heads, tokens)};
  query.heads = heads;
  query.batch = tokens;
  bench::Case output = query;
  output.name = fmt::format("output h{} {} tokens", heads, tokens);
  if (!runner.wants(query) && !runner.wants(output)) return;
  bench::AbsorbProblem problem({.heads = heads, .batch = tokens, .device = runner.device()});
  query.flops = output.flops = problem.flops();
  query.bytes = output.bytes = problem.bytes();
  for (const std::string& kernel : runner.kernels()) {
    query.kernel = output.kernel = kernel;
    problem.query.target.kernel = problem.output.target.kernel = kernel.c_str();
    runner.measure(query, [&] { absorb_query(problem.query); });
    runner.measure(output, [&] { project_output(problem.output); });
  }
}

void measure_decompress(bench::Runner& runner, int64_t heads, int64_t rows) {
  constexpr int64_t kKey = kNope + kRope;
  bench::Case c{.name = fmt::format("decompress h{} {} rows", heads, rows)};
  c.heads = heads;
  c.batch = rows;
  c.flops = 4.0 * static_cast<double>(rows * heads * kLatent * kNope);
  c.bytes = 2.0 * static_cast<double>(rows * (kLatent + kRope + heads * (kKey + kNope)) +
                                      2 * heads * kLatent * kNope);
  if (!runner.wants(c)) return;
  bench::Placement placement(runner.device());
  tools::Random random(1);
  tools::Buffer<bf16> buffers[5];
  const Tensor latent = placement.normals(buffers[0], {rows, kLatent + kRope}, random);
  DecompressArgs args{.latent = latent,
                      .w_uk = placement.normals(buffers[1], {kLatent, heads, kNope}, random, 0.05f),
                      .w_uv = placement.normals(buffers[2], {kLatent, heads, kNope}, random, 0.05f),
                      .k = placement.room(buffers[3], {rows, heads, kKey}),
                      .v = placement.room(buffers[4], {rows, heads, kNope})};
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    args.target = {runner.device(), kernel.c_str()};
    runner.measure(c, [&] { decompress(args); });
  }
}

const bench::Suite suite("absorb", "default", [](bench::Runner& runner) {
  if (runner.on_cuda()) {
    for (const int64_t tokens : {1, 128, 4096}) measure(runner, 128, tokens);
    measure(runner, 16, 512);  // where queries once began to be streamed, half as fast
    for (const int64_t rows : {128, 4096}) measure_decompress(runner, 128, rows);
  } else
    for (const int64_t tokens : {1, 16, 128}) measure(runner, 16, tokens);
});

}  // namespace
}  // namespace winnow::absorb_bench
