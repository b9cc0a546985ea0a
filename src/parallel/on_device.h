// What ranks with devices need besides: agreement stays on the host, data do not.
#pragma once

#include <cstdint>

#include "parallel/agree.h"

namespace winnow::internal::parallel {

// Ranks agree on the host, which a stream under capture cannot wait for: throws kUnsupported for a
// call that would agree inside one. A plan's calls do not, since its refill() has.
void check_not_captured(const char* stage, const Communicator* comm, const Device& device);

// Where sizes of collectives and launches follow from a batch's lengths, a graph would repeat those
// of the batch that it was captured with: throws kUnsupported inside a capture.
void check_lengths_not_captured(const char* stage, const Device& device);

// agree() in `room`, or in memory of its own where that is null: a call's workspace is the
// device's.
void agree_in(Communicator& comm, const Offer& offer, std::byte* room);

// A rank's part of every row's keys: [ends * rank / ranks, ends * (rank + 1) / ranks).
struct KeyShares {
  const int32_t* all_ends;  // [tokens], on the host, or for CUDA on the device
  int64_t tokens;
  int32_t rank, ranks;
  int32_t *starts, *ends;  // [tokens], out
  Device device;
};
void share_keys(const KeyShares& shares);

// Ids that name nothing.
void clear_ids(const Device& device, int32_t* ids, int64_t count);

#ifdef WINNOW_WITH_CUDA
void share_keys_sm90(const KeyShares& shares) noexcept;
#endif

}  // namespace winnow::internal::parallel
