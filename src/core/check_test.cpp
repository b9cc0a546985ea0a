// Check's messages and limits, and the arena.
#include "core/check.h"

#include "core/arena.h"
#include "testing.h"
#include "winnow/model.h"

namespace winnow {
namespace {

using testing::expect_invalid;

const Check check("stage");

TEST(Check, MessagesReadTheSameWay) {
  try {
    check.range(9, "width", 1, 8);
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "stage: width: expected 1 to 8, found 9");
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
  }
  float x[24] = {};
  expect_invalid(
      [&] {
        check.tensor(tensor(x, {2, 3, 4}), "q", DType::kBf16, {2, Check::kAny, 5});
      },
      {"stage: q: expected [2, any, 5] bf16, found [2, 3, 4] f32"});
  expect_invalid([&] { check.tensor({}, "q", DType::kBf16, {2}); },
                 {"stage: q: expected [2] bf16, found nothing"});
  EXPECT_EQ(check.range(8, "width", 1, 8), 8);
}

TEST(Check, TensorRefuses) {
  float x[24] = {};
  const Tensor good = tensor(x, {4, 6});
  check.tensor(good, "x", DType::kF32, {4, 6});
  const auto refuse = [&](auto change, std::initializer_list<const char*> words) {
    Tensor t = good;
    change(t);
    expect_invalid([&] { check.tensor(t, "x", DType::kF32, {Check::kAny, Check::kAny}); }, words);
  };
  refuse([](Tensor& t) { t.rank = 3; }, {"x", "[any, any]"});
  refuse([](Tensor& t) { t.dtype = DType::kI32; }, {"f32", "int32"});
  refuse([](Tensor& t) { t.shape[0] = -1; }, {"[-1, 6]"});
  refuse([](Tensor& t) { t.stride[0] = -6; }, {"strides >= 0", "stride -6 in dimension 0"});
  refuse([](Tensor& t) { t.stride[1] = 2; }, {"contiguous innermost", "stride 2"});
  refuse([](Tensor& t) { t.data = nullptr; }, {"data", "null"});
  refuse([&](Tensor& t) { t.data = reinterpret_cast<char*>(x) + 1; }, {"aligned to 4"});
  refuse([](Tensor& t) { t.stride[0] = INT64_MAX / 2; }, {"64 bits"});
  refuse([](Tensor& t) { t.shape[0] = INT64_MAX, t.stride[0] = 0, t.shape[1] = INT64_MAX; },
         {"64 bits"});
  refuse([](Tensor& t) { t.stride = {}, t.shape[0] = t.shape[1] = int64_t{1} << 40; }, {"64 bits"});
}

TEST(Check, TensorAccepts) {
  float x[24] = {};
  check.tensor(tensor(static_cast<float*>(nullptr), {0, 6}), "x", DType::kF32, {0, 6});
  check.tensor(tensor(x, {5, 1}, {2, 7}), "x", DType::kF32, {5, 1});   // one column: any stride
  check.tensor(tensor(x, {5, 4}, {0, 1}), "x", DType::kF32, {5, 4});   // inputs may repeat rows
  check.strided(tensor(x, {3, 4}, {1, 3}), "x", DType::kF32, {3, 4});  // transposed
  EXPECT_FALSE(check.optional({}, "x", DType::kF32, {4}));
  EXPECT_TRUE(check.optional(tensor(x, {4}), "x", DType::kF32, {4}));
  expect_invalid([&] { check.optional(tensor(x, {5}), "x", DType::kF32, {4}); }, {"[4]", "[5]"});
  // Data without a rank: a field forgotten.
  expect_invalid([&] { check.optional(tensor(x, {}), "x", DType::kF32, {4}); }, {"[4]", "[] f32"});
}

TEST(Check, OutputsDoNotOverlap) {
  float x[64] = {};
  const auto output = [&](std::initializer_list<int64_t> shape,
                          std::initializer_list<int64_t> stride) {
    check.output(tensor(x, shape, stride), "out", DType::kF32,
                 {Check::kAny, Check::kAny, Check::kAny});
  };
  output({2, 3, 4}, {12, 4, 1});
  output({2, 3, 4}, {4, 8, 1});   // heads first in memory
  output({2, 3, 4}, {1, 2, 6});   // fully reversed
  output({2, 3, 4}, {20, 5, 1});  // gaps
  output({1, 3, 4}, {0, 4, 1});   // a stride nobody walks
  output({0, 3, 4}, {0, 0, 0});   // empty
  for (auto stride : {std::array<int64_t, 3>{0, 4, 1}, {12, 3, 1}, {11, 4, 1}, {12, 4, 0}})
    expect_invalid(
        [&] {
          output({2, 3, 4}, {stride[0], stride[1], stride[2]});
        },
        {"out", "do not overlap"});
}

TEST(Check, OutputRows) {
  float x[24] = {};
  check.output_rows(tensor(x, {3, 4}, {5, 1}), "out", DType::kF32, {3, 4});
  expect_invalid(
      [&] {
        check.output_rows(tensor(x, {3, 4}, {1, 3}), "out", DType::kF32, {3, 4});
      },
      {"out", "contiguous"});
  expect_invalid(
      [&] {
        check.output_rows(tensor(x, {3, 4}, {3, 1}), "out", DType::kF32, {3, 4});
      },
      {"out", "do not overlap"});
}

TEST(Check, RowsOf16) {
  alignas(16) bf16 x[128] = {};
  check.rows_of_16(tensor(x, {2, 2, 8}), "q");
  check.rows_of_16(tensor(x, {2, 2, 3}, {40, 16, 1}), "q");
  check.rows_of_16({}, "q");
  check.rows_of_16(tensor(x + 1, {0, 2, 8}), "q");
  expect_invalid([&] { check.rows_of_16(tensor(x + 1, {2, 2, 8}), "q"); }, {"q", "16 bytes"});
  expect_invalid([&] { check.rows_of_16(tensor(x, {2, 2, 9}), "q"); }, {"q", "strides 18, 9"});
}

constexpr Check::CacheUse kOnCuda{DeviceKind::kCuda, true}, kOnCpu{DeviceKind::kCpu, true};

TEST(Check, Caches) {
  alignas(16) static std::byte memory[1];
  const Cache good{memory, CacheFormat::kV4Fp8, 10, 64};
  EXPECT_EQ(check.cache(good, "cache", kOnCuda).page_stride, 37440);
  EXPECT_EQ(check.cache({memory, CacheFormat::kV4Fp8, 10, 64, 37376}, "c", kOnCuda).page_stride,
            37376);  // padding is not required
  EXPECT_EQ(check.cache({memory, CacheFormat::kV32Fp8, 0, 64}, "c", kOnCuda).pages, 0);
}

// On the CPU a page begins wherever its largest element may.
TEST(Check, CachesOnTheCpu) {
  alignas(16) static std::byte memory[64];
  const auto take = [&](CacheFormat format, int64_t address, int64_t more) {
    const int64_t stride = page_bytes(format, 4) + more;
    EXPECT_EQ(check.cache({memory + address, format, 3, 4, stride}, "c", kOnCpu).page_stride,
              stride);
  };
  const auto refuse = [&](CacheFormat format, int64_t address, int64_t more) {
    const int64_t stride = page_bytes(format, 4) + more;
    expect_invalid(
        [&] {
          check.cache({memory + address, format, 3, 4, stride}, "c", kOnCpu);
        },
        {"c", "aligned to"});
  };
  for (const CacheFormat f : cache_formats()) {
    const bool floats = f == CacheFormat::kV32Fp8 || f == CacheFormat::kIndexKeys;
    const int64_t element = floats ? 4 : 2;
    take(f, element, 0);
    take(f, 0, element);
    take(f, 3 * element, 3 * element);
    refuse(f, element / 2, 0);
    refuse(f, 0, element / 2);
    refuse(f, 1, 0);
  }
}

TEST(Check, CachesRefused) {
  alignas(16) static std::byte memory[32];
  const Cache good{memory, CacheFormat::kV4Fp8, 10, 64};
  const auto refuse = [&](auto change, std::initializer_list<const char*> words) {
    Cache c = good;
    change(c);
    expect_invalid([&] { check.cache(c, "cache", kOnCuda); }, words);
  };
  refuse([](Cache& c) { c = {}; }, {"stage: cache: expected a cache, found none"});
  refuse([](Cache& c) { c.format = static_cast<CacheFormat>(6); }, {"cache", "format", "number 6"});
  refuse([](Cache& c) { c.page = 0; }, {"cache.page", "1 to", "found 0"});
  refuse([](Cache& c) { c.pages = -1; }, {"cache.pages", "-1"});
  refuse([](Cache& c) { c.page_stride = 37375; }, {"at least 37376", "37375"});
  refuse([](Cache& c) { c.page_stride = 37377; }, {"aligned to 16"});
  refuse([](Cache& c) { c.page_stride = -37440; }, {"page_stride"});
  refuse([](Cache& c) { c.data = memory + 8; }, {"aligned to 16"});
  refuse([](Cache& c) { c.data = nullptr; }, {"null"});
  refuse([](Cache& c) { c.pages = int64_t{1} << 50; }, {"64 bits"});
  refuse([](Cache& c) { c.pages = (int64_t{1} << 31) / 64; }, {"2147483647 slots", "2147483648"});
  Cache wide = good;
  wide.pages = (int64_t{1} << 31) / 64;
  EXPECT_EQ(check.cache(wide, "cache", {DeviceKind::kCuda, false}).pages,
            wide.pages);  // slots are int64 here
  Cache keys{memory + 4, CacheFormat::kIndexKeys, 3, 5};
  EXPECT_EQ(check.cache(keys, "cache", kOnCuda).page_stride, 5 * 132);
}

TEST(Names, OfTypes) {
  EXPECT_STREQ(name_of(DType::kE4m3), "e4m3");
  EXPECT_STREQ(name_of(static_cast<DType>(99)), "unknown dtype");
  EXPECT_EQ(shape_of({}), "nothing");
  int64_t x[6];
  EXPECT_EQ(shape_of(tensor(x, {2, 3})), "[2, 3] int64");
}

TEST(Arena, MeasuresAndTakesTheSame) {
  const auto takes = [](Arena& a) {
    struct Parts {
      float* f;
      char* c;
      double* d;
    };
    return Parts{a.take<float>(3), a.take<char>(1), a.take<double>(100)};
  };
  Arena measure;
  const auto none = takes(measure);
  EXPECT_EQ(none.f, nullptr);
  EXPECT_EQ(none.d, nullptr);
  ASSERT_GE(measure.bytes(), 64 + 64 + 832);
  for (size_t shift : {0, 1, 63}) {  // any alignment of the workspace will do
    testing::Guarded<std::byte> memory(measure.bytes() + shift);
    Arena arena({memory.data() + shift, measure.bytes()});
    const auto p = takes(arena);
    ASSERT_NE(p.d, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p.f) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p.c), reinterpret_cast<uintptr_t>(p.f) + 64);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p.d) % 64, 0u);
    std::fill_n(p.f, 3, 1.0f);
    *p.c = 1;
    std::fill_n(p.d, 100, 1.0);  // the guards stay
  }
}

TEST(Arena, GivesNullWhenFull) {
  alignas(64) std::byte memory[128];
  Arena arena(memory);
  EXPECT_NE(arena.take<char>(128), nullptr);
  EXPECT_EQ(arena.take<char>(1), nullptr);
  // A size that wraps around must not look small.
  for (size_t count : {SIZE_MAX / 8, SIZE_MAX / 8 + 1, SIZE_MAX / 8 + 2, SIZE_MAX}) {
    Arena again(memory), measure;
    EXPECT_NE(again.take<char>(64), nullptr);
    EXPECT_EQ(again.take<double>(count), nullptr) << count;
    EXPECT_EQ(again.take<char>(1), nullptr) << count;
    measure.take<char>(64);
    measure.take<double>(count);
    measure.take<double>(count);
    EXPECT_GE(measure.bytes(), SIZE_MAX / 2) << count;
  }
}

}  // namespace
}  // namespace winnow
