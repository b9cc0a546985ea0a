// The projections on the device: products per head, and strided copies. Operands of even strides go
// to multiply_sm90.cu; here is the product of any others, by the tensor cores' m16n8k16.
//
// A block owns a kRows x kCols tile of one head's result, four warps a quarter each. Slices of 64
// of the depth come through a ring of three stages in shared memory, copied two ahead. Every
// element is added up in the order of the depth, so a row's bits do not depend on the call's other
// rows.
#include <cuda_runtime.h>

#include <algorithm>

#include "absorb/kernel.h"
#include "absorb/multiply_sm90.h"
#include "core/arithmetic.h"
#include "core/formats.h"
#include "core/tuning_h200.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/mma.h"

namespace winnow::internal::absorb::sm90 {

namespace {

constexpr int kThreads = 128, kDepth = 64, kStages = 3;

template <int kRows_, int kCols_, bool kByColumn_>
struct Config {
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr bool kByColumn = kByColumn_;  // b is contiguous along the depth
  static constexpr int kWidthA = kDepth + cuda::kTilePad;
  static constexpr int kWidthB = (kByColumn ? kDepth : kCols) + cuda::kTilePad;
  struct Stage {
    alignas(16) bf16 a[kRows * kWidthA];
    alignas(16) bf16 b[(kByColumn ? kCols : kDepth) * kWidthB];
  };
  struct SharedMemory {
    Stage stages[kStages];
  };
};

struct Task {
  Product p;
  bool fast_a, fast_b;
};

// Copies slice `k` of the depth for the tile at (row, col) of a head; zeros outside the operands.
template <class C>
__device__ void load_stage(typename C::Stage& stage, const Task& task, const bf16* a, const bf16* b,
                           int64_t k) {
  const Product& p = task.p;
  const int64_t row_tiles = ceil_div(p.rows, C::kRows);
  const int64_t col_tiles = ceil_div(p.cols, C::kCols);
  const int64_t row = blockIdx.x / col_tiles % row_tiles * C::kRows;
  const int64_t col = blockIdx.x % col_tiles * C::kCols;
  constexpr int kVectors = kDepth / 8;
  for (int i = threadIdx.x; i < C::kRows * kVectors; i += kThreads) {
    const int r = i / kVectors, at = i % kVectors * 8;
    const int64_t valid = row + r < p.rows ? p.depth - k - at : 0;
    const bf16* from = valid > 0 ? a + (row + r) * p.a_row + k + at : a;
    cuda::copy8(stage.a + r * C::kWidthA + at, {from, 1, task.fast_a}, valid);
  }
  constexpr int kAcross = (C::kByColumn ? kDepth : C::kCols) / 8;
  constexpr int kLines = C::kByColumn ? C::kCols : kDepth;
  for (int i = threadIdx.x; i < kLines * kAcross; i += kThreads) {
    const int line = i / kAcross, at = i % kAcross * 8;
    const int64_t d = k + (C::kByColumn ? at : line), c = col + (C::kByColumn ? line : at);
    const int64_t valid = d < p.depth && c < p.cols ? (C::kByColumn ? p.depth - d : p.cols - c) : 0;
    const bf16* from = valid > 0 ? b + d * p.b_k + c * p.b_col : b;
    cuda::copy8(stage.b + line * C::kWidthB + at,
                {from, C::kByColumn ? p.b_k : p.b_col, task.fast_b}, valid);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads) multiply_any(const __grid_constant__ Task task) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename C::SharedMemory*>(memory);
  const Product& p = task.p;
  const int64_t row_tiles = ceil_div(p.rows, C::kRows);
  const int64_t col_tiles = ceil_div(p.cols, C::kCols);
  const int64_t head = blockIdx.x / (row_tiles * col_tiles);
  const bf16* a = p.a + head * p.a_head;
  const bf16* b = p.b + head * p.b_head;

  // A warp's quarter of the tile.
  constexpr int kWarpRows = C::kRows / 2, kWarpCols = C::kCols / 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / 2 * kWarpRows, warp_col = warp % 2 * kWarpCols;
  float sums[kWarpRows / 16][kWarpCols / 8][4] = {};

  // Fill two stages ahead; a group is committed every time, so that counting them works.
  const int slices = static_cast<int>(ceil_div(p.depth, kDepth));
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < slices) load_stage<C>(shared.stages[s], task, a, b, int64_t{s} * kDepth);
    cuda::copy_commit();
  }
  for (int s = 0; s < slices; ++s) {
    // Wait for this slice; everyone is then done with the one before, whose stage is filled next.
    cuda::copy_wait<kStages - 2>();
    __syncthreads();
    if (const int next = s + kStages - 1; next < slices)
      load_stage<C>(shared.stages[next % kStages], task, a, b, int64_t{next} * kDepth);
    cuda::copy_commit();
    const typename C::Stage& stage = shared.stages[s % kStages];
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t left[kWarpRows / 16][4];
#pragma unroll
      for (int m = 0; m < kWarpRows / 16; ++m)
        cuda::load_a(left[m], stage.a, C::kWidthA, warp_row + 16 * m, k);
#pragma unroll
      for (int n = 0; n < kWarpCols / 16; ++n) {
        uint32_t right[4];
        if constexpr (C::kByColumn) cuda::load_b(right, stage.b, C::kWidthB, warp_col + 16 * n, k);
        else cuda::load_b_rows(right, stage.b, C::kWidthB, warp_col + 16 * n, k);
#pragma unroll
        for (int m = 0; m < kWarpRows / 16; ++m) {
          cuda::mma_bf16(sums[m][2 * n], left[m], right[0], right[1]);
          cuda::mma_bf16(sums[m][2 * n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  // Store what lies inside the result.
  const int64_t row0 = blockIdx.x / col_tiles % row_tiles * C::kRows + warp_row + lane / 4;
  const int64_t col0 = blockIdx.x % col_tiles * C::kCols + warp_col + lane % 4 * 2;
  bf16* out = p.out + head * p.out_head;
#pragma unroll
  for (int m = 0; m < kWarpRows / 16; ++m)
#pragma unroll
    for (int n = 0; n < kWarpCols / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = row0 + 16 * m + i / 2 * 8, col = col0 + 8 * n + i % 2;
        if (row < p.rows && col < p.cols) out[row * p.out_row + col] = to_bf16(sums[m][n][i]);
      }
}

template <class C>
void launch_tiles(const Task& task, cudaStream_t stream) {
  const Product& p = task.p;
  const int64_t tiles = ceil_div(p.rows, C::kRows) * ceil_div(p.cols, C::kCols);
  constexpr int kBytes = sizeof(typename C::SharedMemory);
  cuda::keep_error(cuda::allow_shared(multiply_any<C>, kBytes));
  multiply_any<C><<<static_cast<unsigned>(tiles * p.heads), kThreads, kBytes, stream>>>(task);
  cuda::keep_error(cudaGetLastError());
}

void tile_product(const Product& p, const Device& device) {
  const cudaStream_t stream = cuda::stream_of(device);
  if (p.rows == 0 || p.cols == 0 || p.heads == 0) return;
  Params one{.product_count = 1, .device = device};
  one.products[0] = p;
  if (multiply_fits(one)) return multiply(one);
  const bool by_column = contiguous_depth(p);
  Task task{p};
  task.fast_a = cuda::aligned8(p.a, p.a_row, p.a_head);
  task.fast_b =
      (by_column || p.b_col == 1) && cuda::aligned8(p.b, by_column ? p.b_col : p.b_k, p.b_head);
  if (by_column) launch_tiles<Config<64, 64, true>>(task, stream);
  else launch_tiles<Config<64, 64, false>>(task, stream);
}

// Tiles of 32 x 32 over the outer and inner dimension, turned in shared memory when what is
// consecutive in one tensor is not in the other.
constexpr int kTile = 32;
__global__ void __launch_bounds__(kTile * 8) copy_tiles(const __grid_constant__ Copy c) {
  __shared__ bf16 tile[kTile][kTile + 2];
  const int64_t inner = ceil_div(c.shape[2], kTile);
  const int64_t outer = ceil_div(c.shape[0], kTile);
  const bool from_inner = c.from_stride[2] <= c.from_stride[0] || c.shape[0] == 1;
  const bool to_inner = c.to_stride[2] <= c.to_stride[0] || c.shape[0] == 1;
  for (int64_t b = blockIdx.x; b < inner * outer * c.shape[1]; b += gridDim.x) {
    const int64_t k0 = b % inner * kTile, i0 = b / inner % outer * kTile, j = b / (inner * outer);
    for (int y = threadIdx.y; y < kTile; y += 8) {
      const int i = from_inner ? y : threadIdx.x, k = from_inner ? threadIdx.x : y;
      if (i0 + i < c.shape[0] && k0 + k < c.shape[2])
        tile[i][k] = c.from[(i0 + i) * c.from_stride[0] + j * c.from_stride[1] +
                            (k0 + k) * c.from_stride[2]];
    }
    __syncthreads();
    for (int y = threadIdx.y; y < kTile; y += 8) {
      const int i = to_inner ? y : threadIdx.x, k = to_inner ? threadIdx.x : y;
      if (i0 + i < c.shape[0] && k0 + k < c.shape[2])
        c.to[(i0 + i) * c.to_stride[0] + j * c.to_stride[1] + (k0 + k) * c.to_stride[2]] =
            tile[i][k];
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(256) copy_rows(const __grid_constant__ Copy c) {
  copy_vectors(c, blockIdx.x * int64_t{256} + threadIdx.x, gridDim.x * int64_t{256});
}

// Blocks of a pass over `work` pieces: enough to fill the device, the rest in turns.
unsigned blocks_for(int64_t work, const Device& device) {
  return static_cast<unsigned>(std::min<int64_t>(work, 16 * cuda::multiprocessors(device.index)));
}

void copy(const Copy& c, const Device& device) {
  const cudaStream_t stream = cuda::stream_of(device);
  if (c.shape[0] == 0 || c.shape[1] == 0 || c.shape[2] == 0) return;
  if (copies_vectors(c)) {
    copy_rows<<<blocks_for(ceil_div(vectors_of(c), 256), device), 256, 0, stream>>>(c);
    cuda::keep_error(cudaGetLastError());
    return;
  }
  const int64_t tiles = ceil_div(c.shape[0], kTile) * c.shape[1] * ceil_div(c.shape[2], kTile);
  copy_tiles<<<blocks_for(tiles, device), dim3(kTile, 8), 0, stream>>>(c);
  cuda::keep_error(cudaGetLastError());
}

__global__ void __launch_bounds__(256) dequantize_rows(const __grid_constant__ DequantizeParams p) {
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const float* scales = p.scale + row / kBlock * p.scale_row;
    for (int64_t col = threadIdx.x; col < p.cols; col += 256)
      p.out[row * p.out_row + col] = to_bf16(to_float(p.weight[row * p.weight_row + col]) *
                                             scales[col / kBlock * p.scale_col]);
  }
}

// Each product in a launch of its own, then the copies.
template <bool kStream>
void each(const Params& p) noexcept {
  for (int i = 0; i < p.product_count; ++i)
    if (!kStream || !stream(p.products[i], p.device)) tile_product(p.products[i], p.device);
  for (int i = 0; i < p.copy_count; ++i) copy(p.copies[i], p.device);
}

int streamed(const Params& p) {
  const auto end = p.products.begin() + p.product_count;
  return static_cast<int>(std::count_if(p.products.begin(), end, stream_fits));
}

const char* decompress_fits(const Params& p) {
  return expand_fits(p) ? nullptr : "not keys and values of many latents in rows of 16 bytes";
}
void run_decompress(const Params& p) noexcept {
  if (!expand(p)) each<true>(p);
}

const char* one_launch_fits(const Params& p) {
  return multiply_fits(p) ? nullptr : "operands that cannot be copied 16 bytes at a time";
}
// One launch for products of few rows, and for what nobody streams.
const char* one_launch_slower(const Params& p) {
  const bool few = p.product_count > 1 && p.products[0].rows <= tuning_h200::absorb::kOneLaunchRows;
  return few || streamed(p) == 0 ? nullptr : "rows enough to stream past weights that stay";
}
void run_one_launch(const Params& p) noexcept { multiply(p); }

const char* stream_all(const Params& p) {
  return p.product_count > 0 && streamed(p) == p.product_count ? nullptr
                                                               : "a product that cannot stream";
}
const char* stream_some(const Params& p) {
  return streamed(p) > 0 ? nullptr : "no product that can stream";
}

}  // namespace

std::array<AbsorbKernel, 5> kernels() {
  const auto row = [](const char* name) {
    return detail::KernelEntry{name, DeviceKind::kCuda, false, cuda::missing};
  };
  return {{{row("sm90/decompress"), decompress_fits, run_decompress},
           {row("sm90/multiply"), one_launch_fits, run_one_launch, one_launch_slower},
           {row("sm90/stream"), stream_all, each<true>},
           {row("sm90/stream+tiles"), stream_some, each<true>},
           {row("sm90/tiles"), nullptr, each<false>}}};
}

void dequantize(const DequantizeParams& p) noexcept {
  if (p.rows == 0 || p.cols == 0) return;
  dequantize_rows<<<blocks_for(p.rows, p.device), 256, 0, cuda::stream_of(p.device)>>>(p);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::absorb::sm90
