// The tile wrappers of amx.h in plain C++: they test the logic of AMX kernels on a CPU without AMX.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace winnow::internal::cpu {
namespace {

struct Tile {
  alignas(64) uint8_t row[16][64];
};
inline thread_local Tile tiles[8];

struct TileSession {
  TileSession() {}
};

template <int T>
void tile_zero() {
  std::memset(&tiles[T], 0, sizeof(Tile));
}
template <int T>
void tile_load(const void* from, int64_t stride) {
  for (int r = 0; r < 16; ++r)
    std::memcpy(tiles[T].row[r], static_cast<const char*>(from) + r * stride, 64);
}
template <int T>
void tile_stream(const void* from, int64_t stride) {
  tile_load<T>(from, stride);
}
template <int T>
void tile_store(void* to, int64_t stride) {
  for (int r = 0; r < 16; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, tiles[T].row[r], 64);
}
template <int C, int A, int B>
void tile_dot() {
  uint16_t a[16][32], b[16][32];
  float c[16][16];
  std::memcpy(a, &tiles[A], 1024), std::memcpy(b, &tiles[B], 1024), std::memcpy(c, &tiles[C], 1024);
  const auto wide = [](uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); };
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 32; ++k)
      for (int n = 0; n < 16; ++n) c[m][n] += wide(a[m][k]) * wide(b[k / 2][2 * n + k % 2]);
  std::memcpy(&tiles[C], c, 1024);
}

}  // namespace
}  // namespace winnow::internal::cpu
