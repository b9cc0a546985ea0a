// rotate and rope_table on the device. rotate is a pass over heads (cuda/heads.h). In e4m3: 8 lanes
// per tile of 128 values, each with 8 of either half, a thread four tiles of its token at once, of
// few tokens one; 2 B read and 1 B written a value, everything between in registers. rope_table: a
// thread per angle, cosine and sine in double, rounded once; made at load, so nobody waits for it.
#include <cuda_runtime.h>

#include "core/arithmetic.h"
#include "cuda/heads.h"
#include "cuda/launch.h"
#include "cuda/record.h"
#include "rotate/kernel.h"

namespace winnow::internal::rotate::sm90 {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) fill_table(const __grid_constant__ TableParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t position = i / core::kPairs;
  const int64_t pair = i % core::kPairs;
  if (position >= p.positions) return;
  const float angle = __fmul_rn(static_cast<float>(position), p.frequencies[pair]);
  float* at = p.table + position * p.position_stride + pair * p.pair_stride;
  at[0] = static_cast<float>(cos(double{angle}));
  at[p.sine_stride] = static_cast<float>(sin(double{angle}));
}

constexpr int kWarpHeads = 32 / cuda::kRopeLanes;  // heads whose tiles share a warp

struct Quantized {
  Params p;
  uint32_t blocks = 1;  // of a token
  bool wide = false, out_wide = false;
};

// A warp takes the same tile of four heads, so that only the warps of the tile that RoPE turns do
// so. kEach: such tiles of a warp. kPlain: everything is aligned, and RoPE turns pairs in place,
// last.
template <int kEach, bool kPlain>
__global__ void __launch_bounds__(kThreads, kPlain ? 4 : 3)
    quantize(const __grid_constant__ Quantized call) {
  constexpr int kHalf = kTile / 2;
  const Params& p = call.p;
  const uint32_t t = cuda::divided(blockIdx.x, call.blocks);
  const int64_t position = p.positions[t * p.position_stride];
  const int lane = static_cast<int>(threadIdx.x) % cuda::kRopeLanes;
  const int at = lane * cuda::kPiece;
  const auto tiles = static_cast<uint32_t>(p.width / kTile);  // of a head
  const uint32_t warps = blockDim.x / 32;
  const uint32_t first = (blockIdx.x - t * call.blocks) * warps * kEach + threadIdx.x / 32;
  struct Spot {
    uint32_t head, tile;
  };
  const auto spot_of = [&](int i) {
    const uint32_t heads = cuda::divided(first + i * warps, tiles);
    return Spot{heads * kWarpHeads + threadIdx.x % 32 / cuda::kRopeLanes,
                first + i * warps - heads * tiles};
  };
  uint4 low[kEach], high[kEach];
  const auto load = [&](bool wide) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const auto [head, tile] = spot_of(i);
      low[i] = high[i] = {};
      if (head >= p.heads) continue;
      const bf16* x = p.x + t * p.x_token + head * p.x_head + tile * kTile;
      low[i] = cuda::load_piece(x, at, kTile, wide);
      high[i] = cuda::load_piece(x, at + kHalf, kTile, wide);
    }
  };
  kPlain || call.wide ? load(true) : load(false);
  if (!core::in_table(p.rope, position)) return;
  const bool first_turns = !kPlain && p.rope.first;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const auto [head, tile] = spot_of(i);
    // The first half of the head's first tile turns, or the second of its last.
    const bool turns = tile == (first_turns ? 0 : tiles - 1);
    if (kPlain && turns) {
      constexpr int kPairs = cuda::kPiece / 2;
      float cosine[kPairs], sine[kPairs];
      cuda::load_turns<true>(p.rope, position, lane * kPairs, cosine, sine);
      high[i] = cuda::turned_pairs(high[i], p.rope.inverse, cosine, sine);
    } else if (turns) {
      const cuda::Turn turn = cuda::turn_of(p.rope, position, lane);
      const uint4 turned =
          cuda::rotated(p.rope.half, turn, cuda::either(first_turns, low[i], high[i]));
      low[i] = cuda::either(first_turns, turned, low[i]);
      high[i] = cuda::either(first_turns, high[i], turned);
    }
    const float amax = fmaxf(cuda::largest(low[i]), cuda::largest(high[i]));
    const float scale = cuda::tile_scale<cuda::kRopeLanes>(p.quantizer, amax);
    if (head >= p.heads) continue;
    auto* out = reinterpret_cast<uint8_t*>(p.codes) + t * p.out_token + head * p.out_head +
                tile * kTile + at;
    const cuda::ScaleInverse by = cuda::scale_inverse(p.quantizer, scale);
    const bool out_wide = kPlain || call.out_wide;
    cuda::store_codes(out, out_wide, cuda::codes_of(p.quantizer, by, low[i]));
    cuda::store_codes(out + kHalf, out_wide, cuda::codes_of(p.quantizer, by, high[i]));
    if (lane == 0) p.scales[t * p.scale_token + head * p.scale_head + tile * p.scale_tile] = scale;
  }
}

void launch_quantized(const Params& p) {
  // Tiles of a token, four heads at a time.
  const int64_t tiles = core::ceil_div(p.heads, int64_t{kWarpHeads}) * (p.width / kTile);
  if (p.tokens * tiles == 0) return;
  Quantized call{p};
  // One tile a thread is the shortest wait; four keep the memory busy once all multiprocessors are.
  constexpr int64_t kFew = 1024;  // such tiles of the call
  constexpr int kMost = 4;
  const bool few = p.tokens * tiles <= kFew;
  const int threads = few ? 64 : kThreads;
  call.blocks =
      static_cast<uint32_t>(core::ceil_div(tiles, int64_t{threads / 32} * (few ? 1 : kMost)));
  call.wide = cuda::is_wide(p.x, p.x_token * 2) && p.x_head % cuda::kPiece == 0;
  call.out_wide = reinterpret_cast<uintptr_t>(p.codes) % cuda::kPiece == 0 &&
                  p.out_token % cuda::kPiece == 0 && p.out_head % cuda::kPiece == 0;
  const auto blocks = static_cast<unsigned>(p.tokens * call.blocks);
  const bool plain =
      call.wide && call.out_wide && cuda::is_wide(p.rope) && !p.rope.half && !p.rope.first;
  const auto kernel = plain ? (few ? quantize<1, true> : quantize<kMost, true>)
                            : (few ? quantize<1, false> : quantize<kMost, false>);
  kernel<<<blocks, threads, 0, cuda::stream_of(p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace

void rotate(const Params& p) noexcept {
  if (p.codes != nullptr) return launch_quantized(p);
  cuda::HeadParams heads;
  heads.x = p.x;
  heads.x_token = p.x_token;
  heads.x_head = p.x_head;
  heads.out = p.out;
  heads.out_token = p.out_token;
  heads.out_head = p.out_head;
  heads.tokens = p.tokens;
  heads.heads = p.heads;
  heads.width = p.width;
  heads.positions = p.positions;
  heads.position_stride = p.position_stride;
  heads.rope = p.rope;
  heads.device = p.device;
  cuda::prepare_heads(heads);
}

void rope_table(const TableParams& p) noexcept {
  const int64_t angles = p.positions * core::kPairs;
  if (angles == 0) return;
  const auto blocks = static_cast<unsigned>(core::ceil_div(angles, int64_t{kThreads}));
  fill_table<<<blocks, kThreads, 0, cuda::stream_of(p.device)>>>(p);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::rotate::sm90
