// topk_mask: every kernel against a set, hostile ids included.
#include <set>

#include "testing.h"
#include "winnow/mask.h"

namespace winnow {
namespace {

using testing::Guarded;

struct Case {
  std::string name;
  int64_t tokens, topk, bytes;
  bool lengths = false, strided = false;
};

std::vector<Case> cases() {
  return {{"small", 3, 5, 2},
          {"topk", 9, 2048, 600, true},
          {"one_byte", 4, 20, 1, true},
          {"no_ids", 3, 0, 7},
          {"no_bytes", 3, 6, 0},
          {"no_tokens", 0, 6, 4},
          {"strided", 5, 33, 11, true, true},
          {"rows_of_any_alignment", 19, 130, 53, true, true},
          {"long", 3, 5000, 40000, true, true}};
}

class MaskTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(MaskTest, IsTheSet) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("mask", kernel); !why.empty()) GTEST_SKIP() << why;
  testing::Rng rng(c.topk);
  const int64_t stride = c.topk + (c.strided ? 3 : 0), row = c.bytes + (c.strided ? 2 : 0);
  Guarded<int32_t> ids(c.tokens * stride), lengths(c.tokens);
  Guarded<uint8_t> mask(c.tokens * row);
  const auto bad = testing::hostile(8 * c.bytes);
  for (int32_t& id : ids)
    id = static_cast<int32_t>(testing::draw(rng, 0, 5) == 0
                                  ? bad[testing::draw(rng, 0, bad.size() - 1)]
                                  : testing::draw(rng, 0, 8 * c.bytes));
  const int32_t some[] = {static_cast<int32_t>(4 * c.bytes), 0, INT32_MAX, -5};
  for (int64_t t = 0; t < c.tokens; ++t) lengths[t] = some[t % 4];
  TopkMaskArgs a{.ids = tensor(ids.data(), {c.tokens, c.topk}, {stride, 1}),
                 .mask = tensor(mask.data(), {c.tokens, c.bytes}, {row, 1}),
                 .target = testing::target("mask", kernel)};
  if (c.lengths) a.lengths = tensor(lengths.data(), {c.tokens});
  topk_mask(a);
  ASSERT_TRUE(testing::device_finished());
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::set<int64_t> want;
    for (int64_t k = 0; k < c.topk; ++k) {
      const int64_t id = ids[t * stride + k];
      if (id >= 0 && id < 8 * c.bytes && (!c.lengths || id < lengths[t])) want.insert(id);
    }
    for (int64_t j = 0; j < 8 * c.bytes; ++j)
      ASSERT_EQ(mask[t * row + j / 8] >> j % 8 & 1, want.count(j)) << "token " << t << " key " << j;
    for (int64_t j = c.bytes; j < row; ++j) EXPECT_EQ(mask[t * row + j], 0xcd);  // the gap
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, MaskTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("mask")),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

TEST(MaskErrors, NameTheArgument) {
  Guarded<int32_t> ids(12), lengths(3);
  Guarded<uint8_t> mask(9);
  const TopkMaskArgs good{.ids = tensor(ids.data(), {3, 4}),
                          .lengths = tensor(lengths.data(), {3}),
                          .mask = tensor(mask.data(), {3, 3})};
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    TopkMaskArgs a = good;
    change(a);
    testing::expect_error([&] { topk_mask(a); }, code, words);
  };
  expect([](TopkMaskArgs& a) { a.ids = {}; }, {"topk_mask", "ids", "nothing"});
  expect([](TopkMaskArgs& a) { a.ids.dtype = DType::kI64; }, {"ids", "int32", "int64"});
  expect([](TopkMaskArgs& a) { a.lengths.shape[0] = 2; }, {"lengths", "[3]", "[2]"});
  expect([](TopkMaskArgs& a) { a.mask.shape[0] = 2; }, {"mask", "[3, any]", "[2, 3]"});
  expect([](TopkMaskArgs& a) { a.mask.stride[0] = 1; }, {"mask", "overlap"});
  expect([](TopkMaskArgs& a) { a.mask.data = nullptr; }, {"mask", "null"});
  expect([](TopkMaskArgs& a) { a.target.kernel = "fastest"; }, {"mask", "no kernel fits", "simd"},
         ErrorCode::kUnsupported);
  for (const uint8_t x : mask) EXPECT_EQ(x, 0xcd);  // nothing was written
}

}  // namespace
}  // namespace winnow
