// prepare_query: a step's query heads. Bytes: rows read and written.
#include "layer_bench.h"

namespace winnow::prepare_query_bench {
namespace {

using bench::Sizes;

const bench::Suite suite("prepare_query", "default", [](bench::Runner& runner) {
  const auto v4 = [](const Sizes& s) { return bench::PrepareQueryProblem(s); };
  const auto v32 = [](const Sizes& s) { return bench::PrepareQueryProblem(s, true); };
  bench::measure_tokens(runner, "64 heads of 512", 64, v4, prepare_query);
  bench::measure_tokens(runner, "128 heads of 512", 128, v4, prepare_query);
  bench::measure_tokens(runner, "128 heads, 64 of 192", 128, v32, prepare_query);
});

}  // namespace
}  // namespace winnow::prepare_query_bench
