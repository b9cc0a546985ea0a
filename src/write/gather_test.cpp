// gather: every kernel x every latent format against a direct decoding of the pages, with hostile
// tables, starts and lengths.
#include <cmath>

#include "core/formats.h"
#include "testing.h"
#include "winnow/error.h"
#include "winnow/write.h"

namespace winnow {
namespace {

using testing::draw;
using testing::Guarded;

struct Case {
  std::string name;
  CacheFormat format;
  int32_t page;
  int64_t pages, table_width, rows;
  std::vector<int32_t> starts, lengths, out_starts;
  int64_t gap = 8;  // columns between rows of out
};

// Lengths of n requests, a third of them empty.
std::vector<int32_t> many(int n) {
  std::vector<int32_t> lengths;
  for (int i = 0; i < n; ++i) lengths.push_back(i % 3 * (i % 5) + (i % 3 == 2));
  return lengths;
}

std::vector<Case> cases() {
  using F = CacheFormat;
  return {
      {"v32", F::kV32Fp8, 16, 9, 4, 100, {0, 5, 17, 63}, {30, 0, 20, 1}, {}},
      {"v32_odd_page", F::kV32Fp8, 7, 9, 5, 80, {3, 30}, {32, 10}, {}},
      {"v32_bf16", F::kV32Bf16, 4, 12, 6, 40, {1, 2, 3}, {11, 0, 9}, {20, 0, 3}},
      {"v4", F::kV4Fp8, 64, 3, 2, 130, {}, {65, 64}, {}},
      {"v4_page_2", F::kV4Fp8, 2, 20, 9, 30, {1, 4}, {9, 12}, {15, 1}},
      {"v4_bf16", F::kV4Bf16, 3, 8, 4, 20, {}, {7, 5}, {}},
      {"past_the_table", F::kV4Fp8, 4, 6, 2, 60, {6, -3, INT32_MAX, INT32_MIN}, {9, 9, 9, 9}, {}},
      {"past_out", F::kV32Fp8, 4, 6, 2, 10, {0, 0, 0}, {8, INT32_MAX, 5}, {-5, 7, INT32_MAX}},
      {"hostile_lengths", F::kV32Bf16, 4, 6, 2, 12, {}, {-1, INT32_MIN, 4, INT32_MAX}, {}},
      {"no_rows", F::kV4Fp8, 4, 6, 2, 0, {}, {4, 4}, {}},
      {"no_requests", F::kV4Fp8, 4, 6, 2, 5, {}, {}, {}},
      {"no_pages", F::kV32Fp8, 4, 0, 2, 9, {}, {4, 5}, {}},
      {"no_columns", F::kV32Fp8, 4, 2, 0, 9, {}, {4, 5}, {}},
      {"many", F::kV32Fp8, 4, 9, 3, 300, {}, many(100), {}},
      {"many_past_out", F::kV4Fp8, 4, 9, 3, 100, {}, many(70), {}},
      // A warp of a GPU takes several pieces.
      {"long_past_the_table", F::kV4Fp8, 64, 3, 3, 12900, {}, {6500, 6390}, {}},
      {"odd_rows", F::kV32Fp8, 16, 5, 3, 50, {2, 0}, {19, 21}, {}, 3},
      {"odd_rows_v4", F::kV4Fp8, 16, 5, 3, 50, {2, 0}, {19, 21}, {}, 4},
      {"odd_rows_bf16", F::kV32Bf16, 16, 5, 3, 50, {2, 0}, {19, 21}, {}, 1},
      {"long", F::kV4Fp8, 64, 20, 20, 1400, {11, 0, 70}, {700, 1, 699}, {}},
  };
}

// Value i of a record, by the byte maps of docs/cache-format.md.
bf16 value(const Case& c, const uint8_t* page, int64_t off, int64_t i) {
  bf16 v;
  const auto at = [&](int64_t byte) { std::memcpy(&v, page + byte, 2); };
  switch (c.format) {
    case CacheFormat::kV32Bf16: at(off * 1152 + i * 2); break;
    case CacheFormat::kV4Bf16: at(off * 1024 + i * 2); break;
    case CacheFormat::kV32Fp8: {
      if (i >= 512) {
        at(off * 656 + 528 + (i - 512) * 2);
        break;
      }
      float s;
      std::memcpy(&s, page + off * 656 + 512 + i / 128 * 4, 4);
      return to_bf16(to_float(e4m3{page[off * 656 + i]}) * s);
    }
    default: {
      if (i >= 448) {
        at(off * 576 + 448 + (i - 448) * 2);
        break;
      }
      const uint8_t e = page[c.page * 576 + off * 8 + i / 64];
      return to_bf16(to_float(e4m3{page[off * 576 + i]}) * from_ue8m0(e));
    }
  }
  return v;
}

struct Problem {
  Case c;
  int64_t requests, dim, stride, page_stride;
  Guarded<uint8_t> cache;
  Guarded<int32_t> table, starts, lengths, out_starts;

