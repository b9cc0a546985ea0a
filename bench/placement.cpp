#include "placement.h"

#include <string>
#include <string_view>

#include "winnow/error.h"

#ifdef WINNOW_WITH_CUDA
#include "cuda_backend.h"
#endif

namespace winnow::bench {

Device device_of([[maybe_unused]] const char* name) {
#ifdef WINNOW_WITH_CUDA
  if (std::string_view(name) == "cuda") return cuda(cuda_stream());
#endif
  return cpu();
}

void wait_for([[maybe_unused]] const Device& device) {
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) cuda_wait();
#endif
}

double bytes_of(std::initializer_list<Tensor> tensors) {
  int64_t bytes = 0;
  for (const Tensor& t : tensors) bytes += t.size() * size_of(t.dtype);
  return static_cast<double>(bytes);
}

#ifdef WINNOW_WITH_CUDA
Placement::~Placement() {
  for (void* p : owned_) cuda_release(p);
}
std::byte* Placement::bytes(size_t count) {
  owned_.push_back(cuda_allocate(count));
  return static_cast<std::byte*>(owned_.back());
}
void Placement::upload(void* to, const void* from, size_t count) const {
  cuda_upload(to, from, count);
}
#else
Placement::~Placement() = default;
std::byte* Placement::bytes(size_t) {
  throw Error(ErrorCode::kUnsupported, "bench: device: this build has no CUDA");
}
void Placement::upload(void*, const void*, size_t) const {}
#endif

std::span<std::byte> Placement::workspace(tools::Buffer<std::byte>& buffer, size_t count) {
  if (!on_host()) return {bytes(count), count};
  buffer = tools::Buffer<std::byte>(static_cast<int64_t>(count));
  return buffer.span();
}

}  // namespace winnow::bench
