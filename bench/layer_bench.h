// The benchmark that the verbs in front of the stages share: tokens of a step, then of a prefill.
#pragma once

#include <fmt/format.h>

#include <string>

#include "harness.h"
#include "layer_problems.h"

namespace winnow::bench {

// `verb(args)` over problems of 1 to 4,096 tokens; `what` says the rest of a case's name.
template <class Problem, class Verb>
void measure_tokens(Runner& runner, const char* what, Verb verb) {
  for (const int64_t tokens : {1, 16, 128, 4096}) {
    const Sizes sizes{.heads = 64, .batch = tokens, .context = 8192, .device = runner.device()};
    Case c{.name = fmt::format("{} tokens {}", tokens, what)};
    c.batch = tokens;
    c.s_q = 1;
    if (!runner.wants(c)) continue;
    Problem problem(sizes);
    c.bytes = problem.bytes();
    for (const std::string& kernel : runner.kernels()) {
      c.kernel = kernel;
      problem.args.target.kernel = kernel.c_str();
      runner.measure(c, [&] { verb(problem.args); });
    }
  }
}

}  // namespace winnow::bench
