// The CUDA backend of the harness: a run is captured in a graph and replayed between events, after
// a write over 256 MB that empties the 50 to 60 MB of L2.
#ifdef WINNOW_WITH_CUDA
#include "cuda_backend.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "cuda/device.h"
#include "harness.h"
#include "winnow/error.h"

namespace winnow::bench {

namespace {

constexpr size_t kFlush = size_t{256} << 20;
constexpr int64_t kRuns = 30;
constexpr int kFirst = 3;  // runs that do not count

void check(cudaError_t e) {
  if (e != cudaSuccess)
    throw Error(ErrorCode::kRuntime, std::string("bench: CUDA: ") + cudaGetErrorString(e));
}

cudaStream_t stream() { return static_cast<cudaStream_t>(cuda_stream()); }

struct Event {
  cudaEvent_t event = nullptr;
  Event() { check(cudaEventCreate(&event)); }
  ~Event() { cudaEventDestroy(event); }
};

void flush() {
  static void* memory = cuda_allocate(kFlush);
  check(cudaMemsetAsync(memory, 1, kFlush, stream()));
}

// Everything of a sample is queued at once: the flush keeps the device busy until the host is done.
// Other code runs before the flush, which leaves none of it in L2, either.
template <class F>
double sample(const Method& method, const F& run) {
  static const Event begin, end;
  if (method.after_code) cuda_run_other_code(stream());
  if (method.cold) flush();
  check(cudaEventRecord(begin.event, stream()));
  run();
  check(cudaEventRecord(end.event, stream()));
  check(cudaEventSynchronize(end.event));
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin.event, end.event));
  return 1e3 * ms;
}

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
Clock::time_point ended = Clock::now();  // the case before

// Long runs draw what the power limit allows, and 30 to 80 ms after the first the clock falls. So a
// case of this length begins from rest, unless it ends before that with what was run since. Seen
// with 107 ms of prefills: the next ones ran at 1.00 of the best times after 0.2 s, at 1.003 after
// 0.1 s, at 1.01 to 1.08 after 0.05 s. What a case's set-up takes on the host is rest, too.
void rest_before(double seconds) {
  constexpr double kBurst = 0.03, kEach = 2, kMost = 0.3;  // rest for each second, and at most
  static double busy = 0;                                  // seconds not yet rested from
  busy = std::max(0.0, busy - Seconds(Clock::now() - ended).count() / kEach);
  if (busy + seconds > kBurst) {
    const double due = std::min(busy, busy + seconds - kBurst);
    std::this_thread::sleep_for(Seconds(std::min(kEach * due, kMost)));
    busy -= due;
  }
  busy += seconds;
}

std::vector<double> time_on_device(const std::function<void()>& run, const Method& method) {
  run();  // first-use work of the runtime
  check(cudaStreamSynchronize(stream()));
  const int64_t runs = std::min(kRuns, method.max_runs);
  rest_before(1e-6 * sample({.cold = false}, run) * static_cast<double>(kFirst + runs));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  run();
  check(cudaStreamEndCapture(stream(), &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  const auto once = [&] { check(cudaGraphLaunch(replay, stream())); };
  for (int i = 0; i < kFirst; ++i) sample(method, once);
  std::vector<double> us;
  for (int64_t i = 0; i < runs; ++i) us.push_back(sample(method, once));
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  ended = Clock::now();
  return us;
}

std::vector<double> time_copy(double bytes, const Method& method) {
  constexpr size_t kUnit = 16;
  static void *from = nullptr, *to = nullptr;
  static size_t room = 0;
  const size_t half = (static_cast<size_t>(bytes / 2) / kUnit + 1) * kUnit;
  if (half > room) {
    cuda_release(from);
    cuda_release(to);
    from = cuda_allocate(half);
    to = cuda_allocate(half);
    room = half;
  }
  return time_on_device([&] { cuda_copy(to, from, half, cuda_stream()); }, method);
}

// Bytes read and written by a large copy on the device; products of the tensor cores.
Roofs measure_device_roofs() {
  constexpr size_t kCopy = size_t{1} << 30;
  void *from = cuda_allocate(kCopy), *to = cuda_allocate(kCopy);
  double best = 1e30;
  for (int i = 0; i < 10; ++i)
    best = std::min(best, sample({.cold = false}, [&] {
                      check(cudaMemcpyAsync(to, from, kCopy, cudaMemcpyDeviceToDevice, stream()));
                    }));
  cuda_release(from);
  cuda_release(to);
  Roofs r;
  r.read = 2.0 * kCopy / (1e-6 * best);
  r.tensor = cuda_tensor_roof(cuda_stream());
  return r;
}

std::string describe_device() {
  cudaDeviceProp p{};
  if (!internal::cuda::missing().empty() || cudaGetDeviceProperties(&p, 0) != cudaSuccess)
    return "";
  return p.name;
}

const bool added = [] {
  add_backend({.device = "cuda",
               .time = time_on_device,
               .roofs = measure_device_roofs,
               .machine = describe_device,
               .copy = time_copy});
  return true;
}();

}  // namespace

void* cuda_stream() {
  static cudaStream_t stream = [] {
    if (const std::string why = internal::cuda::missing(); !why.empty())
      throw Error(ErrorCode::kUnsupported, "bench: device: " + why);
    cudaStream_t s = nullptr;
    check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
  }();
  return stream;
}

void* cuda_allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes > 0 ? bytes : 1));
  check(cudaMemset(memory, 0, bytes));
  check(cudaDeviceSynchronize());
  return memory;
}
void cuda_release(void* memory) { cudaFree(memory); }
void cuda_wait() { check(cudaStreamSynchronize(stream())); }
void cuda_upload(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  // The last bytes may still be on their way, and the stream of the runs does not wait for them.
  check(cudaDeviceSynchronize());
}

}  // namespace winnow::bench
#endif
