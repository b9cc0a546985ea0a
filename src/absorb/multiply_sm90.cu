// Products per head by the tensor cores' wgmma, for operands whose rows can be copied 16 bytes at a
// time: queries into the latent space, outputs out of it, latents into keys and values.
//
// A block owns a tile of one head's result, 64 rows a warpgroup and 128 columns. Slices of 64 of
// the depth come through a ring of three stages in shared memory, copied two ahead by all threads,
// so that two blocks share a multiprocessor and one stores while the other multiplies; where there
// are no more tiles than multiprocessors, through six, and tiles of 64 rows spread few rows. A
// row's sums are formed in the order of the depth whatever the tile's size.
//
// Products that lie alike share a launch, and so does a copy, by blocks after the others: keys,
// values and RoPE of 128 latents with 16 heads take 8.5 us instead of 20. Budget of 4,096 tokens of
// 128 heads: absorb_query writes 537 MB (0.13 ms) and reads 1 GB from L2 (0.19 ms), project_output
// the other way round; 69 GFLOP are 0.07 ms.
#include <cuda_runtime.h>

#include <algorithm>

#include "absorb/multiply_sm90.h"
#include "core/arithmetic.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/mma.h"
#include "cuda/wgmma_bf16_128.h"

namespace winnow::internal::absorb::sm90 {

namespace {

using namespace internal::cuda;

constexpr int kCols = 128, kDepth = 64;
constexpr int kFew = 3, kMany = 6;    // stages where two blocks share a multiprocessor, and alone
constexpr int kTileBytes = 64 * 128;  // 64 rows of 64 elements

struct Tiles {
  Product p[2];
  Copy copy;
  int64_t row_tiles[2]{}, col_tiles[2]{}, tiles[2]{};
  int copiers = 0;  // blocks that copy, after those that multiply
};

template <int kGroups>  // warpgroups
struct alignas(1024) Stage {
  uint8_t a[kGroups][kTileBytes], b[2][kTileBytes];
};

// kByColumn: b is contiguous along the depth, so a tile of it is 64 columns of the result; else it
// is contiguous along the columns, and a tile is 64 of the depth.
template <int kGroups, bool kByColumn, int kStages>
__global__ void __launch_bounds__(128 * kGroups, kStages == kFew ? 4 / kGroups : 1)
    multiply_tiles(const __grid_constant__ Tiles t) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto* const stages = reinterpret_cast<Stage<kGroups>*>(memory);
  int64_t tile = blockIdx.x;
  const int which = tile >= t.tiles[0];
  if (which) tile -= t.tiles[0];
  if (tile >= t.tiles[which]) {
    constexpr int kThreads = 128 * kGroups;
    return copy_vectors(t.copy, (tile - t.tiles[which]) * kThreads + threadIdx.x,
                        int64_t{t.copiers} * kThreads);
  }
  const Product& p = t.p[which];
  const int col0 = static_cast<int>(tile % t.col_tiles[which]) * kCols;
  const int64_t rest = tile / t.col_tiles[which], head = rest / t.row_tiles[which];
  const int64_t row0 = rest % t.row_tiles[which] * (64 * kGroups);
  const int cols = static_cast<int>(p.cols) - col0, depth = static_cast<int>(p.depth);
  // A thread copies chunk c of every 16 * kGroups-th row.
  const int c = threadIdx.x % 8, r = threadIdx.x / 8;
  constexpr int kStep = 16 * kGroups;
  const bf16* a = p.a + head * p.a_head + (row0 + r) * p.a_row + c * 8;
  const bf16* b =
      p.b + head * p.b_head + (kByColumn ? (col0 + r) * p.b_col + c * 8 : r * p.b_k + col0 + c * 8);
  const int64_t rows = p.rows - row0;

  const auto load = [&](int slice) {
    const int s = slice % kStages, k = slice * kDepth;
    const uint32_t to_a = s32(stages[s].a), to_b = s32(stages[s].b);
#pragma unroll
    for (int i = 0; i < 64 * kGroups / kStep; i++) {
      const bool there = r + i * kStep < rows && k + c * 8 < depth;
      copy16(to_a + swizzled(r + i * kStep, c), there ? a + i * kStep * p.a_row + k : p.a, there);
    }
    if constexpr (kByColumn) {
#pragma unroll
      for (int i = 0; i < kCols / kStep; i++) {
        const bool there = r + i * kStep < cols && k + c * 8 < depth;
        copy16(to_b + swizzled(r + i * kStep, c), there ? b + i * kStep * p.b_col + k : p.b, there);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 64 / kStep; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const bool there = k + r + i * kStep < depth && half * 64 + c * 8 < cols;
          copy16(to_b + half * kTileBytes + swizzled(r + i * kStep, c),
                 there ? b + (k + i * kStep) * p.b_k + half * 64 : p.b, there);
        }
    }
  };

