// Models and formats as data: sizes, names, and the questions of an engine.
#include "winnow/model.h"

#include "model/records.h"
#include "testing.h"

namespace winnow {
namespace {

using F = CacheFormat;

TEST(Model, Families) {
  EXPECT_EQ(&model_of("v32"), &kV32);
  EXPECT_EQ(&model_of("v4"), &kV4);
  EXPECT_EQ(kV32.d_qk, kV32.d_nope + kV32.d_rope);
  EXPECT_EQ(kV4.d_qk, kV4.d_nope + kV4.d_rope);
  EXPECT_EQ(kV32.d_v, 512);
  EXPECT_EQ(kV4.d_v, 512);
  for (const Model* m : {&kV32, &kV4}) {
    EXPECT_EQ(record_dim(m->fp8), m->d_qk);
    EXPECT_EQ(record_dim(m->bf16), m->d_qk);
    EXPECT_EQ(cache_formats(*m), (std::array{m->fp8, m->bf16}));
  }
  testing::expect_invalid([] { model_of("v5"); }, {"model", "v32", "v4", "v5"});
  testing::expect_invalid([] { model_of(""); }, {"model"});
}

TEST(Model, FormatNames) {
  const char* names[] = {"v32_fp8", "v32_bf16",   "v4_fp8",
                         "v4_bf16", "index_keys", "index_keys_bf16"};
  ASSERT_EQ(cache_formats().size(), std::size(names));
  for (size_t i = 0; i < std::size(names); ++i) {
    EXPECT_EQ(name_of(cache_formats()[i]), names[i]);
    EXPECT_EQ(format_of(names[i]), cache_formats()[i]);
  }
  EXPECT_EQ(name_of(static_cast<F>(77)), "unknown");
  testing::expect_invalid([] { format_of("fp8"); }, {"format", "v32_fp8", "index_keys", "fp8"});
}

TEST(Model, HeadsAndSizes) {
  EXPECT_EQ(std::vector(head_sizes().begin(), head_sizes().end()), (std::vector{576, 512}));
  for (int heads : {1, 8, 12, 24, 128}) EXPECT_TRUE(supports_heads(heads));
  for (int64_t heads : {int64_t{0}, int64_t{-1}, int64_t{129}, INT64_MAX, INT64_MIN})
    EXPECT_FALSE(supports_heads(heads));
}

TEST(Model, PageBytes) {
  const auto expect = [](F format, int64_t page, int64_t used, int64_t padded) {
    EXPECT_EQ(page_bytes_used(format, page), used) << name_of(format) << " " << page;
    EXPECT_EQ(page_bytes(format, page), padded) << name_of(format) << " " << page;
  };
  expect(F::kV4Fp8, 64, 37376, 37440);
  expect(F::kV4Fp8, 2, 1168, 1728);
  expect(F::kV4Fp8, 1, 584, 1152);
  expect(F::kV4Fp8, 72, 42048, 42048);  // 72 * 8 = 576: no padding
  expect(F::kV4Fp8, 256, 149504, 149760);
  expect(F::kV32Fp8, 64, 41984, 41984);
  expect(F::kV32Fp8, 1, 656, 656);
  expect(F::kV32Bf16, 64, 73728, 73728);
  expect(F::kV4Bf16, 3, 3072, 3072);
  expect(F::kIndexKeys, 64, 8448, 8448);
  expect(F::kIndexKeys, 5, 660, 660);
  expect(F::kIndexKeysBf16, 5, 1280, 1280);
  // A page of 2^31 - 1 tokens needs more than 32 bits.
  expect(F::kV32Fp8, INT32_MAX, int64_t{INT32_MAX} * 656, int64_t{INT32_MAX} * 656);
  for (int64_t page : {int64_t{0}, int64_t{-64}, int64_t{INT32_MAX} + 1, INT64_MAX})
    testing::expect_invalid([&] { page_bytes(F::kV4Fp8, page); },
                            {"model: page: expected 1 to 2147483647, found"});
}

TEST(Model, CacheShape) {
  EXPECT_EQ(cache_shape(F::kV4Fp8, 100, 64), (std::array<int64_t, 2>{100, 37440}));
  EXPECT_EQ(cache_shape(F::kIndexKeys, 0, 64), (std::array<int64_t, 2>{0, 8448}));
  EXPECT_EQ(cache_shape(F::kV32Fp8, 200000, 64)[0] * 41984, int64_t{8396800000});
  testing::expect_invalid([] { cache_shape(F::kV32Fp8, -1, 64); }, {"model", "pages", "-1"});
  testing::expect_invalid([] { cache_shape(F::kV32Fp8, INT64_MAX, 64); }, {"pages"});
  testing::expect_invalid([] { cache_shape(F::kV32Fp8, 4, 0); }, {"page", "found 0"});
}

// Records of a page tile it: no byte belongs to two parts, none of the used ones is left out.
TEST(Records, PartsTileThePage) {
  for (F format : cache_formats())
    for (int64_t page : {1, 2, 3, 64, 65})
      with_record(format, [&](auto record) {
        using R = decltype(record);
        std::vector<int> owner(R::used(page), 0);
        const auto mark = [&](int64_t first, int64_t bytes) {
          for (int64_t i = first; i < first + bytes; ++i) ++owner.at(i);
        };
        for (int64_t off = 0; off < page; ++off)
          if constexpr (R::kQuantized) {
            mark(R::row(off, page), R::kNope);
            mark(R::scales(off, page), R::kScaleBytes);
            if constexpr (R::kRope > 0) mark(R::rope(off, page), R::kRope * 2);
          } else {
            mark(R::row(off, page), R::kDim * 2);
          }
        for (int count : owner) ASSERT_EQ(count, 1) << name_of(format) << " " << page;
      });
}

}  // namespace
}  // namespace winnow
