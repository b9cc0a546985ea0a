// A communicator made of a C caller's functions.
#pragma once

#include <memory>

#include "c_api/common.h"
#include "winnow/parallel.h"

namespace winnow::internal::c_api {

class CallersRanks final : public Communicator {
 public:
  explicit CallersRanks(const winnow_communicator& functions) : f_(functions) {}
  int32_t rank() const noexcept override { return f_.rank; }
  int32_t size() const noexcept override { return f_.size; }
  const char* name() const noexcept override { return f_.name ? f_.name : "communicator"; }
  bool takes(DeviceKind kind) const noexcept override {
    return kind == DeviceKind::kCuda ? f_.takes_cuda : f_.takes_host;
  }
  void all_gather(const void* send, void* recv, size_t bytes, const Device& device) override {
    ensure(f_.all_gather(f_.context, send, recv, bytes, device.stream), "all_gather");
  }
  void all_to_all(const void* send, void* recv, size_t bytes, const Device& device) override {
    ensure(f_.all_to_all(f_.context, send, recv, bytes, device.stream), "all_to_all");
  }
  void exchange(const void* send, void* recv, size_t bytes) override {
    ensure(f_.exchange(f_.context, send, recv, bytes), "exchange");
  }
  void check() override {}

 private:
  void ensure(int status, const char* what) const {
    if (status == 0) return;
    const char* const why = f_.why ? f_.why(f_.context) : nullptr;
    throw Error(ErrorCode::kRuntime,
                cat(name(), ": ", what, ": ", why ? why : "failed", " (status ", status, ")"));
  }
  winnow_communicator f_;
};

// The caller's ranks, or none; throws where a function is missing.
std::unique_ptr<CallersRanks> ranks_of(const winnow_communicator* c, const char* argument,
                                       const In& in);

}  // namespace winnow::internal::c_api
