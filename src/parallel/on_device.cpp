// What ranks with devices need besides.
#include "parallel/on_device.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "cuda/device.h"

namespace winnow::internal::parallel {

void check_not_captured([[maybe_unused]] const char* stage,
                        [[maybe_unused]] const Communicator* comm,
                        [[maybe_unused]] const Device& device) {
#ifdef WINNOW_WITH_CUDA
  if (!comm || comm->size() == 1 || device.kind != DeviceKind::kCuda) return;
  if (cuda::capturing(device))
    throw Error(ErrorCode::kUnsupported,
                cat(stage,
                    ": plan: expected one inside a stream capture (ranks agree in its "
                    "refill()), found none"));
#endif
}

void check_lengths_not_captured([[maybe_unused]] const char* stage,
                                [[maybe_unused]] const Device& device) {
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda && cuda::capturing(device))
    throw Error(ErrorCode::kUnsupported,
                cat(stage,
                    ": plan: expected kHeads or kContext inside a stream capture (lengths decide "
                    "what travels), found kQueries"));
#endif
}

void agree_in(Communicator& comm, const Offer& offer, std::byte* room) {
  const size_t bytes = agreement_bytes(comm.size());
  if (room) return agree(comm, offer, {room, bytes});
  std::vector<std::byte> own(bytes);
  agree(comm, offer, own);
}

void share_keys(const KeyShares& s) {
#ifdef WINNOW_WITH_CUDA
  if (s.device.kind == DeviceKind::kCuda) {
    const cuda::Current current(s.device);
    share_keys_sm90(s);
    return cuda::check_launch("pipeline");
  }
#endif
  for (int64_t t = 0; t < s.tokens; ++t) {
    const int64_t end = s.all_ends[t];
    s.starts[t] = static_cast<int32_t>(end * s.rank / s.ranks);
    s.ends[t] = static_cast<int32_t>(end * (s.rank + 1) / s.ranks);
  }
}

void clear_ids([[maybe_unused]] const Device& device, int32_t* ids, int64_t count) {
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    const cuda::Current current(device);
    cuda::fill(device, ids, 0xff, static_cast<size_t>(count) * sizeof(int32_t));
    return cuda::check_launch("pipeline");
  }
#endif
  std::fill_n(ids, count, -1);
}

}  // namespace winnow::internal::parallel
