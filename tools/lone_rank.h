// Rank 0 of several, alone: it agrees with itself, and collectives leave what is received as it is.
// For timing one rank's work where the others are not there.
#pragma once

#include <cstring>

#include "winnow/parallel.h"

namespace winnow::tools {

class LoneRank final : public Communicator {
 public:
  explicit LoneRank(int32_t ranks) : ranks_(ranks) {}
  int32_t rank() const noexcept override { return 0; }
  int32_t size() const noexcept override { return ranks_; }
  const char* name() const noexcept override { return "lone"; }
  bool takes(DeviceKind) const noexcept override { return true; }
  void all_gather(const void*, void*, size_t, const Device&) override {}
  void all_to_all(const void*, void*, size_t, const Device&) override {}
  void exchange(const void* send, void* recv, size_t bytes) override {
    for (int32_t r = 0; r < ranks_; ++r)
      std::memcpy(static_cast<std::byte*>(recv) + static_cast<size_t>(r) * bytes, send, bytes);
  }
  void check() override {}

 private:
  const int32_t ranks_;
};

}  // namespace winnow::tools
