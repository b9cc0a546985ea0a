// The CPU's ceilings on the workers that winnow uses: arithmetic units and memory.
#pragma once

#include <cstdint>
#include <string>

#include "harness.h"

namespace winnow::bench {

// The unit that a kernel is held against: its name ends in the instruction set.
double Roofs::*unit_of(const std::string& kernel);

Roofs measure_cpu_roofs();
// One sample of a kernel's unit on all workers, about a millisecond.
double sample_cpu_roof(const std::string& kernel);

// `rounds` rounds of independent operations in registers; each returns the FLOP it did. Those of an
// instruction set are compiled for it alone and may be called only where it exists.
double fma_portable(int64_t rounds) noexcept;
double fma_avx2(int64_t rounds) noexcept;
double fma_avx512(int64_t rounds) noexcept;
double bf16_dot_avx512bf16(int64_t rounds) noexcept;
double matrix_amx(int64_t rounds) noexcept;

}  // namespace winnow::bench
