// write with a prologue: the bytes of norm(), rotate() and write(), one after the other.
#include <bit>
#include <cmath>

#include "core/formats.h"
#include "testing.h"
#include "winnow/error.h"
#include "winnow/index_query.h"
#include "winnow/write.h"

namespace winnow {
namespace {

using testing::Guarded;

constexpr int64_t kPositions = 30;
constexpr int32_t kPages[] = {3, 4};  // kernels know pages of a power of two

struct Case {
  const char* name;
  CacheFormat format;
  NormKind norm;
  bool bias = false;
  bool split = false;  // RoPE in a tensor of its own
  bool rope = true;
  bool hadamard = false;
  RopePairs pairs = RopePairs::kInterleaved;
  RopeSlice slice = RopeSlice::kLast;
  int64_t tokens = 13;
  int32_t page = kPages[0];
  bool small = false;  // quarters of a row down to subnormal values
  bool nans = false;   // rows and an angle that are not finite

  int64_t pages() const { return tokens / page + 1; }
};

std::vector<Case> cases() {
  using F = CacheFormat;
  using N = NormKind;
  constexpr RopePairs kHalf = RopePairs::kHalf, kInterleaved = RopePairs::kInterleaved;
  constexpr RopeSlice kFirst = RopeSlice::kFirst;
  return {
      {"v32", F::kV32Fp8, N::kRms},
      {"v32_split", F::kV32Fp8, N::kRms, false, true},
      {"v32_bf16", F::kV32Bf16, N::kRms},
      {"v32_bf16_bias", F::kV32Bf16, N::kRms, true},
      {"v32_bf16_layer", F::kV32Bf16, N::kLayer, true},
      {"v4", F::kV4Fp8, N::kRms},
      {"v4_split_bf16", F::kV4Bf16, N::kRms, false, true},
      {"v4_norm_alone", F::kV4Fp8, N::kRms, false, false, false},
      {"v4_rope_alone", F::kV4Fp8, N::kNone},
      {"v32_index", F::kIndexKeys, N::kLayer, true, false, true, false, kHalf, kFirst},
      {"glm_index", F::kIndexKeys, N::kLayer, true, false, true, false, kInterleaved, kFirst},
      {"v41_index", F::kIndexKeys, N::kRms},
      {.name = "v32_first", .format = F::kV32Fp8, .norm = N::kRms, .slice = kFirst},
      {.name = "v32_first_bf16", .format = F::kV32Bf16, .norm = N::kRms, .slice = kFirst},
      {.name = "v4_first", .format = F::kV4Fp8, .norm = N::kRms, .slice = kFirst},
      {.name = "v4_first_bf16", .format = F::kV4Bf16, .norm = N::kRms, .slice = kFirst},
      {.name = "v4_first_alone", .format = F::kV4Fp8, .norm = N::kNone, .slice = kFirst},
      {"v32_index_bf16", F::kIndexKeysBf16, N::kLayer, true, false, true, false, kHalf, kFirst},
      {"index_bf16_hadamard", F::kIndexKeysBf16, N::kNone, false, false, true, true},
      {"index_hadamard", F::kIndexKeys, N::kNone, false, false, true, true},
      {.name = "v32_prefill", .format = F::kV32Fp8, .norm = N::kRms, .tokens = 1030},
      {.name = "v4_prefill", .format = F::kV4Fp8, .norm = N::kRms, .tokens = 1027},
      {.name = "v32_index_prefill",
       .format = F::kIndexKeys,
       .norm = N::kLayer,
       .bias = true,
       .pairs = kHalf,
       .slice = kFirst,
       .tokens = 1031},
      {.name = "v32_nans", .format = F::kV32Fp8, .norm = N::kRms, .nans = true},
      {.name = "v4_nans", .format = F::kV4Fp8, .norm = N::kRms, .nans = true},
      {.name = "index_nans",
       .format = F::kIndexKeys,
       .norm = N::kLayer,
       .pairs = kHalf,
       .slice = kFirst,
       .nans = true},
      {.name = "v32_small", .format = F::kV32Fp8, .norm = N::kRms, .small = true},
      {.name = "v32_small_prefill",
       .format = F::kV32Fp8,
       .norm = N::kRms,
       .tokens = 1030,
       .small = true},
      {.name = "v4_small", .format = F::kV4Fp8, .norm = N::kRms, .small = true},
      {.name = "index_small", .format = F::kIndexKeys, .norm = N::kRms, .small = true},
      {.name = "index_small_half",
       .format = F::kIndexKeys,
       .norm = N::kRms,
       .pairs = kHalf,
       .slice = kFirst,
       .small = true},
  };
}

struct Problem {
  Case c;
  int64_t dim, norm_width;
  Guarded<bf16> kv;
  Guarded<float> weight, bias, angles;
  Guarded<int32_t> positions;
  Guarded<int64_t> slots;

