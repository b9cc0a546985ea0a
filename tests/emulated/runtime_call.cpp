// Errors of the CUDA runtime: the last one of each thread, the one that breaks the device.
#include <cstdio>
#include <utility>

#include "runtime.h"

namespace winnow::emulated {

namespace {

thread_local cudaError_t last_error = cudaSuccess;

// One lock for everything: a kernel runs under it. A function of the host that is called in between
// may call the API again.
std::recursive_mutex& lock_of_device() {
  static auto* const mutex = new std::recursive_mutex;
  return *mutex;
}

cudaError_t broken = cudaSuccess;
bool break_found = false;

// A kernel that cannot be read says so at every launch, and once is enough.
void say(const std::string& message) {
  static std::string last;
  if (std::exchange(last, message) != message)
    std::fprintf(stderr, "emulated device: %s\n", message.c_str());
}

cudaError_t kept(cudaError_t result) {
  if (result != cudaSuccess && result != cudaErrorNotReady) last_error = result;
  return result;
}

}  // namespace

cudaError_t call(Waits waits, const std::function<cudaError_t()>& body) {
  const std::lock_guard lock(lock_of_device());
  if (broken != cudaSuccess && waits == Waits::kYes) break_found = true;
  if (break_found) return kept(broken);
  try {
    return kept(body());
  } catch (const Fault& fault) {
    say(fault.what());
    return kept(cudaErrorInvalidKernelImage);
  } catch (const std::bad_alloc&) {
    return kept(cudaErrorMemoryAllocation);
  } catch (const std::exception& e) {
    say(e.what());
    return kept(cudaErrorUnknown);
  }
}

void break_device(cudaError_t error, const std::string& message) {
  if (broken != cudaSuccess) return;
  broken = error;
  say(message);
}

bool device_broken() { return broken != cudaSuccess; }

}  // namespace winnow::emulated

namespace {

struct Words {
  cudaError_t error;
  const char *name, *text;
};
#define ERROR(name, text) \
  { name, #name, text }
constexpr Words kWords[] = {
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR(cudaErrorMissingConfiguration, "__global__ function call is not configured"),
    ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorInvalidKernelImage, "device kernel image is invalid"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR(cudaErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
    ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR(cudaErrorStreamCaptureInvalidated,
          "operation failed due to a previous error during capture"),
    ERROR(cudaErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(cudaErrorCapturedEvent,
          "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(cudaErrorStreamCaptureWrongThread,
          "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(cudaErrorInvalidClusterSize, "invalid cluster size"),
    ERROR(cudaErrorUnknown, "unknown error"),
};
#undef ERROR

const Words* words_of(cudaError_t error) {
  for (const Words& words : kWords)
    if (words.error == error) return &words;
  return nullptr;
}

}  // namespace

extern "C" {

cudaError_t cudaGetLastError() { return std::exchange(winnow::emulated::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return winnow::emulated::last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  const Words* words = words_of(error);
  return words ? words->name : "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  const Words* words = words_of(error);
  return words ? words->text : "unrecognized error code";
}
}
