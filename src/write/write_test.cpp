// write: every kernel x every case against a direct statement of the records, byte for byte over
// the whole cache.
#include "winnow/write.h"

#include <sys/mman.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>

#include "core/formats.h"
#include "testing.h"
#include "write/write_cases.h"

namespace winnow {
namespace {

using internal::write::Case;
using testing::draw;
using testing::Guarded;

// The nearest e4m3 code by search over all of them; of two equally near, the even one.
uint8_t nearest_code(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  uint8_t best = 0;
  double distance = INFINITY;
  for (uint8_t code = 0; code < 0x7f; ++code) {
    const double d = std::fabs(std::min<double>(std::fabs(x), 448) - to_float(e4m3{code}));
    if (d < distance || (d == distance && code % 2 == 0)) {
      best = code;
      distance = d;
    }
  }
  return sign | best;
}

// The quantiser table of docs/cache-format.md.
float scale_of(CacheFormat format, ScaleMode mode, const bf16* x, int tile) {
  float amax = 0;
  for (int i = 0; i < tile; ++i)
    if (const float a = std::fabs(to_float(x[i])); !std::isnan(a)) amax = std::max(amax, a);
  amax = std::min(amax, FLT_MAX);
  const auto pow2 = [](float s) {
    return static_cast<float>(std::exp2(std::ceil(std::log2(static_cast<double>(s)))));
  };
  const float on_amax = std::max(amax, 1e-4f) / 448;
  if (format == CacheFormat::kIndexKeys) return mode == ScaleMode::kAmax ? on_amax : pow2(on_amax);
  if (format == CacheFormat::kV32Fp8 && mode != ScaleMode::kPow2)
    return std::max(amax / 448, FLT_MIN);
  return mode == ScaleMode::kPow2FloorAmax ? pow2(on_amax) : pow2(std::max(amax / 448, 1e-4f));
}

struct Layout {
  int nope, rope, tile;          // tile 0: not quantised
  int64_t row, scales, rope_at;  // bytes from the start of the page
};

Layout layout(CacheFormat format, int64_t off, int64_t page) {
  switch (format) {
    case CacheFormat::kV32Fp8: return {512, 64, 128, off * 656, off * 656 + 512, off * 656 + 528};
    case CacheFormat::kV32Bf16: return {512, 64, 0, off * 1152, 0, 0};
    case CacheFormat::kV4Fp8:
      return {448, 64, 64, off * 576, page * 576 + off * 8, off * 576 + 448};
    case CacheFormat::kV4Bf16: return {448, 64, 0, off * 1024, 0, 0};
    case CacheFormat::kIndexKeysBf16: return {128, 0, 0, off * 256, 0, 0};
    default: return {128, 0, 128, off * 128, page * 128 + off * 4, 0};
  }
}

struct Problem {
  Case c;
  int64_t dim, stride, page_stride;
  Guarded<bf16> kv;
  Guarded<int64_t> slots;

  explicit Problem(const Case& c_)
      : c(c_),
        dim(record_dim(c.format)),
        stride(dim + c.row_padding),
        kv((c.tokens + c.spare_rows) * stride, 0xff),  // NaN where nothing is read
        slots(c.tokens) {
    page_stride = page_bytes(c.format, c.page) + c.page_padding;
    testing::Rng rng(c.tokens * 100 + c.page);
    for (int64_t t = 0; t < c.tokens; ++t)
      for (int64_t i = 0; i < dim; ++i) {
        const int64_t tile = t + i / 64;  // magnitudes differ from tile to tile
        float x = std::ldexp(testing::normal(rng), static_cast<int>(tile * 7 % 60) - 40);
        if (tile % 11 == 3) x = 0;
        if (draw(rng, 0, 400) == 0) x = std::copysign(NAN, x);
        if (draw(rng, 0, 2000) == 0) x = std::copysign(INFINITY, x);
        kv[t * stride + i] = to_bf16(x);
      }
    std::vector<int64_t> all(c.pages * c.page);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), rng);
    all.resize(std::max<size_t>(all.size(), c.tokens), -1);
    std::copy_n(all.begin(), c.tokens, slots.begin());
    const int64_t skip[] = {-1, -2, INT64_MIN, INT32_MIN};
    for (int64_t t = 3; t < c.tokens; t += 5) slots[t] = skip[t % 4];
  }

