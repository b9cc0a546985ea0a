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

bool given(const NormArgs& a) {
  return a.rows[0].x || a.rows[0].out || a.rows[1].x || a.rows[1].out;
}
bool given(const WriteArgs& a) { return a.kv || a.slots || a.cache; }

// What a write reads.
struct WriteNames {
  const char *kv, *rope, *slots, *weight, *bias, *table, *positions;
};
constexpr WriteNames kNames[2] = {
    {"write[0].kv", "write[0].rope", "write[0].slots", "write[0].norm.weight", "write[0].norm.bias",
     "write[0].rope.table", "write[0].prologue.positions"},
    {"write[1].kv", "write[1].rope", "write[1].slots", "write[1].norm.weight", "write[1].norm.bias",
     "write[1].rope.table", "write[1].prologue.positions"}};

// No part reads what another writes. Two caches may share memory, as the pools of engines do: which
// pages are whose, the slots say.
void check_parts(const Check& check, const NormWriteArgs& a) {
  const auto& [first, second] = a.norm.rows;
  const bool normed = given(a.norm);
  const bool both = second.x || second.out;
  const auto apart_with = [&](const Tensor& pages, const char* name) {
    const std::initializer_list<Check::Named> outputs = {
        {first.out, "norm.out"}, {second.out, "norm.rows[1].out"}, {pages, name}};
    check.apart(outputs, {{first.x, "norm.x", &first.out},
                          {second.x, "norm.rows[1].x", &second.out},
                          {Check::read(normed, first.norm.weight), "norm.norm.weight"},
                          {Check::read(normed, first.norm.bias), "norm.norm.bias"},
                          {Check::read(both, second.norm.weight), "norm.rows[1].norm.weight"},
                          {Check::read(both, second.norm.bias), "norm.rows[1].norm.bias"}});
    for (int i = 0; i < 2; ++i) {
      const WriteArgs& part = a.write[i];
      if (!given(part)) continue;
      const Prologue& prologue = part.prologue;
      const bool prepared = prologue.norm.kind != NormKind::kNone;
      const bool turned = static_cast<bool>(prologue.rope.table);
      check.apart(outputs, {{part.kv, kNames[i].kv},
                            {part.rope, kNames[i].rope},
                            {part.slots, kNames[i].slots},
                            {Check::read(prepared, prologue.norm.weight), kNames[i].weight},
                            {Check::read(prepared, prologue.norm.bias), kNames[i].bias},
                            {prologue.rope.table, kNames[i].table},
                            {Check::read(turned, prologue.positions), kNames[i].positions}});
    }
  };
  apart_with(core::pages_view(a.write[0].cache), "write[0].cache");
  apart_with(core::pages_view(a.write[1].cache), "write[1].cache");
}

Params checked(const NormWriteArgs& a) {
  Params p;
  p.device = a.target.device;
  const bool normed = given(a.norm);
  bool any = normed;
  if (normed) {
    NormArgs part = a.norm;
    part.target = a.target;
    p.norm =
        norm::checked(Check("norm_write", "norm."), Check("norm_write", "norm.rows[1]."), part);
  }
  for (int i = 0; i < 2; ++i) {
    WriteArgs part = a.write[i];
    if (!given(part)) continue;
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
