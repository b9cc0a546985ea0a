// AMX tiles behind one-line wrappers. Include only from files compiled for AMX.
#pragma once

#include <cstdint>

#ifdef WINNOW_EMULATE_AMX
#include "cpu/amx_emulated.h"
#else

namespace winnow::internal::cpu {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Eight full tiles, 16 rows of 64 bytes, for the lifetime of the object, in this thread.
struct TileSession {
  TileSession() {
    TileConfig c;
    for (int i = 0; i < 8; ++i) {
      c.bytes_per_row[i] = 64;
      c.rows[i] = 16;
    }
    asm volatile("ldtilecfg %0" ::"m"(c));
  }
  ~TileSession() { asm volatile("tilerelease"); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

// Assembly instead of the compiler's macros: those take literal tile numbers only, and do not say
// that a load reads memory, so that stores before it may be moved behind it.
template <int T>
[[gnu::always_inline]] inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
[[gnu::always_inline]] inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}
// The same of lines that are used once: they do not push others out of L1.
template <int T>
[[gnu::always_inline]] inline void tile_stream(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T>
[[gnu::always_inline]] inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}
// C[16x16] += A[16 rows x 32 bf16] * B[16 pairs x 16 columns], in fp32.
template <int C, int A, int B>
[[gnu::always_inline]] inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace
}  // namespace winnow::internal::cpu

#endif
