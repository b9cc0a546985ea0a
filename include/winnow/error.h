// winnow::Error: the one exception of the library.
#pragma once

#include <stdexcept>
#include <string>

namespace winnow {

enum class ErrorCode {
  kInvalidArgument =
      1,             // a shape, stride, dtype, range or pointer is not what the contract asks for
  kUnsupported = 2,  // valid, but no kernel of this build and machine can do it
  kRuntime = 3,      // the device or the operating system refused (CUDA error, unreadable file)
};

// Thrown only while validating and planning, before anything is written. The message names the
// stage, the argument, what was expected and what came: "attend: q: expected shape [4, 16, 576],
// found [4, 16, 512]".
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace winnow
