#include "plan/staging.h"

#include <algorithm>

#include "cuda/device.h"

namespace winnow::internal::plan {

Staging::Staging([[maybe_unused]] const Device& device, size_t count) : count_(count) {
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    const cuda::Current current(device);
    memory_ = {static_cast<int32_t*>(cuda::allocate_pinned(count * sizeof(int32_t))), Free{true}};
    std::fill_n(memory_.get(), count, 0);
    sent_.reset(cuda::make_mark(device));
    return;
  }
#endif
  memory_ = {new int32_t[count](), Free{false}};
}

void Staging::send([[maybe_unused]] void* to, [[maybe_unused]] const Device& device) noexcept {
#ifdef WINNOW_WITH_CUDA
  if (!sent_) return;
  const cuda::Current current(device);
  cuda::copy_to_device(device, to, memory_.get(), count_ * sizeof(int32_t));
  cuda::pass_mark(sent_.get(), device);
#endif
}

void Staging::settle() noexcept {
#ifdef WINNOW_WITH_CUDA
  cuda::wait_mark(sent_.get());
#endif
}

void Staging::FreeMark::operator()([[maybe_unused]] void* mark) const noexcept {
#ifdef WINNOW_WITH_CUDA
  cuda::release_mark(mark);
#endif
}

void Staging::Free::operator()(int32_t* memory) const noexcept {
#ifdef WINNOW_WITH_CUDA
  if (pinned) {
    cuda::release_pinned(memory);
    return;
  }
#endif
  delete[] memory;
}

}  // namespace winnow::internal::plan
