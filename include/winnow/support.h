// What this build can do on this machine.
#pragma once

#include <string>
#include <vector>

namespace winnow {

struct KernelInfo {
  std::string stage;
  std::string kernel;
  std::string device;  // "cpu", "cuda"
  bool available;
  std::string reason;  // why not; empty when available
};

// The stage of the row that stands for all kernels of a device that this build lacks.
inline constexpr const char* kEveryStage = "every stage";

// Every kernel of every stage's table, in the order in which they are tried. A build without CUDA
// ends with a row for kEveryStage whose reason says why it has none.
std::vector<KernelInfo> support();

const char* version();   // "0.1.0"
std::string cpu_name();  // model name of the CPU, on x86 family and model; ISA features in brackets
int threads();  // CPU workers a call uses: WINNOW_THREADS, else the cores given to the process

}  // namespace winnow
