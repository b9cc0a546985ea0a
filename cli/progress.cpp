#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

namespace winnow::cli {

namespace {
constexpr int64_t kLines = 5;  // where nothing can be rewritten
}

Progress::Progress(int64_t total) : terminal_(isatty(STDERR_FILENO) != 0), total_(total) {}

Progress::~Progress() {
  if (terminal_) fmt::print(stderr, "\r\033[K");
}

void Progress::at(int64_t done, const std::string& what) {
  const std::string line = fmt::format("step {}/{}  {}", done, total_, what);
  if (terminal_) {
    fmt::print(stderr, "\r\033[K{}", line);
    std::fflush(stderr);
  } else if (done * kLines / total_ > lines_) {
    lines_ = done * kLines / total_;
    fmt::print(stderr, "{}\n", line);
  }
}

}  // namespace winnow::cli
