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
#include "cpu/stream_simd.h"
#include "cpu/write_record_simd.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::rotate::HWY_NAMESPACE {

namespace hs = cpu::HWY_NAMESPACE;

// Whether heads go past the caches: those of a long call, unless they stay where they are.
bool past_caches(const Params& p) {
  const int64_t size = p.codes ? 1 : sizeof(bf16);
  const void* out = p.codes ? static_cast<const void*>(p.codes) : p.out;
  return out != p.x && hs::is_long(p.tokens * p.heads * p.width * size) && hs::at_line(out) &&
         p.width * size % hs::kLine == 0 && p.out_token * size % hs::kLine == 0 &&
         p.out_head * size % hs::kLine == 0;
}

// Asks for a head's values, counted as token * heads + head. Between stores past the caches nothing
// else asks early enough.
HWY_INLINE void prefetch_head(const Params& p, int64_t at) {
  constexpr int64_t kValues = hs::kLine / static_cast<int64_t>(sizeof(bf16));
  const bf16* x = p.x + at / p.heads * p.x_token + at % p.heads * p.x_head;
  for (int64_t i = 0; i < p.width; i += kValues) __builtin_prefetch(x + i, 0, 2);
}

// A head as codes and scales. The rotated values are one half of a tile, whose other half stays.
HWY_INLINE void quantize_head(const Params& p, const hs::TileQuantizer& quantizer,
                              const hs::TokenAngles& angles, hs::Rounding rounding, bool stream,
                              const bf16* x, int64_t t, int64_t h) {
  HWY_ALIGN uint8_t streamed[kTile];
  HWY_ALIGN bf16 row[kTile];
  static_assert(kTile == 2 * kRopeDim);
  const int64_t begin = core::rope_begin(p.rope, p.width);
  const int64_t turned = begin % kTile;
  const int64_t other = kRopeDim - turned;
  angles.rotate(x + begin, row + turned, rounding);
  hs::copy_64(x + begin - turned + other, row + other);
  auto* codes = reinterpret_cast<uint8_t*>(p.codes + t * p.out_token + h * p.out_head);
  float* scales = p.scales + t * p.scale_token + h * p.scale_head;
  for (int64_t tile = 0; tile < p.width / kTile; ++tile) {
    const bf16* values = begin / kTile == tile ? row : x + tile * kTile;
    uint8_t* to = codes + tile * kTile;
    scales[tile * p.scale_tile] = hs::write_tile<kTile>(quantizer, values, stream ? streamed : to);
    if (stream) hs::stream_lines(streamed, kTile, to);
  }
}

// Heads [first, last) of all tokens, counted as token * heads + head.
void rotate_heads(const Params& p, int64_t first, int64_t last) {
  const int64_t begin = core::rope_begin(p.rope, p.width);
  const hs::TileQuantizer quantizer(p.quantizer);
  hs::TokenAngles angles(p.rope, p.positions, p.position_stride);
  const bool stream = past_caches(p);
  const hs::Rounding rounding = hs::rounding_of(false);
  constexpr int64_t kAhead = 4;  // heads
  for (int64_t at = first; at < last; ++at) {
    const int64_t t = at / p.heads;
    const int64_t h = at % p.heads;
    if (!angles.load(t)) continue;
    const bf16* x = p.x + t * p.x_token + h * p.x_head;
    if (p.codes) {
      if (at + kAhead < last) prefetch_head(p, at + kAhead);
      quantize_head(p, quantizer, angles, rounding, stream, x, t, h);
      continue;
    }
    bf16* out = p.out + t * p.out_token + h * p.out_head;
    if (stream) {
      constexpr int64_t kSize = sizeof(bf16);
      HWY_ALIGN bf16 turned[kRopeDim];
      angles.rotate(x + begin, turned, rounding);
      hs::stream_lines(x, begin * kSize, out);
      hs::stream_lines(turned, sizeof turned, out + begin);
      const int64_t behind = begin + kRopeDim;
      hs::stream_lines(x + behind, (p.width - behind) * kSize, out + behind);
      continue;
    }
    if (out != x) std::memcpy(out, x, p.width * sizeof(bf16));
    angles.rotate(x + begin, out + begin, rounding);
  }
  if (stream) hwy::FlushStream();
}

}  // namespace winnow::internal::rotate::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::rotate {

HWY_EXPORT(rotate_heads);

void simd::rotate(const Params& p) noexcept {
  const int64_t count = p.tokens * p.heads;
  // 64 KB of traffic, above the cost of a task; more for heads that go elsewhere, since a task
  // waits for its stores past the caches.
  const int64_t least = 1 + 16384 / p.width;
  const int64_t most = p.codes == nullptr && p.out == p.x ? least : 8 * least;
  const int64_t block = std::clamp<int64_t>(count / (16 * cpu::threads()), least, most);
  cpu::parallel_for(ceil_div(count, block), [&](int64_t task, int) {
    const int64_t first = task * block;
    HWY_DYNAMIC_DISPATCH(rotate_heads)(p, first, std::min(first + block, count));
  });
}

}  // namespace winnow::internal::rotate
#endif  // HWY_ONCE
