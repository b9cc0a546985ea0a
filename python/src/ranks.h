// A communicator that is a Python object: winnow.parallel.Communicator, or anything with its
// members.
#pragma once

#include <memory>
#include <string>

#include "call.h"
#include "winnow/parallel.h"

namespace winnow::python {

class PyRanks final : public Communicator {
 public:
  // Reads rank, size, name and takes_cuda once, with the GIL.
  explicit PyRanks(nb::handle object);
  ~PyRanks() override;
  PyRanks(const PyRanks&) = delete;
  PyRanks& operator=(const PyRanks&) = delete;

  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return size_; }
  const char* name() const noexcept override { return name_.c_str(); }
  bool takes(DeviceKind kind) const noexcept override {
    return kind == (takes_cuda_ ? DeviceKind::kCuda : DeviceKind::kCpu);
  }
  void all_gather(const void* send, void* recv, size_t bytes, const Device& device) override;
  void all_to_all(const void* send, void* recv, size_t bytes, const Device& device) override;
  void exchange(const void* send, void* recv, size_t bytes) override;
  void check() override;

 private:
  // object.method(send, recv, bytes), addresses as integers. Takes the GIL.
  void call(const char* method, const void* send, void* recv, size_t bytes);

  nb::object object_;
  int32_t rank_ = 0, size_ = 1;
  std::string name_, spent_;
  bool takes_cuda_ = false;
};

// The argument `comm`, or none.
std::unique_ptr<PyRanks> ranks_of(const Call& c);
Wire wire_of(const Call& c);

}  // namespace winnow::python
