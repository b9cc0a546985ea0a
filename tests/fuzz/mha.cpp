// attend_mha: output and lse within the accuracy bar, sets by ids, mask, bits and bias.
#include "winnow/mha.h"

#include "target.h"

namespace winnow::testing {
namespace {

void run(Source& s) {
  // Nine in ten are small: a hundred of them in the time of a large one.
  const int64_t most = chance(s, 90) ? 18 : 90;
  const int64_t T = draw(s, 0, 4), N = draw(s, 0, most), H = draw(s, 1, 3);
  const int64_t K = draw(s, 0, most), d_qk = draw(s, 1, most), d_v = draw(s, 1, most);
  const int64_t M = draw(s, 0, most + 10);
  auto starts = indices(s, T, N / 2 + 1), lengths = indices(s, T, N + 1, 20);
  MhaArgs a{.scale = 1 / std::sqrt(static_cast<float>(d_qk)), .empty_lse_negative = chance(s, 50)};
  const bool with_ids = chance(s, 70), with_mask = chance(s, 25), with_bits = chance(s, 25);
  const bool with_bias = chance(s, 25), with_sink = chance(s, 40);
  if (chance(s, 50)) a.starts = tensor(starts.data(), {T});
  if (chance(s, 70)) a.lengths = tensor(lengths.data(), {T});
  auto ids = indices(s, T * K, N);
  if (with_ids) a.ids = tensor(ids.data(), {T, K});
  auto q = normals(s, T * H * d_qk), k = normals(s, N * H * d_qk), v = normals(s, N * H * d_v);
  a.q = tensor(q.data(), {T, H, d_qk});
  a.k = tensor(k.data(), {N, H, d_qk});
  a.v = tensor(v.data(), {N, H, d_v});
  Guarded<uint8_t> mask(T * M), bits(T * M);
  Guarded<float> bias(T * M), sink(H);
  for (uint8_t& x : mask) x = static_cast<uint8_t>(s() % 3);
  for (uint8_t& x : bits) x = static_cast<uint8_t>(s());
  for (float& x : bias) x = s() % 8 == 0 ? -INFINITY : s.normal();
  for (float& x : sink) x = s.normal();
  if (with_mask) a.mask = tensor(mask.data(), {T, M});
  if (with_bits) a.bits = tensor(bits.data(), {T, M});
  if (with_bias) a.bias = tensor(bias.data(), {T, M});
  if (with_sink) a.sink = tensor(sink.data(), {H});
  tools::Bar lse_bar = tools::kDecodeLse;  // as of attend
  lse_bar.absolute = d_qk * 0x1p-24 * a.scale * std::sqrt(d_qk);
  // A device rounds its weights to bf16, by a share of sum_j p_j |v_j|: the result over |v|.
  Guarded<bf16> sizes = v, magnitude(T * H * d_v);
  for (bf16& x : sizes) x.bits &= 0x7fff;
  MhaArgs over_sizes = a;
  over_sizes.v.data = sizes.data();
  over_sizes.out = tensor(magnitude.data(), {T, H, d_v});
  over_sizes.target.kernel = "reference";
  if (compared == Compared::kCuda) attend_mha(over_sizes);
  std::vector<bf16> want_out;
  std::vector<float> want_lse;
  for (const Candidate& kernel : candidates("mha")) {
    Guarded<bf16> out(T * H * d_v);
    Guarded<float> lse(T * H);
    a.out = tensor(out.data(), {T, H, d_v});
    a.lse = tensor(lse.data(), {T, H});
    a.target = kernel.target();
    attend_mha(a);
    finish(kernel);
    if (kernel.name == "reference") {
      want_out = out.values();
      want_lse = lse.values();
    }
    expect_close(kernel.name + " out", a.out, want_out, kOutBar,
                 kernel.cuda ? over_sizes.out : Tensor{});
    expect_close(kernel.name + " lse", a.lse, want_lse, lse_bar);
  }
}

const FuzzTarget mha_target{"mha", 1, run};

}  // namespace
}  // namespace winnow::testing
