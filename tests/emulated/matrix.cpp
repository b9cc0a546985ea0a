// All operands come down to blocks: eight rows of A or eight columns of B, 32 bytes deep. In memory
// and in registers alike, a block is 16 chunks of 16 bytes.
#include "emulated/matrix.h"

#include <bit>
#include <cstdio>
#include <cstring>
#include <string>

#include "emulated/machine.h"
#include "emulated/numbers.h"

namespace winnow::emulated {
namespace {

constexpr int kChunkBytes = 16, kChunks = 16;
constexpr int kMostDepth = 32;  // of a block, in elements of a byte

[[noreturn]] void fail(const char* instruction, const std::string& what) {
  throw Fault(std::string(instruction) + ": " + what);
}
std::string hexadecimal(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

// The chunk of shared memory at an address, which must be there and aligned.
std::byte* chunk_at(const char* instruction, const SharedBytes& shared, uint32_t address) {
  if (address % kChunkBytes)
    fail(instruction, "shared address " + hexadecimal(address) + " is not a multiple of 16");
  if (uint64_t{address} + kChunkBytes > shared.size)
    fail(instruction, "shared address " + hexadecimal(address) + " lies outside of the " +
                          std::to_string(shared.size) + " bytes of shared memory");
  return shared.data + address;
}

// Eight rows of A, or eight columns of B, before they are decoded. K-major: the two chunks of each
// row in turn. MN-major: a chunk of all eight for each k.
struct RawBlock {
  alignas(16) std::byte bytes[kChunks * kChunkBytes];
  std::byte* chunk(int i) { return bytes + i * kChunkBytes; }
};

// The same in registers: each lane holds four bytes, four lanes a chunk. Always K-major.
RawBlock from_registers(const uint32_t* first_half, const uint32_t* second_half) {
  RawBlock raw;
  for (int row = 0; row < 8; ++row) {
    std::memcpy(raw.chunk(2 * row), first_half + 4 * row, kChunkBytes);
    std::memcpy(raw.chunk(2 * row + 1), second_half + 4 * row, kChunkBytes);
  }
  return raw;
}

// An operand in shared memory, as its descriptor says.
class Operand {
 public:
  Operand(uint64_t descriptor, bool transposed, const SharedBytes& shared)
      : shared_(shared), transposed_(transposed) {
    // What was added to the start address may have left its field.
    constexpr uint64_t kFields = 0xc00e3fff3fff3fff;
    if (descriptor & ~kFields)
      fail("wgmma", "descriptor " + hexadecimal(descriptor) + " has bits outside of its fields");
    const auto offset = [&](int bit) {
      return static_cast<uint32_t>(descriptor >> bit & 0x3fff) * 16;
    };
    start_ = offset(0);
    const uint32_t leading = offset(16), stride = offset(32);
    base_offset_ = descriptor >> 49 & 7;
    const int mode = static_cast<int>(descriptor >> 62);
    span_ = mode == 0 ? 16 : 256 >> mode;
    swizzle_mask_ = span_ / 16 - 1;
    // Without a swizzle the two distances are those of 8 x 16 bytes: the leading one along K.
    if (!transposed) {
      next_eight_ = stride;
      next_half_ = mode == 0 ? leading : 16;
    } else {
      next_atom_ = mode == 0 ? stride : leading;
      next_half_ = mode == 0 ? leading : stride;
    }
  }

  // Rows or columns [8 * eight, 8 * eight + 8).
  RawBlock read(int eight) const {
    RawBlock raw;
    if (transposed_) {
      // An atom has span / 16 chunks along MN, and eight k.
      const int chunks = static_cast<int>(span_ / 16);
      const uint32_t first = start_ + eight % chunks * 16 + eight / chunks * next_atom_;
      for (int k = 0; k < kChunks; ++k)
        copy(raw.chunk(k), first + k % 8 * span_ + k / 8 * next_half_);
    } else {
      const uint32_t first = start_ + eight * next_eight_;
      for (int row = 0; row < 8; ++row)
        for (int half = 0; half < 2; ++half)
          copy(raw.chunk(2 * row + half), first + row * span_ + half * next_half_);
    }
    return raw;
  }

 private:
  // The swizzle is one of absolute addresses: bits 4 to 6 are changed by bits 7 to 9, which the
  // base offset says how to count where the pattern does not begin at a multiple of its size.
  void copy(std::byte* to, uint32_t address) const {
    const uint32_t swizzled = address ^ (((address >> 7) - base_offset_) & swizzle_mask_) << 4;
    std::memcpy(to, chunk_at("wgmma", shared_, swizzled), kChunkBytes);
  }

  SharedBytes shared_;
  bool transposed_;
  uint32_t start_, base_offset_, span_, swizzle_mask_;
  uint32_t next_eight_ = 0;  // K-major: from eight rows to the next
  uint32_t next_atom_ = 0;   // MN-major: from one atom to the next along MN
  uint32_t next_half_;       // K-major: from 16 bytes to the next; MN-major: from 8 k to the next
};

// Where the i-th of eight columns stands in a decoded block: even columns, then odd ones. Four
// lanes hold the even columns of a row of the sums in one register and the odd ones in the next, so
// that sums are loaded, added to and stored without a shuffle.
constexpr int place(int i) { return i % 2 * 4 + i / 2; }

// GCC makes an array of eight sums out of memory, not of registers.
using Pair = double __attribute__((vector_size(16)));

union Block {
  double values[kMostDepth * 8];  // of the eight at k: [8 * k, 8 * k + 8)
  Pair pairs[kMostDepth * 4];
};

// T: of the size of an element.
template <class T, float (*kDecode)(T)>
void decode(const RawBlock& raw, bool transposed, bool negated, Block& block) {
  constexpr int kDepth = 32 / sizeof(T);
  T stored[8 * kDepth], codes[8 * kDepth];
  std::memcpy(stored, raw.bytes, sizeof stored);
  const T sign = static_cast<T>(negated ? T{1} << (8 * sizeof(T) - 1) : 0);
  if (transposed) {
    for (int k = 0; k < kDepth; ++k)
      for (int i = 0; i < 8; ++i) codes[8 * k + place(i)] = stored[8 * k + i];
  } else {
    for (int i = 0; i < 8; ++i)
      for (int k = 0; k < kDepth; ++k) codes[8 * k + place(i)] = stored[kDepth * i + k];
  }
  for (int i = 0; i < 8 * kDepth; ++i) block.values[i] = kDecode(codes[i] ^ sign);
}
void decode(Element element, const RawBlock& raw, bool transposed, bool negated, Block& block) {
  switch (element) {
    case Element::kF16: return decode<uint16_t, from_f16>(raw, transposed, negated, block);
    case Element::kBf16: return decode<uint16_t, from_bf16>(raw, transposed, negated, block);
    case Element::kE4m3: return decode<uint8_t, from_e4m3>(raw, transposed, negated, block);
    case Element::kE5m2: return decode<uint8_t, from_e5m2>(raw, transposed, negated, block);
  }
}
constexpr int depth_of(Element element) {
  return element == Element::kF16 || element == Element::kBf16 ? 16 : 32;
}

using PairOfFloats = float __attribute__((vector_size(8)));
using PairOfBits = uint32_t __attribute__((vector_size(8)));

Pair widened(const uint32_t* bits) {
  PairOfFloats x;
  std::memcpy(&x, bits, sizeof x);
  return __builtin_convertvector(x, Pair);
}
void round_to(uint32_t* bits, Pair sum) {
  const PairOfFloats x = __builtin_convertvector(sum, PairOfFloats);
  // The device has one NaN for all.
  const PairOfBits canonical = {0x7fffffff, 0x7fffffff};
  const PairOfBits result = x == x ? std::bit_cast<PairOfBits>(x) : canonical;
  std::memcpy(bits, &result, sizeof result);
}

// 16 rows by eight columns: four registers of sums, even and odd columns of the first eight rows
// and of the others. addends: null for zeros.
//
// In double, products are exact, and so are their sums where magnitudes are within 2^24 of each
// other: the order within an instruction hardly ever shows in a result. On the device, which aligns
// all products of an instruction and adds them at once, it does not either. That the device drops
// bits when it aligns is not pretended. Sums in fp32 would take half the time and show the order.
template <int kDepth>
void multiply(const Block (&a)[2], const Block& b, uint32_t* const* sums,
              const uint32_t* const* addends) {
  for (int half = 0; half < 2; ++half)
    for (int row = 0; row < 8; ++row) {
      Pair sum[4] = {};
      if (addends)
        for (int i = 0; i < 4; ++i)
          sum[i] = widened(&addends[2 * half + i / 2][4 * row + i % 2 * 2]);
      const double* x = a[half].values + place(row);
      const Pair* y = b.pairs;
      for (int k = 0; k < kDepth; ++k, x += 8, y += 4) {
        const Pair factor = {*x, *x};
        sum[0] += factor * y[0];
        sum[1] += factor * y[1];
        sum[2] += factor * y[2];
        sum[3] += factor * y[3];
      }
      for (int i = 0; i < 4; ++i) round_to(&sums[2 * half + i / 2][4 * row + i % 2 * 2], sum[i]);
    }
}

}  // namespace

void wgmma(const Wgmma& op, int warp, uint32_t* const* sums, const uint32_t* const* a,
           uint64_t a_descriptor, uint64_t b_descriptor, const SharedBytes& shared) {
  const int depth = depth_of(op.a);
  if (op.n < 8 || op.n > 256 || op.n % 8) fail("wgmma", "n is " + std::to_string(op.n));
  if (warp < 0 || warp > 3) fail("wgmma", "warp " + std::to_string(warp) + " of a warpgroup");
  if (depth != depth_of(op.b)) fail("wgmma", "A and B have elements of different sizes");
  if ((depth == 32 && (op.transposed_a || op.transposed_b)) ||
      (op.a_in_registers && op.transposed_a))
    fail("wgmma", "only operands of 16 bits in shared memory may be MN-major");

  Block rows[2], columns;
  if (op.a_in_registers) {
    for (int half = 0; half < 2; ++half)
      decode(op.a, from_registers(a[half], a[half + 2]), false, op.negated_a, rows[half]);
  } else {
    const Operand from(a_descriptor, op.transposed_a, shared);
    for (int half = 0; half < 2; ++half)
      decode(op.a, from.read(2 * warp + half), op.transposed_a, op.negated_a, rows[half]);
  }
  const Operand from(b_descriptor, op.transposed_b, shared);
  for (int eight = 0; eight < op.n / 8; ++eight) {
    decode(op.b, from.read(eight), op.transposed_b, op.negated_b, columns);
    uint32_t* const* const to = sums + 4 * eight;
    const uint32_t* const* const addends = op.keeps_sums ? to : nullptr;
    if (depth == 16) multiply<16>(rows, columns, to, addends);
    else multiply<32>(rows, columns, to, addends);
  }
}

void mma_m16n8k16(Element element, uint32_t* const* sums, const uint32_t* const* a,
                  const uint32_t* const* b, const uint32_t* const* addends) {
  if (depth_of(element) != 16) fail("mma", "m16n8k16 has elements of 16 bits");
  Block rows[2], columns;
  for (int half = 0; half < 2; ++half)
    decode(element, from_registers(a[half], a[half + 2]), false, false, rows[half]);
  decode(element, from_registers(b[0], b[1]), false, false, columns);
  // Sums may lie in the registers of other addends.
  uint32_t results[4][32];
  uint32_t* const to[4] = {results[0], results[1], results[2], results[3]};
  multiply<16>(rows, columns, to, addends);
  for (int i = 0; i < 4; ++i) std::memcpy(sums[i], results[i], sizeof results[i]);
}

void load_matrices(int count, bool transposed, const uint32_t* addresses,
                   uint32_t* const* registers, const SharedBytes& shared) {
  // A register of the results may be the one that holds the addresses.
  uint32_t results[4][32];
  for (int matrix = 0; matrix < count; ++matrix)
    for (int row = 0; row < 8; ++row) {
      const std::byte* from = chunk_at("ldmatrix", shared, addresses[8 * matrix + row]);
      if (!transposed) {
        std::memcpy(results[matrix] + 4 * row, from, kChunkBytes);
        continue;
      }
      // Row `row` of the transposed matrix's column: a half of one lane of every four.
      for (int column = 0; column < 8; ++column)
        std::memcpy(
            reinterpret_cast<std::byte*>(&results[matrix][4 * column + row / 2]) + 2 * (row % 2),
            from + 2 * column, 2);
    }
  for (int matrix = 0; matrix < count; ++matrix)
    std::memcpy(registers[matrix], results[matrix], sizeof results[matrix]);
}

void store_matrices(int count, bool transposed, const uint32_t* addresses,
                    const uint32_t* const* registers, const SharedBytes& shared) {
  std::byte* to[32];
  for (int i = 0; i < 8 * count; ++i) to[i] = chunk_at("stmatrix", shared, addresses[i]);
  for (int matrix = 0; matrix < count; ++matrix)
    for (int row = 0; row < 8; ++row) {
      std::byte* const chunk = to[8 * matrix + row];
      if (!transposed) {
        std::memcpy(chunk, registers[matrix] + 4 * row, kChunkBytes);
        continue;
      }
      for (int column = 0; column < 8; ++column)
        std::memcpy(chunk + 2 * column,
                    reinterpret_cast<const std::byte*>(&registers[matrix][4 * column + row / 2]) +
                        2 * (row % 2),
                    2);
    }
}

}  // namespace winnow::emulated
