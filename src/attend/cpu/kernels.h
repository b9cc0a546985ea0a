// The CPU kernels of attend, for the kernel table. A tuned x86 kernel stands in a file of its own,
// which is compiled for its instruction set and entered only after the CPU was asked.
#pragma once

#include <string>

#include "attend/kernel.h"

namespace winnow::internal::attend::cpu {

// Portable vectors, fp32.
void simd(const Params& p) noexcept;
size_t simd_workspace(const Shape& shape, int64_t tiles);

void amx(const Params& p) noexcept;
void avx512bf16(const Params& p) noexcept;
void avx512(const Params& p) noexcept;

size_t amx_workspace(const Shape& shape, int64_t tiles);
size_t avx512bf16_workspace(const Shape& shape, int64_t tiles);
size_t avx512_workspace(const Shape& shape, int64_t tiles);

// "" if this CPU can run the kernel, else what it lacks.
std::string amx_machine();
std::string avx512bf16_machine();
std::string avx512_machine();

// Whether VDPBF16PS beats FMA here: on AMD's CPUs that have it (twice the rate), not on Intel's.
bool bf16_dot_is_fast();

// Whether the vector kernels fetch records all the way to L1, instead of to L2.
bool fetch_near();

}  // namespace winnow::internal::attend::cpu
