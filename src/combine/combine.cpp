// combine: blocks of heads to their ranks, then merge() reads what came in place.
#include "winnow/combine.h"

#include <algorithm>
#include <optional>

#include "combine/kernel.h"
#include "core/arena.h"
#include "core/check.h"
#include "core/formats.h"
#include "core/own_memory.h"
#include "cpu/threads.h"
#include "parallel/agree.h"
#include "winnow/merge.h"
#include "winnow/plan.h"

namespace winnow {

namespace internal::combine {
namespace {

// How much travels.
struct Sizes {
  int64_t tokens, heads, own_heads, d_v;
  int32_t ranks;
  bool bf16_wire;

  int64_t block_rows() const { return tokens * own_heads; }
  int64_t value_bytes() const { return bf16_wire ? 2 : 4; }
  // Rows of values, then their lse, rounded up to whole floats.
  size_t lse_offset() const {
    return static_cast<size_t>((block_rows() * d_v * value_bytes() + 3) / 4 * 4);
  }
  size_t block_bytes() const {
    return lse_offset() + static_cast<size_t>(block_rows()) * sizeof(float);
  }
};

// A call whose arguments are right.
struct Call : Sizes {
  const CombineArgs& a;
  Communicator* comm;  // null: this rank is alone
  Device device;
};

Call checked(const Check& check, const CombineArgs& a) {
  check.tensor(a.partial_out, "partial_out", DType::kF32, {Check::kAny, Check::kAny, Check::kAny});
  const int64_t tokens = a.partial_out.shape[0], heads = a.partial_out.shape[1];
  const int64_t d_v = a.partial_out.shape[2];
  check.strided(a.partial_lse, "partial_lse", DType::kF32, {tokens, heads});
  check.choice(a.wire, "wire", Wire::kBf16);
  check.that(!a.plan || !a.comm, "comm", "none with a plan", "one");
  if (a.plan)
    check.that(a.plan->tokens() == tokens, "plan", cat("a plan refilled for ", tokens, " tokens"),
               cat("one for ", a.plan->tokens()));
  Communicator* const comm = a.plan ? a.plan->options().parallel.comm : a.comm;
  const Device device = a.plan ? a.plan->device(a.target) : a.target.device;
  if (device.kind != DeviceKind::kCpu)
    throw Error(ErrorCode::kUnsupported, "combine: target: expected the CPU, found CUDA");
  if (comm) parallel::check_communicator("combine", *comm, device);
  const int32_t ranks = comm ? comm->size() : 1;
  check.that(heads % ranks == 0, "partial_out", cat("a multiple of ", ranks, " heads (ranks)"),
             cat(heads));
  const int64_t own_heads = heads / ranks;
  const DType out = a.out.dtype == DType::kF32 ? DType::kF32 : DType::kBf16;
  check.output_rows(a.out, "out", out, {tokens, own_heads, d_v});
  if (a.lse) check.output(a.lse, "lse", DType::kF32, {tokens, own_heads});
  check.optional(a.sink, "sink", DType::kF32, {own_heads});
  const Wire wire = a.plan ? a.plan->options().parallel.wire : a.wire;
  const Sizes sizes{tokens, heads, own_heads, d_v, ranks, wire == Wire::kBf16 && ranks > 1};
  return {sizes, a, ranks > 1 ? comm : nullptr, device};
}

struct Memory {
  std::byte *agreement, *send, *received;
  Memory(Arena& arena, const Sizes& c) {
    const size_t blocks = c.ranks > 1 ? static_cast<size_t>(c.ranks) * c.block_bytes() : 0;
    agreement = arena.take<std::byte>(parallel::agreement_bytes(c.ranks));
    send = arena.take<std::byte>(blocks);
    received = arena.take<std::byte>(blocks);
  }
};

void pack(const Call& c, std::byte* send) {
  const Tensor &out = c.a.partial_out, &lse = c.a.partial_lse;
  internal::cpu::parallel_for(c.tokens * c.heads, [&](int64_t task, int) {
    const int64_t t = task / c.heads, h = task % c.heads;
    std::byte* const block = send + static_cast<size_t>(h / c.own_heads) * c.block_bytes();
    const int64_t row = t * c.own_heads + h % c.own_heads;
    const float* const from =
        static_cast<const float*>(out.data) + t * out.stride[0] + h * out.stride[1];
    if (c.bf16_wire)
      std::transform(from, from + c.d_v, reinterpret_cast<bf16*>(block) + row * c.d_v,
                     [](float x) { return to_bf16(x); });
    else std::copy_n(from, c.d_v, reinterpret_cast<float*>(block) + row * c.d_v);
    reinterpret_cast<float*>(block + c.lse_offset())[row] =
        static_cast<const float*>(lse.data)[t * lse.stride[0] + h * lse.stride[1]];
  });
}

void merge_blocks(const Call& c, std::byte* received) {
  const int64_t width = c.value_bytes(), bytes = static_cast<int64_t>(c.block_bytes());
  const int64_t ranks = c.ranks;
  MergeArgs merged{.partial_out = {},
                   .partial_lse = {},
                   .sink = c.a.sink,
                   .out = c.a.out,
                   .lse = c.a.lse,
                   .target = c.a.target};
  merged.target.device = c.device;
  if (c.comm) {
    merged.partial_out = {received,
                          c.bf16_wire ? DType::kBf16 : DType::kF32,
                          4,
                          {ranks, c.tokens, c.own_heads, c.d_v},
                          {bytes / width, c.own_heads * c.d_v, c.d_v, 1}};
    merged.partial_lse = {received + c.lse_offset(),
                          DType::kF32,
                          3,
                          {ranks, c.tokens, c.own_heads},
                          {bytes / 4, c.own_heads, 1}};
  } else {
    const Tensor &out = c.a.partial_out, &lse = c.a.partial_lse;
    merged.partial_out = {out.data,
                          DType::kF32,
                          4,
                          {1, c.tokens, c.heads, c.d_v},
                          {0, out.stride[0], out.stride[1], 1}};
    merged.partial_lse = {
        lse.data, DType::kF32, 3, {1, c.tokens, c.heads}, {0, lse.stride[0], lse.stride[1]}};
  }
  merge(merged);
}

void agree_on(const Call& c, std::byte* room) {
  parallel::Offer offer("combine");
  offer.number("partial_out", c.tokens, " tokens");
  offer.number("partial_out", c.heads, " heads");
  offer.number("partial_out", c.d_v, " columns");
  offer.number("wire", c.bf16_wire);
  parallel::agree(*c.comm, offer, {room, parallel::agreement_bytes(c.ranks)});
}

void run(const Call& c, std::span<std::byte> workspace) {
  Arena arena(workspace);
  const Memory m(arena, c);
  if (c.comm && !c.a.plan) agree_on(c, m.agreement);
  if (c.tokens == 0) return;
  if (c.comm) {
    pack(c, m.send);
    const parallel::Step step{"combine", *c.comm, c.device};
    step.all_to_all(m.send, m.received, c.block_bytes());
  }
  merge_blocks(c, m.received);
}

size_t workspace_of(const Sizes& sizes) {
  Arena arena;
  Memory(arena, sizes);
  return arena.bytes();
}

}  // namespace

size_t most_workspace(int64_t tokens, int64_t heads, int64_t d_v, int32_t ranks) {
  return workspace_of({tokens, heads, heads / ranks, d_v, ranks, false});
}

}  // namespace internal::combine

void combine(const CombineArgs& args) try {
  using namespace internal::combine;
  std::optional<OwnMemory> own;
  const Call call = internal::parallel::telling(args.plan ? nullptr : args.comm, "combine", [&] {
    const Check check("combine");
    const Call c = checked(check, args);
    if (args.workspace.empty() && !args.plan) own.emplace("combine", workspace_of(c));
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
