// The matrix instructions of the pretended device against the model, bit by bit.
#include "emulated/matrix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulated/machine.h"
#include "emulated/matrix_model.h"
#include "emulated/numbers.h"

namespace winnow::emulated {
namespace {

using namespace model;

// What the sum of products must be, in the other order of k.
uint32_t expected_sum(const Wgmma& op, const std::function<uint32_t(int)>& a,
                      const std::function<uint32_t(int)>& b, uint32_t addend) {
  double sum = 0;
  for (int k = 32 / bytes_of(op.a); k-- > 0;) {
    const double x = value_of(op.a, a(k)), y = value_of(op.b, b(k));
    sum += (op.negated_a ? -x : x) * (op.negated_b ? -y : y);
  }
  if (op.keeps_sums) sum += std::bit_cast<float>(addend);
  return std::bit_cast<uint32_t>(static_cast<float>(sum));
}

void check(const Wgmma& op, const Layout& at_a, const Layout& at_b, Shared& shared,
           Random& random) {
  for (int warp = 0; warp < 4; ++warp) {
    Registers a(4), sums(op.n / 2);
    a.randomize(random, op.a);
    sums.randomize_floats(random);
    Registers before = sums;
    const std::vector<std::byte> bytes = shared.bytes;
    wgmma(op, warp, sums.data(), op.a_in_registers ? a.data() : nullptr, at_a.descriptor(),
          at_b.descriptor(), shared.view());
    ASSERT_EQ(bytes, shared.bytes);
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < op.n; ++column) {
        const auto of_a = [&](int k) {
          return op.a_in_registers
                     ? a_of(a, op.a, row, k)
                     : shared.get(at_a.address(16 * warp + row, k, bytes_of(op.a)), op.a);
        };
        const auto of_b = [&](int k) {
          return shared.get(at_b.address(column, k, bytes_of(op.b)), op.b);
        };
        ASSERT_EQ(sum_of(sums, row, column),
                  expected_sum(op, of_a, of_b, sum_of(before, row, column)))
            << "n " << op.n << ", warp " << warp << ", row " << row << ", column " << column;
      }
  }
}

constexpr int kWidths[] = {8, 16, 24, 32, 48, 64, 128, 192, 256};
constexpr size_t kSharedBytes = 227 * 1024;

// Rows or columns of 128 bytes (or of the span), one group of eight after the other.
Layout random_layout(Random& random, int mode, bool transposed, uint32_t first) {
  Layout layout;
  layout.mode = mode;
  layout.transposed = transposed;
  const uint32_t pattern = 8 * layout.span();
  layout.start = first + below(random, 8) * 1024;
  // Along K, a product begins within the span.
  if (!transposed && mode > 0) layout.start += below(random, layout.span() / 32) * 32;
  layout.stride = pattern * (1 + below(random, 3));
  layout.leading = pattern * (1 + below(random, 3));
  return layout;
}

class WgmmaOf : public ::testing::TestWithParam<Element> {};

TEST_P(WgmmaOf, AllWidthsAndLayouts) {
  Random random(1);
  const Element element = GetParam();
  Shared shared(kSharedBytes, random, element);
  for (int n : kWidths)
    for (int mode = 0; mode < 4; ++mode)
      for (bool transposed : {false, true}) {
        if (transposed && bytes_of(element) == 1) continue;
        SCOPED_TRACE(::testing::Message() << "mode " << mode << ", transposed " << transposed);
        Wgmma op;
        op.n = n;
        op.a = op.b = element;
        op.a_in_registers = true;
        op.transposed_b = transposed;
        const Layout b = random_layout(random, mode, transposed, 32 * 1024);
        check(op, {}, b, shared, random);
        // A in shared memory, in any other layout.
        op.a_in_registers = false;
        op.transposed_a = bytes_of(element) == 2 && below(random, 2);
        op.negated_a = below(random, 2);
        op.negated_b = below(random, 2);
        op.keeps_sums = below(random, 2);
        const Layout a =
            random_layout(random, static_cast<int>(below(random, 4)), op.transposed_a, 0);
        check(op, a, b, shared, random);
      }
}
INSTANTIATE_TEST_SUITE_P(Elements, WgmmaOf,
                         ::testing::Values(Element::kF16, Element::kBf16, Element::kE4m3,
                                           Element::kE5m2));

TEST(WgmmaTest, ElementsOfTwoKinds) {
  Random random(2);
  Shared shared(kSharedBytes, random, Element::kE5m2);
  Wgmma op;
  op.n = 16;
  op.a = Element::kE4m3;
  op.b = Element::kE5m2;
  op.a_in_registers = true;
  check(op, {}, {.start = 2048, .leading = 16, .stride = 1024}, shared, random);
}

TEST(WgmmaTest, NegationAndScale) {
  Random random(3);
  Shared shared(kSharedBytes, random, Element::kBf16);
  const Layout a{.start = 4096, .leading = 16, .stride = 1024};
  const Layout b{.start = 65536, .leading = 8192, .stride = 1024, .transposed = true};
  for (int bits = 0; bits < 16; ++bits) {
    Wgmma op;
    op.n = 24;
    op.negated_a = bits & 1;
    op.negated_b = bits & 2;
    op.keeps_sums = bits & 4;
    op.a_in_registers = bits & 8;
    op.transposed_b = true;
    check(op, a, b, shared, random);
  }
}

// The tiles that the library's kernels make: the copy engine's 128-byte swizzle, written down here
// as its documentation has it, and products that step through 64 columns or rows of K.
TEST(WgmmaTest, TilesOfTheCopyEngine) {
  Random random(4);
  const Element element = Element::kBf16;
  for (bool along_n : {false, true}) {
    Shared shared(kSharedBytes);
    constexpr int kColumns = 128, kDepth = 64;
    constexpr uint32_t kTileA = 8192, kTileB = 32768;
    std::vector<uint32_t> a(64 * kDepth), b(kColumns * kDepth);
    const auto place = [&](uint32_t tile, int row, int column, uint32_t code) {
      const int chunk = (column / 8) ^ (row % 8);
      shared.put(tile + row * 128 + chunk * 16 + column % 8 * 2, element, code);
    };
    for (int row = 0; row < 64; ++row)
      for (int k = 0; k < kDepth; ++k)
        place(kTileA, row, k, a[row * kDepth + k] = moderate_code(random, element));
    for (int column = 0; column < kColumns; ++column)
      for (int k = 0; k < kDepth; ++k) {
        const uint32_t code = b[column * kDepth + k] = moderate_code(random, element);
        if (along_n) place(kTileB + column / 64 * 8192, k, column % 64, code);
        else place(kTileB, column, k, code);
      }
    for (int warp = 0; warp < 4; ++warp) {
      Registers sums(kColumns / 2);
      for (int step = 0; step < kDepth / 16; ++step) {
        Wgmma op;
        op.n = kColumns;
        op.transposed_b = along_n;
        op.keeps_sums = step > 0;
        // desc() of src/cuda/hopper.h, and kDescHigh.
        const uint64_t high = uint64_t{1024 / 16 | 1u << 30} << 32;
        const uint64_t low_a = (kTileA + step * 32) / 16 | 1 << 16;
        const uint64_t low_b = along_n ? (kTileB + step * 2048) / 16 | (8192 / 16) << 16
                                       : (kTileB + step * 32) / 16 | 1 << 16;
        wgmma(op, warp, sums.data(), nullptr, high | low_a, high | low_b, shared.view());
      }
      for (int row = 0; row < 16; ++row)
        for (int column = 0; column < kColumns; ++column) {
          double sum = 0;
          for (int k = 0; k < kDepth; ++k)
            sum += value_of(element, a[(16 * warp + row) * kDepth + k]) *
                   value_of(element, b[column * kDepth + k]);
          // Four roundings to fp32, of sums below 2^16.
          ASSERT_NEAR(std::bit_cast<float>(sum_of(sums, row, column)), sum, 4 * 0x1p-9)
              << row << ", " << column;
        }
    }
  }
}

// A pattern that does not begin at a multiple of its size, as the descriptor's base offset says.
TEST(WgmmaTest, BaseOffset) {
  Random random(5);
  Shared shared(kSharedBytes, random, Element::kF16);
  for (uint32_t base = 0; base < 8; ++base) {
    Layout b{.start = 8192 + 128 * base, .stride = 1024, .base_offset = base};
    for (uint32_t row = 0; row < 16; ++row)
      ASSERT_EQ(b.address(row, 0, 2), b.start + row * 128 + row % 8 * 16);
    Wgmma op;
    op.n = 16;
    op.a = op.b = Element::kF16;
    op.a_in_registers = true;
    check(op, {}, b, shared, random);
  }
}

TEST(WgmmaTest, NanAndInfinity) {
  constexpr uint32_t kInf = 0x7f800000, kNan = 0x7fffffff, kMinusInf = 0xff800000;
  const auto sum = [](std::vector<float> x, std::vector<float> y, uint32_t addend,
                      bool keeps_sums = true) {
    Shared shared(8192);
    Registers a(4), sums(4);
    for (size_t k = 0; k < x.size(); ++k) {
      a.lanes[k / 8 * 2][k % 8 / 2] |= uint32_t{to_bf16(x[k])} << 16 * (k % 2);
      shared.put(k * 2, Element::kBf16, to_bf16(y[k]));
    }
    sums.lanes[0][0] = addend;
    Wgmma op;
    op.a_in_registers = true;
    op.keeps_sums = keeps_sums;
    wgmma(op, 0, sums.data(), a.data(), 0, uint64_t{64} << 32 | uint64_t{1} << 62, shared.view());
    return sums.lanes[0][0];
  };
  const float inf = INFINITY, huge = 0x1p127f;
  EXPECT_EQ(sum({inf}, {0}, 0), kNan);
  EXPECT_EQ(sum({inf}, {2}, 0), kInf);
  EXPECT_EQ(sum({inf, inf}, {2, -2}, 0), kNan);
  EXPECT_EQ(sum({inf}, {2}, kMinusInf), kNan);
  EXPECT_EQ(sum({inf}, {2}, kMinusInf, false), kInf);
  EXPECT_EQ(sum({-NAN}, {1}, 0), kNan);
  EXPECT_EQ(sum({0}, {NAN}, 0), kNan);
  EXPECT_EQ(sum({1}, {1}, 0xffc00001), kNan);
  EXPECT_EQ(sum({1}, {1}, 0xffc00001, false), std::bit_cast<uint32_t>(1.f));
  EXPECT_EQ(sum({huge}, {-4}, 0), kMinusInf);
  // What overflows on the way does not do so at the end; small terms keep their bits.
  EXPECT_EQ(sum({huge, huge}, {4, -3.5f}, 0), std::bit_cast<uint32_t>(0x1p126f));
  EXPECT_EQ(sum({0x1p-100f}, {0x1p-49f}, 0), 1u);
  EXPECT_EQ(sum({1, 1, 1}, {1, 0x1p-24f, 0x1p-24f}, 0), 0x3f800001u);
}

std::string fault_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "none";
}

