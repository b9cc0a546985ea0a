// prepare_queries: what follows the projections of a step's queries. Bytes: those of its parts.
#include "layer_bench.h"

namespace winnow::prepare_queries_bench {
namespace {

using bench::Sizes;

const bench::Suite suite("prepare_queries", "default", [](bench::Runner& runner) {
  const auto v32 = [](const Sizes& s) { return bench::PrepareQueriesProblem(s, true); };
  const auto v4 = [](const Sizes& s) { return bench::PrepareQueriesProblem(s, false); };
  bench::measure_tokens(runner, "V3.2, 128 heads", 128, v32, prepare_queries);
  bench::measure_tokens(runner, "V4, 64 heads", 64, v4, prepare_queries);
  bench::measure_tokens(runner, "V4, 128 heads", 128, v4, prepare_queries);
});

}  // namespace
}  // namespace winnow::prepare_queries_bench
