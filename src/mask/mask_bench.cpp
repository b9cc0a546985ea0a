// topk_mask of 2,048 ids a token on a device. Bytes: what is read and what is written.
#include <fmt/format.h>

#include "harness.h"
#include "winnow/mask.h"

namespace winnow {
namespace {

void measure_mask(bench::Runner& runner, int64_t tokens, int64_t keys) {
  constexpr int64_t kTopk = 2048;
  bench::Case c{.name = fmt::format("{} tokens of {}k", tokens, keys / 1024)};
  c.topk = kTopk;
  c.batch = 1;
  c.s_q = tokens;
  c.context = keys;
  const int64_t row_bytes = 4 * kTopk + keys / 8;
  c.bytes = static_cast<double>(tokens * row_bytes);
  if (!runner.wants(c)) return;
  bench::Placement placement(runner.device());
  tools::Random random(1);
  tools::Buffer<int32_t> ids(tokens * kTopk);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.draw(0, keys - 1));
  tools::Buffer<uint8_t> mask;
  TopkMaskArgs args{.ids = placement.copied(ids, {tokens, kTopk}),
                    .mask = placement.room(mask, {tokens, keys / 8})};
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    args.target = {runner.device(), kernel.c_str()};
    runner.measure(c, [&] { topk_mask(args); });
  }
}

const bench::Suite masks("mask", "default", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return;
  for (const int64_t keys : {4096, 262144}) measure_mask(runner, 4096, keys);
});

}  // namespace
}  // namespace winnow
