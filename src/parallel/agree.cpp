// How ranks agree: messages of one size, compared with rank 0's.
#include "parallel/agree.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"

namespace winnow::internal::parallel {

namespace {

constexpr uint64_t kMagic = 0x77696e6e6f770001;  // "winnow", form 1

// Copies what fits and ends it with a zero.
void put(char* to, size_t room, std::string_view text) {
  const size_t n = std::min(text.size(), room - 1);
  std::memcpy(to, text.data(), n);
  std::memset(to + n, 0, room - n);
}

// A word of a message's text; empty where there is none. A message of another program may lack
// every zero.
std::string_view word_at(const char (&text)[Message::kText], int number) {
  std::string_view rest(text, sizeof text);
  for (int i = 0;; ++i) {
    const std::string_view word = rest.substr(0, rest.find('\0'));
    if (i == number) return word;
    if (word.size() + 1 >= rest.size()) return {};
    rest.remove_prefix(word.size() + 1);
  }
}

template <size_t N>
std::string_view text_of(const char (&text)[N]) {
  return {text, static_cast<size_t>(std::find(text, text + N, '\0') - text)};
}

// Puts the stage in front of what a transport says, for instance "cut: mpi: all_gather: ...".
template <class F>
void named(const char* stage, F&& call) {
  try {
    call();
  } catch (const Error& e) {
    throw Error(e.code(), cat(stage, ": ", e.what()));
  }
}

}  // namespace

Offer::Offer(const char* stage) noexcept {
  message_.magic = kMagic;
  put(message_.stage, sizeof message_.stage, stage);
}

void Offer::number(const char* argument, int64_t value, const char* unit) noexcept {
  if (message_.count == Message::kNumbers) return;
  arguments_[message_.count] = argument;
  units_[message_.count] = unit;
  message_.numbers[message_.count++] = value;
}

void Offer::kernel(const char* stage, const char* name) noexcept {
  const size_t size = std::strlen(name) + 1;
  if (words_ == Message::kNumbers || text_ + size > Message::kText) return;
  std::memcpy(message_.text + text_, name, size);
  text_ += size;
  kernels_[words_++] = stage;
}

void Offer::refuse(const char* why) noexcept {
  message_.refused = 1;
  put(message_.text, sizeof message_.text, why);
}

void agree(Communicator& comm, const Offer& offer, std::span<std::byte> room) {
  const Message& own = offer.message_;
  const std::string_view stage = text_of(own.stage);
  named(own.stage, [&] { comm.exchange(&own, room.data(), sizeof(Message)); });
  if (own.refused) return;

  const auto message_of = [&](int32_t rank) {
    Message m;
    std::memcpy(&m, room.data() + static_cast<size_t>(rank) * sizeof m, sizeof m);
    return m;
  };
  const auto fail = [&](const std::string& argument, const std::string& expected,
                        const std::string& found) {
    throw Error(ErrorCode::kInvalidArgument,
                cat(stage, ": ", argument, ": expected ", expected, ", found ", found));
  };
  const Message first = message_of(0);
  for (int32_t r = 0; r < comm.size(); ++r) {
    const Message m = message_of(r);
    if (m.magic != kMagic)
      fail("parallel.comm", "every rank to run this version of winnow",
           cat("another one on rank ", r));
    if (m.refused)
      fail("parallel.comm", "every rank to go along",
           cat("rank ", r, " refusing: ", text_of(m.text)));
    if (text_of(m.stage) != text_of(first.stage))
      fail("parallel.comm", cat("every rank to call ", text_of(first.stage), " as rank 0 does"),
           cat(text_of(m.stage), " on rank ", r));
  }
  for (int i = 0; i < own.count; ++i)
    for (int32_t r = 1; r < comm.size(); ++r) {
      const Message m = message_of(r);
      if (m.numbers[i] != first.numbers[i])
        fail(offer.arguments_[i], cat(first.numbers[i], offer.units_[i], " as rank 0 has"),
             cat(m.numbers[i], " on rank ", r));
    }
  for (int i = 0; i < offer.words_; ++i)
    for (int32_t r = 1; r < comm.size(); ++r) {
      const Message m = message_of(r);
      const std::string_view expected = word_at(first.text, i), found = word_at(m.text, i);
      if (found != expected)
        fail("parallel.comm",
             cat("every rank to run ", offer.kernels_[i], "=", expected, " as rank 0 does"),
             cat(found, " on rank ", r));
    }
}

void tell_refusal(Communicator& comm, const char* stage, const char* why) noexcept {
  try {
    std::vector<std::byte> room(agreement_bytes(comm.size()));
    Offer offer(stage);
    offer.refuse(why);
    agree(comm, offer, room);
  } catch (const std::exception&) {
    // They learn it by their deadline, then; this rank has its own error to throw.
    return;
  }
}

void Step::all_gather(const void* send, void* recv, size_t bytes) const {
  named(stage, [&] { comm.all_gather(send, recv, bytes, device); });
}

void Step::all_to_all(const void* send, void* recv, size_t bytes) const {
  named(stage, [&] { comm.all_to_all(send, recv, bytes, device); });
}

void check_communicator(const char* stage, Communicator& comm, const Device& device) {
  const Check check(stage);
  check.range(comm.size(), "comm (ranks)", 1, kMaxRanks);
  check.range(comm.rank(), "comm (rank)", 0, comm.size() - 1);
  if (comm.takes(device.kind)) return;
  const bool cuda = device.kind == DeviceKind::kCuda;
  throw Error(
      ErrorCode::kUnsupported,
      cat(stage, ": comm: expected one that takes ", cuda ? "CUDA" : "host", " memory, found ",
          comm.name(), cuda ? ", which does not (NCCL does)" : ", which does not (MPI does)"));
}

}  // namespace winnow::internal::parallel
