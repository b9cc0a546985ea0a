// norm_write: the bytes of norm() and write(), part by part, for every kernel.
#include "winnow/norm_write.h"

#include "core/formats.h"
#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using testing::Guarded;

constexpr int64_t kPositions = 30;
constexpr int32_t kPages[] = {3, 4};  // kernels know pages of a power of two

struct Case {
  const char* name;
  int64_t tokens;
  int64_t widths[2];       // of the normalised rows; 0: none
  CacheFormat formats[2];  // of the written records
  int writes;              // how many of them
  int64_t padding = 0;     // elements between rows
  int32_t page = kPages[0];
};

std::vector<Case> cases() {
  using F = CacheFormat;
  return {
      {"v32", 13, {1536, 0}, {F::kV32Fp8, F::kIndexKeys}, 2},
      {"v32_bf16_unaligned", 7, {1536, 0}, {F::kV32Bf16, F::kIndexKeys}, 2, 3},
      {"glm", 5, {2048, 512}, {F::kV32Fp8, F::kIndexKeys}, 2},
      {"v4", 9, {1024, 0}, {F::kV4Fp8}, 1},
      {"v4_bf16", 130, {1536, 512}, {F::kV4Bf16}, 1},
      {"long_rows", 6, {7168, 0}, {F::kV4Fp8, F::kV4Fp8}, 2},
      {"norm_alone", 4, {100, 7}, {}, 0},
      {"writes_alone", 11, {0, 0}, {F::kIndexKeys, F::kV4Fp8}, 2},
      {"v32_prefill", 1027, {1536, 0}, {F::kV32Fp8, F::kIndexKeys}, 2},
      {"v4_prefill", 1025, {1024, 0}, {F::kV4Fp8}, 1},
      {"one_token", 1, {1536, 0}, {F::kV32Fp8, F::kIndexKeys}, 2},
      {"no_tokens", 0, {1536, 0}, {F::kV32Fp8, F::kIndexKeys}, 2},
  };
}

// Rows that are normalised or written, of `dim` values; none if that is 0.
struct Part {
  int64_t dim, norm_width;
  Guarded<bf16> x;
  Guarded<float> weight;

  Part(testing::Rng& rng, const Case& c, int64_t dim_)
      : dim(dim_),
        norm_width(dim == 576 ? 512 : dim),
        x(c.tokens * (dim + c.padding)),
        weight(norm_width) {
    for (bf16& v : x) v = to_bf16(testing::normal(rng) + 0.25f);
    for (float& w : weight) w = 1 + 0.2f * testing::normal(rng);
  }
};

int64_t pages(const Case& c) { return c.tokens / c.page + 1; }
int64_t written(const Case& c, int i) { return i < c.writes ? record_dim(c.formats[i]) : 0; }
int64_t cache_bytes(const Case& c, int i) {
  return i < c.writes ? pages(c) * page_bytes(c.formats[i], c.page) : 0;
}

struct Outputs {
  Guarded<bf16> rows[2];
  Guarded<std::byte> caches[2];

  explicit Outputs(const Case& c)
      : rows{Guarded<bf16>(c.tokens * c.widths[0]), Guarded<bf16>(c.tokens * c.widths[1])},
        caches{Guarded<std::byte>(cache_bytes(c, 0)), Guarded<std::byte>(cache_bytes(c, 1))} {}
};

struct Problem {
  Case c;
  testing::Rng rng{17};
  Part norms[2], writes[2];
  Guarded<float> angles{kPositions * 64};
  Guarded<int32_t> positions;
  Guarded<int64_t> slots;
  Outputs outputs[2];  // of the fused call, and of the single ones

  explicit Problem(const Case& c_)
      : c(c_),
        norms{Part(rng, c, c.widths[0]), Part(rng, c, c.widths[1])},
        writes{Part(rng, c, written(c, 0)), Part(rng, c, written(c, 1))},
        positions(c.tokens),
        slots(c.tokens),
        outputs{Outputs(c), Outputs(c)} {
    rope_table({.table = tensor(angles.data(), {kPositions, 2, 32})});
    const auto hostile = testing::hostile(kPositions);
    for (int64_t t = 0; t < c.tokens; ++t) {
      positions[t] =
          static_cast<int32_t>(t % 4 == 3 ? hostile[t % hostile.size()] : 2 * t % kPositions);
      slots[t] = t % 5 == 4 ? -1 : c.tokens - 1 - t;
    }
  }

