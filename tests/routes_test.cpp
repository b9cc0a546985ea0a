// The ways of a V3.2 prefill give one result: absorbed queries over the pages, the same over
// gathered rows, and keys and values of each head, as a plan's parts ask for them.
#include "accuracy.h"
#include "core/formats.h"
#include "testing.h"
#include "winnow/absorb.h"
#include "winnow/attend.h"
#include "winnow/plan.h"
#include "winnow/write.h"

namespace winnow {
namespace {

using testing::draw;
using testing::Guarded;

constexpr int64_t kHeads = 3, kLatent = 512, kNope = 128, kRope = 64, kValue = 128;
constexpr int32_t kPage = 16, kPages = 12, kContext = 150, kTokens = 70, kTopk = 90;
constexpr float kScale = 0.07f;

Guarded<bf16> normals(size_t size, float sigma, uint64_t seed) {
  testing::Rng rng(seed);
  Guarded<bf16> x(size);
  for (bf16& v : x) v = to_bf16(sigma * testing::normal(rng));
  return x;
}

class Routes : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!GetParam()) return;
    if (const std::string why = testing::why_not("attend", "sm90"); !why.empty())
      GTEST_SKIP() << why;
    target.device = cuda();
  }

  // One request in pages from the last to the first, and each token's keys: all while there are no
  // more than the top-k, then some.
  Routes() {
    for (int32_t i = 0; i < kPages; ++i) table[i] = kPages - 1 - i;
    for (int32_t i = 0; i < kContext; ++i) slots[i] = table[i / kPage] * kPage + i % kPage;
    testing::Rng rng(7);
    for (int32_t t = 0; t < kTokens; ++t) {
      const int32_t end = kContext - kTokens + t + 1, count = std::min(end, kTopk);
      ends[t] = end;
      for (int32_t i = 0; i < kTopk; ++i)
        ids[t * kTopk + i] =
            i >= count
                ? -1
                : static_cast<int32_t>(draw(rng, i * end / count, (i + 1) * end / count - 1));
    }
  }

  Plan plan(Route (*route)(const RouteArgs&) noexcept) {
    Plan p({.heads = kHeads,
            .topk = kTopk,
            .page = kPage,
            .pages = kPages,
            .max_requests = 1,
            .max_tokens = kTokens,
            .route = route,
            .mha = true,
            .workspace_rows = kContext,
            .target = target});
    p.refill({.query_starts = query_starts, .seq_lens = seq_lens});
    return p;
  }
  void store() {
    write({.kv = tensor(kv.data(), {kContext, kLatent + kRope}),
           .slots = tensor(slots.data(), {kContext}),
           .cache = cache,
           .target = target});
  }
  void fetch() {
    gather({.cache = cache,
            .block_table = tensor(table.data(), {1, kPages}),
            .lengths = tensor(length.data(), {1}),
            .out = latent,
            .target = target});
  }
  // Absorbed queries, attention in the latent space, outputs out of it.
  void attend_latent(bool gathered) {
    if (gathered) fetch();
    const int64_t wide = kNope + kRope;
    Guarded<bf16> absorbed(kTokens * kHeads * kLatent), attended(kTokens * kHeads * kLatent);
    absorb_query({.q_nope = tensor(q.data(), {kTokens, kHeads, kNope}, {kHeads * wide, wide, 1}),
                  .w_uk = w_uk,
                  .out = tensor(absorbed.data(), {kTokens, kHeads, kLatent}),
                  .target = target});
    AttendArgs a{
        .q = tensor(absorbed.data(), {kTokens, kHeads, kLatent}),
        .q_rope = tensor(q.data() + kNope, {kTokens, kHeads, kRope}, {kHeads * wide, wide, 1}),
        .scale = kScale,
        .out = tensor(attended.data(), {kTokens, kHeads, kLatent}),
        .target = target};
    KvList& list = a.lists[0];
    list.indices = tensor(ids.data(), {kTokens, kTopk});
    if (gathered) {
      list.cache = {rows.data(), CacheFormat::kV32Bf16, 1, kContext};
    } else {
      list.cache = cache;
      list.block_table = tensor(table.data(), {1, kPages});
      a.requests = tensor(requests.data(), {kTokens});
    }
    Guarded<std::byte> workspace(attend_workspace_bytes(a));
    a.workspace = {workspace.data(), workspace.size()};
    attend(a);
    project_output({.attn = a.out, .w_uv = w_uv, .out = out, .target = target});
    ASSERT_TRUE(testing::device_finished());
  }
  void attend_heads() {
    fetch();
    Guarded<bf16> k(kContext * kHeads * (kNope + kRope)), v(kContext * kHeads * kValue);
    Guarded<uint8_t> bits(kTokens * 24);
    MhaArgs a{.q = tensor(q.data(), {kTokens, kHeads, kNope + kRope}),
              .k = tensor(k.data(), {kContext, kHeads, kNope + kRope}),
              .v = tensor(v.data(), {kContext, kHeads, kValue}),
              .lengths = tensor(ends.data(), {kTokens}),
              .bits = tensor(bits.data(), {kTokens, 24}),
              .scale = kScale,
              .out = out,
              .target = target};
    decompress(
        {.latent = latent, .w_uk = w_uk, .w_uv = w_uv, .k = a.k, .v = a.v, .target = target});
    topk_mask({.ids = tensor(ids.data(), {kTokens, kTopk}), .mask = a.bits, .target = target});
    attend_mha(a);
    ASSERT_TRUE(testing::device_finished());
  }

  Target target;
  std::vector<int32_t> query_starts{0, kTokens}, seq_lens{kContext};
  Guarded<bf16> kv = normals(kContext * (kLatent + kRope), 0.5f, 1);
  Guarded<bf16> q = normals(kTokens * kHeads * (kNope + kRope), 1.0f, 2);
  Guarded<bf16> uk = normals(kLatent * kHeads * kNope, 0.05f, 3);
  Guarded<bf16> uv = normals(kLatent * kHeads * kValue, 0.05f, 4);
  Guarded<bf16> rows{kContext * (kLatent + kRope)}, result{kTokens * kHeads * kValue};
  Guarded<uint8_t> pages{static_cast<size_t>(kPages * page_bytes(CacheFormat::kV32Fp8, kPage)),
                         0xff};
  Guarded<int32_t> table{kPages}, ids{kTokens * kTopk}, ends{kTokens};
  Guarded<int32_t> requests{kTokens, 0}, length{std::vector<int32_t>{kContext}};
  Guarded<int64_t> slots{kContext};
  Cache cache{pages.data(), CacheFormat::kV32Fp8, kPages, kPage};
  Tensor w_uk = tensor(uk.data(), {kLatent, kHeads, kNope});
  Tensor w_uv = tensor(uv.data(), {kLatent, kHeads, kValue});
  Tensor latent = tensor(rows.data(), {kContext, kLatent + kRope});
  Tensor out = tensor(result.data(), {kTokens, kHeads, kValue});
};

