// Kernel tables: each stage lists its kernels fastest first; choosing takes the first that fits.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/namespaces.h"
#include "cuda/device.h"
#include "winnow/support.h"
#include "winnow/tensor.h"

namespace winnow::internal::core {

namespace detail {

struct KernelEntry {
  const char* name;
  DeviceKind device;
  bool on_request;           // never chosen by itself (the reference)
  std::string (*machine)();  // "" if this build and machine can run it, else the reason
};

// The index chosen, or throws kUnsupported listing every kernel and why it was passed over.
// `fits(i)` gives "" or the reason why kernel i cannot serve the shape. `reasons` gets what was
// skipped.
struct Candidate {
  const KernelEntry* entry;
  std::string misfit;
};
size_t choose(const char* stage, std::span<const Candidate> candidates, const Target& target,
              std::string* reasons);

// Name of the kernel that this thread chose last, for tools that let the library choose.
const char* last_chosen();

inline std::string any_machine() { return {}; }

}  // namespace detail

// Shape: what the choice depends on. Params: plain pointers and sizes, already checked.
template <class Shape_, class Params_>
struct Kernel : detail::KernelEntry {
  using Shape = Shape_;
  using Params = Params_;
  std::string (*fits)(const Shape&);  // "" or the reason; null fits everything
  void (*run)(const Params&) noexcept;
};

// The shape comes by value: GCC 13 takes a result for a reference into a temporary argument.
template <class K>
const K& choose(const char* stage, std::span<const K> table, typename K::Shape shape,
                const Target& target, std::string* reasons = nullptr) {
  detail::Candidate candidates[16];
  size_t n = 0;
  for (const K& k : table) candidates[n++] = {&k, k.fits ? k.fits(shape) : std::string()};
  return table[detail::choose(stage, {candidates, n}, target, reasons)];
}

// Calls `body`, which runs a chosen kernel, on the device of the call, and reports a failed launch.
template <class F>
void launch([[maybe_unused]] const char* stage, [[maybe_unused]] const detail::KernelEntry& kernel,
            [[maybe_unused]] const Device& device, F&& body) {
#ifdef WINNOW_WITH_CUDA
  if (kernel.device == DeviceKind::kCuda) {
    const cuda::Current current(device);
    body();
    cuda::check_launch(stage);
    return;
  }
#endif
  body();
}

template <class K>
void run(const char* stage, const K& kernel, const typename K::Params& params) {
  launch(stage, kernel, params.device, [&] { kernel.run(params); });
}

// The kernels of a table as support() reports them.
template <class K>
void list_kernels(const char* stage, std::span<const K> table, std::vector<KernelInfo>& out) {
  for (const K& k : table) {
    std::string reason = k.machine();
    out.push_back({stage, k.name, k.device == DeviceKind::kCpu ? "cpu" : "cuda", reason.empty(),
                   std::move(reason)});
  }
}

}  // namespace winnow::internal::core
