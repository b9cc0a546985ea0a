// Every fuzz target (tests/fuzz) from fixed seeds, and over its stored corpus. WINNOW_FUZZ_ROUNDS
// sets the number of rounds. tools/fuzz.sh runs the same targets with libFuzzer.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "fuzz/target.h"

namespace winnow::testing {
namespace {

int rounds() {
  const char* env = std::getenv("WINNOW_FUZZ_ROUNDS");
  return env ? std::max(1, std::atoi(env)) : 100;
}

class Fuzz : public ::testing::TestWithParam<FuzzTarget> {};

TEST_P(Fuzz, FromSeeds) {
  for (int round = 0; round < rounds() * GetParam().times; ++round) {
    SCOPED_TRACE(::testing::Message() << "seed " << round);
    Source source(static_cast<uint64_t>(round));
    GetParam().run(source);
    if (HasFailure()) return;
  }
}

TEST_P(Fuzz, Corpus) {
  const std::filesystem::path corpus =
      std::filesystem::path(WINNOW_TEST_DATA) / "../fuzz/corpus" / GetParam().name;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(corpus)) {
    SCOPED_TRACE(entry.path().string());
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    Source source({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    GetParam().run(source);
    if (HasFailure()) return;
    ++files;
  }
  EXPECT_GT(files, 0) << corpus;
}

INSTANTIATE_TEST_SUITE_P(Targets, Fuzz, ::testing::ValuesIn(FuzzTarget::all()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace winnow::testing
