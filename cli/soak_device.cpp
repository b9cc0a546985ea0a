#include "soak_device.h"

#include <string>

#include "winnow/error.h"

#ifdef WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::cli {

#ifdef WINNOW_WITH_CUDA

namespace {

void expect_success(cudaError_t e, const char* what) {
  if (e != cudaSuccess)
    throw Error(ErrorCode::kRuntime, std::string(what) + ": CUDA: " + cudaGetErrorString(e));
}

}  // namespace

void expect_cuda() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)
    throw Error(ErrorCode::kUnsupported, "--device cuda: no CUDA device");
}

int64_t device_bytes_used() {
  size_t left = 0, all = 0;
  if (cudaMemGetInfo(&left, &all) != cudaSuccess) return 0;
  return static_cast<int64_t>(all - left);
}

DeviceMemory::DeviceMemory(size_t bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  expect_success(cudaMalloc(&data, bytes), "memory");
  data_ = static_cast<std::byte*>(data);
  expect_success(cudaMemset(data_, 0, bytes), "memory");
  expect_success(cudaDeviceSynchronize(), "memory");
}
DeviceMemory::~DeviceMemory() { cudaFree(data_); }

Queue::Queue(bool cuda) : cuda_(cuda) {
  if (!cuda) return;
  expect_cuda();
  cudaStream_t stream = nullptr;
  expect_success(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  stream_ = stream;
}
Queue::~Queue() {
  if (stream_) cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}
void Queue::to_device(void* to, const void* from, size_t bytes) const {
  if (!cuda_) return;
  const auto stream = static_cast<cudaStream_t>(stream_);
  expect_success(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "copy");
}
void Queue::to_host(void* to, const void* from, size_t bytes) const {
  if (!cuda_) return;
  const auto stream = static_cast<cudaStream_t>(stream_);
  expect_success(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "copy");
}
void Queue::wait() const {
  if (cuda_) expect_success(cudaStreamSynchronize(static_cast<cudaStream_t>(stream_)), "a step");
}

// Capture is of this thread alone: other lanes allocate meanwhile.
Replay::Replay(const Queue& queue, const std::function<void()>& run)
    : stream_(queue.device().stream) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  run();
  cudaGraph_t graph = nullptr;
  expect_success(cudaStreamEndCapture(stream, &graph), "capture");
  graph_ = graph;
  cudaGraphExec_t ready = nullptr;
  expect_success(cudaGraphInstantiate(&ready, graph, 0), "graph");
  ready_ = ready;
}
Replay::~Replay() {
  if (ready_) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(ready_));
  if (graph_) cudaGraphDestroy(static_cast<cudaGraph_t>(graph_));
}
void Replay::launch(int64_t times) const {
  for (int64_t i = 0; i < times; ++i)
    expect_success(
        cudaGraphLaunch(static_cast<cudaGraphExec_t>(ready_), static_cast<cudaStream_t>(stream_)),
        "replay");
}

#else

void expect_cuda() {
  throw Error(ErrorCode::kUnsupported, "--device cuda: this build has no CUDA kernels");
}
int64_t device_bytes_used() { return 0; }
DeviceMemory::DeviceMemory(size_t bytes) {
  if (bytes > 0) expect_cuda();
}
DeviceMemory::~DeviceMemory() = default;
Queue::Queue(bool cuda) : cuda_(cuda) {
  if (cuda) expect_cuda();
}
Queue::~Queue() = default;
void Queue::to_device(void*, const void*, size_t) const {}
void Queue::to_host(void*, const void*, size_t) const {}
void Queue::wait() const {}
Replay::Replay(const Queue&, const std::function<void()>&) : stream_(nullptr) { expect_cuda(); }
Replay::~Replay() = default;
void Replay::launch(int64_t) const {}

#endif

}  // namespace winnow::cli
