// The CUDA runtime API over the emulated machine: what its parts share. The device is synchronous:
// an operation runs when it is queued, in the order of the calls of all threads.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "machine.h"

namespace winnow::emulated {

// ---- calls and errors
// -----------------------------------------------------------------------------

// Whether a call waits for the device. As on one that works beside the host, a fault is first found
// by such a call; until then others succeed and do nothing. From then on every call fails.
enum class Waits { kNo, kYes };

// The body of a function of the API: under the lock, with the error kept for cudaGetLastError().
cudaError_t call(Waits waits, const std::function<cudaError_t()>& body);

// Breaks the device: prints the message and keeps the first error.
void break_device(cudaError_t error, const std::string& message);
bool device_broken();

// ---- streams, capture
// -----------------------------------------------------------------------------

using Operation = std::function<void()>;

// What a stream queues between cudaStreamBeginCapture() and cudaStreamEndCapture().
struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  cudaStream_t stream;  // where it began
  bool invalid = false;
  std::vector<Operation> operations;
};

// Runs the operation, or records it where the stream is captured.
cudaError_t queue(cudaStream_t stream, Operation operation);
// Of a call that a capture forbids: success if none does. The capture becomes invalid.
cudaError_t forbidden_by_capture();

// ---- fat binaries, kernels
// ------------------------------------------------------------------------

// What nvcc embeds for one source.
class Image {
 public:
  explicit Image(const void* wrapper) : wrapper_(wrapper) {}
  // Reads the PTX when it is first asked for. Throws Fault.
  Module& module();

 private:
  const void* wrapper_;
  std::unique_ptr<Module> module_;
};

struct Kernel {
  Image* image;
  std::string name;
  size_t most_dynamic_shared = 48 * 1024;
  bool non_portable_clusters = false;
};

// The memory of a __device__ or __constant__ variable, or null.
std::byte* variable_of(const void* symbol, size_t offset, size_t bytes);

// Blocks of a kernel that one multiprocessor holds, by threads and shared memory: registers are not
// known.
unsigned blocks_at_once(const dim3& block, size_t dynamic_shared);

}  // namespace winnow::emulated
