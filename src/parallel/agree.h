// How ranks agree before they move data. Transports do not notice that ranks disagree: with other
// block sizes they give wrong data, fail on one rank, or hang. So every rank first tells the others
// what it is about to do, in a message of one size whatever it says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/namespaces.h"
#include "winnow/error.h"
#include "winnow/parallel.h"

namespace winnow::internal::parallel {

// What a rank sends. Numbers and words stand in the order in which they were added.
struct Message {
  static constexpr int kNumbers = 26, kText = 256;
  uint64_t magic;
  char stage[24];
  int32_t refused;  // `text` holds why
  int32_t count;
  int64_t numbers[kNumbers];
  char text[kText];  // words, each behind a zero
};
static_assert(sizeof(Message) == 504);

// What this rank is about to do. Names are kept by pointer.
class Offer {
 public:
  explicit Offer(const char* stage) noexcept;
  // "expected 32 tokens as rank 0 has, found 33 on rank 2": `unit` follows the first number.
  void number(const char* argument, int64_t value, const char* unit = "") noexcept;
  // A kernel: "expected every rank to run score=amx, found simd on rank 3".
  void kernel(const char* stage, const char* name) noexcept;
  // Instead of all that: this rank cannot.
  void refuse(const char* why) noexcept;

 private:
  friend void agree(Communicator& comm, const Offer& offer, std::span<std::byte> room);
  Message message_{};
  const char* arguments_[Message::kNumbers] = {};
  const char* units_[Message::kNumbers] = {};
  const char* kernels_[Message::kNumbers] = {};
  int words_ = 0;
  size_t text_ = 0;
};

// Bytes of `room` that agree() wants.
inline size_t agreement_bytes(int32_t ranks) {
  return static_cast<size_t>(ranks) * sizeof(Message);
}

// Exchanges the offers and compares them with rank 0's. Throws one Error, the same on all ranks,
// which names the rank that differs; on a rank that refused, nothing, since it throws its own.
void agree(Communicator& comm, const Offer& offer, std::span<std::byte> room);

// Tells the other ranks that this one throws; they throw as well instead of waiting for it.
void tell_refusal(Communicator& comm, const char* stage, const char* why) noexcept;

// The result of `prepare`, which checks a call. If it throws, the other ranks are told. There are
// none without a communicator, or where its size cannot be.
template <class F>
auto telling(Communicator* comm, const char* stage, F&& prepare) {
  try {
    return prepare();
  } catch (const Error& e) {
    if (comm && comm->size() > 1 && comm->size() <= kMaxRanks) tell_refusal(*comm, stage, e.what());
    throw;
  }
}

// The collectives, with the stage in front of what a transport says.
struct Step {
  const char* stage;
  Communicator& comm;
  Device device;
  void all_gather(const void* send, void* recv, size_t bytes) const;
  void all_to_all(const void* send, void* recv, size_t bytes) const;
};

// Throws unless the communicator has ranks and takes the device's memory.
void check_communicator(const char* stage, Communicator& comm, const Device& device);

}  // namespace winnow::internal::parallel