TEST(WgmmaTest, Faults) {
  Shared shared(8192);
  Registers a(4), sums(128);
  const Layout inside{.start = 1024, .leading = 16, .stride = 1024};
  const auto with = [&](Wgmma op, const Layout& at_a, const Layout& at_b, int warp = 0,
                        uint64_t more = 0) {
    return fault_of([&] {
      wgmma(op, warp, sums.data(), a.data(), at_a.descriptor(), at_b.descriptor() | more,
            shared.view());
    });
  };
  EXPECT_EQ(with({.n = 56}, inside, inside), "none");
  EXPECT_EQ(with({.n = 64}, inside, inside),
            "wgmma: shared address 0x2000 lies outside of the 8192 bytes of shared memory");
  EXPECT_EQ(with({.n = 8}, {.start = 1024, .stride = 4096}, inside, 0), "none");
  EXPECT_EQ(with({.n = 8}, {.start = 1024, .stride = 4096}, inside, 1),
            "wgmma: shared address 0x2400 lies outside of the 8192 bytes of shared memory");
  const Layout columns{.start = 7168, .leading = 8192, .stride = 1024, .transposed = true};
  EXPECT_EQ(with({.transposed_b = true}, inside, columns),
            "wgmma: shared address 0x2000 lies outside of the 8192 bytes of shared memory");
  for (int bit : {14, 15, 30, 31, 46, 48, 52, 61})
    EXPECT_NE(with({}, inside, inside, 0, uint64_t{1} << bit).find("bits outside of its fields"),
              std::string::npos);
  EXPECT_EQ(with({.n = 12}, inside, inside), "wgmma: n is 12");
  EXPECT_EQ(with({.n = 264}, inside, inside), "wgmma: n is 264");
  EXPECT_EQ(with({.n = 0}, inside, inside), "wgmma: n is 0");
  EXPECT_EQ(with({}, inside, inside, 4), "wgmma: warp 4 of a warpgroup");
  EXPECT_EQ(with({.a = Element::kE4m3}, inside, inside),
            "wgmma: A and B have elements of different sizes");
  const char* const major = "wgmma: only operands of 16 bits in shared memory may be MN-major";
  const Element e4m3 = Element::kE4m3;
  EXPECT_EQ(with({.a = e4m3, .b = e4m3, .transposed_b = true}, inside, inside), major);
  EXPECT_EQ(with({.a_in_registers = true, .transposed_a = true}, inside, inside), major);
}

