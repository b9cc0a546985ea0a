// libFuzzer's way into the one target that a program is linked with.
#include "target.h"

namespace winnow::testing {
namespace {

const FuzzTarget& the_target() {
  if (FuzzTarget::all().size() != 1) std::abort();
  return FuzzTarget::all().front();
}

}  // namespace
}  // namespace winnow::testing

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  // Failures print as they happen; gtest keeps no flag of libFuzzer's.
  int none = 1;
  ::testing::InitGoogleTest(&none, *argv);
  (void)argc;
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  winnow::testing::Source source(std::span<const uint8_t>(data, size));
  winnow::testing::the_target().run(source);
  if (::testing::Test::HasFailure()) std::abort();
  return 0;
}
