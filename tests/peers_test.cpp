// Peers' stored figures: which machines they were measured on.
#include "peers.h"

#include <string>

#include "testing.h"

namespace winnow::bench {
namespace {

bool measured(const char* name, const std::string& machine) {
  for (const auto& [file, text] : peer_files())
    if (file == name) return measured_on(text, "cpu", machine);
  ADD_FAILURE() << "no file " << name;
  return false;
}

TEST(Peers, GenerationsOfCpusAreToldApart) {
  const std::string features = " (AVX2, AVX-512, AVX-512 BF16)";
  EXPECT_TRUE(measured("cpu-zen4", "AMD EPYC, family 25 model 17" + features));
  EXPECT_FALSE(measured("cpu-zen4", "AMD EPYC, family 26 model 2" + features));
  EXPECT_FALSE(measured("cpu-zen4", "AMD EPYC, family 25 model 1 (AVX2)"));  // Zen 3

  const std::string tiles = " (AVX2, AVX-512, AVX-512 BF16, AMX)";
  EXPECT_TRUE(measured("cpu-emerald-rapids", "Intel(R) Xeon, family 6 model 207" + tiles));
  EXPECT_FALSE(measured("cpu-emerald-rapids", "Intel(R) Xeon, family 6 model 143" + tiles));
}

TEST(Peers, FiguresOfADeviceAreOfNoOther) {
  for (const auto& [file, text] : peer_files())
    EXPECT_EQ(measured_on(text, "cuda", "NVIDIA H200"), file.starts_with("h200")) << file;
}

}  // namespace
}  // namespace winnow::bench