TEST(MmaTest, M16n8k16) {
  Random random(6);
  for (Element element : {Element::kBf16, Element::kF16})
    for (int round = 0; round < 20; ++round) {
      Registers a(4), b(2), addends(4), sums(4);
      a.randomize(random, element);
      b.randomize(random, element);
      addends.randomize_floats(random);
      Wgmma op;
      op.a = op.b = element;
      const auto expect = [&](Registers& found, Registers& added) {
        for (int row = 0; row < 16; ++row)
          for (int column = 0; column < 8; ++column)
            ASSERT_EQ(sum_of(found, row, column),
                      expected_sum(
                          op, [&](int k) { return a_of(a, element, row, k); },
                          [&](int k) { return b_of(b, element, k, column); },
                          sum_of(added, row, column)));
      };
      mma_m16n8k16(element, sums.data(), a.data(), b.data(), addends.data());
      expect(sums, addends);
      // Sums in the addends' registers, in the same and in another order, and in those of A.
      Registers same = addends;
      mma_m16n8k16(element, same.data(), a.data(), b.data(), same.data());
      expect(same, addends);
      Registers other = addends;
      uint32_t* const reversed[] = {other.pointers[3], other.pointers[2], other.pointers[1],
                                    other.pointers[0]};
      mma_m16n8k16(element, reversed, a.data(), b.data(), other.data());
      std::swap(other.lanes[0], other.lanes[3]);
      std::swap(other.lanes[1], other.lanes[2]);
      expect(other, addends);
      Registers overwritten = a;
      mma_m16n8k16(element, overwritten.data(), overwritten.data(), b.data(), addends.data());
      expect(overwritten, addends);
    }
  Registers a(4);
  EXPECT_EQ(fault_of([&] { mma_m16n8k16(Element::kE4m3, a.data(), a.data(), a.data(), a.data()); }),
            "mma: m16n8k16 has elements of 16 bits");
}

