// norm_write: checks the parts, chooses the kernel. On the CPU a kernel is those of norm() and
// write() one after the other, which is also the specification.
#include "winnow/norm_write.h"

#include "core/check.h"
#include "norm_write/kernel.h"

namespace winnow {

namespace internal::norm_write {

namespace {

template <void (*kNorm)(const norm::Params&) noexcept,
          void (*kWrite)(const write::Params&) noexcept>
void compose(const Params& p) noexcept {
  kNorm(p.norm);
  for (const write::Params& part : p.write) kWrite(part);
}

}  // namespace

std::span<const NormWriteKernel> kernels() {
  static constexpr NormWriteKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine},
       nullptr,
       compose<norm::simd, write::simd::write>},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine},
       nullptr,
       compose<norm::reference, write::reference::write>},
  };
  return table;
}

namespace {

// No part reads what another writes. Two caches may share memory, as the pools of engines do: which
// pages are whose, the slots say.
void check_parts(const Check& check, const NormWriteArgs& a) {
  const auto& [first, second] = a.norm.rows;
  const auto& [latents, keys] = a.write;
  const auto apart_with = [&](const Cache& cache, const char* name) {
    check.apart({{first.out, "norm.out"},
                 {second.out, "norm.rows[1].out"},
                 {core::pages_view(cache), name}},
                {{first.x, "norm.x", &first.out},
                 {second.x, "norm.rows[1].x", &second.out},
                 {latents.kv, "write[0].kv"},
                 {latents.rope, "write[0].rope"},
                 {keys.kv, "write[1].kv"},
                 {keys.rope, "write[1].rope"}});
  };
  apart_with(latents.cache, "write[0].cache");
  apart_with(keys.cache, "write[1].cache");
}

Params checked(const NormWriteArgs& a) {
  Params p;
  p.device = a.target.device;
  const NormRows* rows = a.norm.rows;
  const bool normed = rows[0].x || rows[0].out || rows[1].x || rows[1].out;
  bool any = normed;
  if (normed) {
    NormArgs part = a.norm;
    part.target = a.target;
    p.norm =
        norm::checked(Check("norm_write", "norm."), Check("norm_write", "norm.rows[1]."), part);
  }
  for (int i = 0; i < 2; ++i) {
    WriteArgs part = a.write[i];
    if (!part.kv && !part.slots && !part.cache) continue;
    any = true;
    part.plan = nullptr;
    part.target = a.target;
    p.write[i] = write::checked(Check("norm_write", i == 0 ? "write[0]." : "write[1]."), part);
  }
  const Check check("norm_write");
  check.that(any, "norm", "rows to normalise or to write", "neither");
  check_parts(check, a);
  return p;
}

}  // namespace
}  // namespace internal::norm_write

void norm_write(const NormWriteArgs& args) try {
  using namespace internal::norm_write;
  const Params params = checked(args);
  run("norm_write", choose("norm_write", kernels(), Shape{}, args.target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("norm_write");
}

}  // namespace winnow
