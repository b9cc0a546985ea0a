// Streams, events and graphs of the CUDA runtime. Events take the host's time.
#include <algorithm>
#include <map>
#include <set>

#include "runtime.h"

namespace winnow::emulated {

namespace {

using Clock = std::chrono::steady_clock;

struct Stream {
  bool waits_for_legacy = true;
  std::shared_ptr<Capture> capture;
};
struct Event {
  bool timed = true, recorded = false;
  Clock::time_point time;
  std::shared_ptr<Capture> capture;
};
struct Graph {
  std::vector<Operation> operations;
};

// Handles are addresses; each kind knows its own.
struct Handles {
  std::map<cudaStream_t, Stream> streams;
  std::map<cudaEvent_t, Event> events;
  std::map<cudaGraph_t, Graph> graphs;
  std::map<cudaGraphExec_t, Graph> replays;
  uintptr_t next = 0x1000;
};
Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}

template <class Handle, class T>
Handle add(std::map<Handle, T>& to, T object) {
  const auto handle = reinterpret_cast<Handle>(handles().next += 16);
  to.emplace(handle, std::move(object));
  return handle;
}
template <class Handle, class T>
T* find(std::map<Handle, T>& in, Handle handle) {
  const auto found = in.find(handle);
  return found == in.end() ? nullptr : &found->second;
}

bool is_legacy(cudaStream_t stream) {
  return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}
bool is_capture(const Stream& stream) { return stream.capture != nullptr; }

// The capture that the legacy stream would have to join, or null.
Capture* capture_before_legacy() {
  for (auto& [handle, stream] : handles().streams)
    if (is_capture(stream) && stream.waits_for_legacy) return stream.capture.get();
  return nullptr;
}

// Where a call on this stream finds its capture (null: none), or why it fails.
cudaError_t find_capture(cudaStream_t handle, std::shared_ptr<Capture>& capture) {
  if (is_legacy(handle)) {
    Capture* const other = capture_before_legacy();
    if (!other) return cudaSuccess;
    other->invalid = true;
    return cudaErrorStreamCaptureImplicit;
  }
  const Stream* const stream = find(handles().streams, handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (stream->capture && stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
  capture = stream->capture;
  return cudaSuccess;
}

cudaError_t wait_for_stream(cudaStream_t handle) {
  std::shared_ptr<Capture> capture;
  if (const cudaError_t e = find_capture(handle, capture)) return e;
  if (!capture) return cudaSuccess;
  capture->invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t wait_for_event(cudaEvent_t handle) {
  const Event* const event = find(handles().events, handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  if (!event->capture) return cudaSuccess;
  event->capture->invalid = true;
  return cudaErrorCapturedEvent;
}

cudaError_t create_stream(cudaStream_t* handle, unsigned flags) {
  return call(Waits::kNo, [&] {
    if (!handle) return cudaErrorInvalidValue;
    *handle = add(handles().streams, Stream{.waits_for_legacy = !(flags & cudaStreamNonBlocking)});
    return cudaSuccess;
  });
}

cudaError_t create_event(cudaEvent_t* handle, unsigned flags) {
  return call(Waits::kNo, [&] {
    if (!handle) return cudaErrorInvalidValue;
    *handle = add(handles().events, Event{.timed = !(flags & cudaEventDisableTiming)});
    return cudaSuccess;
  });
}

cudaError_t end_capture(Stream& stream, cudaGraph_t* graph) {
  const std::shared_ptr<Capture> capture = stream.capture;
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id())
    return cudaErrorStreamCaptureWrongThread;
  for (auto& [other, joined] : handles().streams)
    if (joined.capture == capture) joined.capture.reset();
  for (auto& [event, recorded] : handles().events)
    if (recorded.capture == capture) recorded.capture.reset();
  *graph = nullptr;
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  *graph = add(handles().graphs, Graph{std::move(capture->operations)});
  return cudaSuccess;
}

}  // namespace

cudaError_t queue(cudaStream_t stream, Operation operation) {
  std::shared_ptr<Capture> capture;
  if (const cudaError_t e = find_capture(stream, capture)) return e;
  if (capture) capture->operations.push_back(std::move(operation));
  else if (!device_broken()) operation();
  return cudaSuccess;
}

cudaError_t forbidden_by_capture() {
  cudaError_t result = cudaSuccess;
  for (auto& [handle, stream] : handles().streams) {
    if (!is_capture(stream)) continue;
    Capture& capture = *stream.capture;
    const bool ours = capture.thread == std::this_thread::get_id();
    if (capture.mode == cudaStreamCaptureModeGlobal ||
        (capture.mode == cudaStreamCaptureModeThreadLocal && ours)) {
      capture.invalid = true;
      result = cudaErrorStreamCaptureUnsupported;
    }
  }
  return result;
}

}  // namespace winnow::emulated

using namespace winnow::emulated;

extern "C" {

// ---- streams
// --------------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create_stream(stream, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create_stream(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call(Waits::kNo, [&] {
    return handles().streams.erase(stream) ? cudaSuccess : cudaErrorInvalidResourceHandle;
  });
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call(Waits::kYes, [&] { return wait_for_stream(stream); });
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call(Waits::kYes, [&] { return wait_for_stream(stream); });
}
cudaError_t cudaDeviceSynchronize() {
  return call(Waits::kYes, [] {
    for (auto& [handle, stream] : handles().streams)
      if (is_capture(stream)) {
        stream.capture->invalid = true;
        return cudaErrorStreamCaptureUnsupported;
      }
    return cudaSuccess;
  });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return call(Waits::kNo, [&] {
    const Event* const before = find(handles().events, event);
    if (!before) return cudaErrorInvalidResourceHandle;
    std::shared_ptr<Capture> capture;
    if (const cudaError_t e = find_capture(stream, capture)) return e;
    if (!before->capture) return cudaSuccess;  // it has passed
    if (is_legacy(stream) || (capture && capture != before->capture))
      return cudaErrorStreamCaptureUnsupported;
    find(handles().streams, stream)->capture = before->capture;
    return cudaSuccess;
  });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return call(Waits::kNo, [&] {
    if (!function) return cudaErrorInvalidValue;
    return queue(stream, [function, data] { function(data); });
  });
}

