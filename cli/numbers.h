// Options that take a list of numbers.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace winnow::cli {

struct NumberRange {
  int32_t least, most;
};

// "1,2,3" into `numbers`, which holds the default before. CLI11's own lists drop what is empty
// between two commas, so that the numbers behind it would count for the places before theirs.
CLI::Option* add_numbers(CLI::App& cmd, const std::string& name, std::vector<int32_t>& numbers,
                         const std::string& description, NumberRange range);

}  // namespace winnow::cli
