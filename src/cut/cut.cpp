// cut: checks the call, moves candidates and cuts between the ranks, keeps what is not after them.
#include "winnow/cut.h"

#include <algorithm>
#include <optional>

#include "core/arena.h"
#include "core/arithmetic.h"
#include "core/check.h"
#include "core/own_memory.h"
#include "cpu/threads.h"
#include "cuda/device.h"
#include "cut/kernel.h"
#include "parallel/agree.h"
#include "parallel/on_device.h"
#include "winnow/plan.h"

namespace winnow {

namespace internal::cut {

std::span<const CutKernel> kernels() {
  static constexpr CutKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, fits_sm90, sm90},
       pack_sm90,
       keep_sm90},
#endif
      {{{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd}, pack, keep},
      {{{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
       pack,
       keep},
  };
  return table;
}

namespace {

// A collective costs as much as the bytes that come in meanwhile: between the processes of a
// machine 3.5 us at some 10 GB/s; between devices, by a model of NVLink that no machine with
// several devices has confirmed, 5 us more than one that carries the candidates, at 322 GB/s.
constexpr int64_t kBytesOfACollective = 32 << 10;
constexpr int64_t kBytesOfACollectiveCuda = 1536 << 10;

// How much travels.
struct Sizes {
  int64_t tokens, width;
  int32_t ranks;
  bool positions;  // are requested
  bool on_cpu;
  bool owner = false;  // the form
  int64_t rows = 0;    // of which each rank finds the cuts

  Sizes(int64_t tokens_, int64_t width_, int32_t ranks_, bool positions_, DeviceKind device)
      : tokens(tokens_),
        width(width_),
        ranks(ranks_),
        positions(positions_),
        on_cpu(device == DeviceKind::kCpu) {}
  Sizes in(CutForm form) const {
    Sizes s = *this;
    const int64_t own = ceil_div(tokens, ranks);
    const int64_t more = 8 * width * (tokens - own) * (ranks - 1);  // bytes, by gathering
    const int64_t worth = on_cpu ? kBytesOfACollective : kBytesOfACollectiveCuda;
    s.owner = form == CutForm::kOwner || (form == CutForm::kAuto && more > worth);
    s.rows = s.owner ? own : tokens;
    return s;
  }
  int64_t all_rows() const { return owner ? ranks * rows : tokens; }
  int64_t row_floats() const { return 2 * width; }
  size_t row_bytes() const { return static_cast<size_t>(row_floats()) * sizeof(float); }
};

// A call whose arguments are right.
struct CheckedCall : Sizes {
  const CutArgs& a;
  Communicator* comm;  // null: this rank is alone
  Shard shard;
  Device device;
};

CheckedCall checked(const Check& check, const CutArgs& a) {
  check.tensor(a.ids, "ids", DType::kI32, {Check::kAny, Check::kAny});
  const int64_t tokens = a.ids.shape[0], width = a.ids.shape[1];
  check.tensor(a.values, "values", DType::kF32, {tokens, width});
  if (a.kept) check.output_rows(a.kept, "kept", DType::kI32, {tokens, width});
  if (a.positions) check.output_rows(a.positions, "positions", DType::kI32, {tokens, width});
  if (a.counts) check.output(a.counts, "counts", DType::kI32, {tokens});
  check.apart({{a.kept, "kept"}, {a.positions, "positions"}, {a.counts, "counts"}},
              {{a.ids, "ids", &a.kept}, {a.values, "values"}});
  check.that(a.kept || a.counts || a.positions, "kept", "kept, counts or positions", "none");
  check.choice(a.form, "form", CutForm::kOwner);
  check.that(!a.plan || !a.comm, "comm", "none with a plan", "one");
  if (a.plan)
    check.that(a.plan->tokens() == tokens, "plan", cat("a plan refilled for ", tokens, " tokens"),
               cat("one for ", a.plan->tokens()));

  Communicator* const comm = a.plan ? a.plan->options().parallel.comm : a.comm;
  const Device device = a.plan ? a.plan->device(a.target) : a.target.device;
  if (comm) parallel::check_communicator("cut", *comm, device);
  const int32_t ranks = comm ? comm->size() : 1;
  const Shard shard = a.plan ? a.plan->options().parallel.shard() : a.shard;
  check.range(shard.interleave, "shard.interleave", 1, INT32_MAX);
  check.that(shard.world == 1 || shard.world == ranks, "shard.world",
             cat("1, or the communicator's ", ranks, " ranks"), cat(shard.world));
  check.that(shard.rank == (shard.world == 1 ? 0 : comm->rank()), "shard.rank",
             cat(shard.world == 1 ? 0 : comm->rank(), ", as the communicator has"),
             cat(shard.rank));
  // Rows that no memory holds end here, not in an overflow.
  check.range(width, "ids columns", 0, INT32_MAX / 16);
  check.range(tokens, "ids rows", 0, INT64_MAX / 64 / (width + 1) / (ranks + 1));

  const Sizes sizes(tokens, width, ranks, static_cast<bool>(a.positions), device.kind);
  return {sizes.in(a.form), a, ranks > 1 ? comm : nullptr, shard, device};
}

// What travels, and what is found.
struct Memory {
  std::byte* agreement;
  float* send;         // [owner: ranks * rows, else tokens][2 K]
  float* received;     // [ranks][rows][2 K]
  int64_t* cuts;       // [rows], of which this rank finds
  int64_t* all_cuts;   // [ranks * rows]
  int32_t* positions;  // owner form: [rows, K] found here, then those of all
  int32_t* all_positions;
  std::byte* scratch;

  Memory(Arena& arena, const Sizes& c) {
    const auto all_rows = static_cast<size_t>(c.all_rows());
    const auto rows = static_cast<size_t>(c.rows);
    const auto width = static_cast<size_t>(c.width);
    const size_t listed = c.owner && c.positions ? width : 0;
    agreement = arena.take<std::byte>(c.on_cpu ? parallel::agreement_bytes(c.ranks) : 0);
    send = arena.take<float>(all_rows * 2 * width);
    received = arena.take<float>(c.ranks * rows * 2 * width);
    cuts = arena.take<int64_t>(rows);
    all_cuts = arena.take<int64_t>(all_rows);
    positions = arena.take<int32_t>(rows * listed);
    all_positions = arena.take<int32_t>(all_rows * listed);
    const auto workers = static_cast<size_t>(c.on_cpu ? internal::cpu::threads() : 0);
    scratch = arena.take<std::byte>(scratch_bytes(c.width, c.ranks) * workers);
  }
};

template <class T>
T* row_of(const Tensor& t, int64_t row) {
  return static_cast<T*>(t.data) + row * t.stride[0];
}

OwnRows own_rows(const CheckedCall& c, float* packed) {
  return {.ids = row_of<const int32_t>(c.a.ids, 0),
          .values = row_of<const float>(c.a.values, 0),
          .id_stride = c.a.ids.stride[0],
          .value_stride = c.a.values.stride[0],
          .tokens = c.tokens,
          .width = c.width,
          .all_rows = c.all_rows(),
          .shard = c.shard,
          .packed = packed,
          .device = c.device};
}

// Rows of positions into rows of the output's stride.
void spread_positions(const CheckedCall& c, const int32_t* rows) noexcept {
#ifdef WINNOW_WITH_CUDA
  if (!c.on_cpu) {
    const size_t bytes = static_cast<size_t>(c.width) * sizeof(int32_t);
    const auto stride = static_cast<size_t>(c.a.positions.stride[0]) * sizeof(int32_t);
    return internal::cuda::copy_rows(c.device, {.to = c.a.positions.data,
                                                .to_stride = stride,
                                                .from = rows,
                                                .row_bytes = bytes,
                                                .rows = static_cast<size_t>(c.tokens)});
  }
#endif
  for (int64_t t = 0; t < c.tokens; ++t)
    std::copy_n(rows + t * c.width, c.width, row_of<int32_t>(c.a.positions, t));
}

// The ranks make one call: shapes, form and outputs decide what is sent.
void agree_on(const CheckedCall& c, std::byte* room) {
  parallel::Offer offer("cut");
  offer.number("ids", c.tokens, " tokens");
  offer.number("ids", c.width, " columns");
  offer.number("form", c.owner);
  offer.number("kept", c.a.kept || c.a.counts);
  offer.number("positions", static_cast<bool>(c.a.positions));
  offer.number("shard.interleave", c.shard.interleave);
  offer.number("shard.world", c.shard.world);
  parallel::agree_in(*c.comm, offer, c.on_cpu ? room : nullptr);
}

void run(const CheckedCall& c, const CutKernel& kernel, Arena& arena) {
  const Memory m(arena, c);
  if (c.comm && !c.a.plan) agree_on(c, m.agreement);
  if (c.tokens == 0) return;
  const OwnRows own = own_rows(c, m.send);
  launch("cut", kernel, c.device, [&] { kernel.pack(own); });
  const float* candidates = m.send;
  if (c.comm) {
    const parallel::Step step{"cut", *c.comm, c.device};
    const size_t bytes = static_cast<size_t>(c.rows) * c.row_bytes();
    if (c.owner) step.all_to_all(m.send, m.received, bytes);
    else step.all_gather(m.send, m.received, bytes);
    candidates = m.received;
  }

  const bool gather = c.owner && c.comm;
  const bool keeps = c.a.kept || c.a.counts;
  // Gathered rows have this rank's own among them, which are in a cache then.
  OwnRows at_hand = own;
  if (c.comm && !c.owner) at_hand.packed = m.received + c.comm->rank() * c.rows * c.row_floats();
  const Keeping keeping{.own = at_hand,
                        .cuts = gather ? m.all_cuts : m.cuts,
                        .kept = row_of<int32_t>(c.a.kept, 0),
                        .kept_stride = c.a.kept.stride[0],
                        .counts = row_of<int32_t>(c.a.counts, 0),
                        .count_stride = c.a.counts.stride[0]};
  Params p;
  p.candidates = candidates;
  p.rows = c.rows;
  p.width = c.width;
  p.blocks = c.ranks;
  p.cuts = m.cuts;
  if (c.a.positions) {
    p.positions = gather ? m.positions : row_of<int32_t>(c.a.positions, 0);
    p.position_stride = gather ? c.width : c.a.positions.stride[0];
  }
  p.scratch = m.scratch;
  p.keeping = keeps && !gather ? &keeping : nullptr;
  p.device = c.device;
  winnow::run("cut", kernel, p);
  if (!gather) return;

  const parallel::Step step{"cut", *c.comm, c.device};
  if (keeps) {
    step.all_gather(m.cuts, m.all_cuts, static_cast<size_t>(c.rows) * sizeof(int64_t));
    launch("cut", kernel, c.device, [&] { kernel.keep(keeping); });
  }
  if (c.a.positions) {
    step.all_gather(m.positions, m.all_positions,
                    static_cast<size_t>(c.rows * c.width) * sizeof(int32_t));
    launch("cut", kernel, c.device, [&] { spread_positions(c, m.all_positions); });
  }
}

size_t workspace_of(const Sizes& sizes) {
  Arena arena;
  Memory(arena, sizes);
  return arena.bytes();
}

}  // namespace

size_t most_workspace(int64_t tokens, int64_t width, int32_t ranks, bool positions,
                      DeviceKind device) {
  const auto sizes = [&](int64_t rows, CutForm form) {
    return Sizes(rows, width, ranks, positions, device).in(form);
  };
  size_t most = workspace_of(sizes(tokens, CutForm::kOwner));
  // Few rows are gathered, which takes more memory for each of them.
  for (int64_t t = 1; t <= tokens && !sizes(t, CutForm::kAuto).owner; ++t)
    most = std::max(most, workspace_of(sizes(t, CutForm::kGather)));
  return most;
}

}  // namespace internal::cut

void cut(const CutArgs& args) try {
  using namespace internal::cut;
  if (!args.plan) internal::parallel::check_not_captured("cut", args.comm, args.target.device);
  const CutKernel* kernel = nullptr;
  std::optional<OwnMemory> own;
  const CheckedCall call = internal::parallel::telling(args.plan ? nullptr : args.comm, "cut", [&] {
    const Check check("cut");
    const CheckedCall c = checked(check, args);
    Target target = args.target;
    target.device = c.device;
    kernel = &choose("cut", kernels(), Shape{c.width, c.positions}, target);
    if (args.workspace.empty() && !args.plan && c.on_cpu) own.emplace("cut", workspace_of(c));
    else check.workspace(args.workspace, workspace_of(c));
    return c;
  });
  Arena arena(own ? own->span() : args.workspace);
  run(call, *kernel, arena);
} catch (const std::bad_alloc&) {
  out_of_memory("cut");
}

size_t cut_workspace_bytes(const CutArgs& args) try {
  return internal::cut::workspace_of(internal::cut::checked(Check("cut"), args));
} catch (const std::bad_alloc&) {
  out_of_memory("cut");
}

}  // namespace winnow
