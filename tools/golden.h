// Golden vectors: one file's tensors, and the checks of write, locate and attend against them.
#pragma once

#include <string>
#include <vector>

namespace winnow::tools {

// One check of one file by one kernel.
struct Verdict {
  std::string file, check, kernel;
  bool ok = true;
  std::string deviation;  // the largest, against its bound
};

// Every check of a golden file by every kernel that this machine can run, on its device. Throws
// Error if the file is no golden file.
std::vector<Verdict> check_golden(const std::string& path);

}  // namespace winnow::tools
