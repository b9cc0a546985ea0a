// The machine header of a benchmark.
#pragma once

#include <string>

namespace winnow::bench {

struct Machine {
  std::string cpu;  // model and features
  int cores = 0, threads = 0;
  std::string gpu, driver;  // "" when there is none
  std::string commit, date;
  std::string load;  // one, five and fifteen minutes
  std::string compiler, version;
};

Machine describe_machine();

}  // namespace winnow::bench
