// Parts as they wait for the merge: halves close to their values, whatever the row holds; floats
// where halves would not do.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "attend/cpu/tiles.h"
#include "cpu/isa.h"
#include "testing.h"

namespace winnow::internal::attend::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Values of about `size`, some of them a thousand and a billion times smaller.
std::unique_ptr<Partial> part_of(float size, uint64_t seed = 1) {
  testing::Rng rng(seed);
  auto part = std::make_unique<Partial>();
  for (int i = 0; i < kValueDim; ++i) {
    const float factor = i % 3 == 0 ? 1.0f : i % 3 == 1 ? 1e-3f : 1e-9f;
    part->o[i] = size * factor * std::clamp(testing::normal(rng), -4.0f, 4.0f);
  }
  part->m = -2.5f;
  part->l = 7.25f;
  part->max = 3.0f;
  part->w = 7.5f;
  return part;
}

std::unique_ptr<Partial> there_and_back(const Partial& part, bool rounded, float* unit) {
  auto stored = std::make_unique<StoredPart>();
  auto back = std::make_unique<Partial>();
  store(part, rounded, *stored);
  load(*stored, *back);
  *unit = stored->unit;
  EXPECT_EQ(back->m, part.m);
  EXPECT_EQ(back->l, part.l);
  EXPECT_EQ(back->max, part.max);
  EXPECT_EQ(back->w, part.w);
  return back;
}

bool same_values(const Partial& a, const Partial& b) {
  return std::memcmp(a.o, b.o, sizeof a.o) == 0;
}

// Highway's own conversion to halves, where the CPU has none, truncates. The kernels whose parts
// are halves run on CPUs that have it.
std::string why_no_halves() {
#if defined(__x86_64__)
  if (!internal::cpu::isa().avx2)
    return testing::allowed_skip("this CPU does not convert to halves", testing::cpu_has({"f16c"}));
#endif
  return "";
}

TEST(StoredParts, HalvesAreClose) {
  if (const std::string why = why_no_halves(); !why.empty()) GTEST_SKIP() << why;
  // Largest and smallest finite rows among them: neither overflows on the way or back.
  for (const float size : {1.0f, 1e-30f, 3e30f, 4e37f, 1e-36f, 65504.0f, 6e-8f}) {
    const auto part = part_of(size);
    float unit = 0, largest = 0;
    const auto back = there_and_back(*part, true, &unit);
    EXPECT_GT(unit, 0) << size;
    for (const float x : part->o) largest = std::max(largest, std::fabs(x));
    for (int i = 0; i < kValueDim; ++i)  // half of a unit in the last place, as tiles.h says
      EXPECT_LE(std::fabs(back->o[i] - part->o[i]),
                std::max(std::fabs(part->o[i]) * 0x1p-11f, std::max(largest * 0x1p-39f, 0x1p-149f)))
          << size << " " << i;
  }
}

TEST(StoredParts, EdgesOfTheRange) {
  if (const std::string why = why_no_halves(); !why.empty()) GTEST_SKIP() << why;
  Partial part = *part_of(0);
  float unit = 0;
  for (float& x : part.o) x = 0;
  const auto zeros = there_and_back(part, true, &unit);
  for (const float x : zeros->o) EXPECT_EQ(x, 0);
  part.o[7] = std::numeric_limits<float>::max();
  part.o[8] = -std::numeric_limits<float>::max();
  const auto large = there_and_back(part, true, &unit);
  EXPECT_TRUE(same_values(*large, part));  // rounded, it would be infinite
  part.o[7] = std::nextafter(0x1p127f, 0.0f);
  part.o[8] = 0;
  const auto rounded = there_and_back(part, true, &unit);
  EXPECT_EQ(rounded->o[7], 0x1p127f);
  EXPECT_GT(unit, 0);
  // subnormal: below the smallest unit
  part.o[7] = part.o[8] = 0;
  part.o[9] = 0x1p-140f;
  const auto small = there_and_back(part, true, &unit);
  EXPECT_EQ(small->o[9], 0x1p-140f);
}

TEST(StoredParts, InfinitiesAndNanStayFloats) {
  for (const float odd : {kInf, -kInf, kNan, -kNan}) {
    const auto part = part_of(1);
    part->o[kValueDim - 1] = odd;
    float unit = 1;
    EXPECT_TRUE(same_values(*there_and_back(*part, true, &unit), *part)) << odd;
    EXPECT_EQ(unit, 0);
  }
}

TEST(StoredParts, AsTheyAreUnlessRounded) {
  const auto part = part_of(1);
  float unit = 1;
  EXPECT_TRUE(same_values(*there_and_back(*part, false, &unit), *part));
  EXPECT_EQ(unit, 0);
}

TEST(StoredParts, FoldAsTheyAre) {
  // Halves are added as what they stand for: all that differs is where the factor is rounded.
  const auto part = part_of(3, 2);
  StoredPart stored;
  store(*part, true, stored);
  Partial loaded, a = *part_of(1, 3), b = a;
  load(stored, loaded);
  fold(a, stored);
  fold(b, loaded);
  EXPECT_EQ(a.l, b.l);
  EXPECT_EQ(a.w, b.w);
  EXPECT_EQ(a.m, b.m);
  EXPECT_EQ(a.max, b.max);
  EXPECT_TRUE(same_values(a, b));  // the unit is a power of two
  // A part of nothing changes nothing, whatever its row holds.
  stored.l = 0;
  Partial before = a;
  fold(a, stored);
  EXPECT_TRUE(same_values(a, before));
  EXPECT_EQ(a.l, before.l);
}

}  // namespace
}  // namespace winnow::internal::attend::cpu
