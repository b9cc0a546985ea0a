// rotate and rope_table, as specified.
#include <algorithm>
#include <cmath>

#include "rotate/kernel.h"

namespace winnow::internal::rotate::reference {

namespace {

// A head as codes and scales. The rotated values lie in one tile.
void quantize_head(const Params& p, const core::Angles& angles, const bf16* x, int64_t t,
                   int64_t h) {
  const int64_t begin = core::rope_begin(p.rope, p.width);
  for (int64_t tile = 0; tile < p.width / kTile; ++tile) {
    bf16 row[kTile];
    std::copy_n(x + tile * kTile, kTile, row);
    if (begin / kTile == tile) core::rotate_row(p.rope, angles, x + begin, row + begin % kTile);
    e4m3* codes = p.codes + t * p.out_token + h * p.out_head + tile * kTile;
    p.scales[t * p.scale_token + h * p.scale_head + tile * p.scale_tile] =
        core::write_tile(p.quantizer, row, kTile, codes);
  }
}

}  // namespace

void rotate(const Params& p) noexcept {
  const int64_t begin = core::rope_begin(p.rope, p.width);
  for (int64_t t = 0; t < p.tokens; ++t) {
    const int32_t position = p.positions[t * p.position_stride];
    if (!core::in_table(p.rope, position)) continue;
    core::Angles angles;
    core::load_angles(p.rope, position, angles);
    for (int64_t h = 0; h < p.heads; ++h) {
      const bf16* x = p.x + t * p.x_token + h * p.x_head;
      if (p.codes) {
        quantize_head(p, angles, x, t, h);
        continue;
      }
      bf16* out = p.out + t * p.out_token + h * p.out_head;
      if (out != x) std::copy_n(x, p.width, out);
      core::rotate_row(p.rope, angles, x + begin, out + begin);
    }
  }
}

void rope_table(const TableParams& p) noexcept {
  for (int64_t position = 0; position < p.positions; ++position)
    for (int i = 0; i < core::kPairs; ++i) {
      const float angle = static_cast<float>(position) * p.frequencies[i];
      float* at = p.table + position * p.position_stride + i * p.pair_stride;
      at[0] = static_cast<float>(std::cos(double{angle}));
      at[p.sine_stride] = static_cast<float>(std::sin(double{angle}));
    }
}

}  // namespace winnow::internal::rotate::reference
