// Plan: made for a capacity, refilled for every batch.
#include "winnow/plan.h"

#include <nanobind/ndarray.h>
#include <nanobind/operators.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <algorithm>

#include <charconv>

#include "call.h"
#include "ranks.h"
#include "winnow/error.h"

namespace winnow::python {

namespace {

struct ModeName {
  const char* name;
  Mode mode;
};
constexpr ModeName kModes[] = {{"auto", Mode::kAuto},
                               {"bf16", Mode::kBf16},
                               {"mixed", Mode::kMixed},
                               {"separate", Mode::kSeparate},
                               {"direct", Mode::kDirect}};
struct StageName {
  const char* name;
  Stage stage;
};
constexpr StageName kStageNames[] = {{"write", Stage::kWrite},   {"score", Stage::kScore},
                                     {"select", Stage::kSelect}, {"locate", Stage::kLocate},
                                     {"attend", Stage::kAttend}, {"gather", Stage::kGather},
                                     {"lists", Stage::kLists}};

Stage stage_of(std::string_view name) {
  for (const StageName& s : kStageNames)
    if (name == s.name) return s.stage;
  throw Error(
      ErrorCode::kInvalidArgument,
      "plan: stage: expected write, score, select, locate, attend, gather or lists, found " +
          std::string(name));
}

// "cpu", "cuda" (torch's current device), "cuda:1", or a torch.device. The stream comes with each
// call.
Device device_of(const Call& c) {
  const nb::handle h = c["device"];
  const std::string name = h.is_valid() ? utf8(nb::str(h)) : "cpu";
  if (name == "cpu") return cpu();
  if (int index = 0; name.starts_with("cuda:")) {
    const char* end = name.data() + name.size();
    const auto [rest, error] = std::from_chars(name.data() + 5, end, index);
    if (error == std::errc() && rest == end && index >= 0) {
      require_cuda_build(index, "Plan: device");
      return cuda(nullptr, index);
    }
  }
  if (name != "cuda") c.fail("device", "cpu, cuda or cuda:<index>", name);
  require_cuda_build(0, "Plan: device");
  const nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (!modules.contains("torch")) return cuda();
  return cuda(nullptr, nb::cast<int>(modules["torch"].attr("cuda").attr("current_device")()));
}

PlanOptions options_of(Call& c) {
  PlanOptions o;
  const auto set = [&](auto& field, const char* name) {
    if constexpr (sizeof(field) == sizeof(int32_t)) field = c.int32(name, field);
    else field = c.integer(name, field);
  };
  const std::string model = c.text("model", "v32");
  if (model != kV32.name && model != kV4.name) c.fail("model", "v32 or v4", model);
  o.model = model_of(model);
  o.format = c.given("format") ? format_of(c.text("format")) : o.model.fp8;
  set(o.heads, "heads");
  set(o.topk, "topk");
  set(o.extra_topk, "extra_topk");
  set(o.ratio, "ratio");
  set(o.index_heads, "index_heads");
  set(o.page, "page");
  set(o.pages, "pages");
  set(o.max_requests, "max_requests");
  set(o.max_tokens, "max_tokens");
  set(o.max_context, "max_context");
  set(o.decode_threshold, "decode_threshold");
  o.uniform_decode = c.flag("uniform_decode");
  o.mha = c.flag("mha");
  set(o.workspace_rows, "workspace_rows");
  set(o.split_size, "split_size");
  const std::string mode = c.text("mode", "auto"), split = c.text("split", "balanced");
  bool known = false;
  for (const ModeName& m : kModes)
    if (mode == m.name) o.mode = m.mode, known = true;
  if (!known) c.fail("mode", "auto, bf16, mixed, separate or direct", mode);
  if (split != "balanced" && split != "fixed") c.fail("split", "balanced or fixed", split);
  o.split = split == "fixed" ? SplitPolicy::kFixed : SplitPolicy::kBalanced;
  o.precision = precision_of(c);
  o.target = {device_of(c), c.target().kernel};  // a plan keeps a copy of the name
  return o;
}

// How this rank works with others; `ranks` stays with the plan.
Parallel parallel_of(const Call& c, PyRanks* ranks) {
  const std::string spread = c.text("spread", "none");
  constexpr std::string_view kSpreads[] = {"none", "heads", "context", "queries"};
  const auto* const found = std::find(std::begin(kSpreads), std::end(kSpreads), spread);
  if (found == std::end(kSpreads)) c.fail("spread", "none, heads, context or queries", spread);
  return {.comm = ranks,
          .spread = static_cast<Spread>(found - std::begin(kSpreads)),
          .interleave = c.int32("interleave", 1),
          .wire = wire_of(c),
          .sharded = c.flag("sharded")};
}

constexpr const char* kInit =
    "def __init__(self, *, model: str = 'v32', format: str | None = None, heads: int = 128, topk: "
    "int = 0, "
    "extra_topk: int = 0, ratio: int = 0, index_heads: int = 64, page: int = 64, pages: int, "
    "max_requests: int = 256, max_tokens: int = 4096, max_context: int = 0, decode_threshold: int "
    "= 1, "
    "uniform_decode: bool = False, mode: str = 'auto', mha: bool = False, workspace_rows: int = "
    "0, split: str = 'balanced', "
    "split_size: int = 512, device: object = 'cpu', kernel: str | None = None, comm: object | None "
    "= None, spread: str = 'none', interleave: int = 1, wire: str = 'f32', sharded: bool = False, "
    "precision: str = 'full') -> None";
constexpr const char* kRefill =
    "def refill(self, query_starts: Ints, seq_lens: Ints, *, tokens: int = 0) -> None";

const Signature& named(const char* text, const char* name) {
  auto* s = new Signature(text);
  s->name = name;
  return *s;
}

using Ints = nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>;

// A read-only NumPy view of the plan's own memory, which keeps the plan alive.
nb::object view(nb::handle self, std::span<const int32_t> s) {
  const size_t shape[] = {s.size()};
  return nb::cast(Ints(s.data(), 1, shape, self));
}

// The plan behind a property or method, which a refill must not change meanwhile.
const Plan& plan_of(nb::handle self) { return nb::cast<const PyPlan&>(self).at_rest("Plan"); }

template <auto Member>
nb::object array(nb::handle self) {
  return view(self, (plan_of(self).*Member)());
}

// A number of the plan, or one of its structs.
template <auto Member>
auto value(nb::handle self) {
  return (plan_of(self).*Member)();
}

template <class T>
std::vector<T> vector_of(std::span<const T> s) {
  return {s.begin(), s.end()};
}

nb::object schedule(nb::handle self, int32_t part) {
  const Plan& plan = plan_of(self);
  if (part < 0 || part >= static_cast<int32_t>(plan.parts().size()))
    throw Error(ErrorCode::kInvalidArgument, "plan: part: expected 0 to " +
                                                 std::to_string(plan.parts().size() - 1) +
                                                 ", found " + std::to_string(part));
  const Schedule s = plan.schedule(part);
  const size_t shape[] = {s.tiles.size(), 4};
  static_assert(sizeof(Tile) == 4 * sizeof(int32_t));
  const nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>> tiles(s.tiles.data(), 2, shape, self);
  return nb::make_tuple(nb::cast(tiles), view(self, s.worker_starts), view(self, s.split_starts));
}

// The next batch. Other threads' calls read the plan without the GIL, so it must be at rest, which
// is refused and not waited for: a thread that waits with the GIL would wait for ever.
void refill_plan(PyPlan& self, Call& c) {
  const auto starts = c.integers("query_starts");
  const auto lens = c.integers("seq_lens");
  const Batch batch{starts, lens, c.integer("tokens")};
  if (self.calls > 0)
    throw Error(ErrorCode::kRuntime,
                "refill: plan: expected one that no call uses, found " +
                    std::to_string(self.calls) +
                    " in flight; let them return, or give each thread a plan of its own");
  self.at_rest("refill");
  self.refilling = true;
  try {
    // On CUDA this waits for a copy of the last batch.
    without_gil([&] { self.plan.refill(batch); });
  } catch (...) {
    self.refilling = false;
    throw;
  }
  self.refilling = false;
}

void bind_part(nb::module_& m) {
  nb::class_<Part>(m, "Part", "One attend() call of a batch: tokens and requests [first, last).")
      .def_ro("first_token", &Part::first_token)
      .def_ro("last_token", &Part::last_token)
      .def_ro("first_request", &Part::first_request)
      .def_ro("last_request", &Part::last_request)
      .def_ro("gathered", &Part::gathered)
      .def_ro("compressed", &Part::compressed)
      .def_ro("rows", &Part::rows)
      .def_ro("mha", &Part::mha)
      .def(nb::self == nb::self)
      .def("__repr__", [](const Part& p) {
        return "Part(tokens " + std::to_string(p.first_token) + " to " +
               std::to_string(p.last_token) +
               (p.mha        ? ", gathered, mha)"
                : p.gathered ? ", gathered)"
                             : ")");
      });
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_part(m);
  static const Signature& init = named(kInit, "Plan");
  static const Signature& refill = named(kRefill, "refill");
  nb::class_<PyPlan>(m, "Plan",
                     R"(Kernels, workspace and schedule for a capacity; refilled for every batch.

model, format   "v32" or "v4", and its cache format (the fp8 one if not given)
heads           query heads, 1 to 128
topk            width of the list (0: the model's); extra_topk: of V4's second list
page, pages     of the cache; pages has no default
max_requests, max_tokens, max_context
                what refill() accepts; max_context 0 means pages * page
mode            "auto", "bf16", "mixed", "separate" or "direct"
mha             of "auto", V3.2, balanced splits: parts may be for decompress and attend_mha
split           "balanced", or "fixed": a token's result is the same bits in any batch
device          "cpu", "cuda:0" or a torch.device; calls over the plan run on their current stream
comm, spread    a winnow.parallel.Communicator, and what its ranks share out: "heads", "context" or
                "queries"
interleave      of "context" and "queries": consecutive positions on one rank
wire            of "context": "f32" or "bf16" outputs
sharded         of "queries": caches hold this rank's positions, and gather_prefix() brings the others
precision       of attend: "full" or "fp8", which reads fp8 pages alone

Arrays are read-only NumPy views of the plan's memory: they change with the next refill. Calls of
several threads may use a plan at once; refill() raises RuntimeError while one does, and they while
it is being refilled.)")
      .def(
          "__init__",
          [](PyPlan* self, nb::args args, nb::kwargs kwargs) {
            Call c(init, args, kwargs);
            std::shared_ptr<PyRanks> ranks = ranks_of(c);
            PlanOptions o = options_of(c);
            o.parallel = parallel_of(c, ranks.get());
            new (self) PyPlan{std::move(ranks), Plan(o)};
          },
          nb::sig(kInit))
      .def(
          "refill",
          [](PyPlan& self, nb::args args, nb::kwargs kwargs) {
            Call c(refill, args, kwargs);
            refill_plan(self, c);
          },
          nb::sig(kRefill),
          R"(The next batch: query_starts [requests + 1], seq_lens [requests], host int32 or sequences.
Raises RuntimeError while a call of another thread uses the plan.)")
      .def_prop_ro("mode",
                   [](const PyPlan& p) { return kModes[static_cast<int>(p.plan.mode())].name; })
      .def_prop_ro("device",
                   [](const PyPlan& p) {
                     const Device& d = p.plan.options().target.device;
                     return device_name(d.kind, d.index);
                   })
      .def_prop_ro("request_count", value<&Plan::request_count>, "Requests of the batch.")
      .def_prop_ro("tokens", value<&Plan::tokens>, "Tokens of the batch, padding included.")
      .def_prop_ro("batch_tokens", value<&Plan::batch_tokens>,
                   "Tokens of the whole batch, where ranks share them out.")
      .def_prop_ro("token_order", array<&Plan::token_order>)
      .def_prop_ro("split", value<&Plan::split>)
      .def_prop_ro("parts", [](nb::handle self) { return vector_of(plan_of(self).parts()); })
      .def_prop_ro("chunks", [](nb::handle self) { return vector_of(plan_of(self).chunks()); })
      .def_prop_ro("query_lens", array<&Plan::query_lens>)
      .def_prop_ro("seq_lens", array<&Plan::seq_lens>)
      .def_prop_ro("request_ids", array<&Plan::request_ids>)
      .def_prop_ro("positions", array<&Plan::positions>)
      .def_prop_ro("key_ends", array<&Plan::key_ends>)
      .def_prop_ro("state_starts", array<&Plan::state_starts>)
      .def_prop_ro("prefill_requests", array<&Plan::prefill_requests>)
      .def_prop_ro("workspace_starts", array<&Plan::workspace_starts>)
      .def_prop_ro("compressed_lens", array<&Plan::compressed_lens>)
      .def_prop_ro("gather_starts", array<&Plan::gather_starts>)
      .def_prop_ro("gather_lens", array<&Plan::gather_lens>)
      .def_prop_ro("gather_rows", array<&Plan::gather_rows>)
      .def_prop_ro("workspace_bytes", value<&Plan::workspace_bytes>)
      .def_prop_ro("gather_bytes", value<&Plan::gather_bytes>)
      .def("schedule", schedule, nb::arg("part") = 0,
           "(tiles [n, 4], worker_starts, split_starts) of a part; a tile is token, begin, end, "
           "split.")
      .def(
          "kernel",
          [](nb::handle self, std::string_view s, int32_t part) {
            return plan_of(self).kernel(stage_of(s), part);
          },
          nb::arg("stage"), nb::arg("part") = 0,
          R"(The kernel that a stage runs for the current batch; of "attend", in one of its parts.
Before the first refill: for a batch of the plan's capacity.)")
      .def(
          "reasons",
          [](const PyPlan& p, std::string_view s) { return p.plan.reasons(stage_of(s)); },
          nb::arg("stage"), "Why the kernels before it were passed over.");
}

}  // namespace winnow::python
