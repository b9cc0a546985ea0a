// norm: a step's query and KV latents. Bytes: rows read and written.
#include "layer_bench.h"

namespace winnow::norm_bench {
namespace {

using bench::Sizes;

const bench::Suite suite("norm", "default", [](bench::Runner& runner) {
  const auto measure = [&](const char* what, int64_t query_latent) {
    bench::measure_tokens(
        runner, what, 1, [=](const Sizes& s) { return bench::NormProblem(s, query_latent); }, norm);
  };
  measure("of 1536 and 512", 1536);  // V3.2, V4 Pro
  measure("of 1024 and 512", 1024);  // V4 Flash
});

}  // namespace
}  // namespace winnow::norm_bench
