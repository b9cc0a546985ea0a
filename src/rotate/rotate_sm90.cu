// rotate and rope_table on the device. rotate is a pass over heads (cuda/heads.h). In e4m3: 8 lanes
// per tile of 128 values, each with 8 of either half, a thread four tiles of its token at once, of
// few tokens one; 2 B read and 1 B written a value, everything between in registers. rope_table: a
// thread per angle, cosine and sine in double, rounded once; made at load, so nobody waits for it.
#include <cuda_runtime.h>

#include "core/arithmetic.h"
#include "cuda/few.cuh"
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
// so. kEach: such tiles of a warp.
template <int kEach>
__global__ void __launch_bounds__(kThreads, 3) quantize(const __grid_constant__ Quantized call) {
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
  call.wide ? load(true) : load(false);
  if (!core::in_table(p.rope, position)) return;
  const bool first_turns = p.rope.first;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const auto [head, tile] = spot_of(i);
    // The first half of the head's first tile turns, or the second of its last.
    if (tile == (first_turns ? 0 : tiles - 1)) {
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
    cuda::store_codes(out, call.out_wide, cuda::codes_of(p.quantizer, by, low[i]));
    cuda::store_codes(out + kHalf, call.out_wide, cuda::codes_of(p.quantizer, by, high[i]));
    if (lane == 0) p.scales[t * p.scale_token + head * p.scale_head + tile * p.scale_tile] = scale;
  }
}

// Heads of 512, everything aligned, RoPE over pairs in place, last: what V4 has. Strides are in
// bytes of what they step over.
constexpr int kLatentTiles = 4;
struct Latents {
  cuda::FewTurns turns;
  const bf16* x;
  uint8_t* codes;
  float* scales;
  uint32_t x_token, x_head;
  uint32_t out_token, out_head;
  uint32_t scale_token, scale_head, scale_tile;
  uint32_t tokens, heads;
  core::Quantizer quantizer;
  bool inverse;
};
constexpr uint32_t kRowsOfGrid = 32768;  // tokens in the grid's second dimension

// The scales of four tiles, which lie in the same 8 lanes: those of tile i are in lane
// holder_of(i). Maxima of two tiles share a word, and half of the lanes reduce one word, half the
// other.
__device__ __forceinline__ constexpr int holder_of(int tile) { return tile / 2 * 4 + tile % 2 * 2; }
template <bool kPowerOfTwo>
__device__ __forceinline__ float four_scales(core::Quantizer q, const uint32_t (&most)[4],
                                             int lane) {
  q.power_of_two = kPowerOfTwo;
  uint32_t both[2];
#pragma unroll
  for (int j = 0; j < 2; ++j)
    both[j] = cuda::larger_pair(__byte_perm(most[2 * j], most[2 * j + 1], 0x5410),
                                __byte_perm(most[2 * j], most[2 * j + 1], 0x7632));
  const bool upper = lane & 4;
  uint32_t own = upper ? both[1] : both[0];
  own = cuda::larger_pair(own, __shfl_xor_sync(~0u, upper ? both[0] : both[1], 4));
  own = cuda::larger_pair(own, __shfl_xor_sync(~0u, own, 2));
  own = cuda::larger_pair(own, __shfl_xor_sync(~0u, own, 1));
  const float amax = fabsf(__uint_as_float(lane & 2 ? own & 0xffff0000u : own << 16));
  return cuda::scale_of_bf16(q, fminf(fmaxf(amax, 0.0f), FLT_MAX));  // not of NaNs alone
}