// The 16 bits of matrix `matrix` that lie at (row, column) of memory, as registers hold them.
uint32_t held(const Registers& registers, int matrix, bool transposed, int row, int column) {
  if (transposed) std::swap(row, column);
  return registers.element(matrix, 4 * row + column / 2, column % 2 * 2, Element::kF16);
}

// Rows of 16 bytes at random places, none twice.
std::vector<uint32_t> row_addresses(Random& random, size_t bytes) {
  std::vector<uint32_t> addresses(bytes / 16);
  for (size_t i = 0; i < addresses.size(); ++i) addresses[i] = static_cast<uint32_t>(16 * i);
  std::shuffle(addresses.begin(), addresses.end(), random);
  addresses.resize(32);
  return addresses;
}

TEST(MatrixCopies, LoadAndStore) {
  Random random(7);
  constexpr Element kHalf = Element::kF16;
  for (int count : {1, 2, 4})
    for (bool transposed : {false, true}) {
      Shared shared(4096, random, kHalf);
      const std::vector<uint32_t> addresses = row_addresses(random, 4096);
      Registers registers(4);
      load_matrices(count, transposed, addresses.data(), registers.data(), shared.view());
      for (int matrix = 0; matrix < count; ++matrix)
        for (int row = 0; row < 8; ++row)
          for (int column = 0; column < 8; ++column)
            ASSERT_EQ(held(registers, matrix, transposed, row, column),
                      shared.get(addresses[8 * matrix + row] + 2 * column, kHalf));
      for (int matrix = count; matrix < 4; ++matrix)
        ASSERT_EQ(registers.lanes[matrix], std::vector<uint32_t>(32));

      // Into the register that holds the addresses.
      Registers over = registers;
      std::copy(addresses.begin(), addresses.end(), over.pointers[0]);
      load_matrices(count, transposed, over.pointers[0], over.data(), shared.view());
      ASSERT_EQ(over.lanes, registers.lanes);

      registers.randomize(random, kHalf);
      Shared expected = shared;
      for (int matrix = 0; matrix < count; ++matrix)
        for (int row = 0; row < 8; ++row)
          for (int column = 0; column < 8; ++column)
            expected.put(addresses[8 * matrix + row] + 2 * column, kHalf,
                         held(registers, matrix, transposed, row, column));
      store_matrices(count, transposed, addresses.data(), registers.data(), shared.view());
      ASSERT_EQ(shared.bytes, expected.bytes);
    }
}

