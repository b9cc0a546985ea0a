// score with AMX tiles in bf16. Keys are rows of A as they are dequantised, a panel of the packed
// query is B, so nothing is transposed; C is 16 keys x 16 heads. A unit is 2 key tiles x 2 panels,
// or up to 4 x 1 when a panel is left over: four accumulators cover the latency of TDPBF16PS (52
// cycles, one every 16).
//
// Budget per key and 64 heads: 16 cycles of tile products, 8 of tile loads beside them; ReLU,
// weights and sum of the unit before (some 6 cycles of vector work) run between the products of the
// current one; decoding, about 12 cycles on the shuffle port, is done before and paid once per
// token block.
#include "core/arithmetic.h"
#include "cpu/amx.h"
#include "score/bf16_avx512.h"

namespace winnow::internal::score {

namespace {

constexpr int kTileRows = 16, kSteps = 4;  // 128 dimensions are four tiles of 32
constexpr int64_t kKeyBytes = kDim * 2, kTileBytes = 1024;

// A unit whose dot products are stored and still wait for ReLU, weights and the sum over panels.
struct Pending {
  float (*sums)[16];
  const float* dots;  // [rows][panels * 16]
  const float* weights;
  int rows = 0, panels = 1;
  bool first = true;  // sets the sums instead of adding to them

  // One of kSteps equal shares.
  [[gnu::always_inline]] void weigh(int step) const {
    panels == 2 ? share<2>(step) : share<1>(step);
  }

 private:
  template <int kPanels>
  [[gnu::always_inline]] void share(int step) const {
    const int count = rows / kSteps;
    const __mmask16 add = first ? 0 : 0xffff;
    const __m512 w0 = _mm512_load_ps(weights);
    const __m512 w1 = _mm512_load_ps(weights + (kPanels - 1) * kPanelHeads);
    float(*sum)[16] = sums + step * count;
    const float* dot = dots + step * count * kPanels * kPanelHeads;
    for (int r = 0; r < count; ++r, dot += kPanels * kPanelHeads) {
      __m512 s = add_head(_mm512_maskz_load_ps(add, sum[r]), w0, _mm512_load_ps(dot));
      if constexpr (kPanels == 2) s = add_head(s, w1, _mm512_load_ps(dot + kPanelHeads));
      _mm512_store_ps(sum[r], s);
    }
  }
};

// C tile `kTile` of a unit: zero, multiply-add, store.
template <int kKeyTiles, int kPanels, int kTile = 0>
[[gnu::always_inline]] inline void zero_all() {
  cpu::tile_zero<kTile>();
  if constexpr (kTile + 1 < kKeyTiles * kPanels) zero_all<kKeyTiles, kPanels, kTile + 1>();
}
template <int kKeyTiles, int kPanels, int kKeyTile = 0>
[[gnu::always_inline]] inline void multiply_all(const std::byte* keys) {
  constexpr int a = 4 + kKeyTile % 2, c = kKeyTile * kPanels;  // A alternates, B are tiles 6 and 7
  cpu::tile_load<a>(keys + kKeyTile * kTileRows * kKeyBytes, kKeyBytes);
  cpu::tile_dot<c, a, 6>();
  if constexpr (kPanels == 2) cpu::tile_dot<c + 1, a, 7>();
  if constexpr (kKeyTile + 1 < kKeyTiles) multiply_all<kKeyTiles, kPanels, kKeyTile + 1>(keys);
}
template <int kKeyTiles, int kPanels, int kTile = 0>
[[gnu::always_inline]] inline void store_all(float* dots) {
  constexpr int row = kTile / kPanels * kTileRows, column = kTile % kPanels * kPanelHeads;
  cpu::tile_store<kTile>(dots + row * kPanels * kPanelHeads + column,
                         kPanels * kPanelHeads * int64_t{4});
  if constexpr (kTile + 1 < kKeyTiles * kPanels) store_all<kKeyTiles, kPanels, kTile + 1>(dots);
}

// The dot products of one unit, and the vector work of the unit before in between.
template <int kKeyTiles, int kPanels>
void unit(const std::byte* query, const std::byte* keys, float* dots, const Pending& before) {
  zero_all<kKeyTiles, kPanels>();
  for (int step = 0; step < kSteps; ++step) {
    cpu::tile_load<6>(query + step * kTileBytes, 64);
    if constexpr (kPanels == 2) cpu::tile_load<7>(query + (kSteps + step) * kTileBytes, 64);
    multiply_all<kKeyTiles, kPanels>(keys + step * 64);
    before.weigh(step);
  }
  store_all<kKeyTiles, kPanels>(dots);
}

using Unit = void (*)(const std::byte*, const std::byte*, float*, const Pending&);
constexpr Unit kWide[] = {unit<1, 2>, unit<2, 2>};  // by key tiles - 1
constexpr Unit kNarrow[] = {unit<1, 1>, unit<2, 1>, unit<3, 1>, unit<4, 1>};

void block(const Block& b) noexcept {
  alignas(64) float sums[kBlockKeys][16], dots[2][4 * kTileRows * kPanelHeads];
  const int panels = panels_of(b.heads), key_tiles = ceil_div(b.count, kTileRows);
  const auto* weights = reinterpret_cast<const float*>(b.query + panels * kPanelValues * 2);
  Pending before{sums, dots[1], weights};  // of no rows
  int turn = 0;
  for (int panel = 0; panel < panels; panel += 2) {
    const bool wide = panels - panel > 1;
    for (int k = 0; k < key_tiles;) {
      const int most = wide ? 2 : 4, tiles = key_tiles - k < most ? key_tiles - k : most;
      (wide ? kWide : kNarrow)[tiles - 1](b.query + panel * kPanelValues * 2,
                                          b.keys + k * kTileRows * kKeyBytes, dots[turn], before);
      before = {sums + k * kTileRows, dots[turn],   weights + panel * kPanelHeads,
                tiles * kTileRows,    wide ? 2 : 1, panel == 0};
      turn ^= 1;
      k += tiles;
    }
  }
  for (int step = 0; step < kSteps; ++step) before.weigh(step);
  for (int k = 0; k < b.count; k += kGroupKeys)
    _mm512_store_ps(b.out + k, _mm512_mul_ps(sum_rows(sums + k), _mm512_load_ps(b.scales + k)));
}

// Tiles are configured once per worker and call.
void with_tiles(void (*work)(void*), void* context) noexcept {
  const cpu::TileSession session;
  work(context);
}

}  // namespace

void amx(const Params& p) noexcept {
  static constexpr Engine engine = {2,     bf16_query_bytes, pack_bf16, dequantize_bf16,
                                    block, with_tiles};
  run_blocks(p, engine);
}

}  // namespace winnow::internal::score
