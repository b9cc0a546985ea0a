// V4's index lists.
#include "winnow/lists.h"

#include "call.h"

namespace winnow::python {

namespace {

Shard shard_of(const Call& c) {
  return {c.int32("world", 1), c.int32("rank"), c.int32("interleave", 1)};
}

nb::object compressed_slots_(Call& c) {
  CompressedSlotsArgs a;
  a.positions = c.in("positions");
  a.requests = c.in("requests");
  a.block_table = c.in("block_table");
  a.ratio = c.int32("ratio", 4);
  a.page = c.int32("page", 64);
  a.pages = c.pages_of_table();
  a.slots = c.out("out", DType::kI64, {a.positions.shape[0]});
  a.plan = c.plan();
  a.target = c.target();
  a.shard = shard_of(c);
  c.run([&] { compressed_slots(a); });
  return c.result({"out"});
}

nb::object c128a_lists_(Call& c) {
  C128aListsArgs a;
  a.positions = c.in("positions");
  a.requests = c.in("requests");
  a.block_table = c.in("block_table");
  a.ratio = c.int32("ratio", 128);
  a.page = c.int32("page", 64);
  a.pages = c.pages_of_table();
  a.decode_tokens = c.integer("decode_tokens");
  a.lists = c.out("out", DType::kI32, {a.positions.shape[0], c.size("width")});
  c.agree("width", c.size("width"), a.lists, 1);
  a.lengths = c.out("lengths", DType::kI32, {a.positions.shape[0]});
  a.plan = c.plan();
  a.target = c.target();
  a.shard = shard_of(c);
  c.run([&] { c128a_lists(a); });
  return c.result({"out", "lengths"});
}

nb::object window_lists_(Call& c) {
  WindowListsArgs a;
  a.positions = c.in("positions");
  a.requests = c.in("requests");
  a.block_table = c.in("block_table");
  a.window = c.int32("window", 128);
  a.page = c.int32("page", 64);
  a.pages = c.pages_of_table();
  a.lists = c.out("out", DType::kI32, {a.positions.shape[0], a.window});
  a.lengths = c.out("lengths", DType::kI32, {a.positions.shape[0]});
  a.plan = c.plan();
  a.target = c.target();
  a.shard = shard_of(c);
  c.run([&] { window_lists(a); });
  return c.result({"out", "lengths"});
}

nb::object combined_lists_(Call& c) {
  CombinedListsArgs a;
  a.topk = c.in("topk");
  a.positions = c.in("positions");
  a.requests = c.in("requests");
  a.seq_lens = c.in("seq_lens");
  a.gather_lens = c.in("gather_lens");
  a.first_request = c.int32("first_request");
  a.ratio = c.int32("ratio", 4);
  a.window = c.int32("window", 128);
  a.compressed = c.int32("compressed");
  a.rows = c.int32("rows");
  const int64_t width = (a.topk.shape[1] + a.window + 127) / 128 * 128;
  a.lists = c.out("out", DType::kI32, {a.topk.shape[0], width});
  a.lengths = c.out("lengths", DType::kI32, {a.topk.shape[0]});
  a.plan = c.plan();
  a.target = c.target();
  c.run([&] { combined_lists(a); });
  return c.result({"out", "lengths"});
}

nb::object c128a_width_(Call& c) {
  return nb::int_(c128a_width(c.int32("max_position"), c.int32("ratio", 128)));
}

}  // namespace

void bind_lists(nb::module_& m) {
  def(m,
      "def compressed_slots(positions: Array, requests: Array, block_table: Array, *, ratio: int = "
      "4, page: "
      "int = 64, pages: int = 0, out: Array | None = None, plan: Plan | None = None, kernel: str | "
      "None = "
      "None, world: int = 1, rank: int = 0, interleave: int = 1) -> Array",
      compressed_slots_,
      R"(Where each token writes a compressed state: a slot if (position + 1) % ratio == 0, or -1.

positions, requests [tokens] int32, block_table [requests, pages] int32 of the compressed cache.
Returns slots [tokens] int64 (all of out= is written, -1 after the tokens). With a world, states that
another rank owns get -1; the others are local ones of block_table.)");
  def(m,
      "def c128a_lists(positions: Array, requests: Array, block_table: Array, *, width: int | None "
      "= None, "
      "ratio: int = 128, page: int = 64, pages: int = 0, decode_tokens: int = 0, out: Array | None "
      "= None, "
      "lengths: Array | None = None, plan: Plan | None = None, kernel: str | None = None, world: "
      "int "
      "= 1, rank: int = 0, interleave: int = 1) -> "
      "tuple[Array, "
      "Array]",
      c128a_lists_,
      R"(All compressed states of each token so far: slots for the first decode_tokens rows, 0, 1,
2... for the others, then -1. Returns (lists [tokens, width] int32, lengths [tokens] int32);
c128a_width() gives the width of a batch. With a world, the states that this rank owns.)");
  def(m, "def c128a_width(max_position: int, ratio: int = 128) -> int", c128a_width_,
      "Columns that a batch of this largest position uses: (max_position + 1) / ratio, padded to "
      "128.");
  def(m,
      "def window_lists(positions: Array, requests: Array | None = None, block_table: Array | None "
      "= None, "
      "*, window: int = 128, page: int = 64, pages: int = 0, out: Array | None = None, lengths: "
      "Array | "
      "None = None, plan: Plan | None = None, kernel: str | None = None, world: int = 1, rank: int "
      "= "
      "0, interleave: int = 1) -> tuple[Array, Array]",
      window_lists_,
      R"(Positions (p - window, p] of each token, or their slots when block_table is given; then -1.
Returns (lists [tokens, window] int32, lengths [tokens] int32). With a world, the
positions that this rank owns: the lists of all ranks hold each once.)");
  def(m,
      "def combined_lists(topk: Array, positions: Array, requests: Array, seq_lens: Array, "
      "gather_lens: "
      "Array, *, compressed: int, rows: int, first_request: int = 0, ratio: int = 4, window: int = "
      "128, "
      "out: Array | None = None, lengths: Array | None = None, plan: Plan | None = None, kernel: "
      "str | None "
      "= None) -> tuple[Array, Array]",
      combined_lists_,
      R"(Rows of a V4 prefill chunk's workspace for each token: compressed states, then its window.

topk [tokens, K] int32; positions, requests [tokens] int32; seq_lens, gather_lens [requests of
the chunk] int32; compressed and rows: N and M of the chunk (v4_prefill_chunks). Returns (lists
[tokens, ceil128(K + window)] int32, lengths [tokens] int32).)");
}

}  // namespace winnow::python
