// rotate with portable vectors, parallel over tokens. Budget: 4 B of traffic a value (2 B for those
// that stay, in place); a token's 256 B of angles are read once for all its heads.
#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "rotate/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "rotate/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/prologue_simd.h"
#include "cpu/write_record_simd.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::rotate::HWY_NAMESPACE {

namespace hs = cpu::HWY_NAMESPACE;

// A head as codes and scales. The rotated values lie in one tile, and its other half stays.
HWY_INLINE void quantize_head(const Params& p, const hs::TileQuantizer& quantizer,
                              const hs::TokenAngles& angles, const bf16* x, int64_t t, int64_t h) {
  HWY_ALIGN bf16 row[kTile];
  const int64_t begin = core::rope_begin(p.rope, p.width);
  std::memcpy(row, x + begin / kTile * kTile, sizeof row);
  angles.rotate(row + begin % kTile, row + begin % kTile);
  auto* codes = reinterpret_cast<uint8_t*>(p.codes + t * p.out_token + h * p.out_head);
  float* scales = p.scales + t * p.scale_token + h * p.scale_head;
  for (int64_t tile = 0; tile < p.width / kTile; ++tile) {
    const bf16* values = begin / kTile == tile ? row : x + tile * kTile;
    scales[tile * p.scale_tile] = hs::write_tile<kTile>(quantizer, values, codes + tile * kTile);
  }
}

// Heads [first, last) of all tokens, counted as token * heads + head.
void rotate_heads(const Params& p, int64_t first, int64_t last) {
  const int64_t begin = core::rope_begin(p.rope, p.width);
  const hs::TileQuantizer quantizer(p.quantizer);
  hs::TokenAngles angles(p.rope, p.positions, p.position_stride);
  for (int64_t at = first; at < last; ++at) {
    const int64_t t = at / p.heads;
    const int64_t h = at % p.heads;
    if (!angles.load(t)) continue;
    const bf16* x = p.x + t * p.x_token + h * p.x_head;
    if (p.codes) {
      quantize_head(p, quantizer, angles, x, t, h);
      continue;
    }
    bf16* out = p.out + t * p.out_token + h * p.out_head;
    if (out != x) std::memcpy(out, x, p.width * sizeof(bf16));
    angles.rotate(x + begin, out + begin);
  }
}

}  // namespace winnow::internal::rotate::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::rotate {

HWY_EXPORT(rotate_heads);

void simd::rotate(const Params& p) noexcept {
  const int64_t count = p.tokens * p.heads;
  const int64_t block = 1 + 16384 / p.width;  // 64 KB of traffic: above the cost of a task
  cpu::parallel_for(ceil_div(count, block), [&](int64_t task, int) {
    const int64_t first = task * block;
    HWY_DYNAMIC_DISPATCH(rotate_heads)(p, first, std::min(first + block, count));
  });
}

}  // namespace winnow::internal::rotate
#endif  // HWY_ONCE
