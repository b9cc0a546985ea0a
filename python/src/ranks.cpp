// Ranks: communicators that are Python objects, cut and combine.
#include "ranks.h"

#include <nanobind/stl/string.h>

#include "winnow/combine.h"
#include "winnow/cut.h"
#include "winnow/error.h"
#include "winnow/gather_prefix.h"

namespace winnow::python {

PyRanks::PyRanks(nb::handle object)
    : object_(nb::borrow(object)),
      rank_(nb::cast<int32_t>(object.attr("rank"))),
      size_(nb::cast<int32_t>(object.attr("size"))),
      name_(nb::cast<std::string>(object.attr("name"))),
      takes_cuda_(nb::cast<bool>(object.attr("takes_cuda"))) {}

PyRanks::~PyRanks() = default;

void PyRanks::call(const char* method, const void* send, void* recv, size_t bytes) {
  check();
  const nb::gil_scoped_acquire gil;
  try {
    object_.attr(method)(reinterpret_cast<uintptr_t>(send), reinterpret_cast<uintptr_t>(recv),
                         bytes);
  } catch (nb::python_error& e) {
    spent_ = name_ + ": " + method + ": " + nb::cast<std::string>(nb::str(e.value()));
    throw Error(ErrorCode::kRuntime, spent_);
  }
}

void PyRanks::all_gather(const void* send, void* recv, size_t bytes, const Device&) {
  call("all_gather", send, recv, bytes);
}
void PyRanks::all_to_all(const void* send, void* recv, size_t bytes, const Device&) {
  call("all_to_all", send, recv, bytes);
}
void PyRanks::exchange(const void* send, void* recv, size_t bytes) {
  call("exchange", send, recv, bytes);
}
void PyRanks::check() {
  if (!spent_.empty()) throw Error(ErrorCode::kRuntime, spent_);
}

std::unique_ptr<PyRanks> ranks_of(const Call& c) {
  const nb::handle h = c["comm"];
  if (!h.is_valid()) return nullptr;
  for (const char* member :
       {"rank", "size", "name", "takes_cuda", "all_gather", "all_to_all", "exchange"})
    if (!nb::hasattr(h, member)) c.wrong_type("comm", "a winnow.parallel.Communicator");
  try {
    return std::make_unique<PyRanks>(h);
  } catch (const nb::cast_error&) {
    c.wrong_type("comm", "a winnow.parallel.Communicator");
  }
}

Wire wire_of(const Call& c) {
  const std::string wire = c.text("wire", "f32");
  if (wire != "f32" && wire != "bf16") c.fail("wire", "f32 or bf16", wire);
  return wire == "bf16" ? Wire::kBf16 : Wire::kF32;
}

namespace {

// What a call has of its plan, if it has one, it cannot be given as well.
void check_of_plan(const Call& c, const Plan* plan, const char* name) {
  if (plan && c.given(name)) c.fail(name, "nothing with a plan, which has its own", "a value");
}

int32_t ranks_in(const Plan* plan, const Communicator* comm) {
  if (plan) comm = plan->options().parallel.comm;
  return comm && comm->size() > 0 ? comm->size() : 1;
}

nb::object cut_(Call& c) {
  CutArgs a;
  const auto comm = ranks_of(c);
  a.comm = comm.get();
  a.ids = c.in("ids");
  a.values = c.in("values");
  a.plan = c.plan();
  check_of_plan(c, a.plan, "interleave");
  // Not given: ids are positions already.
  if (c.given("interleave"))
    a.shard = {comm ? comm->size() : 1, comm ? comm->rank() : 0, c.int32("interleave")};
  const std::string form = c.text("form", "auto");
  if (form != "auto" && form != "gather" && form != "owner")
    c.fail("form", "auto, gather or owner", form);
  a.form = form == "gather" ? CutForm::kGather : form == "owner" ? CutForm::kOwner : CutForm::kAuto;
  const int64_t tokens = a.ids.shape[0], width = a.ids.shape[1];
  a.kept = c.out("out", DType::kI32, {tokens, width});
  if (c.wanted("counts")) a.counts = c.out("counts", DType::kI32, {tokens});
  if (c.wanted("positions")) a.positions = c.out("positions", DType::kI32, {tokens, width});
  a.target = c.target();
  if (a.plan) a.workspace = c.scratch(cut_workspace_bytes(a));
  c.run([&] { cut(a); });
  return c.result({"out", "counts", "positions"});
}

nb::object combine_(Call& c) {
  CombineArgs a;
  const auto comm = ranks_of(c);
  a.comm = comm.get();
  a.wire = wire_of(c);
  a.partial_out = c.in("partial_out");
  a.partial_lse = c.in("partial_lse");
  a.sink = c.in("sink");
  a.plan = c.plan();
  check_of_plan(c, a.plan, "wire");
  const int32_t ranks = ranks_in(a.plan, a.comm);
  const int64_t tokens = a.partial_out.shape[0], own = a.partial_out.shape[1] / ranks;
  a.out = c.out("out", DType::kBf16, {tokens, own, a.partial_out.shape[2]});
  if (c.wanted("lse")) a.lse = c.out("lse", DType::kF32, {tokens, own});
  a.target = c.target();
  if (a.plan) a.workspace = c.scratch(combine_workspace_bytes(a));
  c.run([&] { combine(a); });
  return c.result({"out", "lse"});
}

nb::object gather_prefix_(Call& c) {
  GatherPrefixArgs a;
  a.plan = c.plan();
  if (!a.plan) c.fail("plan", "a plan", "none");
  const auto comm = ranks_of(c);
  a.comm = comm.get();
  a.cache = c.cache("cache");
  a.block_table = c.in("block_table");
  a.keys = c.cache("index_keys");
  a.key_table = c.in("index_table");
  const Tensor rows =
      c.out("out", DType::kU8, {static_cast<int64_t>(gather_prefix_bytes(*a.plan))});
  a.rows = {static_cast<std::byte*>(rows.data), static_cast<size_t>(rows.shape[0])};
  a.target.device = c.device();
  c.run([&] { gather_prefix(a); });
  return c.result({"out"});
}

}  // namespace

void bind_ranks(nb::module_& m) {
  def(m,
      "def gather_prefix(plan: Plan, cache: Cache, block_table: Array, index_keys: Cache, "
      "index_table: Array, *, comm: object | None = None, out: Array | None = None) -> Array",
      gather_prefix_,
      R"(What the caches of all ranks hold of the sequences of plan's batch, as rows, for one layer.

plan         with spread="queries" and sharded=True, refilled
cache, block_table, index_keys, index_table
             this rank's records and index keys, by local positions
comm         another communicator of the same ranks, for a call beside a pipeline()

Returns bytes for pipeline(prefix=...). The next layer's may be gathered while this one runs.)");
  def(m,
      "def cut(ids: Array, values: Array, *, comm: object | None = None, interleave: int | None = "
      "None, form: str = 'auto', out: Array | None = None, counts: Array | bool = False, "
      "positions: "
      "Array | bool = False, plan: Plan | None = None, kernel: str | None = None) -> Array | tuple",
      cut_,
      R"(The top-k of a row over all ranks, from the top-k of each rank's part of it.

ids, values  [tokens, topk] int32 and f32: of this rank's part, as score_select(values=True) gives
             them
comm         a winnow.parallel.Communicator; None: one rank
interleave   ids count the positions that this rank holds, consecutive ones so many at a time; not
             given: ids are positions of the row
form         "gather", "owner" or "auto": how much travels; the result is the same
plan         with spread="context" or "heads", refilled, instead of comm and interleave: its ranks have
             agreed on the batch, so that nothing more is exchanged

Returns those of ids that belong to the row's top-k, then -1; with counts=True how many, and with
positions=True the whole top-k of the row, the same on every rank.)");
  def(m,
      "def combine(partial_out: Array, partial_lse: Array, *, comm: object | None = None, sink: "
      "Array | None = None, wire: str = 'f32', out: Array | None = None, lse: Array | bool = "
      "False, "
      "plan: Plan | None = None, kernel: str | None = None) -> Array | tuple",
      combine_,
      R"(Attention over parts of the context, one on each rank, to that over all of it.

partial_out  [tokens, heads, d_v] f32: all heads over this rank's part, without a sink
partial_lse  [tokens, heads] f32; +inf and -inf both mean "empty"
sink         [heads / ranks] f32 of this rank's heads, applied once, here
wire         "f32", or "bf16": half the bytes, rounded once more
plan         with spread="context", refilled, instead of comm and wire

Returns out [tokens, heads / ranks, d_v] bf16 of this rank's heads; with lse=True lse as well.)");
}

}  // namespace winnow::python