TEST_P(Routes, GiveOneResult) {
  store();
  ASSERT_TRUE(testing::device_finished());
  std::vector<std::vector<float>> results;
  Route (*const routes[])(const RouteArgs&) noexcept = {
      [](const RouteArgs&) noexcept { return Route::kDirect; },
      [](const RouteArgs&) noexcept { return Route::kGathered; },
      [](const RouteArgs&) noexcept { return Route::kMha; }};
  for (const auto& route : routes) {
    const Plan p = plan(route);
    ASSERT_EQ(p.parts().size(), 1u);
    const Part& part = p.parts()[0];
    EXPECT_EQ(std::vector<int32_t>(p.key_ends().begin(), p.key_ends().end()), ends.values());
    if (part.mha) attend_heads();
    else attend_latent(part.gathered);
    std::vector<float>& values = results.emplace_back();
    for (const bf16 x : result) values.push_back(to_float(x));
  }
  // Queries, weights, latent results, keys and values are rounded to bf16 on the way, 2^-8 each at
  // most: six such steps of a result, or of 0.6, the size of a value (0.05 * 512^1/2 * 0.5) where
  // values cancel; squared for the cosine.
  const tools::Bar bar{6 * 0x1p-8 * 0.6, 6 * 0x1p-8, 36 * 0x1p-16};
  for (size_t i = 1; i < results.size(); ++i) {
    const tools::Deviation d =
        tools::compare(tensor(results[i].data(), {kTokens, kHeads, kValue}),
                       tensor(results[0].data(), {kTokens, kHeads, kValue}), bar);
    EXPECT_TRUE(d.ok) << "route " << i << ": " << d.text(out);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Routes, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "cuda" : "cpu"; });

}  // namespace
}  // namespace winnow
