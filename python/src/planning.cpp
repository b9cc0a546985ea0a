// The arithmetic of planning, each function alone.
#include <nanobind/operators.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "call.h"
#include "winnow/plan.h"

namespace winnow::python {

namespace {

std::vector<Chunk> chunks_of(const Call& c) {
  std::vector<Chunk> chunks;
  if (!c.given("chunks")) c.fail("chunks", "a sequence of Chunk or (first, last)", "None");
  for (nb::handle item : nb::iter(c["chunks"])) {
    Chunk chunk;
    std::pair<int32_t, int32_t> pair;
    if (nb::try_cast(item, pair)) chunk = {pair.first, pair.second};
    else if (!nb::try_cast(item, chunk))
      c.fail("chunks", "Chunk or (first, last)", nb::cast<std::string>(nb::repr(item)));
    chunks.push_back(chunk);
  }
  return chunks;
}

// Tokens of an output: what is requested, else those of the batch.
std::span<int32_t> per_token(Call& c, const std::vector<int32_t>& query_starts) {
  const int64_t tokens = query_starts.empty() ? 0 : query_starts.back();
  const int64_t asked = c.size("tokens", tokens);
  // The library would name the array that is made.
  if (asked < tokens)
    c.fail("tokens", std::to_string(tokens) + " or more, as query_starts has",
           std::to_string(asked));
  return c.integers_out(asked);
}

nb::object request_ids_(Call& c) {
  const auto starts = c.integers("query_starts");
  request_ids(starts, per_token(c, starts));
  return c.result({"out"});
}

nb::object split_batch_(Call& c) {
  const auto starts = c.integers("query_starts");
  const int64_t tokens = c.integer("tokens", starts.empty() ? 0 : starts.back());
  return nb::cast(split_batch(starts, tokens, c.int32("threshold", 1), c.flag("uniform")));
}

nb::object prefill_chunks_(Call& c) {
  return nb::cast(prefill_chunks(c.integers("seq_lens"), c.integer("rows")));
}

nb::object workspace_starts_(Call& c) {
  const auto lens = c.integers("seq_lens");
  const auto chunks = chunks_of(c);
  workspace_starts(lens, chunks, c.integers_out(static_cast<int64_t>(lens.size())));
  return c.result({"out"});
}

nb::object prefill_request_ids_(Call& c) {
  const auto starts = c.integers("query_starts");
  prefill_request_ids(starts, c.int32("decodes"), per_token(c, starts));
  return c.result({"out"});
}

nb::object v4_prefill_chunks_(Call& c) {
  const auto query_lens = c.integers("query_lens"), seq_lens = c.integers("seq_lens");
  return nb::cast(v4_prefill_chunks({.query_lens = query_lens,
                                     .seq_lens = seq_lens,
                                     .ratio = c.int32("ratio", 4),
                                     .window = c.int32("window", 128),
                                     .max_model_len = c.integer("max_model_len"),
                                     .max_batched_tokens = c.integer("max_batched_tokens")}));
}

nb::object shard_batch_(Call& c) {
  const auto starts = c.integers("query_starts"), lens = c.integers("seq_lens");
  const Shard shard{c.int32("world", 1), c.int32("rank"), c.int32("interleave", 1)};
  const BatchShare share = shard_batch({.query_starts = starts, .seq_lens = lens}, shard);
  return nb::make_tuple(share.query_starts, share.seq_lens, share.tokens, share.positions);
}

std::string fields(const char* name, std::initializer_list<int32_t> values) {
  std::string s;
  for (int32_t v : values) s += (s.empty() ? "" : ", ") + std::to_string(v);
  return std::string(name) + "(" + s + ")";
}

void bind_structs(nb::module_& m) {
  nb::class_<BatchSplit>(m, "BatchSplit", "Decodes and prefills of a batch.")
      .def_ro("decodes", &BatchSplit::decodes)
      .def_ro("prefills", &BatchSplit::prefills)
      .def_ro("decode_tokens", &BatchSplit::decode_tokens)
      .def_ro("prefill_tokens", &BatchSplit::prefill_tokens)
      .def_ro("active_decodes", &BatchSplit::active_decodes)
      .def(nb::self == nb::self)
      .def("__repr__", [](const BatchSplit& s) {
        return fields("BatchSplit",
                      {s.decodes, s.prefills, s.decode_tokens, s.prefill_tokens, s.active_decodes});
      });
  nb::class_<Chunk>(m, "Chunk", "Requests [first, last).")
      .def(nb::init<int32_t, int32_t>(), nb::arg("first"), nb::arg("last"))
      .def_ro("first", &Chunk::first)
      .def_ro("last", &Chunk::last)
      .def(nb::self == nb::self)
      .def("__repr__", [](const Chunk& c) {
        return fields("Chunk", {c.first, c.last});
      });
  nb::class_<V4Chunk>(m, "V4Chunk", "Requests [first, last), compressed rows and rows of each.")
      .def_ro("first", &V4Chunk::first)
      .def_ro("last", &V4Chunk::last)
      .def_ro("compressed", &V4Chunk::compressed)
      .def_ro("rows", &V4Chunk::rows)
      .def(nb::self == nb::self)
      .def("__repr__", [](const V4Chunk& c) {
        return fields("V4Chunk", {c.first, c.last, c.compressed, c.rows});
      });
}

}  // namespace

void bind_planning(nb::module_& m) {
  bind_structs(m);
  def(m,
      "def request_ids(query_starts: Ints, *, tokens: int | None = None, out: Array | None = None) "
      "-> Array",
      request_ids_,
      "The request of each token from query_starts [requests + 1]; padding behind them maps to 0.");
  def(m,
      "def shard_batch(query_starts: Ints, seq_lens: Ints, *, world: int, rank: int, interleave: "
      "int "
      "= 1) -> tuple[list[int], list[int], list[int], list[int]]",
      shard_batch_,
      R"(What a rank computes of a batch whose queries are shared out (Plan(spread="queries")).

Returns (query_starts, seq_lens, tokens, positions): the rank's part as a batch of the same requests,
and the number in the whole batch and the position of each of its tokens.)");
  def(m,
      "def split_batch(query_starts: Ints, *, threshold: int = 1, uniform: bool = False, tokens: "
      "int | None "
      "= None) -> BatchSplit",
      split_batch_,
      R"(Decodes stand first; a request with more than threshold query tokens is a prefill. uniform
asks for decodes of one length. tokens: of the batch, padding included.)");
  def(m, "def prefill_chunks(seq_lens: Ints, rows: int) -> list[Chunk]", prefill_chunks_,
      "Greedy runs of consecutive requests whose sequence lengths sum to at most rows.");
  def(m,
      "def workspace_starts(seq_lens: Ints, chunks: Sequence[Chunk] | Sequence[tuple[int, int]], "
      "*, out: "
      "Array | None = None) -> Array",
      workspace_starts_,
      "First workspace row of each request: prefix sums, from 0 in every chunk.");
  def(m,
      "def prefill_request_ids(query_starts: Ints, decodes: int, *, tokens: int | None = None, "
      "out: Array | "
      "None = None) -> Array",
      prefill_request_ids_,
      "-1 for decode tokens and padding, else 0, 1, 2... per prefill request.");
  def(m,
      "def v4_prefill_chunks(query_lens: Ints, seq_lens: Ints, *, max_model_len: int, "
      "max_batched_tokens: "
      "int, ratio: int = 4, window: int = 128) -> list[V4Chunk]",
      v4_prefill_chunks_, "Runs of requests that share a V4 prefill workspace, with their rows.");
}

}  // namespace winnow::python
