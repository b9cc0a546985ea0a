// merge: both dtypes in and out, empty parts in either notation, sinks.
#include "winnow/merge.h"

#include "target.h"

namespace winnow::testing {
namespace {

void run(Source& s) {
  const int64_t P = draw(s, 0, 9), T = draw(s, 0, 3), H = draw(s, 1, 3);
  const int64_t d_v = chance(s, 90) ? draw(s, 0, 20) : draw(s, 0, 150),
                row = d_v + (chance(s, 30) ? draw(s, 0, 9) : 0);
  const bool narrow_in = chance(s, 50), narrow_out = chance(s, 50);
  Guarded<float> lse(P * T * H), sink(H);
  for (float& x : lse) x = chance(s, 15) ? INFINITY : chance(s, 15) ? -INFINITY : 20 * s.normal();
  for (float& x : sink) x = chance(s, 10) ? -INFINITY : chance(s, 10) ? INFINITY : s.normal();
  Guarded<float> in32(P * T * H * row, 0xff);
  Guarded<bf16> in16(P * T * H * row, 0xff);
  for (int64_t i = 0; i < P * T * H; ++i)
    for (int64_t d = 0; d < d_v && !std::isinf(lse[i]); ++d) {  // those of empty parts stay NaN
      in16[i * row + d] = to_bf16(s.normal());
      in32[i * row + d] = to_float(in16[i * row + d]);
    }
  const std::initializer_list<int64_t> shape = {P, T, H, d_v};
  const std::initializer_list<int64_t> stride = {T * H * row, H * row, row, 1};
  MergeArgs a{.partial_out = narrow_in ? tensor(in16.data(), shape, stride)
                                       : tensor(in32.data(), shape, stride),
              .partial_lse = tensor(lse.data(), {P, T, H})};
  if (chance(s, 50)) a.sink = tensor(sink.data(), {H});
  // The bars of merge_test.cpp, twice: the reference rounds as well.
  const tools::Bar out_bar{narrow_out ? 2e-4 : 8e-5, narrow_out ? 2.02 / 256 : 8e-5};
  std::vector<float> want, want_lse;
  for (const Candidate& kernel : candidates("merge")) {
    Guarded<float> out32(T * H * d_v), out_lse(T * H);
    Guarded<bf16> out16(T * H * d_v);
    a.out = narrow_out ? tensor(out16.data(), {T, H, d_v}) : tensor(out32.data(), {T, H, d_v});
    a.lse = tensor(out_lse.data(), {T, H});
    a.target = kernel.target();
    merge(a);
    finish(kernel);
    std::vector<float> got = out32.values();
    if (narrow_out)
      std::transform(out16.begin(), out16.end(), got.begin(), [](bf16 x) { return to_float(x); });
    if (kernel.name == "reference") {
      want = got;
      want_lse = out_lse.values();
    }
    expect_close(kernel.name + " out", tensor(got.data(), {T, H, d_v}), want, out_bar);
    expect_close(kernel.name + " lse", a.lse, want_lse, tools::kDecodeLse);
  }
}

const FuzzTarget merge_target{"merge", 10, run};

}  // namespace
}  // namespace winnow::testing
