// What this machine should run, by the word of the operating system and of who started the tests,
// not by the library's own: a kernel that the library leaves out here although it should run fails
// its test.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace winnow::testing {

// The CPU's features as Linux names them; empty elsewhere.
inline const std::vector<std::string>& cpu_flags() {
  static const std::vector<std::string> flags = [] {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line, word; std::getline(file, line);)
      if (line.starts_with("flags")) {
        std::istringstream words(line.substr(line.find(':') + 1));
        std::vector<std::string> all;
        while (words >> word) all.push_back(word);
        return all;
      }
    return std::vector<std::string>();
  }();
  return flags;
}

inline bool cpu_has(std::initializer_list<const char*> features) {
  const std::vector<std::string>& flags = cpu_flags();
  return std::all_of(features.begin(), features.end(), [&](const char* feature) {
    return std::find(flags.begin(), flags.end(), feature) != flags.end();
  });
}

// True if a Hopper GPU must be there: tools/test.sh says so where it runs the tests of the CUDA
// build.
inline bool expects_device() {
  const char* device = std::getenv("WINNOW_TEST_DEVICE");
  return device && std::string(device) == "cuda";
}

// True if a kernel of this name must run here.
inline bool should_run(const std::string& kernel) {
  if (kernel.starts_with("sm90")) return expects_device();
  const bool avx512 = cpu_has({"avx512f", "avx512bw", "avx512dq", "avx512vl"});
  const bool bf16 = avx512 && cpu_has({"avx512_bf16", "avx512vbmi"});
  if (kernel == "avx512") return avx512;
  if (kernel == "avx512bf16") return bf16;
  if (kernel == "amx") return bf16 && cpu_has({"amx_tile", "amx_bf16"});
  return true;
}

// `why`, for GTEST_SKIP. If there is a reason to skip although `expected`, the test fails as well.
inline std::string allowed_skip(const std::string& why, bool expected) {
  EXPECT_TRUE(why.empty() || !expected) << "should run on this machine: " << why;
  return why;
}

}  // namespace winnow::testing
