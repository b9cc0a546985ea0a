#include "progress.h"

#include <unistd.h>

#include <cstdio>

namespace winnow::tools {

namespace {
constexpr std::chrono::seconds kPause{5};  // where nothing can be rewritten
}

Progress::Progress()
    : terminal_(isatty(STDERR_FILENO) != 0), said_(std::chrono::steady_clock::now()) {}

void Progress::clear() {
  if (terminal_) std::fputs("\r\033[K", stderr), std::fflush(stderr);
}

void Progress::at(const std::string& what) {
  if (terminal_ || std::chrono::steady_clock::now() - said_ >= kPause) say(what);
}

void Progress::done(const std::string& what) { say(what); }

void Progress::say(const std::string& what) {
  std::fprintf(stderr, terminal_ ? "\r\033[K%s" : "%s\n", what.c_str());
  std::fflush(stderr);
  said_ = std::chrono::steady_clock::now();
}

}  // namespace winnow::tools