  const int slices = ceil_div(depth, kDepth), group = threadIdx.x / 128;
  for (int s = 0; s < kStages - 1; s++) {
    if (s < slices) load(s);
    copy_commit();
  }
  float d[64];
#pragma unroll
  for (int i = 0; i < 64; i++) d[i] = 0;
#pragma unroll 1
  for (int s = 0; s < slices; s++) {
    // This slice has arrived, and everyone is done with the one before, whose stage is filled next.
    copy_wait<kStages - 2>();
    fence_async();
    wg_wait<0>();
    __syncthreads();
    const uint32_t at = desc(s32(stages[s % kStages].a[group]), 16);
    const uint32_t bt = desc(s32(stages[s % kStages].b), kByColumn ? 16 : kTileBytes);
    wg_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
      wgmma128<kByColumn ? 0 : 1>(d, at + (k * 32 >> 4), bt + (kByColumn ? k * 32 : k * 2048) / 16,
                                  1);
    wg_commit();
    if (s + kStages - 1 < slices) load(s + kStages - 1);
    copy_commit();
  }
  wg_wait<0>();
  hold(d);

  const int64_t first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  bf16* out = p.out + head * p.out_head + (row0 + first) * p.out_row + col0;
  bf16* const row[2] = {first < rows ? out : nullptr,
                        first + 8 < rows ? out + 8 * p.out_row : nullptr};
  store_rows(d, {1.f, 1.f}, row, cols);
}

template <int kGroups, bool kByColumn, int kStages>
void launch(const Tiles& t, int64_t blocks, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Stage<kGroups>);
  const auto kernel = multiply_tiles<kGroups, kByColumn, kStages>;
  cuda::keep_error(allow_shared(kernel, kStages * kBytes));
  // No more stages than slices: four blocks of a short depth share a multiprocessor.
  const int64_t slices = ceil_div(t.p[0].depth, kDepth);
  const int bytes = static_cast<int>(std::min<int64_t>(slices, kStages)) * kBytes;
  kernel<<<static_cast<unsigned>(blocks), 128 * kGroups, bytes, stream>>>(t);
  cuda::keep_error(cudaGetLastError());
}

// Tiles of 64 * groups rows; their number.
int64_t divide(Tiles& t, int groups) {
  for (int i = 0; i < 2; i++) {
    const Product& p = t.p[i];
    t.row_tiles[i] = ceil_div(p.rows, 64 * groups);
    t.col_tiles[i] = ceil_div(p.cols, kCols);
    t.tiles[i] = t.row_tiles[i] * t.col_tiles[i] * p.heads;
  }
  return t.tiles[0] + t.tiles[1];
}

template <int kGroups, bool kByColumn>
void launch(Tiles& t, const Device& device) {
  const int64_t sms = multiprocessors(device.index), tiles = divide(t, kGroups);
  const int64_t vectors = vectors_of(t.copy), chunk = 128 * kGroups * 4;
  t.copiers = static_cast<int>(std::min(ceil_div(vectors, chunk), 4 * sms));
  if (tiles + t.copiers == 0) return;
  const bool few = tiles <= sms && t.p[0].depth > kFew * kDepth;
  const cudaStream_t stream = stream_of(device);
  if (few) launch<kGroups, kByColumn, kMany>(t, tiles + t.copiers, stream);
  else launch<kGroups, kByColumn, kFew>(t, tiles + t.copiers, stream);
}

}  // namespace

bool multiply_fits(const Product& p) {
  const bool by_column = contiguous_depth(p);
  return p.depth > 0 && p.depth % 8 == 0 && p.cols % 8 == 0 && p.depth < 1 << 20 &&
         p.cols < 1 << 20 && aligned8(p.a, p.a_row, p.a_head) &&
         aligned8(p.out, p.out_row, p.out_head) && (by_column || p.b_col == 1) &&
         aligned8(p.b, by_column ? p.b_col : p.b_k, p.b_head);
}

bool multiply_fits(const Params& p) {
  if (p.product_count == 0 || p.copy_count > 1) return false;
  for (int i = 0; i < p.product_count; i++)
    if (!multiply_fits(p.products[i]) ||
        contiguous_depth(p.products[i]) != contiguous_depth(p.products[0]))
      return false;
  return p.copy_count == 0 || copies_vectors(p.copies[0]);
}

void multiply(const Params& params) {
  Tiles t;
  const bool by_column = contiguous_depth(params.products[0]);
  for (int i = 0; i < params.product_count; i++) t.p[i] = params.products[i];
  if (params.copy_count > 0) t.copy = params.copies[0];
  // Tiles of 64 rows where those of 128 would leave multiprocessors idle.
  if (t.p[0].rows > 64 && 2 * divide(t, 2) > multiprocessors(params.device.index)) {
    if (by_column) launch<2, true>(t, params.device);
    else launch<2, false>(t, params.device);
  } else {
    if (by_column) launch<1, true>(t, params.device);
    else launch<1, false>(t, params.device);
  }
}

}  // namespace winnow::internal::absorb::sm90
