#include "machine.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <thread>

#include "commit.h"
#include "winnow/support.h"

namespace winnow::bench {

namespace {

std::string trimmed(std::string_view s) {
  const size_t first = s.find_first_not_of(" \t"), last = s.find_last_not_of(" \t\r");
  return first == std::string_view::npos ? "" : std::string(s.substr(first, last - first + 1));
}

// What the NVIDIA driver says of itself in /proc: needs no CUDA.
std::string gpu_model() {
  std::error_code none;
  for (const auto& dir : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none)) {
    std::ifstream file(dir.path() / "information");
    for (std::string line; std::getline(file, line);)
      if (line.starts_with("Model:")) return trimmed(std::string_view(line).substr(6));
  }
  return "";
}

std::string gpu_driver() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159  ...": the first word with a dot.
  for (size_t at = 0; at < line.size();) {
    const size_t end = std::min(line.find(' ', at), line.size());
    const std::string_view word = std::string_view(line).substr(at, end - at);
    if (!word.empty() && word.find('.') != word.npos && word[0] >= '0' && word[0] <= '9')
      return std::string(word);
    at = end + 1;
  }
  return "";
}

}  // namespace

Machine describe_machine() {
  Machine m;
  m.cpu = cpu_name();
  m.cores = static_cast<int>(std::thread::hardware_concurrency());
  m.threads = threads();
  m.gpu = gpu_model();
  m.driver = gpu_driver();
  m.commit = WINNOW_COMMIT;
  const std::time_t now = std::time(nullptr);
  char text[64];
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  m.date = text;
  double load[3] = {};
  if (getloadavg(load, 3) == 3) {
    std::snprintf(text, sizeof(text), "%.2f %.2f %.2f", load[0], load[1], load[2]);
    m.load = text;
  }
  m.compiler = "g++ " __VERSION__;
#if defined(__clang__)
  m.compiler = __VERSION__;
#endif
  m.version = version();
  return m;
}

}  // namespace winnow::bench
