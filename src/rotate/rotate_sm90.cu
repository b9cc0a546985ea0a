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

constexpr int kRows = kThreads / cuda::kRopeLanes;  // tiles that a block takes at a time

struct Quantized {
  Params p;
  uint32_t blocks = 1;  // of a token
  bool wide = false, out_wide = false;
};

// kEach: tiles of a thread.
template <int kEach>
__global__ void __launch_bounds__(kThreads, 3) quantize(const __grid_constant__ Quantized call) {
  constexpr int kHalf = kTile / 2;
  const Params& p = call.p;
  const int64_t t = blockIdx.x / call.blocks;
  const int64_t position = p.positions[t * p.position_stride];
  const int lane = static_cast<int>(threadIdx.x) % cuda::kRopeLanes;
  const int at = lane * cuda::kPiece;
  const auto tiles = static_cast<uint32_t>(p.width / kTile);  // of a head
  const uint32_t first = blockIdx.x % call.blocks * kRows * kEach + threadIdx.x / cuda::kRopeLanes;
  uint4 low[kEach], high[kEach];
  const auto load = [&](bool wide) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t tile = first + i * kRows;
      low[i] = high[i] = {};
      if (tile / tiles >= p.heads) continue;
      const bf16* x = p.x + t * p.x_token + tile / tiles * p.x_head + tile % tiles * kTile;
      low[i] = cuda::load_piece(x, at, kTile, wide);
      high[i] = cuda::load_piece(x, at + kHalf, kTile, wide);
    }
  };
  call.wide ? load(true) : load(false);
  if (!core::in_table(p.rope, position)) return;
  const cuda::Turn turn = cuda::turn_of(p.rope, position, lane);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint32_t tile = first + i * kRows;
    const int64_t head = tile / tiles;
    // The first half of the head's first tile turns, or the second of its last.
    const bool turns = tile % tiles == (p.rope.first ? 0 : tiles - 1);
    const uint4 turned =
        cuda::rotated(p.rope.half, turn, cuda::either(p.rope.first, low[i], high[i]));
    low[i] = cuda::either(turns && p.rope.first, turned, low[i]);
    high[i] = cuda::either(turns && !p.rope.first, turned, high[i]);
    const float amax = fmaxf(cuda::largest(low[i]), cuda::largest(high[i]));
    const float scale = cuda::tile_scale<cuda::kRopeLanes>(p.quantizer, amax);
    if (head >= p.heads) continue;
    auto* out = reinterpret_cast<uint8_t*>(p.codes) + t * p.out_token + head * p.out_head +
                tile % tiles * kTile + at;
    cuda::store_codes(out, call.out_wide, cuda::codes_of(p.quantizer, scale, low[i]));
    cuda::store_codes(out + kHalf, call.out_wide, cuda::codes_of(p.quantizer, scale, high[i]));
    if (lane == 0)
      p.scales[t * p.scale_token + head * p.scale_head + tile % tiles * p.scale_tile] = scale;
  }
}

void launch_quantized(const Params& p) {
  const int64_t tiles = p.heads * (p.width / kTile);  // of a token
  if (p.tokens * tiles == 0) return;
  Quantized call{p};
  // One tile a thread is the shortest wait; four keep the memory busy once all multiprocessors are.
  constexpr int64_t kFew = 4096;  // tiles of the call
  constexpr int kMost = 4;
  const int64_t each = p.tokens * tiles <= kFew ? 1 : kMost;
  call.blocks = static_cast<uint32_t>(core::ceil_div(tiles, kRows * each));
  call.wide = cuda::is_wide(p.x, p.x_token * 2) && p.x_head % cuda::kPiece == 0;
  call.out_wide = reinterpret_cast<uintptr_t>(p.codes) % cuda::kPiece == 0 &&
                  p.out_token % cuda::kPiece == 0 && p.out_head % cuda::kPiece == 0;
  const auto blocks = static_cast<unsigned>(p.tokens * call.blocks);
  const auto kernel = each == 1 ? quantize<1> : quantize<kMost>;
  kernel<<<blocks, kThreads, 0, cuda::stream_of(p.device)>>>(call);
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
