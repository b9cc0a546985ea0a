// norm_write: what follows a step's first projections. Bytes: those of its parts.
#include "layer_bench.h"

namespace winnow::norm_write_bench {
namespace {

using bench::Sizes;

const bench::Suite suite("norm_write", "default", [](bench::Runner& runner) {
  const auto v32 = [](const Sizes& s) { return bench::NormWriteProblem(s, true); };
  const auto v4 = [](const Sizes& s) { return bench::NormWriteProblem(s, false); };
  bench::measure_tokens(runner, "V3.2", 1, v32, norm_write);
  bench::measure_tokens(runner, "V4", 1, v4, norm_write);
});

}  // namespace
}  // namespace winnow::norm_write_bench
