// cut: one rank's pieces of a top-k over eight ranks, on CUDA: packing its candidates, the cuts of
// rows of eight times 2,048 candidates with what it keeps, and keeping alone. Bytes: candidates.
#include <fmt/format.h>

#include <cmath>

#include "cut/kernel.h"
#include "harness.h"
#include "random.h"

namespace winnow::cut_bench {
namespace {

using namespace internal::cut;

constexpr int64_t kTopk = 2048;
constexpr int32_t kRanks = 8;

tools::Buffer<float> integers(int64_t count, tools::Random& random) {
  tools::Buffer<float> values(count);
  random.normals(values.span(), 15);
  for (float& x : values.span()) x = std::floor(50 + x);
  return values;
}

// `ties`: the logits are integers below 100, so that some 220 candidates share the K-th's.
void measure(bench::Runner& runner, int64_t tokens, bool ties) {
  const auto case_of = [&](const char* what) {
    bench::Case c{.name = fmt::format("{} {} rows of {} ranks{}", what, tokens, kRanks,
                                      ties ? ", ties" : "")};
    c.topk = kTopk;
    c.batch = tokens;
    c.s_q = 1;
    return c;
  };
  bench::Case packs = case_of("pack"), finds = case_of("find and keep"), keeps = case_of("keep");
  if (!runner.wants(packs) && !runner.wants(finds) && !runner.wants(keeps)) return;
  bench::Placement placement(runner.device());
  tools::Random random(1);
  tools::Buffer<int32_t> ids(tokens * kTopk);
  for (int64_t i = 0; i < tokens * kTopk; ++i) ids[i] = static_cast<int32_t>(i % kTopk * 8);
  tools::Buffer<float> buffers[3];
  tools::Buffer<int32_t> counts, kept;
  tools::Buffer<int64_t> cuts;
  const Tensor all_ids = placement.copied(ids, {tokens, kTopk});
  const auto floats = [](const Tensor& t) { return static_cast<float*>(t.data); };
  OwnRows own{.ids = static_cast<const int32_t*>(all_ids.data),
              .id_stride = kTopk,
              .value_stride = kTopk,
              .tokens = tokens,
              .width = kTopk,
              .all_rows = tokens,
              .device = runner.device()};
  own.packed = floats(placement.room(buffers[0], {tokens, 2 * kTopk}));
  float* const received = floats(placement.room(buffers[1], {kRanks * tokens, 2 * kTopk}));
  Keeping keeping{.kept = static_cast<int32_t*>(placement.room(kept, {tokens, kTopk}).data),
                  .kept_stride = kTopk,
                  .counts = static_cast<int32_t*>(placement.room(counts, {tokens}).data),
                  .count_stride = 1};
  auto* const found = static_cast<int64_t*>(placement.room(cuts, {tokens}).data);
  keeping.cuts = found;

  for (const CutKernel& kernel : kernels()) {
    if (kernel.device != DeviceKind::kCuda || !kernel.machine().empty()) continue;
    // Every rank's candidates, packed into their block.
    float* const packed = own.packed;
    for (int32_t r = kRanks - 1; r >= 0; --r) {
      if (ties) buffers[2] = integers(tokens * kTopk, random);
      own.values = floats(ties ? placement.copied(buffers[2], {tokens, kTopk})
                               : placement.normals(buffers[2], {tokens, kTopk}, random));
      own.shard = {kRanks, r, 1};
      own.packed = received + r * tokens * 2 * kTopk;
      kernel.pack(own);
    }
    // Gathered rows have those of rank 0, the last that was packed, among them.
    keeping.own = own;
    own.packed = packed;
    kernel.pack(own);
    const Params params{.candidates = received,
                        .rows = tokens,
                        .width = kTopk,
                        .blocks = kRanks,
                        .cuts = found,
                        .keeping = &keeping,
                        .device = runner.device()};
    packs.kernel = finds.kernel = keeps.kernel = kernel.name;
    packs.bytes = static_cast<double>(16 * tokens * kTopk);
    finds.bytes = static_cast<double>(kRanks * 4 * tokens * kTopk);
    keeps.bytes = static_cast<double>(16 * tokens * kTopk);
    if (!ties) runner.measure(packs, [&] { kernel.pack(own); });
    runner.measure(finds, [&] { kernel.run(params); });
    if (!ties) runner.measure(keeps, [&] { kernel.keep(keeping); });
  }
}

const bench::Suite suite("cut", "ranks", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return;
  for (const bool ties : {false, true})
    for (const int64_t tokens : {1, 8, 32, 128}) measure(runner, tokens, ties);
});

}  // namespace
}  // namespace winnow::cut_bench
