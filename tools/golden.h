// Golden vectors: one file's tensors, and the checks of write, locate and attend against them.
#pragma once

#include <string>
#include <vector>

namespace winnow::tools {

// One check of one file by one kernel.
struct Verdict {
  std::string file, check, kernel;
  bool ok = true;
  bool skipped = false;   // a device kernel that leaves such a cache to another
  std::string deviation;  // the largest, against its bound; the reason of a skipped check
};

// Every check of a golden file by every kernel that this machine can run, on its device. Throws
// Error if the file is no golden file.
std::vector<Verdict> check_golden(const std::string& path);

}  // namespace winnow::tools
