// Matrix instructions of one warp, over registers as 32 lanes each and over the shared memory of a
// block. The layouts of fragments and of descriptors are those of the PTX documentation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace winnow::emulated {

// A register of a warp: 32 lanes.
using Lanes = uint32_t[32];

// Shared memory of a block, addressed from 0.
struct SharedBytes {
  std::byte* data;
  size_t size;
};

enum class Element { kF16, kBf16, kE4m3, kE5m2 };

// wgmma.mma_async.sync.aligned.m64nNkK.f32.A.B, K = 16 for two-byte elements and 32 for one-byte
// ones; the 16 rows of one warp of the warpgroup. Sums in fp32 (the products of an instruction are
// exact, added in double and rounded once).
struct Wgmma {
  int n = 8;
  Element a = Element::kBf16, b = Element::kBf16;
  bool a_in_registers = false;
  bool transposed_a = false, transposed_b = false;  // MN-major operands in shared memory
  bool negated_a = false, negated_b = false;
  bool keeps_sums = true;  // scale-d: false sets the sums to 0 first
};
// `warp` 0 to 3 of its warpgroup; sums: n / 2 registers; a: four registers, or none with a
// descriptor. Throws Fault where an address lies outside of shared memory.
void wgmma(const Wgmma& op, int warp, uint32_t* const* sums, const uint32_t* const* a,
           uint64_t a_descriptor, uint64_t b_descriptor, const SharedBytes& shared);

// mma.sync.aligned.m16n8k16.row.col.f32.{bf16,f16}: a of four registers, b of two, sums of four.
void mma_m16n8k16(Element element, uint32_t* const* sums, const uint32_t* const* a,
                  const uint32_t* const* b, const uint32_t* const* addends);

// ldmatrix / stmatrix .x1 .x2 .x4 of 8 x 8 elements of 16 bits: addresses[i] is the shared address
// in lane i (the first 8 * count are used), registers[0, count).
void load_matrices(int count, bool transposed, const uint32_t* addresses,
                   uint32_t* const* registers, const SharedBytes& shared);
void store_matrices(int count, bool transposed, const uint32_t* addresses,
                    const uint32_t* const* registers, const SharedBytes& shared);

}  // namespace winnow::emulated
