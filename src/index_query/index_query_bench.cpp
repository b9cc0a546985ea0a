// index_query: a step's index heads and weights. Bytes: heads read, codes and weights.
#include "layer_bench.h"

namespace winnow::index_query_bench {
namespace {

using bench::Sizes;

const bench::Suite suite("index_query", "default", [](bench::Runner& runner) {
  const auto v4 = [](const Sizes& s) { return bench::IndexQueryProblem(s); };
  const auto v32 = [](const Sizes& s) { return bench::IndexQueryProblem(s, true); };
  bench::measure_tokens(runner, "64 heads", 64, v4, index_query);
  bench::measure_tokens(runner, "64 heads, first 64, halves", 64, v32, index_query);
});

}  // namespace
}  // namespace winnow::index_query_bench
