// write, gather, join, quantize: into the cache and back.
#include "winnow/write.h"

#include "layers.h"

namespace winnow::python {

WriteArgs write_args(Call& c) {
  WriteArgs a;
  a.kv = c.in("kv");
  a.rope = c.in("rope");
  a.slots = c.in("slots");
  a.cache = c.cache("cache", true);
  a.scale = scale_mode(c);
  a.prologue.norm = norm_of(c, "norm_weight", "none");
  a.prologue.rope = rope_of(c, "table");
  a.prologue.positions = c.in("positions");
  if (a.prologue.positions && !a.prologue.rope.table)
    c.fail("positions", "none without a table, by which they rotate", "an array");
  a.prologue.hadamard = c.flag("hadamard");
  return a;
}

namespace {

nb::object write_(Call& c) {
  WriteArgs a = write_args(c);
  a.plan = c.plan();
  a.target = c.target();
  c.run([&] { write(a); });
  return nb::none();
}

// Rows that a gather without out= makes: the lengths' sum, where they can be read.
int64_t rows_of(const Call& c, const Tensor& lengths, const Target& target) {
  if (c.given("rows")) return c.size("rows");
  if (lengths.rank != 1 || lengths.dtype != DType::kI32) return 0;  // gather() says what is wrong
  if (target.device.kind != DeviceKind::kCpu || c.given("out_starts")) return -1;
  int64_t rows = 0;
  for (int64_t i = 0; i < lengths.shape[0]; ++i)
    rows += std::max(0, static_cast<const int32_t*>(lengths.data)[i * lengths.stride[0]]);
  return rows;
}

nb::object gather_(Call& c) {
  GatherArgs a;
  a.cache = c.cache("cache");
  a.block_table = c.in("block_table");
  a.lengths = c.in("lengths");
  a.starts = c.in("starts");
  a.out_starts = c.in("out_starts");
  a.plan = c.plan();
  a.target = c.target();
  const int64_t rows = c.given("out") ? 0 : rows_of(c, a.lengths, a.target);
  a.out = c.out("out", DType::kBf16, {rows, record_dim(a.cache.format)});
  c.agree("rows", c.size("rows"), a.out, 0);
  c.run([&] { gather(a); });
  return c.result({"out"});
}

nb::object join_(Call& c) {
  JoinArgs a;
  a.latent = c.in("latent");
  a.rope = c.in("rope");
  const auto& n = a.latent.shape;
  a.out = c.out("out", DType::kBf16, {n[0], n[1], n[2] + a.rope.shape[2]});
  a.target = c.target();
  c.run([&] { join(a); });
  return c.result({"out"});
}

nb::object quantize_(Call& c) {
  QuantizeArgs a;
  a.x = c.in("x");
  const auto& n = a.x.shape;
  switch (a.x.rank) {
    case 1: a.out = c.out("out", DType::kE4m3, {n[0]}); break;
    case 2: a.out = c.out("out", DType::kE4m3, {n[0], n[1]}); break;
    case 3: a.out = c.out("out", DType::kE4m3, {n[0], n[1], n[2]}); break;
    default: a.out = c.out("out", DType::kE4m3, {n[0], n[1], n[2], n[3]});
  }
  a.scale = c.out("scale", DType::kF32, {1});
  a.target = c.target();
  c.run([&] { quantize(a); });
  return c.result({"out", "scale"});
}

}  // namespace

void bind_write(nb::module_& m) {
  def(m,
      "def write(kv: Array, slots: Array, cache: Cache, *, rope: Array | None = None, scale: str = "
      "'default', norm: str = 'none', norm_weight: Array | None = None, norm_bias: Array | None = "
      "None, eps: float = 1e-6, positions: Array | None = None, table: Array | None = None, pairs: "
      "str = 'interleaved', slice: str = 'last', hadamard: bool = False, plan: Plan | None = None, "
      "kernel: str | None = None) -> None",
      write_,
      R"(Quantises new tokens into their slots of the cache; its format says how.

kv     [>= tokens, d] bf16: 576, 512, or 128 for index keys; without the RoPE part when
rope   [>= tokens, 64] bf16 is given
slots  [tokens] int64: page * page size + offset; a negative slot skips its token
scale  "default", "amax", "pow2" or "pow2_floor_amax": how a tile's scale is found

Where kv is a projection's output, norm() (norm, norm_weight, norm_bias, eps), rotate() (positions,
table, pairs, slice) and the Hadamard rotation of index keys come first.)");
  def(m,
      "def gather(cache: Cache, block_table: Array, lengths: Array, *, starts: Array | None = "
      "None, "
      "out_starts: Array | None = None, rows: int | None = None, out: Array | None = None, plan: "
      "Plan | "
      "None = None, kernel: str | None = None) -> Array",
      gather_,
      R"(Tokens [starts[i], starts[i] + lengths[i]) of each request as contiguous bf16 rows.

block_table  [requests, pages] int32
lengths      [requests] int32, starts too (0 if not given)
out_starts   [requests] int32: first row of each request; their prefix sum if not given
rows         of the array that is made: needed for CUDA arrays, and with out_starts
             (rows that no request covers hold anything)

Returns out [rows, d] bf16.)");
  def(m,
      "def join(latent: Array, rope: Array, *, out: Array | None = None, kernel: str | None = "
      "None) -> Array",
      join_,
      R"(latent [tokens, heads, d_nope] and rope [tokens, heads, d_rope] bf16 of any strides, one
after the other: [tokens, heads, d_nope + d_rope].)");
  def(m,
      "def quantize(x: Array, *, out: Array | None = None, scale: Array | None = None, kernel: str "
      "| None "
      "= None) -> tuple[Array, Array]",
      quantize_,
      R"(x (bf16 or f32, contiguous, up to four dimensions) as e4m3 with one factor for all of it.

Returns (out, scale): out of x's shape in float8_e4m3fn, scale [1] f32 with x = out * scale.)");
}

}  // namespace winnow::python
