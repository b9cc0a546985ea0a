// winnow::Error: the one exception of the library.
#pragma once

#include <stdexcept>
#include <string>

namespace winnow {

enum class ErrorCode {
  // A shape, stride, dtype, range or pointer breaks the contract.
  kInvalidArgument = 1,
  // The call is valid, but no kernel of this build and machine can do it.
  kUnsupported = 2,
  // The device or the operating system refused (CUDA error, out of memory, unreadable file).
  kRuntime = 3,
};

// Thrown only while validating and planning, before anything is written. The message names the
// stage, the argument, what was expected and what came: "attend: q: expected shape [4, 16, 576],
// found [4, 16, 512]".
class [[gnu::visibility("default")]] Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace winnow
