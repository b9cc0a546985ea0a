// norm, rotate, rope_table, prepare_query, index_query, compress: from projections to attention.
#include "layers.h"

#include "winnow/compress.h"

namespace winnow::python {

Norm norm_of(Call& c, const char* weight, const char* otherwise) {
  const std::string kind = c.text("norm", otherwise);
  Norm norm;
  if (kind == "none") norm.kind = NormKind::kNone;
  else if (kind == "rms") norm.kind = NormKind::kRms;
  else if (kind == "layer") norm.kind = NormKind::kLayer;
  else c.fail("norm", "none, rms or layer", kind);
  norm.weight = c.in(weight);
  norm.bias = c.in("norm_bias");
  norm.eps = static_cast<float>(c.number("eps", 1e-6));
  // Weights without a norm are a norm forgotten: the rows would go on as they are.
  for (const char* name : {weight, "norm_bias"})
    if (norm.kind == NormKind::kNone && c.given(name))
      c.fail(name, "none without norm=\"rms\" or \"layer\"", "an array");
  return norm;
}

Rope rope_of(Call& c, const char* table) {
  Rope rope;
  rope.table = c.in(table);
  const std::string pairs = c.text("pairs", "interleaved");
  if (pairs == "half") rope.pairs = RopePairs::kHalf;
  else if (pairs != "interleaved") c.fail("pairs", "interleaved or half", pairs);
  const std::string slice = c.text("slice", "last");
  if (slice == "first") rope.slice = RopeSlice::kFirst;
  else if (slice != "last") c.fail("slice", "last or first", slice);
  return rope;
}

ScaleMode scale_mode(const Call& c, const char* argument) {
  const std::string name = c.text(argument, "default");
  if (name == "default") return ScaleMode::kDefault;
  if (name == "amax") return ScaleMode::kAmax;
  if (name == "pow2") return ScaleMode::kPow2;
  if (name == "pow2_floor_amax") return ScaleMode::kPow2FloorAmax;
  c.fail(argument, "default, amax, pow2 or pow2_floor_amax", name);
}

SelectBlocks blocks_of(Call& c, int64_t tokens) {
  SelectBlocks b;
  b.size = c.int32("block", 8);
  b.within = c.in("within");
  const int64_t best = c.size("best", 0);
  if (best > 0 || c.given("best_blocks"))
    b.best = c.out("best_blocks", DType::kI32, {tokens, best});
  if (b.best) c.agree("best", best, b.best, 1);
  return b;
}

NormRows norm_rows(Call& c) {
  NormRows rows;
  rows.x = c.in("x");
  rows.norm = norm_of(c, "weight", "rms");
  rows.out = c.out("out", DType::kBf16, {rows.x.shape[0], rows.x.shape[1]});
  return rows;
}

PrepareQueryArgs prepare_query_args(Call& c) {
  PrepareQueryArgs a;
  a.q = c.in("q");
  a.positions = c.in("positions");
  a.rope = rope_of(c, "table");
  a.norm = norm_of(c, "norm_weight", "none");
  a.out = c.out("out", DType::kBf16, {a.q.shape[0], a.q.shape[1], a.q.shape[2]});
  return a;
}

IndexQueryArgs index_query_args(Call& c) {
  IndexQueryArgs a;
  a.q = c.in("q");
  a.weights = c.in("weights");
  a.positions = c.in("positions");
  a.rope = rope_of(c, "table");
  a.hadamard = c.flag("hadamard");
  a.scale = scale_mode(c);
  a.factor = static_cast<float>(c.number("factor", 1.0));
  const auto& n = a.q.shape;
  a.out = c.out("out", c.flag("bf16") ? DType::kBf16 : DType::kE4m3, {n[0], n[1], n[2]});
  a.out_weights = c.out("out_weights", DType::kF32, {n[0], n[1]});
  return a;
}

namespace {

nb::object norm_(Call& c) {
  NormArgs a;
  a.rows[0] = norm_rows(c);
  a.target = c.target();
  c.run([&] { norm(a); });
  return c.result({"out"});
}

nb::object rope_table_(Call& c) {
  RopeTableArgs a;
  a.theta = c.number("theta", 10000.0);
  a.factor = c.number("factor", 1.0);
  a.original = c.integer("original", 0);
  a.beta_fast = c.number("beta_fast", 32.0);
  a.beta_slow = c.number("beta_slow", 1.0);
  a.table = c.out("out", DType::kF32, {-1, -1, -1});
  a.target = c.target();
  c.run([&] { rope_table(a); });
  return nb::none();
}

nb::object rotate_(Call& c) {
  RotateArgs a;
  a.x = c.in("x");
  a.positions = c.in("positions");
  a.rope = rope_of(c, "table");
  a.rope.inverse = c.flag("inverse");
  const auto& n = a.x.shape;
  const bool quantized = c.flag("e4m3");
  a.out = c.out("out", quantized ? DType::kE4m3 : DType::kBf16, {n[0], n[1], n[2]});
  if (quantized) a.scales = c.out("scales", DType::kF32, {n[0], n[1], n[2] / 128});
  else if (c.given("scales")) c.fail("scales", "none without e4m3=True", "an array");
  a.scale = scale_mode(c);
  a.target = c.target();
  c.run([&] { rotate(a); });
  return c.result({"out", "scales"});
}

nb::object prepare_query_(Call& c) {
  PrepareQueryArgs a = prepare_query_args(c);
  a.target = c.target();
  c.run([&] { prepare_query(a); });
  return c.result({"out"});
}

nb::object index_query_(Call& c) {
  IndexQueryArgs a = index_query_args(c);
  a.target = c.target();
  c.run([&] { index_query(a); });
  return c.result({"out", "out_weights"});
}

nb::object compress_(Call& c) {
  CompressArgs a;
  a.rows = c.in("rows");
  a.positions = c.in("positions");
  a.requests = c.in("requests");
  a.ratio = c.int32("ratio", 4);
  a.overlap = c.flag("overlap");
  a.gate = c.flag("gate", true);
  a.bias = c.in("bias");
  if (c.given("state")) a.state.rows = c.out("state", DType::kF32, {-1, -1, -1});
  a.state.table = c.in("state_table");
  a.state.ring = c.flag("ring");
  a.norm = norm_of(c, "norm_weight", "rms");
  a.rope = rope_of(c, "table");
  a.hadamard = c.flag("hadamard");
  a.slots = c.in("slots");
  if (c.given("cache")) a.cache = c.cache("cache", true);
  a.scale = scale_mode(c);
  if (c.given("latent")) a.latent = c.out("latent", DType::kBf16, {-1, -1});
  a.target = c.target();
  c.run([&] { compress(a); });
  return nb::none();
}

}  // namespace

void bind_layers(nb::module_& m) {
  def(m,
      "def norm(x: Array, weight: Array | None = None, *, norm: str = 'rms', norm_bias: Array | "
      "None = None, eps: float = 1e-6, out: Array | None = None, kernel: str | None = None) -> "
      "Array",
      norm_,
      R"(Normalises rows: x [rows, d] bf16, weight and norm_bias [d] f32, norm "rms" or "layer".

Returns out [rows, d] bf16, which may be x.)");
  def(m,
      "def rope_table(out: Array, *, theta: float = 10000.0, factor: float = 1.0, original: int = "
      "0, beta_fast: float = 32.0, beta_slow: float = 1.0, kernel: str | None = None) -> None",
      rope_table_,
      R"(Fills out [positions, 2, 32] f32 (any strides) with cosines and sines; factor: YaRN's.)");
  def(m,
      "def rotate(x: Array, positions: Array, table: Array, *, pairs: str = 'interleaved', slice: "
      "str = 'last', inverse: bool = False, e4m3: bool = False, scale: str = 'default', out: Array "
      "| None = None, scales: Array | None = None, kernel: str | None = None) -> Array | "
      "tuple[Array, Array]",
      rotate_,
      R"(RoPE of 64 of the d values of x [tokens, heads, d] bf16, or its inverse.

positions  [tokens] int32; rows of out stay as they are where one is outside the table
table      [positions, 2, 32] f32, of rope_table()
pairs      "interleaved" (2i, 2i + 1) or "half" (i, i + 32)
slice      "last" or "first" 64

e4m3       gives codes with a scale ("pow2" or "amax") for each 128 values, for an fp8 projection

Returns out [tokens, heads, d] bf16, which may be x; with e4m3 out and scales [tokens, heads, d / 128]
f32.)");
  def(m,
      "def prepare_query(q: Array, positions: Array, table: Array, *, norm: str = 'none', "
      "norm_weight: Array | None = None, norm_bias: Array | None = None, eps: float = 1e-6, pairs: "
      "str = 'interleaved', slice: str = 'last', out: Array | None = None, kernel: str | None = "
      "None) -> Array",
      prepare_query_,
      R"(norm() of each head (V4: norm="rms" without weights), then rotate(), in one pass.)");
  def(m,
      "def index_query(q: Array, weights: Array, positions: Array, table: Array, *, factor: float "
      "= 1.0, hadamard: bool = False, scale: str = 'default', bf16: bool = False, pairs: str = "
      "'interleaved', slice: str = 'last', out: Array | None = None, out_weights: Array | None = "
      "None, kernel: str | None = None) -> tuple[Array, Array]",
      index_query_,
      R"(The indexer's queries and weights as score() takes them.

q        [tokens, heads, 128] bf16, weights [tokens, heads] f32 or bf16: of the projections
factor   heads^-1/2 * 128^-1/2
hadamard rotates by the Hadamard matrix after RoPE; index keys must be made in the same way
bf16     queries in bf16 instead of e4m3, for keys in bf16

Returns (out, out_weights).)");
  def(m,
      "def compress(rows: Array, positions: Array, *, requests: Array | None = None, ratio: int = "
      "4, overlap: bool = False, gate: bool = True, bias: Array | None = None, state: Array | None "
      "= None, state_table: Array | None = None, ring: bool = False, norm: str = 'rms', "
      "norm_weight: Array | None = None, norm_bias: Array | None = None, eps: float = 1e-6, table: "
      "Array | None = None, pairs: str = 'interleaved', slice: str = 'last', hadamard: bool = "
      "False, slots: Array | None = None, cache: Cache | None = None, scale: str = 'default', "
      "latent: Array | None = None, kernel: str | None = None) -> None",
      compress_,
      R"(V4's compressor: projected rows of new tokens into compressed records and the state.

rows         [tokens, (2 with a gate) * e * d] f32 or bf16, e = 2 with overlap: values, then scores
positions    [tokens] int32; negative: padding
requests     [tokens] int32: row of state_table, or ring
ratio        tokens of an entry; overlap and gate as the layer has them
bias         [ratio, e * d] f32
state        [blocks, block, 2 * e * d] f32: rows of earlier tokens, by state_table int32
             [requests, width] or as rings
table        of rope_table()
slots        [tokens] int64, of compressed_slots(); cache: where entries go
latent       [tokens, d] bf16: entries before RoPE, in the rows of the tokens that close them)");
}

}  // namespace winnow::python
