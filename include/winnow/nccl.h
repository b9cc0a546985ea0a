// winnow over NCCL: a Communicator over a borrowed ncclComm_t. A header alone, the only one that
// includes <nccl.h> and CUDA: the library links no NCCL.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "winnow/error.h"
#include "winnow/parallel.h"

namespace winnow {

// Device memory only. Collectives are queued on the stream of the call's device and can be captured
// in a graph; every rank then captures and replays.
//
// NCCL does not tell which rank is missing. A queued collective that waits for a lost rank keeps
// the stream busy: check() and exchange() throw after the deadline, and aborting the communicator
// (ncclCommAbort), which frees the stream, is the caller's.
class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(ncclComm_t comm,
                            std::chrono::milliseconds deadline = std::chrono::seconds(30))
      : comm_(comm), deadline_(deadline) {
    ensure(ncclCommUserRank(comm_, &rank_), "ncclCommUserRank");
    ensure(ncclCommCount(comm_, &size_), "ncclCommCount");
    ensure(ncclCommCuDevice(comm_, &device_index_), "ncclCommCuDevice");
    const OnDevice here(device_index_);
    ensure(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    reserve(512);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() override {
    if (!spent_.empty()) return;  // freeing would wait for a rank that is gone
    cudaFree(device_);
    cudaFreeHost(host_);
    cudaStreamDestroy(stream_);
  }

  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return size_; }
  const char* name() const noexcept override { return "nccl"; }
  bool takes(DeviceKind kind) const noexcept override { return kind == DeviceKind::kCuda; }

  void all_gather(const void* send, void* recv, size_t bytes, const Device& device) override {
    check();
    const OnDevice here(device_index_);
    ensure(ncclAllGather(send, recv, bytes, ncclUint8, comm_, stream_of(device)), "all_gather");
  }
  void all_to_all(const void* send, void* recv, size_t bytes, const Device& device) override {
    check();
    const OnDevice here(device_index_);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
    ensure(ncclAlltoAll(send, recv, bytes, ncclUint8, comm_, stream_of(device)), "all_to_all");
#else
    ensure(ncclGroupStart(), "all_to_all");
    for (int r = 0; r < size_; ++r) {
      const size_t at = static_cast<size_t>(r) * bytes;
      ensure(ncclSend(static_cast<const char*>(send) + at, bytes, ncclUint8, r, comm_,
                      stream_of(device)),
             "all_to_all");
      ensure(ncclRecv(static_cast<char*>(recv) + at, bytes, ncclUint8, r, comm_, stream_of(device)),
             "all_to_all");
    }
    ensure(ncclGroupEnd(), "all_to_all");
#endif
  }
  // Through device memory, on a stream of its own. NCCL runs the operations of a communicator one
  // after the other, so this waits for collectives queued before it: pass Parallel::control where
  // the host should not.
  void exchange(const void* send, void* recv, size_t bytes) override {
    check();
    const OnDevice here(device_index_);
    reserve(bytes);
    const auto ranks = static_cast<size_t>(size_);
    std::memcpy(host_, send, bytes);
    ensure(cudaMemcpyAsync(device_, host_, bytes, cudaMemcpyHostToDevice, stream_), "exchange");
    ensure(ncclAllGather(device_, device_ + bytes, bytes, ncclUint8, comm_, stream_), "exchange");
    ensure(cudaMemcpyAsync(host_ + bytes, device_ + bytes, ranks * bytes, cudaMemcpyDeviceToHost,
                           stream_),
           "exchange");
    const auto began = std::chrono::steady_clock::now();
    for (;;) {
      const cudaError_t status = cudaStreamQuery(stream_);
      if (status == cudaSuccess) break;
      if (status != cudaErrorNotReady) ensure(status, "exchange");
      check();
      if (std::chrono::steady_clock::now() - began > deadline_)
        fail("exchange: no answer within " + std::to_string(deadline_.count()) + " ms");
      std::this_thread::yield();
    }
    std::memcpy(recv, host_ + bytes, ranks * bytes);
  }
  void check() override {
    if (!spent_.empty()) throw Error(ErrorCode::kRuntime, spent_);
    ncclResult_t met = ncclSuccess;
    ensure(ncclCommGetAsyncError(comm_, &met), "ncclCommGetAsyncError");
    if (met != ncclInProgress) ensure(met, "a queued collective");
  }

 private:
  // Makes the communicator's device current.
  class OnDevice {
   public:
    explicit OnDevice(int index) {
      if (cudaGetDevice(&before_) == cudaSuccess && before_ != index) cudaSetDevice(index);
    }
    ~OnDevice() { cudaSetDevice(before_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

   private:
    int before_ = 0;
  };

  static cudaStream_t stream_of(const Device& device) {
    return static_cast<cudaStream_t>(device.stream);
  }
  [[noreturn]] void fail(const std::string& why) {
    spent_ = "nccl: " + why;
    throw Error(ErrorCode::kRuntime, spent_);
  }
  void ensure(ncclResult_t status, const char* what) {
    if (status != ncclSuccess) fail(std::string(what) + ": " + ncclGetErrorString(status));
  }
  void ensure(cudaError_t status, const char* what) {
    if (status != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(status));
  }
  // Room for a message of this size to and from every rank.
  void reserve(size_t bytes) {
    const size_t room = (static_cast<size_t>(size_) + 1) * bytes;
    if (room <= room_) return;
    cudaFree(device_);
    cudaFreeHost(host_);
    device_ = host_ = nullptr;
    void *on_device = nullptr, *on_host = nullptr;
    ensure(cudaMalloc(&on_device, room), "cudaMalloc");
    device_ = static_cast<char*>(on_device);
    ensure(cudaMallocHost(&on_host, room), "cudaMallocHost");
    host_ = static_cast<char*>(on_host);
    room_ = room;
  }

  ncclComm_t comm_;
  int rank_ = 0, size_ = 1, device_index_ = 0;
  const std::chrono::milliseconds deadline_;
  cudaStream_t stream_ = nullptr;
  char *device_ = nullptr, *host_ = nullptr;
  size_t room_ = 0;
  std::string spent_;
};

}  // namespace winnow
