// The benchmark that the verbs in front of the stages share: tokens of a step, then of a prefill.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "harness.h"
#include "layer_problems.h"

namespace winnow::bench {

// Tokens of decodes, then of prefills. A device takes a launch's time with the smaller one; of many
// heads it has enough to do.
inline std::vector<int64_t> token_counts(const Runner& runner, int64_t heads = 1) {
  if (!runner.on_cuda()) return {1, 16, 128, 4096};
  if (heads > 1) return {1, 32, 128, 8192};
  return {1, 32, 128, 8192, 32768};
}

// `verb(args)` over the problems that `make(sizes)` gives; `what` says the rest of a case's name.
template <class Make, class Verb>
void measure_tokens(Runner& runner, const std::string& what, int64_t heads, Make make, Verb verb) {
  std::vector<int64_t> counts = token_counts(runner, heads);
  // A chunk of a serving engine's prefill: a CPU's cold start is a small part of it.
  if (!runner.on_cuda() && heads == 1) counts.push_back(32768);
  for (const int64_t tokens : counts) {
    const Sizes sizes{.heads = heads, .batch = tokens, .context = 8192, .device = runner.device()};
    Case c{.name = fmt::format("{} tokens {}", tokens, what)};
    c.batch = tokens;
    c.s_q = 1;
    if (!runner.wants(c)) continue;
    auto problem = make(sizes);
    c.bytes = problem.bytes();
    for (const std::string& kernel : runner.kernels()) {
      c.kernel = kernel;
      problem.args.target.kernel = kernel.c_str();
      runner.measure(c, [&] { verb(problem.args); });
    }
  }
}

}  // namespace winnow::bench
