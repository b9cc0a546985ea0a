#include "plan/staging.h"

#include <algorithm>

#include "cuda/device.h"

namespace winnow::planning {

Staging::Staging([[maybe_unused]] const Device& device, size_t count) : count_(count) {
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    const gpu::Current current(device);
    memory_ = {static_cast<int32_t*>(gpu::allocate_pinned(count * sizeof(int32_t))), Free{true}};
    std::fill_n(memory_.get(), count, 0);
    return;
  }
#endif
  memory_ = {new int32_t[count](), Free{false}};
}

void Staging::Free::operator()(int32_t* memory) const noexcept {
#ifdef WINNOW_WITH_CUDA
  if (pinned) {
    gpu::release_pinned(memory);
    return;
  }
#endif
  delete[] memory;
}

}  // namespace winnow::planning
