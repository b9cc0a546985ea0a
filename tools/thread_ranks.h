// Ranks as threads of one process, for tests and the program. It counts calls and bytes, notices
// ranks that disagree about a call, and gives up after a deadline.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "winnow/error.h"
#include "winnow/parallel.h"

namespace winnow::tools {

class ThreadRanks {
 public:
  // Of one rank: calls made, and bytes that came in from the others.
  struct Counted {
    int64_t gathers = 0, all_to_alls = 0, exchanges = 0;
    int64_t gathered_bytes = 0, all_to_all_bytes = 0;
    bool operator==(const Counted&) const = default;
  };

  // How ranks with devices reach memory there; both throw Error.
  struct DeviceMemory {
    // Queues a copy on the device's stream.
    void (*copy)(void* to, const void* from, size_t bytes, const Device& device);
    // Waits for what is queued there.
    void (*wait)(const Device& device);
  };

  explicit ThreadRanks(int32_t ranks, std::chrono::milliseconds deadline = std::chrono::seconds(30),
                       const DeviceMemory* memory = nullptr)
      : deadline_(deadline), memory_(memory), calls_(static_cast<size_t>(ranks)) {
    for (int32_t r = 0; r < ranks; ++r) ranks_.push_back(std::make_unique<Rank>(*this, r));
  }
  Communicator& rank(int32_t r) { return *ranks_[static_cast<size_t>(r)]; }
  const Counted& counted(int32_t r) const { return ranks_[static_cast<size_t>(r)]->counted; }

  // body(communicator) on every rank at once; what each threw, "" if nothing.
  std::vector<std::string> run(const std::function<void(Communicator&)>& body) {
    std::vector<std::string> errors(ranks_.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < ranks_.size(); ++r)
      threads.emplace_back([&, r] {
        try {
          body(*ranks_[r]);
        } catch (const Error& e) {
          errors[r] = e.what();
        }
      });
    for (std::thread& t : threads) t.join();
    return errors;
  }

 private:
  struct Call {
    const char* what = nullptr;  // null: not there yet
    const void* send = nullptr;
    size_t bytes = 0;
  };

  class Rank final : public Communicator {
   public:
    Rank(ThreadRanks& group, int32_t rank) : group_(group), rank_(rank) {}
    int32_t rank() const noexcept override { return rank_; }
    int32_t size() const noexcept override { return static_cast<int32_t>(group_.ranks_.size()); }
    const char* name() const noexcept override { return "threads"; }
    bool takes(DeviceKind kind) const noexcept override {
      return kind == DeviceKind::kCpu || group_.memory_;
    }
    void all_gather(const void* send, void* recv, size_t bytes, const Device& device) override {
      ++counted.gathers;
      counted.gathered_bytes += static_cast<int64_t>(bytes) * (size() - 1);
      gather({"all_gather", send, bytes}, recv, device);
    }
    void exchange(const void* send, void* recv, size_t bytes) override {
      ++counted.exchanges;
      gather({"exchange", send, bytes}, recv, {});
    }
    void all_to_all(const void* send, void* recv, size_t bytes, const Device& device) override {
      ++counted.all_to_alls;
      counted.all_to_all_bytes += static_cast<int64_t>(bytes) * (size() - 1);
      wait(device);
      group_.call(
          rank_, {"all_to_all", send, bytes},
          [&](int32_t from, const void* theirs) {
            copy(static_cast<std::byte*>(recv) + from * bytes,
                 static_cast<const std::byte*>(theirs) + rank_ * bytes, bytes, device);
          },
          [&] { wait(device); });
    }
    void check() override {}

    Counted counted;

   private:
    void gather(const Call& own, void* recv, const Device& device) {
      wait(device);
      group_.call(
          rank_, own,
          [&](int32_t from, const void* theirs) {
            copy(static_cast<std::byte*>(recv) + from * own.bytes, theirs, own.bytes, device);
          },
          [&] { wait(device); });
    }
    void copy(void* to, const void* from, size_t bytes, const Device& device) const {
      if (device.kind == DeviceKind::kCpu) std::memcpy(to, from, bytes);
      else group_.memory_->copy(to, from, bytes, device);
    }
    void wait(const Device& device) const {
      if (device.kind != DeviceKind::kCpu) group_.memory_->wait(device);
    }
    ThreadRanks& group_;
    const int32_t rank_;
  };

  // Waits until all ranks are there, takes what they brought, and waits until all have taken.
  template <class Take, class Taken>
  void call(int32_t rank, const Call& own, const Take& take, const Taken& taken) {
    std::unique_lock lock(mutex_);
    if (!failure_.empty()) throw Error(ErrorCode::kRuntime, failure_);
    calls_[rank] = own;
    meet(lock, own.what);
    if (rank == 0)
      for (const Call& c : calls_)
        if (std::string(c.what) != own.what || c.bytes != own.bytes) fail("ranks disagree");
    meet(lock, own.what);
    lock.unlock();
    for (size_t r = 0; r < calls_.size(); ++r) take(static_cast<int32_t>(r), calls_[r].send);
    taken();
    lock.lock();
    meet(lock, own.what);
    calls_[rank] = {};
    meet(lock, own.what);
  }

  void meet(std::unique_lock<std::mutex>& lock, const char* what) {
    const int64_t round = round_;
    if (++arrived_ == calls_.size()) {
      arrived_ = 0;
      ++round_;
      met_.notify_all();
    } else if (!met_.wait_for(lock, deadline_,
                              [&] { return round_ != round || !failure_.empty(); })) {
      std::string missing;
      for (size_t r = 0; r < calls_.size(); ++r)
        if (!calls_[r].what) missing += " " + std::to_string(r);
      fail("threads: " + std::string(what) + ": no answer from rank" + missing + " within " +
           std::to_string(deadline_.count()) + " ms");
    }
    if (!failure_.empty()) throw Error(ErrorCode::kRuntime, failure_);
  }

  void fail(const std::string& why) {
    failure_ = why;
    met_.notify_all();
  }

  const std::chrono::milliseconds deadline_;
  const DeviceMemory* const memory_;
  std::mutex mutex_;
  std::condition_variable met_;
  std::vector<Call> calls_;
  size_t arrived_ = 0;
  int64_t round_ = 0;
  std::string failure_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace winnow::tools
