// Products per head for many rows: a block keeps a head's weights in shared memory and streams rows
// past them.
//
// multiply_sm90.cu reads both operands of every tile again and is bound by L2 there: 64 FLOP a
// byte. Here the weights, up to 128 KB, are read once a block; two warpgroups multiply 64 rows each
// by wgmma, a thread fetches slices of 64 columns of the rows through a ring of five stages,
// another the weights, panel by panel. With one tile of 128 result columns (project_output,
// decompress) a row is read once for 128 FLOP a byte; with several (absorb_query) its slices stay
// until the last tile is done, and what is written counts: 537 MB for 4,096 tokens of 128 heads,
// 0.13 ms. Sums have the order of multiply_sm90.cu.
#include <cuda_runtime.h>

#include <algorithm>

#include "absorb/multiply_sm90.h"
#include "core/arithmetic.h"
#include "core/tuning_h200.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/mma.h"
#include "cuda/tensor_map.h"
#include "cuda/wgmma_bf16_128.h"

namespace winnow::internal::absorb::sm90 {

namespace {

using namespace internal::cuda;
namespace tuned = tuning_h200::absorb;

constexpr int kRows = 128, kCols = 128, kDepth = 64;  // of a tile; of a slice
constexpr int kTileBytes = 64 * 128;                  // 64 rows of 64 elements
constexpr int kPanels = 8;                            // 64 x 128 of the weights, all that fit
constexpr int kStages = 5;
constexpr int kConsumers = 256, kThreads = kConsumers + 64;

struct alignas(1024) SharedMemory {
  uint8_t b[kPanels][2][kTileBytes];
  uint8_t a[kStages][2][kTileBytes];
  uint64_t full[kStages], empty[kStages], weights[kPanels];
};

struct Stream {
  CUtensorMap a, b;
  Product p;
  int splits = 1;         // blocks that share a head's rows
  int64_t row_tiles = 0;  // of a head
  int slices = 0, col_tiles = 0;
};

struct Share {
  int64_t head, first, last;  // row tiles [first, last)
};
__device__ Share share_of(const Stream& t) {
  const int64_t part = blockIdx.x % t.splits;
  return {blockIdx.x / t.splits, part * t.row_tiles / t.splits,
          (part + 1) * t.row_tiles / t.splits};
}

// All weights of a head: panel col_tile * slices + slice. One thread.
template <bool kByColumn>
__device__ void fetch_weights(SharedMemory& sm, const Stream& t, const Share& share) {
  const int head = static_cast<int>(share.head);
#pragma unroll 1
  for (int panel = 0; panel < t.slices * t.col_tiles; panel++) {
    const int k = panel % t.slices * kDepth, col = panel / t.slices * kCols;
    uint64_t* there = &sm.weights[panel];
    mb_expect(there, 2 * kTileBytes);
    if constexpr (kByColumn) {  // a row for each column
      copy_box(s32(sm.b[panel]), t.b, {k, col, head}, there);
    } else {  // a row for each of the depth, 64 columns a tile
      copy_box(s32(sm.b[panel][0]), t.b, {col, k, head}, there);
      copy_box(s32(sm.b[panel][1]), t.b, {col + 64, k, head}, there);
    }
  }
}

// The slices of each row tile. One thread.
__device__ void fetch_rows(SharedMemory& sm, const Stream& t, const Share& share) {
  const int head = t.p.a_head == 0 ? 0 : static_cast<int>(share.head);
  int piece = 0;
#pragma unroll 1
  for (int64_t tile = share.first; tile < share.last; tile++)
#pragma unroll 1
    for (int slice = 0; slice < t.slices; slice++, piece++) {
      const int s = piece % kStages;
      mb_wait(&sm.empty[s], (piece / kStages & 1) ^ 1);
      mb_expect(&sm.full[s], 2 * kTileBytes);
      copy_box(s32(sm.a[s]), t.a, {slice * kDepth, static_cast<int>(tile * kRows), head},
               &sm.full[s]);
    }
}

// kOne: one tile of result columns, so that a slice is free as soon as it was multiplied.
template <bool kByColumn, bool kOne>
__device__ void consume(SharedMemory& sm, const Stream& t, const Share& share) {
  const Product& p = t.p;
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int64_t mine = threadIdx.x / 32 * 16 + lane / 4;
  const auto release = [&](int n) {
    if (lane == 0) mb_arrive(&sm.empty[n % kStages]);
  };
  float d[64];
  int piece = 0;  // the tile's first
#pragma unroll 1
  for (int64_t tile = share.first; tile < share.last; tile++, piece += t.slices) {
    const int64_t row = tile * kRows + mine;
#pragma unroll 1
    for (int col = 0; col < t.col_tiles; col++) {
#pragma unroll 1
      for (int slice = 0; slice < t.slices; slice++) {
        const int n = piece + slice;
        if (tile == share.first) mb_wait(&sm.weights[col * t.slices + slice], 0);
        mb_wait(&sm.full[n % kStages], n / kStages & 1);
        const uint32_t a = fresh(desc(s32(sm.a[n % kStages][group]), 16));
        const uint32_t b =
            fresh(desc(s32(sm.b[col * t.slices + slice]), kByColumn ? 16 : kTileBytes));
        wg_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
          wgmma128<kByColumn ? 0 : 1>(d, a + k * 32 / 16, b + (kByColumn ? k * 32 : k * 2048) / 16,
                                      slice > 0 || k > 0);
        wg_commit();
        wg_wait<1>();
        if (kOne && slice > 0) release(n - 1);
      }
      wg_wait<0>();
      hold(d);
      if (kOne) release(piece + t.slices - 1);
      else if (col + 1 == t.col_tiles)
        for (int slice = 0; slice < t.slices; slice++) release(piece + slice);
      bf16* out = p.out + share.head * p.out_head + row * p.out_row + col * kCols;
      bf16* const rows[2] = {row < p.rows ? out : nullptr,
                             row + 8 < p.rows ? out + 8 * p.out_row : nullptr};
      store_rows(d, {1.f, 1.f}, rows, static_cast<int>(p.cols) - col * kCols);
    }
  }
}

template <bool kByColumn, bool kOne>
__global__ void __launch_bounds__(kThreads, 1) stream_rows(const __grid_constant__ Stream t) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& sm = *reinterpret_cast<SharedMemory*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      mb_init(&sm.full[i], 1);
      mb_init(&sm.empty[i], kConsumers / 32);
    }
    for (uint64_t& panel : sm.weights) mb_init(&panel, 1);
    fence_barrier_init();
  }
  const Share share = share_of(t);
  __syncthreads();
  if (__shfl_sync(~0u, threadIdx.x / 32, 0) < kConsumers / 32)
    consume<kByColumn, kOne>(sm, t, share);
  else if (threadIdx.x == kConsumers) fetch_weights<kByColumn>(sm, t, share);
  else if (threadIdx.x == kConsumers + 32) fetch_rows(sm, t, share);
}

