// The AMX roof: four sums of 16 x 16 from two A and two B tiles in registers; a product is 16 x 16
// x 32, so 16,384 FLOP in 16 cycles.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "roofs.h"

namespace winnow::bench {

double matrix_amx(int64_t rounds) noexcept {
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);
  Config config{};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
  alignas(64) uint16_t values[16 * 32];
  for (uint16_t& v : values) v = 0x3d00;  // 2^-5 in bf16
  _tile_loadd(4, values, 64);
  _tile_loadd(5, values, 64);
  _tile_loadd(6, values, 64);
  _tile_loadd(7, values, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(rounds);
}

}  // namespace winnow::bench
#endif
