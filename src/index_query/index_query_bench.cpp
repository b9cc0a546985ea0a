// index_query: a step's index heads and weights. Bytes: heads read, codes and weights.
#include "layer_bench.h"

namespace winnow {
namespace {

const bench::Suite suite("index_query", "default", [](bench::Runner& runner) {
  bench::measure_tokens<bench::IndexQueryProblem>(runner, "64 heads", index_query);
});

}  // namespace
}  // namespace winnow