TEST(MatrixCopies, Faults) {
  Random random(8);
  for (const auto& [wrong, what] :
       {std::pair<uint32_t, const char*>{4096, "lies outside of the 4096 bytes of shared memory"},
        {0xfffffff0, "lies outside of the 4096 bytes"},
        {4092, "0xffc is not a multiple of 16"}}) {
    Shared shared(4096, random, Element::kF16);
    const std::vector<std::byte> before = shared.bytes;
    Registers registers(4);
    registers.randomize(random, Element::kF16);
    const auto values = registers.lanes;
    std::vector<uint32_t> addresses = row_addresses(random, 4096);
    addresses[15] = wrong;
    const auto load = [&](int count) {
      return fault_of(
          [&] { load_matrices(count, false, addresses.data(), registers.data(), shared.view()); });
    };
    const auto store = [&](int count) {
      return fault_of(
          [&] { store_matrices(count, false, addresses.data(), registers.data(), shared.view()); });
    };
    EXPECT_NE(load(2).find(what), std::string::npos) << load(2);
    EXPECT_EQ(registers.lanes, values);
    EXPECT_NE(store(4).find(what), std::string::npos) << store(4);
    EXPECT_EQ(shared.bytes, before);
    // The addresses of matrices that are not asked for do not count.
    EXPECT_EQ(load(1), "none");
    EXPECT_EQ(store(1), "none");
  }
}

}  // namespace
}  // namespace winnow::emulated
