// The C ABI with damaged structs: every function that takes one.
#include "c_calls.h"

namespace winnow::testing {
namespace {

void run(Source& s) {
  DamagedCall call(s);
  c_calls::kCalls[draw(s, 0, std::ssize(c_calls::kCalls) - 1)].run(call);
}

const FuzzTarget c_api_target{"c_api", 100, run};

}  // namespace
}  // namespace winnow::testing
