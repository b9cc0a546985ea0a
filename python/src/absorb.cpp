// The projections around attention.
#include "winnow/absorb.h"

#include "call.h"

namespace winnow::python {

namespace {

nb::object dequantize_weight_(Call& c) {
  DequantizeWeightArgs a;
  a.weight = c.in("weight", As::kE4m3);
  a.scale = c.in("scale");
  a.out = c.out("out", DType::kBf16, {a.weight.shape[0], a.weight.shape[1]});
  a.target = c.target();
  c.run([&] { dequantize_weight(a); });
  return c.result({"out"});
}

nb::object split_kv_b_(Call& c) {
  SplitKvBArgs a;
  a.weight = c.in("weight");
  const int64_t p = c.size("d_nope");
  const int64_t latent = a.weight.shape[0], heads = a.weight.shape[1];
  a.w_uk = c.out("w_uk", DType::kBf16, {latent, heads, p});
  a.w_uv = c.out("w_uv", DType::kBf16, {latent, heads, a.weight.shape[2] - p});
  a.target = c.target();
  c.run([&] { split_kv_b(a); });
  return c.result({"w_uk", "w_uv"});
}

nb::object absorb_query_(Call& c) {
  AbsorbQueryArgs a;
  a.q_nope = c.in("q_nope");
  a.w_uk = c.in("w_uk");
  a.out = c.out("out", DType::kBf16, {a.q_nope.shape[0], a.q_nope.shape[1], a.w_uk.shape[0]});
  a.target = c.target();
  c.run([&] { absorb_query(a); });
  return c.result({"out"});
}

nb::object project_output_(Call& c) {
  ProjectOutputArgs a;
  a.attn = c.in("attn");
  a.w_uv = c.in("w_uv");
  a.out = c.out("out", DType::kBf16, {a.attn.shape[0], a.attn.shape[1], a.w_uv.shape[2]});
  a.target = c.target();
  c.run([&] { project_output(a); });
  return c.result({"out"});
}

nb::object decompress_(Call& c) {
  DecompressArgs a;
  a.latent = c.in("latent");
  a.w_uk = c.in("w_uk");
  a.w_uv = c.in("w_uv");
  const int64_t rows = a.latent.shape[0], heads = a.w_uk.shape[1];
  const int64_t rope = a.latent.shape[1] - a.w_uk.shape[0];
  a.k = c.out("k", DType::kBf16, {rows, heads, a.w_uk.shape[2] + rope});
  a.v = c.out("v", DType::kBf16, {rows, heads, a.w_uv.shape[2]});
  a.target = c.target();
  c.run([&] { decompress(a); });
  return c.result({"k", "v"});
}

}  // namespace

void bind_absorb(nb::module_& m) {
  def(m,
      "def dequantize_weight(weight: Array, scale: Array, *, out: Array | None = None, kernel: str "
      "| None = "
      "None) -> Array",
      dequantize_weight_,
      R"(weight [rows, cols] e4m3 times scale: [ceil(rows / 128), ceil(cols / 128)] f32 (a
checkpoint's weight_scale_inv) or [1] f32. Returns bf16. Done once, at load.)");
  def(m,
      "def split_kv_b(weight: Array, d_nope: int, *, w_uk: Array | None = None, w_uv: Array | None "
      "= None, "
      "kernel: str | None = None) -> tuple[Array, Array]",
      split_kv_b_,
      R"(The two halves of kv_b_proj, weight [latent, heads, d_nope + d_v] bf16 of any strides: for
a checkpoint's kv_b_proj.weight W, pass W.view(heads, d_nope + d_v, latent).permute(2, 0, 1).
Returns (w_uk [latent, heads, d_nope], w_uv [latent, heads, d_v]) bf16.)");
  def(m,
      "def absorb_query(q_nope: Array, w_uk: Array, *, out: Array | None = None, kernel: str | "
      "None = None) "
      "-> Array",
      absorb_query_,
      R"(q_nope [tokens, heads, d_nope] into the latent space: [tokens, heads, latent] bf16. out=
may be the front of a 576-wide query.)");
  def(m,
      "def project_output(attn: Array, w_uv: Array, *, out: Array | None = None, kernel: str | "
      "None = None) "
      "-> Array",
      project_output_,
      "attend()'s result [tokens, heads, latent] out of the latent space: [tokens, heads, d_v] "
      "bf16.");
  def(m,
      "def decompress(latent: Array, w_uk: Array, w_uv: Array, *, k: Array | None = None, v: Array "
      "| None = "
      "None, kernel: str | None = None) -> tuple[Array, Array]",
      decompress_,
      R"(Per-head keys and values of latent rows [rows, latent + d_rope] bf16, for attend_mha().
Returns (k [rows, heads, d_nope + d_rope], v [rows, heads, d_v]) bf16.)");
}

}  // namespace winnow::python
