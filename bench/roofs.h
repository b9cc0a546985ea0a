// The CPU's ceilings on the workers that winnow uses: arithmetic units and memory.
#pragma once

#include <cstdint>

#include "harness.h"

namespace winnow::bench {

Roofs measure_cpu_roofs();

// `rounds` rounds of independent operations in registers; each returns the FLOP it did. Those of an
// instruction set are compiled for it alone and may be called only where it exists.
double fma_portable(int64_t rounds) noexcept;
double fma_avx2(int64_t rounds) noexcept;
double fma_avx512(int64_t rounds) noexcept;
double bf16_dot_avx512bf16(int64_t rounds) noexcept;
double matrix_amx(int64_t rounds) noexcept;

}  // namespace winnow::bench