  explicit Problem(const Case& c_)
      : c(c_),
        requests(static_cast<int64_t>(c.lengths.size())),
        dim(record_dim(c.format)),
        stride(dim + c.gap),
        page_stride(page_bytes(c.format, c.page) + 48),
        cache(c.pages * page_stride),
        table(requests * c.table_width),
        starts(c.starts),
        lengths(c.lengths),
        out_starts(c.out_starts) {
    // Any bytes are a cache: all codes, NaN scales, infinite scales.
    testing::Rng rng(c.rows + 7);
    for (uint8_t& b : cache) b = static_cast<uint8_t>(rng());
    const auto bad = testing::hostile(c.pages);
    for (int32_t& id : table)
      id = static_cast<int32_t>(c.pages == 0 || draw(rng, 0, 6) == 0
                                    ? bad[draw(rng, 0, bad.size() - 1)]
                                    : draw(rng, 0, c.pages - 1));
  }

  GatherArgs args(bf16* out) {
    GatherArgs a{.cache = {cache.data(), c.format, c.pages, c.page, page_stride},
                 .block_table = tensor(table.data(), {requests, c.table_width}),
                 .lengths = tensor(lengths.data(), {requests}),
                 .out = tensor(out, {c.rows, dim}, {stride, 1})};
    if (!c.starts.empty()) a.starts = tensor(starts.data(), {requests});
    if (!c.out_starts.empty()) a.out_starts = tensor(out_starts.data(), {requests});
    return a;
  }

  std::vector<bf16> expected(std::vector<bf16> out) const {
    int64_t before = 0;
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t length = std::max(c.lengths[r], 0);
      const int64_t row = c.out_starts.empty() ? before : c.out_starts[r];
      before += length;
      for (int64_t j = 0; j < std::min<int64_t>(length, 10000); ++j) {
        if (row + j < 0 || row + j >= c.rows) continue;
        const int64_t token = (c.starts.empty() ? 0 : c.starts[r]) + j, column = token / c.page;
        int64_t id = -1;
        if (token >= 0 && column < c.table_width) id = table[r * c.table_width + column];
        for (int64_t i = 0; i < dim; ++i)
          out[(row + j) * stride + i] =
              id < 0 || id >= c.pages
                  ? bf16{0}
                  : value(c, cache.data() + id * page_stride, token % c.page, i);
      }
    }
    return out;
  }
};

// Which NaN a product of two NaN is, is the CPU's choice; everything else must agree in its bits.
bool same(bf16 a, bf16 b) {
  return a.bits == b.bits || (std::isnan(to_float(a)) && std::isnan(to_float(b)));
}

class GatherTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(GatherTest, MatchesTheBytes) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("gather", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  Guarded<bf16> out(c.rows * p.stride);
  const std::vector<bf16> poisoned = out.values();
  GatherArgs a = p.args(out.data());
  a.target = testing::target("gather", kernel);
  gather(a);
  ASSERT_TRUE(testing::device_finished());
  const std::vector<bf16> want = p.expected(poisoned);
  for (size_t i = 0; i < want.size(); ++i)
    ASSERT_TRUE(same(out[i], want[i]))
        << "row " << i / p.stride << ", column " << i % p.stride << ": " << std::hex << out[i].bits
        << ", expected " << want[i].bits;
}

INSTANTIATE_TEST_SUITE_P(Kernels, GatherTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("gather")),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

class RoundTrip : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Kernels, RoundTrip, ::testing::ValuesIn(testing::kernels("gather")));