  explicit Problem(const Case& c_)
      : c(c_),
        dim(record_dim(c.format)),
        norm_width(dim == 576 ? 512 : dim),
        kv(c.tokens * dim),
        weight(norm_width),
        bias(norm_width),
        angles(kPositions * 64),
        positions(c.tokens),
        slots(c.tokens) {
    testing::Rng rng(dim);
    for (bf16& v : kv) v = to_bf16(testing::normal(rng) + 0.5f);
    constexpr int kExponents[] = {0, -60, -110, -126};
    for (int64_t i = 0; i < c.tokens * dim && c.small; ++i)
      kv[i] = to_bf16(std::ldexp(to_float(kv[i]), kExponents[(i / dim + i % dim * 4 / dim) % 4]));
    if (c.nans) add_nans();
    for (float& w : weight) w = 1 + 0.2f * testing::normal(rng);
    for (float& b : bias) b = testing::normal(rng);
    rope_table({.table = tensor(angles.data(), {kPositions, 2, 32})});
    if (c.nans) angles[20 * 64 + 37] = std::bit_cast<float>(0x7fffffffu);  // of token 10
    const auto hostile = testing::hostile(kPositions);
    for (int64_t t = 0; t < c.tokens; ++t) {
      positions[t] =
          static_cast<int32_t>(t % 4 == 3 ? hostile[t % hostile.size()] : 2 * t % kPositions);
      slots[t] = t % 5 == 4 ? -1 : c.tokens - 1 - t;
    }
  }
  // An infinity, a NaN, and a value whose square is one. Tokens from 8 on are in a block of others.
  void add_nans() {
    const uint16_t values[] = {0x7f80, 0xffc1, 0x7f00};
    for (int64_t i = 0; i < 3; ++i) kv[(8 + i) * dim + 70 * i] = bf16{values[i]};
  }
  Norm norm() {
    Norm n{.kind = c.norm, .weight = tensor(weight.data(), {norm_width}), .eps = 1e-5f};
    if (c.bias) n.bias = tensor(bias.data(), {norm_width});
    return n;
  }
  Rope rope() { return {tensor(angles.data(), {kPositions, 2, 32}), c.pairs, c.slice}; }
  WriteArgs args(bf16* rows, std::byte* cache) {
    WriteArgs a{.slots = tensor(slots.data(), {c.tokens}),
                .cache = {cache, c.format, c.pages(), c.page}};
    const int64_t nope = dim - 64;
    a.kv = tensor(rows, {c.tokens, c.split ? nope : dim}, {dim, 1});
    if (c.split) a.rope = tensor(rows + nope, {c.tokens, 64}, {dim, 1});
    return a;
  }
  int64_t bytes() const { return c.pages() * page_bytes(c.format, c.page); }
};

class PrologueTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

void expect_composition(const std::string& kernel, const Case& c) {
  Problem p(c);
  Guarded<std::byte> got(p.bytes()), want(p.bytes());
  WriteArgs a = p.args(p.kv.data(), got.data());
  a.prologue.norm = p.norm();
  if (c.rope) {
    a.prologue.rope = p.rope();
    a.prologue.positions = tensor(p.positions.data(), {c.tokens});
  }
  a.prologue.hadamard = c.hadamard;
  a.target = testing::target("write", kernel);
  write(a);
  ASSERT_TRUE(testing::device_finished());

  Guarded<bf16> rows(p.kv);
  if (c.norm != NormKind::kNone) {
    const Tensor view = tensor(rows.data(), {c.tokens, p.norm_width}, {p.dim, 1});
    norm({.rows = {{.x = view, .out = view, .norm = p.norm()}},
          .target = testing::target("norm", kernel)});
  }
  const Tensor heads = tensor(rows.data(), {c.tokens, 1, p.dim});
  const Tensor positions = tensor(p.positions.data(), {c.tokens});
  if (c.hadamard) {  // index_query() has the same steps
    Guarded<float> weights(c.tokens, 0), out_weights(c.tokens);
    index_query({.q = heads,
                 .weights = tensor(weights.data(), {c.tokens, 1}),
                 .positions = positions,
                 .rope = p.rope(),
                 .hadamard = true,
                 .out = heads,
                 .out_weights = tensor(out_weights.data(), {c.tokens, 1}),
                 .target = testing::target("index_query", kernel)});
  } else if (c.rope) {
    rotate({.x = heads,
            .positions = positions,
            .rope = p.rope(),
            .out = heads,
            .target = testing::target("rotate", kernel)});
  }
  if (c.rope)  // positions outside the table are skipped
    for (int64_t t = 0; t < c.tokens; ++t)
      if (p.positions[t] < 0 || p.positions[t] >= kPositions) p.slots[t] = -1;
  WriteArgs b = p.args(rows.data(), want.data());
  b.target = testing::target("write", kernel);
  write(b);
  ASSERT_TRUE(testing::device_finished());
  ASSERT_EQ(got.values(), want.values());
}

TEST_P(PrologueTest, IsTheCompositionOfItsSteps) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("write", kernel); !why.empty()) GTEST_SKIP() << why;
  for (const int32_t page : kPages) {
    SCOPED_TRACE(page);
    Case paged = c;
    paged.page = page;
    expect_composition(kernel, paged);
  }
}

