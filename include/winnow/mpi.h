// winnow over MPI: a Communicator over an MPI_Comm. A header alone, the only one that includes
// <mpi.h>: the library links no MPI, so Open MPI's and MPICH's different binaries do not matter.
#pragma once

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "winnow/error.h"
#include "winnow/parallel.h"

namespace winnow {

// Host memory only: MPI does not know CUDA's streams, so a call on them must go over NCCL.
// Construct it on all ranks of the group between MPI_Init() and MPI_Finalize(). Calls come from one
// thread at a time; MPI_THREAD_SINGLE is enough where that is the main thread.
//
// A rank that has no answer at the deadline asks who is there and names those who are not, within
// half a second more. It never aborts: the buffers of the failed call, and the communicator's own
// copies of `comm`, stay in use by MPI until the process ends.
class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(MPI_Comm comm,
                           std::chrono::milliseconds deadline = std::chrono::seconds(30))
      : deadline_(deadline) {
    ensure(MPI_Comm_dup(comm, &data_), "MPI_Comm_dup");
    ensure(MPI_Comm_dup(comm, &control_), "MPI_Comm_dup");
    ensure(MPI_Comm_set_errhandler(data_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    ensure(MPI_Comm_set_errhandler(control_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    ensure(MPI_Comm_rank(data_, &rank_), "MPI_Comm_rank");
    ensure(MPI_Comm_size(data_, &size_), "MPI_Comm_size");
    requests_.resize(2 * static_cast<size_t>(size_), MPI_REQUEST_NULL);
    buffer_->resize((static_cast<size_t>(size_) + 1) * kExpected);
  }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized) return;
    if (!spent_.empty()) {
      // MPI still writes into what a call left behind; it must stay.
      [[maybe_unused]] const auto* const left_to_mpi = buffer_.release();
      return;
    }
    MPI_Comm_free(&data_);
    MPI_Comm_free(&control_);
  }

  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return size_; }
  const char* name() const noexcept override { return "mpi"; }
  bool takes(DeviceKind kind) const noexcept override { return kind == DeviceKind::kCpu; }

  void all_gather(const void* send, void* recv, size_t bytes, const Device&) override {
    const int count = checked(bytes, "all_gather");
    MPI_Request request = MPI_REQUEST_NULL;
    ensure(MPI_Iallgather(send, count, MPI_BYTE, recv, count, MPI_BYTE, data_, &request),
           "all_gather");
    wait(request, "all_gather");
  }
  void all_to_all(const void* send, void* recv, size_t bytes, const Device&) override {
    const int count = checked(bytes, "all_to_all");
    MPI_Request request = MPI_REQUEST_NULL;
    ensure(MPI_Ialltoall(send, count, MPI_BYTE, recv, count, MPI_BYTE, data_, &request),
           "all_to_all");
    wait(request, "all_to_all");
  }
  // From rank to rank, so that those who are missing are known.
  void exchange(const void* send, void* recv, size_t bytes) override {
    const int count = checked(bytes, "exchange");
    const auto ranks = static_cast<size_t>(size_);
    if (buffer_->size() < (ranks + 1) * bytes) buffer_->resize((ranks + 1) * bytes);
    std::byte* const own = buffer_->data() + ranks * bytes;
    std::memcpy(own, send, bytes);
    std::memcpy(buffer_->data() + static_cast<size_t>(rank_) * bytes, send, bytes);
    const std::string missing = meet(count, kExchangeTag, deadline_);
    if (!missing.empty()) fail("exchange: no answer from " + missing + within());
    std::memcpy(recv, buffer_->data(), ranks * bytes);
  }
  void check() override {
    if (!spent_.empty()) throw Error(ErrorCode::kRuntime, spent_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kExpected = 512;  // bytes of an agreement: no allocation later
  static constexpr int kExchangeTag = 1, kRollCallTag = 2;
  static constexpr std::chrono::milliseconds kRollCall{500};

  [[noreturn]] void fail(const std::string& why) {
    spent_ = "mpi: " + why;
    throw Error(ErrorCode::kRuntime, spent_);
  }
  std::string within() const { return " within " + std::to_string(deadline_.count()) + " ms"; }

  void ensure(int status, const char* what) {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(status, text, &length);
    fail(std::string(what) + ": " + text);
  }
  int checked(size_t bytes, const char* what) {
    check();
    if (bytes <= INT_MAX) return static_cast<int>(bytes);
    throw Error(ErrorCode::kUnsupported,
                "mpi: " + std::string(what) +
                    ": expected blocks of at most 2147483647 bytes, found " +
                    std::to_string(bytes));
  }

  // Lets other processes run where ranks outnumber cores.
  static void pause(Clock::duration waited) {
    if (waited > std::chrono::milliseconds(20))
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    else if (waited > std::chrono::microseconds(200)) std::this_thread::yield();
  }

  void wait(MPI_Request& request, const char* what) {
    const Clock::time_point began = Clock::now();
    for (;;) {
      int done = 0;
      ensure(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
      if (done) return;
      const Clock::duration waited = Clock::now() - began;
      if (waited > deadline_) break;
      pause(waited);
    }
    // Living ranks are here about the same time; who does not answer is late or gone.
    const std::string missing = meet(1, kRollCallTag, kRollCall);
    fail(std::string(what) + ": no answer" +
         (missing.empty() ? std::string(", though every rank is there,") : " from " + missing) +
         within());
  }

  // `count` bytes from the end of the buffer to every rank, theirs to its front; the ranks that
  // sent nothing in time, "" if all did.
  std::string meet(int count, int tag, Clock::duration deadline) {
    const auto ranks = static_cast<size_t>(size_);
    const auto bytes = static_cast<size_t>(count);
    const std::byte* const own = buffer_->data() + ranks * bytes;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      std::byte* const to = buffer_->data() + static_cast<size_t>(r) * bytes;
      ensure(MPI_Irecv(to, count, MPI_BYTE, r, tag, control_, &requests_[static_cast<size_t>(r)]),
             "MPI_Irecv");
      ensure(MPI_Isend(own, count, MPI_BYTE, r, tag, control_,
                       &requests_[ranks + static_cast<size_t>(r)]),
             "MPI_Isend");
    }
    const Clock::time_point began = Clock::now();
    for (;;) {
      int done = 0;
      ensure(MPI_Testall(2 * size_, requests_.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
      if (done) return {};
      const Clock::duration waited = Clock::now() - began;
      if (waited > deadline) break;
      pause(waited);
    }
    std::string missing;
    for (int r = 0; r < size_; ++r) {
      int done = 1;
      MPI_Request& received = requests_[static_cast<size_t>(r)];
      if (received != MPI_REQUEST_NULL) MPI_Test(&received, &done, MPI_STATUS_IGNORE);
      if (!done) missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(r);
    }
    return missing.empty() ? "a rank that takes nothing" : missing;
  }

  MPI_Comm data_ = MPI_COMM_NULL, control_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  const std::chrono::milliseconds deadline_;
  std::vector<MPI_Request> requests_;
  std::unique_ptr<std::vector<std::byte>> buffer_ = std::make_unique<std::vector<std::byte>>();
  std::string spent_;
};

}  // namespace winnow
