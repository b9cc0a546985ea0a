// The AMX roof: four sums of 16 x 16 from two A and two B tiles in registers; a product is 16 x 16
// x 32, so 16,384 FLOP in 16 cycles.
#if defined(__x86_64__)
#include "cpu/amx.h"
#include "roofs.h"

namespace winnow::bench {

double matrix_amx(int64_t rounds) noexcept {
  using internal::cpu::tile_dot, internal::cpu::tile_load, internal::cpu::tile_zero;
  const internal::cpu::TileSession session;
  alignas(64) uint16_t values[16 * 32];
  for (uint16_t& v : values) v = 0x3d00;  // 2^-5 in bf16
  tile_load<4>(values, 64), tile_load<5>(values, 64);
  tile_load<6>(values, 64), tile_load<7>(values, 64);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t r = 0; r < rounds; ++r)
    tile_dot<0, 4, 6>(), tile_dot<1, 4, 7>(), tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>();
  return 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(rounds);
}

}  // namespace winnow::bench
#endif
