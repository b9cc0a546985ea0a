// Kernel tables: each stage lists its kernels fastest first; choosing takes the first that fits.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/namespaces.h"
#include "cuda/device.h"
#include "winnow/support.h"
#include "winnow/tensor.h"

namespace winnow::internal::core {

namespace detail {

struct KernelEntry {
  const char* name;
  DeviceKind device;
  bool on_request;           // runs only if it is named (the reference)
  std::string (*machine)();  // "" if this build and machine can run it, else the reason
};

// The index chosen, or throws kUnsupported listing every kernel and why it was passed over.
// `reasons` gets what was skipped. A request names a kernel ("sm90/wide") or a family of kernels
// ("sm90": every row before whose slash it stands).
struct Candidate {
  const KernelEntry* entry;
  const char* misfit;  // why it cannot serve the shape, or null
  const char* slower;  // why another serves it faster, or null; a request by full name overrides it
};
size_t choose(const char* stage, std::span<const Candidate> candidates, const Target& target,
              std::string* reasons);

// The kernel that the target or WINNOW_KERNEL requests; empty: the library chooses.
std::string_view request_of(const char* stage, std::span<const Candidate> candidates,
                            const Target& target);

// Throws if WINNOW_KERNEL has a name that no stage has, as every choice of a kernel does: for tools
// to say it once.
void check_environment();

// What this thread ran last, for tools that let the library choose: a kernel, or the names of two
// joined by " + " where a call runs both.
const char* last_chosen();
void set_last_chosen(const char* name, const char* second = nullptr);

inline std::string any_machine() { return {}; }

// Whether a request, a kernel's name or its family's, means this kernel.
inline bool means(std::string_view request, std::string_view name) {
  return name.starts_with(request) &&
         (name.size() == request.size() || name[request.size()] == '/');
}

}  // namespace detail

// Shape: what the choice depends on. Params: plain pointers and sizes, already checked.
template <class Shape_, class Params_>
struct Kernel : detail::KernelEntry {
  using Shape = Shape_;
  using Params = Params_;
  const char* (*fits)(const Shape&);  // null or the reason; no function fits everything
  void (*run)(const Params&) noexcept;
  // Null, or why another kernel is faster for the shape; no function: none is.
  const char* (*slower)(const Shape&) = nullptr;
};

// The rows of a stage's table that a plan may run: this machine has them and the request allows
// them. Which of them serves a call depends on its batch, and is picked without allocating.
struct Usable {
  std::vector<const detail::KernelEntry*> rows;
  bool by_name = false;  // the request named the kernel itself, whatever is faster
};

// The first row that serves the shape, or null.
template <class K>
const K* pick(const Usable& usable, const typename K::Shape& shape) noexcept {
  for (const detail::KernelEntry* row : usable.rows) {
    const K& k = static_cast<const K&>(*row);
    if (k.fits && k.fits(shape)) continue;
    if (k.slower && !usable.by_name && k.slower(shape)) continue;
    return &k;
  }
  return nullptr;
}

// The shape comes by value: GCC 13 takes a result for a reference into a temporary argument.
template <class K>
const K& choose(const char* stage, std::span<const K> table, typename K::Shape shape,
                const Target& target, std::string* reasons = nullptr) {
  detail::Candidate candidates[16];
  size_t n = 0;
  for (const K& k : table) {
    candidates[n] = {&k, nullptr, nullptr};
    // Kernels of another device are not examined: their checks query that device.
    if (k.device == target.device.kind && k.machine().empty()) {
      if (k.fits) candidates[n].misfit = k.fits(shape);
      if (k.slower) candidates[n].slower = k.slower(shape);
    }
    ++n;
  }
  return table[detail::choose(stage, {candidates, n}, target, reasons)];
}

// What a plan keeps of a table: see Usable.
template <class K>
Usable usable_rows(const char* stage, std::span<const K> table, const Target& target) {
  std::vector<detail::Candidate> candidates;
  for (const K& k : table) candidates.push_back({&k, nullptr, nullptr});
  const std::string_view request = detail::request_of(stage, candidates, target);
  Usable usable;
  for (const K& k : table) {
    if (k.device != target.device.kind) continue;
    if (request.empty() ? k.on_request : !detail::means(request, k.name)) continue;
    if (k.on_request && request != k.name) continue;
    if (!k.machine().empty()) continue;
    usable.rows.push_back(&k);
    usable.by_name |= request == k.name;
  }
  return usable;
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
  detail::set_last_chosen(kernel.name);
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
