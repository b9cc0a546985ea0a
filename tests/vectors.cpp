// Linked into the stages' tests: WINNOW_TEST_VECTORS=avx2, ssse3 or scalar makes Highway take that
// instruction set, so that the portable kernels run as on lesser CPUs. Exit status 77 (skipped)
// where AVX2 is requested and the CPU has none; any other set that is missing fails.
#include <hwy/targets.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace {

struct Set {
  const char* name;
  int64_t target;
};
constexpr Set kSets[] = {{"avx2", HWY_AVX2}, {"ssse3", HWY_SSSE3}, {"scalar", HWY_STATIC_TARGET}};

[[maybe_unused]] const bool restricted = [] {
  const char* asked = std::getenv("WINNOW_TEST_VECTORS");
  if (!asked) return false;
  for (const Set& s : kSets) {
    if (std::strcmp(asked, s.name) != 0 || !(hwy::SupportedTargets() & HWY_TARGETS & s.target))
      continue;
    hwy::SetSupportedTargetsForTest(s.target);
    hwy::GetChosenTarget().Update(s.target);
    return true;
  }
  std::fprintf(stderr, "no vectors '%s' here\n", asked);
  const bool lacks = std::strcmp(asked, "avx2") == 0 && !winnow::testing::cpu_has({"avx2"});
  std::_Exit(lacks ? 77 : 1);
}();

}  // namespace
