// rotate: the output of a step's heads, turned back. Bytes: rows read and written.
#include "layer_bench.h"

namespace winnow::rotate_bench {
namespace {

using bench::Sizes;

const bench::Suite suite("rotate", "default", [](bench::Runner& runner) {
  const auto make = [](const Sizes& s) { return bench::RotateProblem(s); };
  bench::measure_tokens(runner, "64 heads of 512", 64, make, rotate);
  bench::measure_tokens(runner, "128 heads of 512", 128, make, rotate);
  const auto quantized = [](const Sizes& s) { return bench::RotateProblem(s, true); };
  bench::measure_tokens(runner, "128 heads of 512 in e4m3", 128, quantized, rotate);
});

}  // namespace
}  // namespace winnow::rotate_bench