  WriteArgs args(std::byte* data) {
    WriteArgs a{.slots = tensor(slots.data(), {c.tokens}),
                .cache = {data, c.format, c.pages, c.page, page_stride},
                .scale = c.scale};
    const int64_t rows = c.tokens + c.spare_rows;
    const int nope = layout(c.format, 0, 1).nope, rope = layout(c.format, 0, 1).rope;
    a.kv = tensor(kv.data(), {rows, c.split ? nope : dim}, {stride, 1});
    if (c.split) a.rope = tensor(kv.data() + nope, {rows, rope}, {stride, 1});
    return a;
  }

  // Writes the record of token t where the specification puts it.
  void expect(int64_t t, uint8_t* cache) const {
    if (slots[t] < 0) return;
    uint8_t* page = cache + slots[t] / c.page * page_stride;
    const Layout l = layout(c.format, slots[t] % c.page, c.page);
    const bf16* x = kv.data() + t * stride;
    if (l.tile == 0) {
      std::memcpy(page + l.row, x, dim * 2);
      return;
    }
    if (c.format == CacheFormat::kV4Fp8) page[l.scales + 7] = 0;
    for (int i = 0; i < l.nope; ++i) {
      const int tile = i / l.tile;
      const float s = scale_of(c.format, c.scale, x + tile * l.tile, l.tile);
      page[l.row + i] = nearest_code(to_float(x[i]) / s);
      if (c.format == CacheFormat::kV4Fp8)
        page[l.scales + tile] = static_cast<uint8_t>(std::ilogb(s) + 127);
      else std::memcpy(page + l.scales + tile * 4, &s, 4);
    }
    if (l.rope) std::memcpy(page + l.rope_at, x + l.nope, l.rope * 2);
  }
};

class WriteTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(WriteTest, WritesTheRecordsAndNothingElse) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("write", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  Guarded<std::byte> cache(c.pages * p.page_stride);
  WriteArgs a = p.args(cache.data());
  a.target = testing::target("write", kernel);
  write(a);
  ASSERT_TRUE(testing::device_finished());
  Guarded<uint8_t> want(c.pages * p.page_stride);
  for (int64_t t = 0; t < c.tokens; ++t) p.expect(t, want.data());
  for (size_t i = 0; i < want.size(); ++i)
    ASSERT_EQ(static_cast<int>(cache[i]), want[i])
        << "byte " << i % p.page_stride << " of page " << i / p.page_stride;
}

INSTANTIATE_TEST_SUITE_P(Kernels, WriteTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("write")),
                                            ::testing::ValuesIn(internal::write::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

class WriteKernels : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Kernels, WriteKernels, ::testing::ValuesIn(testing::kernels("write")));

