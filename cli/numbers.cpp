#include "numbers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <string_view>

namespace winnow::cli {

namespace {

int32_t number_of(std::string_view word, const std::string& option, NumberRange range) {
  int32_t number = 0;
  const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error != std::errc() || rest != word.data() + word.size() || number < range.least ||
      number > range.most)
    throw CLI::ValidationError(
        option, fmt::format("expected numbers from {} to {} with a comma between two, found '{}'",
                            range.least, range.most, word));
  return number;
}

}  // namespace

CLI::Option* add_numbers(CLI::App& cmd, const std::string& name, std::vector<int32_t>& numbers,
                         const std::string& description, NumberRange range) {
  const auto parse = [&numbers, name, range](const CLI::results_t& words) {
    numbers.clear();
    const std::string_view list = words.front();
    for (size_t begin = 0, comma = 0; comma != list.npos; begin = comma + 1) {
      comma = list.find(',', begin);
      numbers.push_back(number_of(list.substr(begin, comma - begin), name, range));
    }
    return true;
  };
  return cmd.add_option(name, parse, description)
      ->type_name(fmt::format("INT,... in [{} - {}]", range.least, range.most))
      ->default_str(fmt::format("{}", fmt::join(numbers, ",")));
}

}  // namespace winnow::cli
