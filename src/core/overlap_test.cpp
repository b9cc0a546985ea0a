// Views that share memory, against the sets of their bytes.
#include "core/overlap.h"

#include <set>

#include "core/check.h"
#include "testing.h"

namespace winnow {
namespace {

using internal::core::same_view;
using internal::core::share_bytes;

std::set<uintptr_t> bytes_of(const Tensor& t) {
  std::set<uintptr_t> bytes;
  const auto& n = t.shape;
  for (int64_t i = 0; i < (t.rank > 0 ? n[0] : 0); ++i)
    for (int64_t j = 0; j < (t.rank > 1 ? n[1] : 1); ++j)
      for (int64_t k = 0; k < (t.rank > 2 ? n[2] : 1); ++k)
        for (int64_t l = 0; l < (t.rank > 3 ? n[3] : 1); ++l) {
          const auto& s = t.stride;
          const int64_t at = i * s[0] + j * s[1] + k * s[2] + l * s[3];
          for (int64_t b = 0; b < size_of(t.dtype); ++b)
            bytes.insert(reinterpret_cast<uintptr_t>(t.data) + at * size_of(t.dtype) + b);
        }
  return bytes;
}

bool share_bytes_by_sets(const Tensor& a, const Tensor& b) {
  const std::set<uintptr_t> of_a = bytes_of(a);
  for (const uintptr_t byte : bytes_of(b))
    if (of_a.contains(byte)) return true;
  return false;
}

// Any view: strides of any size, dimensions in any order, rows that repeat.
Tensor any_view(testing::Rng& rng, std::byte* memory) {
  constexpr DType kTypes[] = {DType::kU8, DType::kBf16, DType::kF32, DType::kI64};
  Tensor t;
  t.dtype = kTypes[testing::draw(rng, 0, 3)];
  t.rank = static_cast<int>(testing::draw(rng, 1, 4));
  for (int i = 0; i < t.rank; ++i) {
    t.shape[i] = testing::draw(rng, 0, 19) == 0 ? 0 : testing::draw(rng, 1, 6);
    t.stride[i] =
        testing::draw(rng, 0, 3) == 0 ? testing::draw(rng, 0, 2) : testing::draw(rng, 0, 40);
  }
  t.data = memory + testing::draw(rng, 0, 40) * size_of(t.dtype);
  return t;
}

// A view as reshaping and slicing make it: a range of every dimension of [4, 3, 5, 6], or of two
// that are one, in some order.
Tensor slice(testing::Rng& rng, std::byte* memory, DType dtype) {
  Tensor t;
  t.dtype = dtype;
  int64_t first = 0;
  const auto range = [&](int64_t size, int64_t stride) {
    const int64_t begin = testing::draw(rng, 0, size - 1);
    const int64_t step = testing::draw(rng, 1, 2);
    t.shape[t.rank] = testing::draw(rng, 1, (size - begin + step - 1) / step);
    t.stride[t.rank++] = stride * step;
    first += begin * stride;
  };
  const bool joined = testing::draw(rng, 0, 1) == 1;
  if (joined) {
    range(12, 30);
  } else {
    range(4, 90);
    range(3, 30);
  }
  range(5, 6);
  range(6, 1);
  if (testing::draw(rng, 0, 1) == 1) {
    std::swap(t.shape[0], t.shape[1]);
    std::swap(t.stride[0], t.stride[1]);
  }
  t.data = memory + first * size_of(dtype);
  return t;
}

TEST(Overlap, IsThatOfTheBytes) {
  testing::Rng rng(3);
  std::byte* const memory = reinterpret_cast<std::byte*>(uintptr_t{1} << 32);  // never touched
  int shared = 0;
  for (int round = 0; round < 20000; ++round) {
    const bool sliced = round % 2 == 0;
    const DType dtype = round % 4 == 0 ? DType::kBf16 : DType::kF32;
    const Tensor a = sliced ? slice(rng, memory, dtype) : any_view(rng, memory);
    const Tensor b = sliced ? slice(rng, memory, dtype) : any_view(rng, memory);
    const bool want = share_bytes_by_sets(a, b);
    shared += want;
    ASSERT_EQ(share_bytes(a, b), want) << "round " << round;
    ASSERT_EQ(share_bytes(b, a), want) << "round " << round;
    ASSERT_EQ(share_bytes(a, a), a.size() > 0) << "round " << round;
  }
  EXPECT_GT(shared, 4000);
  EXPECT_LT(shared, 15000);
}

TEST(Overlap, OfLargeAndHostileViews) {
  std::byte* const memory = reinterpret_cast<std::byte*>(uintptr_t{1} << 32);
  const auto rows = [&](int64_t column, int64_t width) {
    return Tensor{memory + 2 * column, DType::kBf16, 3, {100000, 128, width}, {128 * 192, 192, 1}};
  };
  EXPECT_FALSE(share_bytes(rows(0, 128), rows(128, 64)));  // q_nope and q_pe of one tensor
  EXPECT_TRUE(share_bytes(rows(0, 129), rows(128, 64)));
  Tensor huge = rows(0, 128);
  huge.stride[0] = INT64_MAX / 16 / 100000;
  EXPECT_TRUE(share_bytes(huge, rows(0, 1)));
  huge.data = reinterpret_cast<std::byte*>(UINTPTR_MAX - 1);
  EXPECT_FALSE(share_bytes(huge, rows(0, 1)));
  EXPECT_FALSE(share_bytes(rows(0, 1), huge));
}

TEST(Overlap, SameViewsHaveEachElementInOnePlace) {
  float x[24] = {};
  const Tensor t = tensor(x, {4, 6});
  EXPECT_TRUE(same_view(t, t));
  EXPECT_FALSE(same_view(t, tensor(x, {6, 4})));
  EXPECT_FALSE(same_view(t, tensor(x, {4, 6}, {1, 4})));
  EXPECT_FALSE(same_view(t, tensor(x, {4, 5}, {6, 1})));
  EXPECT_FALSE(same_view(t, tensor(reinterpret_cast<int32_t*>(x), {4, 6})));
  EXPECT_TRUE(same_view(tensor(x, {1, 6}), tensor(x, {1, 6}, {99, 1})));  // a row of any stride
}

TEST(Check, ApartNamesBothArguments) {
  const Check check("stage");
  float x[24] = {};
  const Tensor in = tensor(x, {2, 6});
  const Tensor same = in;
  const Tensor shifted = tensor(x + 1, {2, 6});
  const Tensor behind = tensor(x + 12, {2, 6});
  const Tensor none;
  check.apart({{behind, "out"}, {none, "lse"}}, {{in, "x"}, {none, "sink"}});
  check.apart({{same, "out"}}, {{in, "x", &same}});
  testing::expect_invalid(
      [&] {
        check.apart({{same, "out"}}, {{in, "x"}});
      },
      {"stage: out: expected memory apart from x, found memory that overlaps it"});
  testing::expect_invalid(
      [&] {
        check.apart({{shifted, "out"}}, {{in, "x", &shifted}});
      },
      {"stage: out: expected x itself, or memory apart from it, found"});
  testing::expect_invalid(
      [&] {
        check.apart({{in, "out"}, {shifted, "lse"}}, {});
      },
      {"stage: out: expected memory apart from lse"});
  // The second output may not be what the first may be.
  testing::expect_invalid(
      [&] {
        check.apart({{behind, "out"}, {same, "lse"}}, {{in, "x", &behind}});
      },
      {"stage: lse: expected memory apart from x"});
}

}  // namespace
}  // namespace winnow
