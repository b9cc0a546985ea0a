// rotate: the output of a step's heads, turned back. Bytes: rows read and written.
#include "layer_bench.h"

namespace winnow {
namespace {

const bench::Suite suite("rotate", "default", [](bench::Runner& runner) {
  bench::measure_tokens<bench::RotateProblem>(runner, "64 heads of 512", rotate);
});

}  // namespace
}  // namespace winnow
