// The projections: copies bit for bit, sums within the bound of an fp32 sum.
#include "winnow/absorb.h"

#include "absorb/absorb_sums.h"
#include "core/arithmetic.h"
#include "target.h"

namespace winnow::testing {
namespace {

using internal::absorb::at;
using internal::absorb::expect_sums;
using internal::absorb::Sum;

// [L, H, width] in one of the orders in which weights come.
Tensor weights(Source& s, Guarded<bf16>& memory, int64_t l, int64_t h, int64_t width) {
  switch (draw(s, 0, 2)) {
    case 0: return tensor(memory.data(), {l, h, width});
    case 1: return tensor(memory.data(), {l, h, width}, {width, l * width, 1});
    default: return tensor(memory.data(), {l, h, width}, {1, width * l, l});
  }
}

void dequantize_any(Source& s) {
  const int64_t most = chance(s, 80) ? 20 : 150, rows = draw(s, 0, most), cols = draw(s, 0, most);
  const int64_t sr = ceil_div(rows, 128), sc = ceil_div(cols, 128);
  const bool blocks = chance(s, 60);
  Guarded<e4m3> weight(rows * cols);
  Guarded<float> scale(blocks ? sr * sc : 1);
  for (e4m3& x : weight) x.bits = static_cast<uint8_t>(s() % 127 + (s() & 128));  // no NaN
  for (float& x : scale) x = std::ldexp(s.normal(), draw32(s, -130, 100));
  Guarded<bf16> out(rows * cols);
  DequantizeWeightArgs a{
      .weight = tensor(weight.data(), {rows, cols}),
      .scale = blocks ? tensor(scale.data(), {sr, sc}) : tensor(scale.data(), {1}),
      .out = tensor(out.data(), {rows, cols})};
  expect_exact("dequantize_weight", dequantize_weight, a, out);
}

void run(Source& s) {
  if (chance(s, 20)) return dequantize_any(s);
  // Nine in ten are small: a hundred of them in the time of a large one.
  const int64_t most = chance(s, 90) ? 9 : 40;
  const int64_t T = chance(s, 90) ? draw(s, 0, 5) : draw(s, 0, 80), H = draw(s, 0, 3);
  const int64_t L = draw(s, 0, most), P = draw(s, 0, most), V = draw(s, 0, most);
  const int64_t R = draw(s, 0, 9);
  auto both = normals(s, L * H * (P + V)), uk = normals(s, L * H * P), uv = normals(s, L * H * V);
  auto q = normals(s, T * H * P), attn = normals(s, T * H * L), latent = normals(s, T * (L + R));
  const Tensor weight = weights(s, both, L, H, P + V);
  const Tensor w_uk = weights(s, uk, L, H, P), w_uv = weights(s, uv, L, H, V);
  const Tensor queries = tensor(q.data(), {T, H, P}), results = tensor(attn.data(), {T, H, L});
  for (const Candidate& kernel : candidates("absorb")) {
    Guarded<bf16> out(T * H * L), projected(T * H * V), k(T * H * (P + R)), v(T * H * V);
    const Tensor q_out = tensor(out.data(), {T, H, L}), o = tensor(projected.data(), {T, H, V});
    const Tensor keys = tensor(k.data(), {T, H, P + R}), values = tensor(v.data(), {T, H, V});
    absorb_query({.q_nope = queries, .w_uk = w_uk, .out = q_out, .target = kernel.target()});
    project_output({.attn = results, .w_uv = w_uv, .out = o, .target = kernel.target()});
    decompress({.latent = tensor(latent.data(), {T, L + R}),
                .w_uk = w_uk,
                .w_uv = w_uv,
                .k = keys,
                .v = values,
                .target = kernel.target()});
    finish(kernel);
    const auto latent_at = [&](int64_t n, int64_t l) { return to_float(latent[n * (L + R) + l]); };
    expect_sums(q_out, L, "q_latent", [&](int64_t t, int64_t h, int64_t l) {
      return Sum(
          P, [&](int64_t i) { return at(queries, t, h, i); },
          [&](int64_t i) { return at(w_uk, l, h, i); });
    });
    expect_sums(o, V, "o", [&](int64_t t, int64_t h, int64_t i) {
      return Sum(
          L, [&](int64_t l) { return at(results, t, h, l); },
          [&](int64_t l) { return at(w_uv, l, h, i); });
    });
    for (const auto& [got, w] : {std::pair{keys, w_uk}, {values, w_uv}})
      expect_sums(got, w.shape[2], "k or v", [&, w = w](int64_t n, int64_t h, int64_t i) {
        return Sum(
            L, [&](int64_t l) { return latent_at(n, l); },
            [&](int64_t l) { return at(w, l, h, i); });
      });
    for (int64_t i = 0; i < T * H * R; ++i)
      EXPECT_EQ(at(keys, i / R / H, i / R % H, P + i % R), latent_at(i / R / H, L + i % R));
  }
  SplitKvBArgs split{.weight = weight, .w_uk = w_uk, .w_uv = w_uv};
  expect_exact("absorb", split_kv_b, split, uk, uv);
}

const FuzzTarget absorb_target{"absorb", 2, run};

}  // namespace
}  // namespace winnow::testing
