// combine: blocks of heads to their ranks, then merge() reads what came in place.
#include "winnow/combine.h"

#include <algorithm>
#include <optional>

#include "combine/kernel.h"
#include "core/arena.h"
#include "core/arithmetic.h"
#include "core/check.h"
#include "core/formats.h"
#include "core/own_memory.h"
#include "cpu/threads.h"
#include "cuda/device.h"
#include "parallel/on_device.h"
#include "winnow/merge.h"
#include "winnow/plan.h"

namespace winnow {

namespace internal::combine {
namespace {

// How much travels: from every rank to every other a block of rows of values, then their lse, in
// whole units of 16 bytes.
struct Sizes {
  int64_t tokens, heads, own_heads, d_v;
  int32_t ranks;
  bool bf16_wire;

  int64_t block_rows() const { return tokens * own_heads; }
  int64_t value_bytes() const { return bf16_wire ? 2 : 4; }
  // Rounded up to whole floats.
  size_t lse_offset() const {
    return static_cast<size_t>(round_up(block_rows() * d_v * value_bytes(), 4));
  }
  size_t block_bytes() const {
    return round_up(lse_offset() + static_cast<size_t>(block_rows()) * sizeof(float), size_t{16});
  }
  // The values and the lse of blocks at `memory`, one for every rank.
  Tensor out_at(std::byte* memory) const {
    const auto block = static_cast<int64_t>(block_bytes()) / value_bytes();
    return {memory,
            bf16_wire ? DType::kBf16 : DType::kF32,
            4,
            {ranks, tokens, own_heads, d_v},
            {block, own_heads * d_v, d_v, 1}};
  }
  Tensor lse_at(std::byte* memory) const {
    const auto block = static_cast<int64_t>(block_bytes() / sizeof(float));
    return {
        memory + lse_offset(), DType::kF32, 3, {ranks, tokens, own_heads}, {block, own_heads, 1}};
  }
};

// A call whose arguments are right.
struct CheckedCall : Sizes {
  const CombineArgs& a;
  Communicator* comm;  // null: this rank is alone
  Device device;
  bool in_place;  // the parts lie as they travel
};

bool same(const Tensor& a, const Tensor& b) {
  bool equal = a.data == b.data;
  for (int i = 0; i < b.rank; ++i) equal = equal && (a.stride[i] == b.stride[i] || b.shape[i] <= 1);
  return equal;
}

// [T, H, ...] as [1, T, H, ...].
Tensor one_block(const Tensor& t) {
  Tensor r{t.data, t.dtype, t.rank + 1, {1}, {0}};
  std::copy_n(t.shape.begin(), t.rank, r.shape.begin() + 1);
  std::copy_n(t.stride.begin(), t.rank, r.stride.begin() + 1);
  return r;
}

CheckedCall checked(const Check& check, const CombineArgs& a) {
  check.choice(a.wire, "wire", Wire::kBf16);
  check.that(!a.plan || !a.comm, "comm", "none with a plan", "one");
  Communicator* const comm = a.plan ? a.plan->options().parallel.comm : a.comm;
  const Device device = a.plan ? a.plan->device(a.target) : a.target.device;
  if (comm) parallel::check_communicator("combine", *comm, device);
  const int32_t ranks = comm ? comm->size() : 1;

  constexpr int64_t kAny = Check::kAny;
  const bool blocked = a.partial_out.rank == 4;
  if (blocked) check.tensor(a.partial_out, "partial_out", DType::kF32, {ranks, kAny, kAny, kAny});
  else check.tensor(a.partial_out, "partial_out", DType::kF32, {kAny, kAny, kAny});
  const int64_t* const shape = a.partial_out.shape.data() + (blocked ? 1 : 0);
  const int64_t tokens = shape[0], heads = blocked ? shape[1] * ranks : shape[1], d_v = shape[2];
  check.that(heads % ranks == 0, "partial_out", cat("a multiple of ", ranks, " heads (ranks)"),
             cat(heads));
  const int64_t own_heads = heads / ranks;
  if (blocked) check.strided(a.partial_lse, "partial_lse", DType::kF32, {ranks, tokens, own_heads});
  else check.strided(a.partial_lse, "partial_lse", DType::kF32, {tokens, heads});
  if (a.plan)
    check.that(a.plan->tokens() == tokens, "plan", cat("a plan refilled for ", tokens, " tokens"),
               cat("one for ", a.plan->tokens()));
  const DType out = a.out.dtype == DType::kF32 ? DType::kF32 : DType::kBf16;
  check.output_rows(a.out, "out", out, {tokens, own_heads, d_v});
  if (a.lse) check.output(a.lse, "lse", DType::kF32, {tokens, own_heads});
  check.optional(a.sink, "sink", DType::kF32, {own_heads});
  check.apart({{a.out, "out"}, {a.lse, "lse"}},
              {{a.partial_out, "partial_out"}, {a.partial_lse, "partial_lse"}, {a.sink, "sink"}});

  const Wire wire = a.plan ? a.plan->options().parallel.wire : a.wire;
  const Sizes sizes{tokens, heads, own_heads, d_v, ranks, wire == Wire::kBf16 && ranks > 1};
  auto* const first = static_cast<std::byte*>(a.partial_out.data);
  const bool in_place = blocked && !sizes.bf16_wire && same(a.partial_out, sizes.out_at(first)) &&
                        same(a.partial_lse, sizes.lse_at(first));
  return {sizes, a, ranks > 1 ? comm : nullptr, device, in_place};
}

struct Memory {
  std::byte *agreement, *send, *received;
  Memory(Arena& arena, const Sizes& c, DeviceKind device, bool in_place) {
    const bool on_cpu = device == DeviceKind::kCpu;
    const size_t blocks = c.ranks > 1 ? static_cast<size_t>(c.ranks) * c.block_bytes() : 0;
    agreement = arena.take<std::byte>(on_cpu ? parallel::agreement_bytes(c.ranks) : 0);
    send = arena.take<std::byte>(in_place ? 0 : blocks);
    received = arena.take<std::byte>(blocks);
  }
};

Packing packing_of(const CheckedCall& c, std::byte* send) {
  const bool blocked = c.a.partial_out.rank == 4;
  const Tensor out = blocked ? c.a.partial_out : one_block(c.a.partial_out);
  const Tensor lse = blocked ? c.a.partial_lse : one_block(c.a.partial_lse);
  return {.out = static_cast<const float*>(out.data),
          .out_stride = {out.stride[0], out.stride[1], out.stride[2]},
          .lse = static_cast<const float*>(lse.data),
          .lse_stride = {lse.stride[0], lse.stride[1], lse.stride[2]},
          .tokens = c.tokens,
          .heads = c.heads,
          .block_heads = blocked ? c.own_heads : c.heads,
          .own_heads = c.own_heads,
          .d_v = c.d_v,
          .bf16_wire = c.bf16_wire,
          .send = send,
          .block_bytes = c.block_bytes(),
          .lse_offset = c.lse_offset(),
          .device = c.device};
}

void pack(const Packing& p) noexcept {
  internal::cpu::parallel_for(p.tokens * p.heads, [&](int64_t task, int) {
    const int64_t t = task / p.heads, h = task % p.heads;
    const float* const from = p.out + p.from(p.out_stride, t, h);
    std::byte* const block = p.send + static_cast<size_t>(h / p.own_heads) * p.block_bytes;
    const int64_t row = t * p.own_heads + h % p.own_heads;
    if (p.bf16_wire)
      std::transform(from, from + p.d_v, reinterpret_cast<bf16*>(block) + row * p.d_v,
                     [](float x) { return to_bf16(x); });
    else std::copy_n(from, p.d_v, reinterpret_cast<float*>(block) + row * p.d_v);
    reinterpret_cast<float*>(block + p.lse_offset)[row] = p.lse[p.from(p.lse_stride, t, h)];
  });
}

void pack_on(const CheckedCall& c, std::byte* send) {
  const Packing packing = packing_of(c, send);
#ifdef WINNOW_WITH_CUDA
  if (c.device.kind == DeviceKind::kCuda) {
    const internal::cuda::Current current(c.device);
    pack_sm90(packing);
    return internal::cuda::check_launch("combine");
  }
#endif
  pack(packing);
}

void merge_blocks(const CheckedCall& c, std::byte* received) {
  MergeArgs merged{.partial_out = {},
                   .partial_lse = {},
                   .sink = c.a.sink,
                   .out = c.a.out,
                   .lse = c.a.lse,
                   .target = c.a.target};
  merged.target.device = c.device;
  if (c.comm) {
    merged.partial_out = c.out_at(received);
    merged.partial_lse = c.lse_at(received);
  } else {
    const bool blocked = c.a.partial_out.rank == 4;
    merged.partial_out = blocked ? c.a.partial_out : one_block(c.a.partial_out);
    merged.partial_lse = blocked ? c.a.partial_lse : one_block(c.a.partial_lse);
  }
  merge(merged);
}

void agree_on(const CheckedCall& c, std::byte* room) {
  parallel::Offer offer("combine");
  offer.number("partial_out", c.tokens, " tokens");
  offer.number("partial_out", c.heads, " heads");
  offer.number("partial_out", c.d_v, " columns");
  offer.number("wire", c.bf16_wire);
  parallel::agree_in(*c.comm, offer, c.device.kind == DeviceKind::kCpu ? room : nullptr);
}

void run(const CheckedCall& c, std::span<std::byte> workspace) {
  Arena arena(workspace);
  const Memory m(arena, c, c.device.kind, c.in_place);
  if (c.comm && !c.a.plan) agree_on(c, m.agreement);
  if (c.tokens == 0) return;
  if (c.comm) {
    const void* send = c.in_place ? c.a.partial_out.data : m.send;
    if (!c.in_place) pack_on(c, m.send);
    const parallel::Step step{"combine", *c.comm, c.device};
    step.all_to_all(send, m.received, c.block_bytes());
  }
  merge_blocks(c, m.received);
}

size_t workspace_of(const CheckedCall& c) {
  if (!c.comm && c.device.kind == DeviceKind::kCuda) return 0;
  Arena arena;
  Memory(arena, c, c.device.kind, c.in_place);
  return arena.bytes();
}

Sizes sizes_of(const Blocks& b) {
  return {b.tokens, b.heads, b.heads / b.ranks, b.d_v, b.ranks, b.bf16_wire};
}

}  // namespace

size_t most_workspace(const Blocks& most, DeviceKind device) {
  Arena arena;
  Memory(arena, sizes_of(most), device, !most.bf16_wire);
  return arena.bytes();
}

size_t bytes_of(const Blocks& b) {
  return static_cast<size_t>(b.ranks) * sizes_of(b).block_bytes();
}
Tensor out_of(const Blocks& b, std::byte* memory) { return sizes_of(b).out_at(memory); }
Tensor lse_of(const Blocks& b, std::byte* memory) { return sizes_of(b).lse_at(memory); }

}  // namespace internal::combine

void combine(const CombineArgs& args) try {
  using namespace internal::combine;
  if (!args.plan) internal::parallel::check_not_captured("combine", args.comm, args.target.device);
  std::optional<OwnMemory> own;
  const CheckedCall call =
      internal::parallel::telling(args.plan ? nullptr : args.comm, "combine", [&] {
        const Check check("combine");
        const CheckedCall c = checked(check, args);
        const bool on_cpu = c.device.kind == DeviceKind::kCpu;
        if (args.workspace.empty() && !args.plan && on_cpu) own.emplace("combine", workspace_of(c));
        else check.workspace(args.workspace, workspace_of(c));
        return c;
      });
  run(call, own ? own->span() : args.workspace);
} catch (const std::bad_alloc&) {
  out_of_memory("combine");
}

size_t combine_workspace_bytes(const CombineArgs& args) try {
  return internal::combine::workspace_of(internal::combine::checked(Check("combine"), args));
} catch (const std::bad_alloc&) {
  out_of_memory("combine");
}

}  // namespace winnow