// As quantize(), for Latents: position and rows are requested at once, the angles as soon as the
// position is there. (A position of 64 bits would be widened ahead of the rows' loads, which then
// wait for it.) 440 instructions for four tiles, 590 where they turn.
template <int kEach, bool kPowerOfTwo>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_latents(const __grid_constant__ Latents call) {
  constexpr int kHalf = kTile / 2;
  const uint32_t t = blockIdx.z * kRowsOfGrid + blockIdx.y;
  if (t >= call.tokens) return;
  const auto warp = threadIdx.x / 32;
  const auto lane = threadIdx.x % cuda::kRopeLanes;
  const uint32_t warps = blockDim.x / 32;
  const uint32_t position = cuda::ask_position(call.turns, t);
  // Warps take the tiles of a group of four heads in turns, so that each has always the same tile.
  const uint32_t unit = blockIdx.x * warps * kEach + warp;
  const uint32_t tile = unit % kLatentTiles;
  const uint32_t first = unit / kLatentTiles * kWarpHeads + threadIdx.x % 32 / cuda::kRopeLanes;
  const uint32_t step = warps / kLatentTiles * kWarpHeads;  // heads between those of a thread
  const bf16* x = call.x + uint64_t{t} * call.x_token + uint64_t{first} * call.x_head +
                  (tile * kTile + lane * cuda::kPiece);
  uint4 low[kEach], high[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    low[i] = high[i] = {};
    if (first + i * step >= call.heads) continue;
    const auto* from = reinterpret_cast<const uint4*>(x + uint64_t{i * step} * call.x_head);
    low[i] = from[0];
    high[i] = from[kHalf / cuda::kPiece];
  }
  if (position >= call.turns.table_positions) return;
  if (tile == kLatentTiles - 1) {
    constexpr int kPairs = cuda::kPiece / 2;
    float cosine[kPairs], sine[kPairs];
    cuda::load_turns<true>(cuda::rope_of(call.turns, false, call.inverse), position,
                           static_cast<int>(lane) * kPairs, cosine, sine);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      high[i] = cuda::turned_pairs(high[i], call.inverse, cosine, sine);
  }
  constexpr core::Quantizer kOf{0, false, kPowerOfTwo};
  uint8_t* out = call.codes + uint64_t{t} * call.out_token + uint64_t{first} * call.out_head +
                 (tile * kTile + lane * cuda::kPiece);
  float* scales = call.scales + uint64_t{t} * call.scale_token + uint64_t{tile} * call.scale_tile +
                  uint64_t{first} * call.scale_head;
  const auto store = [&](int i, const cuda::ScaleInverse& by) {
    uint8_t* to = out + uint64_t{i * step} * call.out_head;
    if (first + i * step >= call.heads) return;
    cuda::store8(to, cuda::codes_of(kOf, by, low[i]));
    cuda::store8(to + kHalf, cuda::codes_of(kOf, by, high[i]));
  };
  uint32_t most[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    most[i] = cuda::larger_pair(cuda::largest_pair(low[i]), cuda::largest_pair(high[i]));
  core::Quantizer q = call.quantizer;
  q.power_of_two = kPowerOfTwo;
  if constexpr (kEach == 4) {
    const float scale = four_scales<kPowerOfTwo>(q, most, static_cast<int>(lane));
    const cuda::ScaleInverse inverse = cuda::scale_inverse(q, scale);
    const uint32_t held = lane / 2;  // the tile whose scale it is
    if (lane % 2 == 0 && first + held * step < call.heads)
      scales[uint64_t{held * step} * call.scale_head] = scale;
    const bool near = kPowerOfTwo || __all_sync(~0u, inverse.nearer == 1);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const auto of_tile = [&](float value) {
        return __shfl_sync(~0u, value, holder_of(i), cuda::kRopeLanes);
      };
      cuda::ScaleInverse by{of_tile(inverse.high), 0, 1};
      if (!kPowerOfTwo) by.low = of_tile(inverse.low);
      if (!near) by.nearer = of_tile(inverse.nearer);
      store(i, by);
    }
  } else {
    const float amax =
        fmaxf(fabsf(__uint_as_float(most[0] << 16)), fabsf(__uint_as_float(most[0] & 0xffff0000u)));
    const float scale = cuda::tile_scale<cuda::kRopeLanes>(q, amax);
    store(0, cuda::scale_inverse(q, scale));
    if (lane == 0 && first < call.heads) scales[0] = scale;
  }
}

// Whether p is as Latents has it; strides must fit 32 bits.
bool are_latents(const Params& p, const Quantized& call) {
  if (p.width != kLatentTiles * kTile || !call.wide || !call.out_wide || p.rope.half ||
      p.rope.first)
    return false;
  return cuda::fits_few(p.rope, p.position_stride) &&
         cuda::fit_products(p.x_token, p.x_head, p.out_token, p.out_head, p.scale_token,
                            p.scale_head, p.scale_tile, p.tokens, p.heads);
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
  call.wide = cuda::is_wide(p.x, p.x_token * 2) && p.x_head % cuda::kPiece == 0;
  call.out_wide = reinterpret_cast<uintptr_t>(p.codes) % cuda::kPiece == 0 &&
                  p.out_token % cuda::kPiece == 0 && p.out_head % cuda::kPiece == 0;
  const bool plain = are_latents(p, call);
  const int threads = few ? 64 : kThreads;
  call.blocks =
      static_cast<uint32_t>(core::ceil_div(tiles, int64_t{threads / 32} * (few ? 1 : kMost)));
  const cudaStream_t stream = cuda::stream_of(p.device);
  if (plain) {
    const auto narrow = [](int64_t x) { return static_cast<uint32_t>(x); };
    const Latents latents{.turns = cuda::few_turns(p.rope, p.positions, p.position_stride),
                          .x = p.x,
                          .codes = reinterpret_cast<uint8_t*>(p.codes),
                          .scales = p.scales,
                          .x_token = narrow(p.x_token),
                          .x_head = narrow(p.x_head),
                          .out_token = narrow(p.out_token),
                          .out_head = narrow(p.out_head),
                          .scale_token = narrow(p.scale_token),
                          .scale_head = narrow(p.scale_head),
                          .scale_tile = narrow(p.scale_tile),
                          .tokens = narrow(p.tokens),
                          .heads = narrow(p.heads),
                          .quantizer = p.quantizer,
                          .inverse = p.rope.inverse};
    const uint32_t rows = latents.tokens < kRowsOfGrid ? latents.tokens : kRowsOfGrid;
    const dim3 grid(call.blocks, rows, core::ceil_div(latents.tokens, kRowsOfGrid));
    const auto kernel = p.quantizer.power_of_two
                            ? (few ? quantize_latents<1, true> : quantize_latents<kMost, true>)
                            : (few ? quantize_latents<1, false> : quantize_latents<kMost, false>);
    kernel<<<grid, threads, 0, stream>>>(latents);
  } else {
    const auto blocks = static_cast<unsigned>(p.tokens * call.blocks);
    const auto kernel = few ? quantize<1> : quantize<kMost>;
    kernel<<<blocks, threads, 0, stream>>>(call);
  }
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