  NormWriteArgs args(int of) {
    NormWriteArgs a;
    for (int i = 0; i < 2; ++i) {
      Part& n = norms[i];
      if (n.dim > 0)
        a.norm.rows[i] = {.x = tensor(n.x.data(), {c.tokens, n.dim}, {n.dim + c.padding, 1}),
                          .out = tensor(outputs[of].rows[i].data(), {c.tokens, n.dim}),
                          .norm = {.weight = tensor(n.weight.data(), {n.dim})}};
      Part& w = writes[i];
      if (i >= c.writes) continue;
      const bool index = w.dim == 128;
      a.write[i] = {.kv = tensor(w.x.data(), {c.tokens, w.dim}, {w.dim + c.padding, 1}),
                    .slots = tensor(slots.data(), {c.tokens}),
                    .cache = {outputs[of].caches[i].data(), c.formats[i], pages(c), c.page}};
      a.write[i].prologue = {.norm = {.kind = index ? NormKind::kLayer : NormKind::kRms,
                                      .weight = tensor(w.weight.data(), {w.norm_width})},
                             .rope = {tensor(angles.data(), {kPositions, 2, 32}),
                                      index ? RopePairs::kHalf : RopePairs::kInterleaved,
                                      index ? RopeSlice::kFirst : RopeSlice::kLast},
                             .positions = tensor(positions.data(), {c.tokens}),
                             .hadamard = index && c.page == kPages[0]};
    }
    return a;
  }
};

class NormWriteTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

void expect_composition(const std::string& kernel, const Case& c) {
  Problem p(c);
  NormWriteArgs fused = p.args(0);
  fused.target = testing::target("norm_write", kernel);
  norm_write(fused);
  ASSERT_TRUE(testing::device_finished());
  NormWriteArgs single = p.args(1);
  single.norm.target = testing::target("norm", kernel);
  if (c.widths[0] > 0) norm(single.norm);
  for (int i = 0; i < c.writes; ++i) {
    single.write[i].target = testing::target("write", kernel);
    write(single.write[i]);
  }
  ASSERT_TRUE(testing::device_finished());
  for (int i = 0; i < 2; ++i) {
    const auto &got = p.outputs[0].rows[i], &want = p.outputs[1].rows[i];
    for (size_t j = 0; j < want.size(); ++j) ASSERT_EQ(got[j].bits, want[j].bits) << i << " " << j;
    ASSERT_EQ(p.outputs[0].caches[i].values(), p.outputs[1].caches[i].values()) << "write " << i;
  }
}

TEST_P(NormWriteTest, IsTheCompositionOfItsParts) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("norm_write", kernel); !why.empty())
    GTEST_SKIP() << why;
  for (const int32_t page : kPages) {
    SCOPED_TRACE(page);
    Case paged = c;
    paged.page = page;
    expect_composition(kernel, paged);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, NormWriteTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("norm_write")),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

// Engines give caches of several kinds pages of one pool.
TEST(NormWrite, CachesShareMemory) {
  Problem p(cases()[0]);
  NormWriteArgs a = p.args(0);
  Cache& latents = a.write[0].cache;
  const int64_t stride = page_bytes(latents.format, latents.page);
  Guarded<std::byte> pool(2 * pages(p.c) * stride);
  latents = {pool.data(), latents.format, pages(p.c), latents.page, stride};
  Cache& keys = a.write[1].cache;
  keys = {pool.data(), keys.format, 2 * pages(p.c), keys.page, stride};
  const auto* slots = static_cast<const int64_t*>(a.write[1].slots.data);
  std::vector<int64_t> behind(slots, slots + p.c.tokens);
  for (int64_t& slot : behind) slot += slot < 0 ? 0 : pages(p.c) * keys.page;
  a.write[1].slots = tensor(behind.data(), {p.c.tokens});
  norm_write(a);
  ASSERT_TRUE(testing::device_finished());
  EXPECT_NE(pool[0], std::byte{0xcd});
}

TEST(NormWriteErrors, NameThePartAndWriteNothing) {
  Problem p(cases()[0]);
  const auto expect = [&](auto change, std::initializer_list<const char*> words) {
    NormWriteArgs a = p.args(0);
    change(a);
    testing::expect_invalid([&] { norm_write(a); }, words);
  };
  expect([](NormWriteArgs& a) { a = NormWriteArgs{}; }, {"norm_write", "norm", "neither"});
  expect([](NormWriteArgs& a) { a.norm.rows[0].x = {}; }, {"norm_write: norm.x:", "nothing"});
  expect([](NormWriteArgs& a) { a.write[1].cache = {}; }, {"norm_write: write[1].cache:"});
  expect([](NormWriteArgs& a) { a.write[0].kv.shape[1] = 512; },
         {"norm_write: write[0].kv:", "576", "512"});
  expect([](NormWriteArgs& a) { a.write[1].slots = {}; },
         {"norm_write: write[1].slots:", "nothing"});
  expect([](NormWriteArgs& a) { a.write[1].kv.data = a.norm.rows[0].out.data; },
         {"norm_write: norm.out: expected memory apart from write[1].kv"});
  expect([](NormWriteArgs& a) { a.norm.rows[0].out.data = a.write[0].cache.data; },
         {"norm_write: norm.out: expected memory apart from write[0].cache"});
  for (const bf16 v : p.outputs[0].rows[0]) ASSERT_EQ(v.bits, 0xcdcd);
  for (auto& cache : p.outputs[0].caches)
    for (const std::byte b : cache) ASSERT_EQ(b, std::byte{0xcd});
}

}  // namespace
}  // namespace winnow
