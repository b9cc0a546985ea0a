// A Hopper GPU without one: runs the PTX of the library's kernels on the host, so that their tests
// run on any machine (README.md). Results and orders of events, not times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace winnow::emulated {

// What a kernel did wrong: an access outside of its memory, a deadlock, an instruction that the
// machine does not know. The message names kernel, source line, block and thread.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// An access outside of the memory that was given out, or of the block's own.
struct MemoryFault : Fault {
  using Fault::Fault;
};

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

struct LaunchConfig {
  Dim grid, block, cluster;
  size_t dynamic_shared = 0;  // bytes
  // All blocks must run at once.
  bool cooperative = false;
};

// A parameter of a kernel: where it stands in the buffer of all of them.
struct Parameter {
  size_t offset = 0, size = 0;
};

// The PTX of one fat binary. Kernels are read when they are first asked for.
class Module {
 public:
  virtual ~Module() = default;
  virtual bool has_kernel(std::string_view name) const = 0;
  // Throws Fault if there is none, or if it cannot be read.
  virtual std::vector<Parameter> parameters(std::string_view kernel) = 0;
  // A variable of the module (__device__, __constant__), null if there is none.
  virtual void* variable(std::string_view name) = 0;
  // Runs all blocks to their end. Throws Fault.
  virtual void run(std::string_view kernel, const LaunchConfig& config,
                   std::span<const std::byte> parameters) = 0;
};
// `ptx` must outlive the module.
std::unique_ptr<Module> load_module(std::string_view ptx);

// The machine that is pretended: an H200.
inline constexpr int kMultiprocessors = 132;
inline constexpr size_t kMostShared = 227 * 1024;  // bytes of a block

}  // namespace winnow::emulated