// ---- events
// ---------------------------------------------------------------------------------------

cudaError_t cudaEventCreate(cudaEvent_t* event) { return create_event(event, 0); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return create_event(event, flags);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call(Waits::kNo, [&] {
    return handles().events.erase(event) ? cudaSuccess : cudaErrorInvalidResourceHandle;
  });
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return call(Waits::kNo, [&] {
    Event* const event = find(handles().events, handle);
    if (!event) return cudaErrorInvalidResourceHandle;
    std::shared_ptr<Capture> capture;
    if (const cudaError_t e = find_capture(stream, capture)) return e;
    event->capture = capture;
    event->recorded = !capture;
    event->time = Clock::now();
    return cudaSuccess;
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call(Waits::kYes, [&] { return wait_for_event(event); });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call(Waits::kYes, [&] { return wait_for_event(event); });
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  return call(Waits::kYes, [&] {
    const Event* const first = find(handles().events, begin);
    const Event* const last = find(handles().events, end);
    if (!milliseconds) return cudaErrorInvalidValue;
    for (const Event* event : {first, last})
      if (!event || !event->timed || !event->recorded) return cudaErrorInvalidResourceHandle;
    *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
    return cudaSuccess;
  });
}

// ---- capture and graphs
// ---------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call(Waits::kNo, [&] {
    if (is_legacy(handle)) return cudaErrorStreamCaptureUnsupported;
    Stream* const stream = find(handles().streams, handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->capture) return cudaErrorIllegalState;
    stream->capture = std::make_shared<Capture>(
        Capture{.mode = mode, .thread = std::this_thread::get_id(), .stream = handle});
    return cudaSuccess;
  });
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return call(Waits::kNo, [&] {
    Stream* const stream = find(handles().streams, handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (!graph) return cudaErrorInvalidValue;
    if (!stream->capture || stream->capture->stream != handle) return cudaErrorIllegalState;
    return end_capture(*stream, graph);
  });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return call(Waits::kNo, [&] {
    if (!status) return cudaErrorInvalidValue;
    *status = cudaStreamCaptureStatusNone;
    if (is_legacy(handle))
      return capture_before_legacy() ? cudaErrorStreamCaptureImplicit : cudaSuccess;
    const Stream* const stream = find(handles().streams, handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->capture)
      *status = stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}
// The nodes have no handles: their number alone can be asked for.
cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
  return call(Waits::kNo, [&] {
    const Graph* const graph = find(handles().graphs, handle);
    if (!graph || !count) return cudaErrorInvalidValue;
    if (nodes) return cudaErrorNotSupported;
    *count = graph->operations.size();
    return cudaSuccess;
  });
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* replay, cudaGraph_t handle, unsigned long long) {
  return call(Waits::kNo, [&] {
    const Graph* const graph = find(handles().graphs, handle);
    if (!graph || !replay) return cudaErrorInvalidValue;
    *replay = add(handles().replays, Graph(*graph));
    return cudaSuccess;
  });
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  return call(Waits::kNo, [&] {
    const Graph* const replay = find(handles().replays, handle);
    if (!replay) return cudaErrorInvalidValue;
    return queue(stream, [operations = replay->operations] {
      for (const Operation& operation : operations)
        if (!device_broken()) operation();
    });
  });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call(Waits::kNo,
              [&] { return handles().graphs.erase(graph) ? cudaSuccess : cudaErrorInvalidValue; });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t replay) {
  return call(Waits::kNo, [&] {
    return handles().replays.erase(replay) ? cudaSuccess : cudaErrorInvalidValue;
  });
}
}
