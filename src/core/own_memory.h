// Memory for a call on the CPU whose caller gave no workspace.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>

#include "core/check.h"
#include "core/namespaces.h"

namespace winnow::internal::core {

class OwnMemory {
 public:
  // Throws kRuntime when there is none to be had.
  OwnMemory(const char* stage, size_t bytes)
      : bytes_(bytes), memory_(static_cast<std::byte*>(std::malloc(bytes > 0 ? bytes : 1))) {
    if (!memory_) throw Error(ErrorCode::kRuntime, cat(stage, ": no memory for ", bytes, " bytes"));
  }
  std::span<std::byte> span() const { return {memory_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace winnow::internal::core
