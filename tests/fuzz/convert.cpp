// join and quantize, bit for bit.
#include "target.h"
#include "winnow/write.h"

namespace winnow::testing {
namespace {

void join_any(Source& s) {
  const int64_t T = draw(s, 0, 6), H = draw(s, 0, 5), nope = draw(s, 0, 70), rope = draw(s, 0, 40);
  const int64_t step = chance(s, 70) ? 1 : draw(s, 1, 3), gap = draw(s, 0, 3);
  const bool heads_first = chance(s, 50);
  const auto view = [&](Guarded<bf16>& memory, int64_t width) {
    const int64_t row = width * step + gap;
    return heads_first ? tensor(memory.data(), {T, H, width}, {row, row * T, step})
                       : tensor(memory.data(), {T, H, width}, {row * H, row, step});
  };
  const auto size = [&](int64_t width) { return T * H * (width * step + gap); };
  Guarded<bf16> latent(size(nope)), tail(size(rope)), out(size(nope + rope));
  for (Guarded<bf16>* g : {&latent, &tail})
    for (bf16& x : *g) x.bits = static_cast<uint16_t>(s());
  JoinArgs a{.latent = view(latent, nope), .rope = view(tail, rope), .out = view(out, nope + rope)};
  expect_exact("join", join, a, out);
}

template <class T>
void quantize_any(Source& s, T (*value)(Source&)) {
  const int64_t n = chance(s, 80) ? draw(s, 0, 300) : draw(s, 0, 9000);
  const int64_t rows = chance(s, 50) && n % 2 == 0 ? 2 : 1;
  Guarded<T> x(n);
  for (T& v : x) v = value(s);
  Guarded<e4m3> out(n);
  Guarded<float> scale(1);
  QuantizeArgs a{.x = tensor(x.data(), {rows, n / rows}),
                 .out = tensor(out.data(), {rows, n / rows}),
                 .scale = tensor(scale.data(), {1})};
  expect_exact("quantize", quantize, a, out, scale);
}

void run(Source& s) {
  switch (draw(s, 0, 3)) {
    case 0: join_any(s); break;
    case 1:
      quantize_any<bf16>(s, [](Source& r) { return bf16{static_cast<uint16_t>(r())}; });
      break;
    case 2: quantize_any<float>(s, [](Source& r) { return r.normal(); }); break;
    default:
      quantize_any<float>(
          s, [](Source& r) { return std::bit_cast<float>(static_cast<uint32_t>(r())); });
  }
}

const FuzzTarget convert_target{"convert", 10, run};

}  // namespace
}  // namespace winnow::testing
