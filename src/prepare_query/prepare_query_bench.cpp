// prepare_query: a step's query heads. Bytes: rows read and written.
#include "layer_bench.h"

namespace winnow {
namespace {

const bench::Suite suite("prepare_query", "default", [](bench::Runner& runner) {
  bench::measure_tokens<bench::PrepareQueryProblem>(runner, "64 heads of 512", prepare_query);
});

}  // namespace
}  // namespace winnow
