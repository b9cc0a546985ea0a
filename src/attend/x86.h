// The tuned x86 kernels of attend, for the kernel table. One file each, compiled for its own
// instruction set and entered only after the CPU was asked.
#pragma once

#include <string>

#include "attend/kernel.h"

namespace winnow::attention {

void decode_amx(const Params& p) noexcept;
void decode_avx512bf16(const Params& p) noexcept;
void decode_avx512(const Params& p) noexcept;

size_t decode_amx_workspace(const Shape& shape, int64_t tiles);
size_t decode_avx512bf16_workspace(const Shape& shape, int64_t tiles);
size_t decode_avx512_workspace(const Shape& shape, int64_t tiles);

// "" if this CPU can run the kernel, else what it lacks.
std::string decode_amx_machine();
std::string decode_avx512bf16_machine();
std::string decode_avx512_machine();

// Whether VDPBF16PS beats FMA here: on AMD's CPUs that have it (twice the rate), not on Intel's.
bool bf16_dot_is_fast();

}  // namespace winnow::attention
