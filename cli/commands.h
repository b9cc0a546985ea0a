// The program's commands. Each adds itself to the app; its callback runs when it is named.
#pragma once

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdlib>
#include <string>

namespace winnow::cli {

// What a command leaves behind: 0 done, 1 a check failed. Bad input is an Error, which main() turns
// into 2.
struct Outcome {
  int code = 0;
};

// A check of numbers without a sign: CLI11 takes "-1" for the largest of them, and what is larger,
// and nothing at all, as a script's variable that is not set gives it, for 0.
inline std::string not_negative(const std::string& text) {
  if (text.empty()) return "expected 0 or more, found ''";
  if (text.starts_with('-')) return "expected 0 or more, found " + text;
  errno = 0;
  std::strtoull(text.c_str(), nullptr, 0);
  return errno == ERANGE ? "expected a number of 64 bits, found " + text : "";
}

void add_run(CLI::App& app, Outcome& outcome);
void add_layer(CLI::App& app, Outcome& outcome);
void add_soak(CLI::App& app, Outcome& outcome);
void add_verify(CLI::App& app, Outcome& outcome);
void add_support(CLI::App& app, Outcome& outcome);
void add_bench(CLI::App& app, Outcome& outcome);
// One command per verb.
void add_layer_verbs(CLI::App& app, Outcome& outcome);  // norm to compress
void add_write(CLI::App& app, Outcome& outcome);
void add_plan(CLI::App& app, Outcome& outcome);
void add_score(CLI::App& app, Outcome& outcome);
void add_select(CLI::App& app, Outcome& outcome);
void add_locate(CLI::App& app, Outcome& outcome);
void add_attend(CLI::App& app, Outcome& outcome);
void add_side_verbs(CLI::App& app, Outcome& outcome);  // mha to absorb

}  // namespace winnow::cli