// write, then gather. An e4m3 value is off by at most 2^-4 of itself (half of a step of 1/8), or
// half a step of 2^-9 scales near zero; a scale is at most amax / 224 (a power of two above
// amax / 448), at least its floor 2^-13; rounding to bf16 adds 2^-9.
TEST_P(RoundTrip, ErrorIsBounded) {
  if (const std::string why = testing::why_not("gather", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  testing::Rng rng(3);
  for (CacheFormat format : {CacheFormat::kV32Fp8, CacheFormat::kV4Fp8, CacheFormat::kV32Bf16}) {
    const int64_t tokens = 40, dim = record_dim(format), page = 16;
    const int64_t nope = dim == 576 ? 512 : 448, tile = dim == 576 ? 128 : 64;
    Guarded<bf16> kv(tokens * dim), back(tokens * dim);
    for (bf16& x : kv) x = to_bf16(testing::normal(rng) * 3);
    Guarded<int64_t> slots(tokens);
    for (int64_t t = 0; t < tokens; ++t) slots[t] = (2 - t / page) * page + t % page;
    Guarded<int32_t> table(std::vector<int32_t>{2, 1, 0});
    Guarded<int32_t> lengths(std::vector<int32_t>{static_cast<int32_t>(tokens)});
    Guarded<std::byte> memory(3 * page_bytes(format, page));
    const Cache cache{memory.data(), format, 3, static_cast<int32_t>(page)};
    const Target target = testing::target("gather", GetParam());
    write({.kv = tensor(kv.data(), {tokens, dim}),
           .slots = tensor(slots.data(), {tokens}),
           .cache = cache,
           .target = target});
    gather({.cache = cache,
            .block_table = tensor(table.data(), {1, 3}),
            .lengths = tensor(lengths.data(), {1}),
            .out = tensor(back.data(), {tokens, dim}),
            .target = target});
    ASSERT_TRUE(testing::device_finished());
    double worst = 0;
    for (int64_t i = 0; i < tokens * dim; ++i) {
      if (format == CacheFormat::kV32Bf16 || i % dim >= nope) {
        ASSERT_EQ(back[i].bits, kv[i].bits) << "element " << i;
        continue;
      }
      const int64_t first = i - i % dim % tile;
      double amax = 0;
      for (int64_t j = first; j < first + tile; ++j)
        amax = std::max<double>(amax, std::fabs(to_float(kv[j])));
      const double x = to_float(kv[i]), step = std::max(amax / 224, 0x1p-13) * 0x1p-10;
      const double bound = std::max(std::fabs(x) * 0x1p-4, step) + std::fabs(x) * 1.1 * 0x1p-9;
      worst = std::max(worst, std::fabs(to_float(back[i]) - x) / bound);
      ASSERT_LE(std::fabs(to_float(back[i]) - x), bound) << "element " << i << " = " << x;
    }
    EXPECT_LE(worst, 1) << name_of(format);
  }
}

TEST_P(RoundTrip, InfinityComesBack) {
  if (const std::string why = testing::why_not("gather", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  Guarded<bf16> kv(std::vector<bf16>(576, to_bf16(1.0f))), back(576);
  kv[7] = to_bf16(-INFINITY);
  Guarded<int64_t> slots(std::vector<int64_t>{0});
  Guarded<int32_t> table(std::vector<int32_t>{0}), lengths(std::vector<int32_t>{1});
  for (ScaleMode mode : {ScaleMode::kAmax, ScaleMode::kPow2}) {
    Guarded<std::byte> memory(656);
    const Cache cache{memory.data(), CacheFormat::kV32Fp8, 1, 1};
    const Target target = testing::target("gather", GetParam());
    write({.kv = tensor(kv.data(), {1, 576}),
           .slots = tensor(slots.data(), {1}),
           .cache = cache,
           .scale = mode,
           .target = target});
    gather({.cache = cache,
            .block_table = tensor(table.data(), {1, 1}),
            .lengths = tensor(lengths.data(), {1}),
            .out = tensor(back.data(), {1, 576}),
            .target = target});
    ASSERT_TRUE(testing::device_finished());
    EXPECT_EQ(to_float(back[7]), -INFINITY);
    EXPECT_EQ(to_float(back[8]), 0.0f);  // the rest of the tile vanishes beside it
    EXPECT_EQ(to_float(back[128]), 1.0f);
  }
}

TEST(GatherErrors, NameTheArgument) {
  Problem p(cases()[0]);
  Guarded<bf16> out(p.c.rows * p.stride);
  const GatherArgs good = p.args(out.data());
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    GatherArgs a = good;
    change(a);
    testing::expect_error([&] { gather(a); }, code, words);
  };
  expect([](GatherArgs& a) { a.cache.format = CacheFormat::kIndexKeys; },
         {"gather", "cache", "latent", "index_keys"});
  expect([](GatherArgs& a) { a.cache = {}; }, {"cache"});
  expect([](GatherArgs& a) { a.block_table = {}; }, {"block_table", "nothing"});
  expect([](GatherArgs& a) { a.lengths.shape[0] = 3; }, {"lengths", "[4]", "[3]"});
  expect([](GatherArgs& a) { a.lengths.dtype = DType::kI64; }, {"lengths", "int32"});
  expect([](GatherArgs& a) { a.starts.shape[0] = 5; }, {"starts", "[4]", "[5]"});
  expect([&](GatherArgs& a) { a.out_starts = tensor(p.lengths.data(), {2}); },
         {"out_starts", "[4]", "[2]"});
  expect([](GatherArgs& a) { a.out.shape[1] = 512; }, {"out", "576", "512"});
  expect([](GatherArgs& a) { a.out.stride[0] = 500; }, {"out", "overlap"});
  expect([](GatherArgs& a) { a.out.data = nullptr; }, {"out", "null"});
  expect([](GatherArgs& a) { a.target.kernel = "none"; }, {"no kernel fits"},
         ErrorCode::kUnsupported);
  for (bf16 v : out) EXPECT_EQ(v.bits, 0xcdcd);  // nothing was written
}

}  // namespace
}  // namespace winnow