// A table of no positions, which may have no data, is a table: every token is outside it.
TEST_P(PrologueTest, AnEmptyTableSkipsAllTokens) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("write", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  Guarded<std::byte> cache(p.bytes());
  const auto untouched = cache.values();
  WriteArgs a = p.args(p.kv.data(), cache.data());
  a.prologue.norm = p.norm();
  a.prologue.rope = p.rope();
  a.prologue.rope.table.shape[0] = 0;
  a.prologue.positions = tensor(p.positions.data(), {c.tokens});
  a.target = testing::target("write", kernel);
  for (void* const data : {a.prologue.rope.table.data, static_cast<void*>(nullptr)}) {
    a.prologue.rope.table.data = data;
    write(a);
    ASSERT_TRUE(testing::device_finished());
    ASSERT_EQ(cache.values(), untouched) << data;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PrologueTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("write")),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

TEST(PrologueErrors, NameTheArgument) {
  Problem p(cases()[0]);
  Guarded<std::byte> cache(p.bytes());
  WriteArgs good = p.args(p.kv.data(), cache.data());
  good.prologue = {
      .norm = p.norm(), .rope = p.rope(), .positions = tensor(p.positions.data(), {p.c.tokens})};
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    WriteArgs a = good;
    change(a.prologue);
    testing::expect_error([&] { write(a); }, code, words);
  };
  expect([](Prologue& q) { q.norm.weight.shape[0] = 576; }, {"norm.weight", "512", "576"});
  expect([](Prologue& q) { q.norm.eps = 0; }, {"norm.eps"});
  expect([](Prologue& q) { q.rope.table.shape[1] = 3; }, {"rope.table"});
  expect([](Prologue& q) { q.positions = {}; }, {"prologue.positions", "nothing"});
  expect([](Prologue& q) { q.positions.shape[0] = 3; }, {"prologue.positions", "[13]", "[3]"});
  expect([](Prologue& q) { q.hadamard = true; }, {"prologue.hadamard", "128", "576"});
  for (const std::byte b : cache) EXPECT_EQ(b, std::byte{0xcd});  // nothing was written
}

}  // namespace
}  // namespace winnow
