// score with bf16 dot products (VDPBF16PS): heads in lanes, pairs of a key's values broadcast. A
// tile is up to four panels of 16 heads by 4, 8 or 16 keys, 12 to 16 sums in registers. Budget per
// 16 keys and 64 heads on a core that retires one VDPBF16PS a cycle (Zen 4): 4,096 cycles of dot
// products, against which decoding (about 120), weights (128) and the sum over lanes (60) are
// small, and 6 of 16 cycles of loads. e4m3 is exact in bf16, so the error is that of the fp32 sums.
#include <algorithm>

#include "core/arithmetic.h"
#include "cpu/isa.h"
#include "score/bf16_avx512.h"

namespace winnow::internal::score {

namespace {

// Adds w * max(0, q . k) of kPanels panels for kKeys keys to sums[key], or sets them.
template <int kPanels, int kKeys>
[[gnu::always_inline]] inline void tile(const std::byte* q, const float* w, const uint32_t* keys,
                                        float (*sums)[16], bool first) {
  __m512 dots[kKeys][kPanels];
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k)
#pragma GCC unroll 4
    for (int n = 0; n < kPanels; ++n) dots[k][n] = _mm512_setzero_ps();
  for (int i = 0; i < kPairs; ++i) {
    __m512bh heads[kPanels];
#pragma GCC unroll 4
    for (int n = 0; n < kPanels; ++n)
      heads[n] = reinterpret_cast<__m512bh>(_mm512_load_si512(q + (n * kPanelValues + i * 32) * 2));
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      const auto key =
          reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(keys[k * kPairs + i])));
#pragma GCC unroll 4
      for (int n = 0; n < kPanels; ++n) dots[k][n] = _mm512_dpbf16_ps(dots[k][n], heads[n], key);
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
    __m512 sum = first ? _mm512_setzero_ps() : _mm512_load_ps(sums[k]);
#pragma GCC unroll 4
    for (int n = 0; n < kPanels; ++n)
      sum = add_head(sum, _mm512_load_ps(w + n * kPanelHeads), dots[k][n]);
    _mm512_store_ps(sums[k], sum);
  }
}

template <int kPanels, int kKeys>
void tiles(const Block& b, int panel, float (*sums)[16]) {
  const std::byte* q = b.query + panel * kPanelValues * 2;
  const float* w = reinterpret_cast<const float*>(b.query + panels_of(b.heads) * kPanelValues * 2) +
                   panel * kPanelHeads;
  const auto* keys = reinterpret_cast<const uint32_t*>(b.keys);
  // A tile's share of what the next block needs, in whole lines.
  const size_t bytes = panel == 0 ? b.ahead.size() : 0;
  const size_t share = round_up(ceil_div(bytes * kKeys, static_cast<size_t>(b.count)), size_t{64});
  size_t fetched = 0;
  for (int k = 0; k < b.count; k += kKeys) {
    for (const size_t end = std::min(fetched + share, bytes); fetched < end; fetched += 64)
      _mm_prefetch(b.ahead.data() + fetched, _MM_HINT_T0);
    tile<kPanels, kKeys>(q, w, keys + k * kPairs, sums + k, panel == 0);
  }
}

void block(const Block& b) noexcept {
  alignas(64) float sums[kBlockKeys][16];
  const int panels = panels_of(b.heads);
  for (int panel = 0; panel < panels; panel += 4) {
    switch (panels - panel) {
      case 1: tiles<1, 16>(b, panel, sums); break;
      case 2: tiles<2, 8>(b, panel, sums); break;
      case 3: tiles<3, 4>(b, panel, sums); break;
      default: tiles<4, 4>(b, panel, sums); break;
    }
  }
  for (int k = 0; k < b.count; k += kGroupKeys)
    _mm512_store_ps(b.out + k, _mm512_mul_ps(sum_rows(sums + k), _mm512_load_ps(b.scales + k)));
}

}  // namespace

void avx512bf16(const Params& p) noexcept {
  // Zen 5: a fifth of a token's time with cold caches, 2 to 4 % with warm ones. Zen 4: no gain.
  Engine engine = {2, bf16_query_bytes, pack_bf16, dequantize_bf16, block};
  engine.fetches = cpu::isa().zen5;
  run_blocks(p, engine);
}

}  // namespace winnow::internal::score