template <bool kByColumn, bool kOne>
void launch(const Stream& t, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedMemory);
  static_assert(kBytes <= kMaxSharedBytes);
  const auto kernel = stream_rows<kByColumn, kOne>;
  cuda::keep_error(allow_shared(kernel, kBytes));
  kernel<<<static_cast<unsigned>(t.p.heads * t.splits), kThreads, kBytes, stream>>>(t);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace

bool stream_fits(const Product& p) {
  const int64_t slices = ceil_div(p.depth, kDepth), tiles = ceil_div(p.cols, kCols);
  // Slices that stay must leave room for those of the next tile.
  return multiply_fits(p) && p.rows >= kRows && p.rows * p.heads >= tuned::kStreamRowsTimesHeads &&
         slices * tiles <= kPanels && (tiles == 1 || 2 * slices <= kStages);
}

bool stream(const Product& p, const Device& device) {
  if (!stream_fits(p)) return false;
  Stream t{.p = p};
  const bool by_column = contiguous_depth(p);
  const Boxed a{p.a, {p.depth, p.rows, p.a_head == 0 ? 1 : p.heads}, {p.a_row, p.a_head}, kRows};
  const Boxed b = by_column ? Boxed{p.b, {p.depth, p.cols, p.heads}, {p.b_col, p.b_head}, kCols}
                            : Boxed{p.b, {p.cols, p.depth, p.heads}, {p.b_k, p.b_head}, kDepth};
  if (!describe(t.a, a) || !describe(t.b, b)) return false;
  t.row_tiles = ceil_div(p.rows, kRows);
  t.slices = static_cast<int>(ceil_div(p.depth, kDepth));
  t.col_tiles = static_cast<int>(ceil_div(p.cols, kCols));
  // The number of shares that leaves the fewest multiprocessors idle, in up to four rounds.
  const int64_t sms = cuda::multiprocessors(device.index);
  double best = 0;
  for (int64_t rounds = 1; rounds <= 4; rounds++) {
    const int64_t splits = std::clamp<int64_t>(rounds * sms / p.heads, 1, t.row_tiles);
    const int64_t blocks = splits * p.heads, turns = ceil_div(blocks, sms);
    const double busy = static_cast<double>(blocks) / static_cast<double>(turns * sms);
    if (busy > best + tuned::kWorthMoreShares) {
      best = busy;
      t.splits = static_cast<int>(splits);
    }
  }
  const cudaStream_t on = stream_of(device);
  const bool one = t.col_tiles == 1;
  if (by_column) one ? launch<true, true>(t, on) : launch<true, false>(t, on);
  else one ? launch<false, true>(t, on) : launch<false, false>(t, on);
  return true;
}

}  // namespace winnow::internal::absorb::sm90