// The example of docs/cache-format.md, in its bytes.
TEST_P(WriteKernels, WorkedExample) {
  if (const std::string why = testing::why_not("write", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  Guarded<bf16> kv(512, 0);
  const float values[] = {1.0f, -0.5f, 3.0f, 100.0f, 0.3f};
  for (int i = 0; i < 5; ++i) kv[i] = to_bf16(values[i]);
  kv[448] = to_bf16(1.5f);
  Guarded<int64_t> slots(std::vector<int64_t>{3});  // page 1, offset 1 of pages of two tokens
  Guarded<uint8_t> cache(2 * 1728, 0xee);
  write({.kv = tensor(kv.data(), {1, 512}),
         .slots = tensor(slots.data(), {1}),
         .cache = {cache.data(), CacheFormat::kV4Fp8, 2, 2},
         .target = testing::target("write", GetParam())});
  ASSERT_TRUE(testing::device_finished());
  const uint8_t* row = cache.data() + 1728 + 576;
  // amax = 100: 100 / 448 = 0.223, scale 2^-2; 4, -2, 12, 400 (a tie, to even: 384), 1.2 (1.25).
  const uint8_t codes[] = {0x48, 0xc0, 0x54, 0x7c, 0x3a, 0x00};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(row[i], codes[i]) << i;
  EXPECT_EQ(row[448], 0xc0);
  EXPECT_EQ(row[449], 0x3f);                                        // bf16 1.5, little endian
  const uint8_t scales[] = {125, 114, 114, 114, 114, 114, 114, 0};  // 2^-2, then 2^-13
  for (int i = 0; i < 8; ++i) EXPECT_EQ(cache[1728 + 2 * 576 + 8 + i], scales[i]) << i;
  EXPECT_EQ(cache[1728 + 575], 0xee);   // the token before
  EXPECT_EQ(cache[1728 + 1168], 0xee);  // page padding
}

TEST_P(WriteKernels, TilesOfZerosAndExtremes) {
  if (const std::string why = testing::why_not("write", GetParam()); !why.empty())
    GTEST_SKIP() << why;
  Guarded<bf16> kv(576, 0);
  for (int i = 0; i < 128; ++i) kv[i] = {static_cast<uint16_t>(i % 2 ? 0x7fc0 : 0xffc0)};  // NaN
  kv[128] = to_bf16(INFINITY);
  kv[129] = to_bf16(1.0f);
  kv[256] = bf16{1};  // the smallest subnormal
  kv[384] = bf16{0x7f7f};
  kv[385] = bf16{0xff7f};
  Guarded<int64_t> slots(std::vector<int64_t>{0});
  const auto run = [&](CacheFormat format, ScaleMode mode) {
    Guarded<uint8_t> cache(page_bytes(format, 1), 0);
    write({.kv = tensor(kv.data(), {1, record_dim(format)}),
           .slots = tensor(slots.data(), {1}),
           .cache = {cache.data(), format, 1, 1},
           .scale = mode,
           .target = testing::target("write", GetParam())});
    EXPECT_TRUE(testing::device_finished());
    return cache.values();
  };
  const auto scale = [](const std::vector<uint8_t>& record, int tile) {
    float s;
    std::memcpy(&s, record.data() + 512 + 4 * tile, 4);
    return s;
  };
  auto r = run(CacheFormat::kV32Fp8, ScaleMode::kAmax);
  EXPECT_EQ(r[0], 0xff);
  EXPECT_EQ(r[1], 0x7f);            // NaN keeps its sign
  EXPECT_EQ(scale(r, 0), FLT_MIN);  // and does not enter the maximum
  EXPECT_EQ(r[128], 0x7e);
  EXPECT_EQ(r[129], 0x00);
  EXPECT_EQ(scale(r, 1), FLT_MAX / 448);
  EXPECT_EQ(scale(r, 2), FLT_MIN);
  EXPECT_EQ(r[256], nearest_code(to_float(bf16{1}) / FLT_MIN));
  EXPECT_EQ(r[384], 0x7e);
  EXPECT_EQ(r[385], 0xfe);
  r = run(CacheFormat::kV32Fp8, ScaleMode::kPow2);
  EXPECT_EQ(scale(r, 0), 0x1p-13f);
  EXPECT_EQ(scale(r, 1), 0x1p120f);
  r = run(CacheFormat::kV4Fp8, ScaleMode::kPow2FloorAmax);
  EXPECT_EQ(r[576], 127 - 22);
  EXPECT_EQ(r[576 + 2], 127 + 120);
  EXPECT_EQ(r[576 + 7], 0);
}

// Pages beyond 4 GiB, in memory that is reserved and touched in one page only.
class WriteOnCpu : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Kernels, WriteOnCpu, ::testing::ValuesIn(testing::cpu_kernels("write")));
TEST_P(WriteOnCpu, OffsetsBeyond32Bits) {
  const int64_t stride = int64_t{3} << 30, pages = 4;
  void* memory = mmap(nullptr, stride * pages, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED) << "12 GiB of address space";
  std::vector<bf16> kv(576, to_bf16(2.0f));
  const std::vector<int64_t> slots = {3 * 64 + 5};
  write({.kv = tensor(kv.data(), {1, 576}),
         .slots = tensor(slots.data(), {1}),
         .cache = {memory, CacheFormat::kV32Fp8, pages, 64, stride},
         .target = testing::target("write", GetParam())});
  const auto* row = static_cast<const uint8_t*>(memory) + 3 * stride + 5 * 656;
  EXPECT_EQ(row[0], 0x7e);
  EXPECT_EQ(row[655], 0x40);
  munmap(memory, stride * pages);
}

TEST(WriteErrors, NameTheArgument) {
  Case c{"", CacheFormat::kV32Fp8, ScaleMode::kDefault, 4, 64, 2};
  Problem p(c);
  Guarded<std::byte> cache(2 * 64 * 656);
  Guarded<bf16> rope(4 * 64);
  const WriteArgs good = p.args(cache.data());
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    WriteArgs a = good;
    change(a);
    testing::expect_error([&] { write(a); }, code, words);
  };
  expect([](WriteArgs& a) { a.kv = {}; }, {"write", "kv", "nothing"});
  expect([](WriteArgs& a) { a.kv.shape[1] = 512; }, {"kv", "576", "512"});
  expect([](WriteArgs& a) { a.kv.shape[0] = 3; }, {"kv", "at least 4 rows", "3"});
  expect([](WriteArgs& a) { a.kv.dtype = DType::kF32; }, {"kv", "bf16", "f32"});
  expect([](WriteArgs& a) { a.kv.stride[1] = 2; }, {"kv", "contiguous"});
  expect([&](WriteArgs& a) { a.rope = tensor(rope.data(), {4, 64}); }, {"kv", "512", "576"});
  expect([&](WriteArgs& a) { a.rope = tensor(rope.data(), {4, 32}); }, {"rope", "64", "32"});
  expect(
      [&](WriteArgs& a) {
        a.rope = tensor(rope.data(), {3, 64});
        a.kv.shape[1] = 512;
      },
      {"rope", "at least 4 rows", "3"});
  expect(
      [&](WriteArgs& a) {
        a.cache.format = CacheFormat::kIndexKeys;
        a.rope = tensor(rope.data(), {4, 64});
      },
      {"rope", "nothing"});
  expect([](WriteArgs& a) { a.slots.dtype = DType::kI32; }, {"slots", "int64", "int32"});
  expect([](WriteArgs& a) { a.slots = {}; }, {"slots", "nothing"});
  expect([](WriteArgs& a) { a.cache = {}; }, {"cache", "none"});
  expect([](WriteArgs& a) { a.cache.data = nullptr; }, {"cache", "null"});
  expect([](WriteArgs& a) { a.cache.page = -1; }, {"cache"});
  expect([](WriteArgs& a) { a.cache.page_stride = 640; }, {"cache", "page_stride", "41984"});
  expect([](WriteArgs& a) { a.cache.page_stride = 41985; }, {"cache", "aligned"});
  expect([](WriteArgs& a) { a.scale = ScaleMode::kPow2FloorAmax; }, {"scale", "kAmax", "v32_fp8"});
  expect([](WriteArgs& a) { a.target.kernel = "none"; }, {"no kernel fits", "simd", "reference"},
         ErrorCode::kUnsupported);
  p.slots[2] = 128;
  expect([](WriteArgs&) {}, {"slots", "below 128", "128 at token 2"});
  p.slots[2] = INT64_MAX;
  expect([](WriteArgs&) {}, {"slots", "9223372036854775807"});
  for (std::byte b : cache) EXPECT_EQ(b, std::byte{0xcd});  // nothing was written
}

TEST(WriteErrors, ModesThatAFormatDoesNotHave) {
  for (const auto& [format, mode] : {std::pair{CacheFormat::kV4Fp8, ScaleMode::kAmax},
                                     {CacheFormat::kIndexKeys, ScaleMode::kPow2FloorAmax}}) {
    Problem p({"", format, ScaleMode::kDefault, 2, 4, 2});
    Guarded<std::byte> cache(2 * p.page_stride);
    WriteArgs a = p.args(cache.data());
    a.scale = mode;
    testing::expect_invalid([&] { write(a); }, {"write", "scale", name_of(format).data()});
  }
}

}  // namespace
}  // namespace winnow
