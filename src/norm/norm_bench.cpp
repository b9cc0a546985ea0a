// norm: a step's query and KV latents. Bytes: rows read and written.
#include "layer_bench.h"

namespace winnow {
namespace {

const bench::Suite suite("norm", "default", [](bench::Runner& runner) {
  bench::measure_tokens<bench::NormProblem>(runner, "of 1536 and 512", norm);
});

}  // namespace
}  // namespace winnow
