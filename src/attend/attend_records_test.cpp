// attend: fp8 records with values at the edges of their format.
#include <cmath>
#include <limits>
#include <numeric>

#include "attend/attend_problem.h"
#include "core/formats.h"
#include "testing.h"
#include "winnow/attend.h"

namespace winnow {
namespace {

using internal::attend::Answer;
using internal::attend::attend_with_workspace;
using internal::attend::Case;
using internal::attend::expect_close;
using internal::attend::kInf;
using internal::attend::kValueDim;
using internal::attend::Problem;
using internal::attend::Results;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using AttendRecords = internal::attend::KernelTest;

// fp8 records with scales that no writer makes: a reader accepts them all. Several numbers of
// heads, as few may be another way through a kernel; and codes of normal numbers alone, whose
// products a kernel may take from a table.
TEST_P(AttendRecords, StrangeScales) {
  const struct {
    const char* name;
    bool normal;
    float scales[4][4];
  } sets[] = {
      {"all codes",
       false,
       {{0, 1e-38f, -2, 1}, {1e-44f, 0, 1, 0x1p-120f}, {0x1p-126f, 1, -0.0f, 3}, {1, 1, 1e30f, 1}}},
      {"normal codes",
       true,
       {{0.7f, -1.3f, 0x1p-100f, 1},
        {3e-3f, 1.9999f, -0x1.fffp-110f, 0.1f},
        {1, 2, 3, 4},
        {1, 1, 1e30f, 1}}},
      {"powers of two",
       false,
       {{0x1p-60f, 1, 0.5f, 2}, {4, 0x1p-9f, 0x1p-40f, 1}, {1, 2, 0.25f, 8}, {1, 1, 0x1p60f, 1}}},
      {"powers of two, one negative",
       true,
       {{1, 1, 0.5f, 2}, {4, 0x1p-9f, -1, 1}, {1, 2, 0.25f, 8}, {1, 1, 1, 1}}},
      {"powers of two, wide",
       true,
       {{0x1p-127f, 1, 0, 2}, {4, 0x1p-149f, 1, 1}, {1, 2, 0.25f, 8}, {1, 1, 0x1p127f, 1}}},
  };
  for (const auto& [name, normal, scales] : sets)
    for (const int heads : {4, 20, 50}) {
      SCOPED_TRACE(std::to_string(heads) + " heads, " + name);
      Case c{.name = "", .tokens = 1, .heads = heads, .list = {{CacheFormat::kV32Fp8, 8, 1, 4}}};
      Problem p(c);
      std::iota(p.lists[0]->indices->begin(), p.lists[0]->indices->end(), 0);
      uint8_t* bytes = p.lists[0]->bytes->data();
      for (int r = 0; r < 4; ++r) {
        for (int i = 0; i < 512; ++i) {
          int code = (i * 37 + r * 11) % 256;  // subnormals and the largest codes among them
          if (normal) code = (code & 128) + 16 + code % 111;
          bytes[r * 656 + i] = static_cast<uint8_t>((code & 127) == 127 ? 0 : code);
        }
        // The last row's 1e30 meets codes of 0 alone: 0 * scale must stay 0.
        if (r == 3) std::memset(bytes + r * 656 + 256, 0, 128);
        std::memcpy(bytes + r * 656 + 512, scales[r], 16);
        std::memset(bytes + r * 656 + 528, 0, 128);
      }
      Answer want = p.expected();
      Results r(c);
      AttendArgs a = args(p, r);
      attend_with_workspace(a);
      expect_close(a, want, true);
      // A NaN code and a NaN scale are NaN; in a slot that the list does not name they are nothing.
      const uint8_t code = bytes[5];
      bytes[5] = 0x7f;
      attend_with_workspace(a);
      EXPECT_TRUE(std::isnan(to_float(r.out[0])));
      bytes[5] = code;
      std::memcpy(bytes + 656 + 516, &kNan, 4);
      attend_with_workspace(a);
      EXPECT_TRUE(std::isnan(to_float(r.out[0])));
      (*p.lists[0]->indices)[1] = -1;
      attend_with_workspace(a);
      EXPECT_FALSE(std::isnan(to_float(r.out[0])));
    }
}

// The same of V4, whose scales kernels may add to exponents: a NaN code stays one at any scale.
TEST_P(AttendRecords, NanOfV4) {
  Case c{.name = "", .tokens = 1, .heads = 4, .list = {{CacheFormat::kV4Fp8, 8, 1, 4}}};
  Problem p(c);
  for (int i = 0; i < 4; ++i) (*p.lists[0]->indices)[i] = 2 * i;  // the slots that hold records
  uint8_t* bytes = p.lists[0]->bytes->data();
  const int row = 2 * 576, scale = 8 * 576 + 2 * 8;  // of the second record
  Results r(c);
  const AttendArgs a = args(p, r);
  const auto expect_nan = [&](bool want) {
    attend_with_workspace(a);
    for (int h = 0; h < 4; ++h) {
      EXPECT_EQ(std::isnan(to_float(r.out[h * kValueDim + 3])), want) << h;
      EXPECT_EQ(std::isnan(r.lse[h]), want) << h;
    }
  };
  expect_nan(false);
  for (const int code : {0x7f, 0xff})
    for (const int power : {100, 120, 127, 130}) {
      const uint8_t before[] = {bytes[row + 70], bytes[scale + 1]};
      bytes[row + 70] = static_cast<uint8_t>(code);
      bytes[scale + 1] = static_cast<uint8_t>(power);
      expect_nan(true);
      bytes[row + 70] = before[0];
      bytes[scale + 1] = before[1];
    }
  bytes[scale + 1] = 255;
  expect_nan(true);
  (*p.lists[0]->indices)[1] = -1;
  expect_nan(false);
}

// V4's RoPE columns are values, in bf16, of another size than the rest of their record. Queries of
// 0 there, so that they do not decide the logits.
TEST_P(AttendRecords, RopeOfV4) {
  constexpr int kRope = 448;
  for (const int heads : {4, 20, 50}) {
    SCOPED_TRACE(std::to_string(heads) + " heads");
    Case c{.name = "", .tokens = 1, .heads = heads, .list = {{CacheFormat::kV4Fp8, 8, 1, 4}}};
    Problem p(c);
    for (int i = 0; i < 4; ++i) (*p.lists[0]->indices)[i] = 2 * i;  // the slots that hold records
    for (int h = 0; h < heads; ++h)
      for (int d = kRope; d < kValueDim; ++d) p.query(0, h, d) = to_bf16(0);
    Results r(c);
    AttendArgs a = args(p, r);
    const auto rope = [&](int record) {
      return reinterpret_cast<bf16*>(p.lists[0]->bytes->data() + 2 * record * 576 + kRope);
    };
    const auto multiply = [&](int record, float factor) {
      for (int d = 0; d < 64; ++d) rope(record)[d] = to_bf16(to_float(rope(record)[d]) * factor);
    };
    // One record's are larger, then smaller, than everything else.
    for (const float factor : {0x1p12f, 0x1p-40f}) {
      SCOPED_TRACE(factor);
      multiply(1, factor);
      Answer want = p.expected();
      attend_with_workspace(a);
      expect_close(a, want);
    }
    // So large that the output's other columns may count as 0.
    for (int record = 0; record < 4; ++record) multiply(record, record == 1 ? 0x1p110f : 0x1p100f);
    const Answer want = p.expected();
    attend_with_workspace(a);
    for (int h = 0; h < heads; ++h)
      for (int d = 0; d < kValueDim; ++d) {
        const float got = to_float(r.out[h * kValueDim + d]);
        if (d < kRope) EXPECT_TRUE(std::isfinite(got)) << h << ", " << d;
        else
          EXPECT_NEAR(got, want.out[h * kValueDim + d],
                      0x1p-6f * want.magnitude[h * kValueDim + d]);
      }
    // An infinity weighs all, and the other columns are its record's.
    multiply(1, 0x1p-70f);
    rope(1)[9] = to_bf16(kInf);
    for (int h = 0; h < heads; ++h) p.query(0, h, kRope + 9) = to_bf16(1);
    attend_with_workspace(a);
    Results alone(c);
    rope(1)[9] = to_bf16(0);
    (*p.lists[0]->indices)[0] = (*p.lists[0]->indices)[2] = (*p.lists[0]->indices)[3] = -1;
    attend_with_workspace(args(p, alone));
    for (int h = 0; h < heads; ++h)
      for (int d = 0; d < kValueDim; ++d) {
        const int at = h * kValueDim + d;
        EXPECT_EQ(to_float(r.out[at]), d == kRope + 9 ? kInf : to_float(alone.out[at]))
            << h << ", " << d;
      }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttendRecords, ::testing::ValuesIn(testing::kernels("attend")));

}  // namespace
}  // namespace winnow
