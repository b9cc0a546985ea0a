// Latents into keys and values for many rows, both products and the copies of RoPE in one launch.
//
// A block keeps 128 latent rows in shared memory, 128 KB, and the weights of one head after the
// other stream past: 128 columns of keys and 128 of values, so that one wgmma is 64 x 256 x 16. Two
// blocks of a cluster share the stream: one fetches w_uk's part of a slice and the other w_uv's,
// each for both. Clusters take shares of equally many heads, and those at work at one time have
// the same heads: their weights stay in L2.
//
// Two warpgroups multiply 64 rows each; results wait as bf16 in registers and are stored between
// the next head's products. One thread fetches; two warps copy RoPE to every head.
//
// Budget a slice of 64 of the depth: the tensor cores need 1,024 cycles; shared memory is read by
// 80 KB and written by 32, 896 cycles; L2 gives a block 16 KB. 4,096 rows of 128 heads are 137
// GFLOP, 196 us at 700 TFLOP/s, 0.54 GB from L2 and 335 MB to memory (80 us). Two products with
// their weights staying and rows streaming (stream_sm90.cu) read 1.07 GB of rows, have shared
// memory as busy as the tensor cores (64 x 128 x 16: 48 cycles of 64, and 16 to fill) and a pass of
// its own for RoPE: 310 us. Here it takes 217, where warps wait for weights half as long as for the
// tensor cores: six stages of the ring are short of what two blocks and two warpgroups drift apart.
// Sums have the order of multiply_sm90.cu.
#include <algorithm>

#include "absorb/multiply_sm90.h"
#include "core/arithmetic.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/mma.h"
#include "cuda/tensor_map.h"
#include "cuda/wgmma_bf16.h"
#include "cuda/wgmma_bf16_128.h"

namespace winnow::internal::absorb::sm90 {

namespace {

using namespace internal::cuda;

constexpr int kBlocks = 2;                // of a cluster
constexpr int kRows = 128, kCols = 128;   // rows of a block; columns of each result
constexpr int kSliceBytes = kRows * 128;  // 64 of the depth of a block's rows
constexpr int kSlices = 8;                // that fit
constexpr int kRingBytes = 96 * 1024;     // of weights
constexpr int kConsumers = 256, kThreads = 384;
constexpr int kRegsConsumer = 232, kRegsOther = 40;  // sums 128, results 64

// Weights come 32 of the depth at a time; where they are contiguous along it, in rows of 64.
template <bool kByColumn>
struct Ring {
  static constexpr int kDepth = kByColumn ? 64 : 32;
  static constexpr int kStageBytes = 2 * kCols * kDepth * 2, kStages = kRingBytes / kStageBytes;
  static constexpr int kParts = kByColumn ? 4 : 8;  // in which results are stored, one a piece
};

constexpr int kMaxStages = Ring<false>::kStages;

struct alignas(1024) SharedMemory {
  uint8_t a[kSlices][kSliceBytes];
  uint8_t b[kRingBytes];
  uint64_t full[kMaxStages], empty[kMaxStages];
};

struct Expand {
  CUtensorMap latent, weights[2];
  Product p[2];  // keys, values
  Copy rope;
  int row_tiles = 0;  // of a cluster
  int splits = 1;     // shares that the heads of a row tile are divided into
};

// A cluster's tiles, a head of a row tile each, in order.
struct Tile {
  const Expand& t;
  int share, head = 0, end = 0;
  bool fresh = true;  // the rows are not those of the tile before
  int64_t row = 0;    // this block's first

  __device__ explicit Tile(const Expand& t) : t(t), share(blockIdx.x / kBlocks) { enter(); }
  __device__ bool more() const { return share < t.row_tiles * t.splits; }
  __device__ void enter() {
    const int part = share / t.row_tiles, heads = static_cast<int>(t.p[0].heads);
    head = part * heads / t.splits;
    end = (part + 1) * heads / t.splits;
    row = (int64_t{share % t.row_tiles} * kBlocks + blockIdx.x % kBlocks) * kRows;
    fresh = true;
  }
  __device__ void next() {
    fresh = false;
    if (++head == end) {
      share += gridDim.x / kBlocks;
      enter();
    }
  }
};
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// One thread. A slice of the rows may be overwritten when the ring's oldest piece was multiplied:
// that is a later one than the slice's last use, a tile ago (expand() sees to the depth).
template <bool kByColumn>
__device__ void produce(SharedMemory& sm, const Expand& t) {
  using R = Ring<kByColumn>;
  const int depth = static_cast<int>(t.p[0].depth), which = blockIdx.x % kBlocks;
  Place<R::kStages> at;
#pragma unroll 1
  for (Tile tile(t); tile.more(); tile.next())
#pragma unroll 1
    for (int k = 0; k < depth; k += R::kDepth, at.next()) {
      mb_wait(&sm.empty[at.stage], at.phase ^ 1);
      uint64_t* full = &sm.full[at.stage];
      const bool rows = tile.fresh && k % 64 == 0;
      mb_expect(full, R::kStageBytes + (rows ? kSliceBytes : 0));
      if (rows) copy_box(s32(sm.a[k / 64]), t.latent, {k, static_cast<int>(tile.row), 0}, full);
      const uint32_t to = s32(sm.b) + at.stage * R::kStageBytes + which * (R::kStageBytes / 2);
      if constexpr (kByColumn) {
        copy_box_twice(to, t.weights[which], {k, 0, tile.head}, full);
      } else {
        copy_box_twice(to, t.weights[which], {0, k, tile.head}, full);
        copy_box_twice(to + R::kStageBytes / 4, t.weights[which], {64, k, tile.head}, full);
      }
    }
}

// A thread's two rows of a tile as bf16: keys, then values, 32 columns after the other.
struct Results {
  uint32_t x[2][4][2][4];  // keys or values; 32 columns; row; two columns each
  int64_t row;
  int head;
  __device__ void take(const float (&d)[128], int64_t first, int at) {
#pragma unroll
    for (int i = 0; i < 64; i++)
      (&x[0][0][0][0])[(i / 8 * 2 + i % 2) * 4 + i / 2 % 4] = pack<true>(d[2 * i], d[2 * i + 1]);
    row = first;
    head = at;
  }
  // Part `part`, as store_rows() of wgmma_bf16_128.h.
  template <int kParts>
  __device__ __forceinline__ void store(const Expand& t, int part) {
    const Product& p = t.p[part * 2 / kParts];
    bf16* out = p.out + head * p.out_head + row * p.out_row;
#pragma unroll
    for (int m = 0; m < 16 / kParts; m++) {
      const int n = part * (16 / kParts) + m, c = n / 2 % 4, i = n % 2,
                col = c * 32 + threadIdx.x % 4 * 8;
      uint32_t(&y)[4] = x[n / 8][c][i];
      exchange4(y);
      if (row + 8 * i < p.rows && col < p.cols)
        __stcs(reinterpret_cast<uint4*>(out + 8 * i * p.out_row + col),
               make_uint4(y[0], y[1], y[2], y[3]));
    }
  }
};

template <bool kByColumn>
__device__ void consume(SharedMemory& sm, const Expand& t) {
  using R = Ring<kByColumn>;
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int mine = threadIdx.x / 32 * 16 + lane / 4;
  const int depth = static_cast<int>(t.p[0].depth);
  float d[128];
  Place<R::kStages> at;
  int before = 0;  // the stage that was multiplied last
  // A warp has read it: tells both blocks, whose weights it was. Nothing was written that the
  // others must see: release at cluster scope would wait for all of the warp's stores.
  const auto release = [&] {
    if (lane < kBlocks)
      asm volatile(
          "mbarrier.arrive.shared::cluster.b64 _,[%0];" ::"r"(peer(s32(&sm.empty[before]), lane))
          : "memory");
  };
  const auto multiply = [&](int k) {
    mb_wait(&sm.full[at.stage], at.phase);
    const uint32_t a = fresh(desc(s32(sm.a[k / 64]) + group * (kSliceBytes / 2) + k % 64 * 2, 16));
    const uint32_t b =
        fresh(desc(s32(sm.b) + at.stage * R::kStageBytes, kByColumn ? 16 : R::kStageBytes / 4));
    wg_fence();
#pragma unroll
    for (int i = 0; i < R::kDepth / 16; i++)
      wgmma256<kByColumn ? 0 : 1>(d, a + i * 32 / 16, b + (kByColumn ? i * 32 : i * 2048) / 16,
                                  k > 0 || i > 0);
    wg_commit();
  };
  const auto advance = [&] {
    before = at.stage;
    at.next();
  };
  Results results;
  // none yet
  results.row = t.p[0].rows;
  results.head = 0;
#pragma unroll 1
  for (Tile tile(t); tile.more(); tile.next()) {
#pragma unroll
    for (int part = 0; part < R::kParts; part++) {
      multiply(part * R::kDepth);
      wg_wait<1>();
      if (part > 0) release();
      advance();
      results.store<R::kParts>(t, part);
    }
#pragma unroll 1
    for (int k = R::kParts * R::kDepth; k < depth; k += R::kDepth) {
      multiply(k);
      wg_wait<1>();
      release();
      advance();
    }
    wg_wait<0>();
    hold(d);
    release();
    results.take(d, tile.row + mine, tile.head);
  }
#pragma unroll
  for (int part = 0; part < R::kParts; part++) results.store<R::kParts>(t, part);
}

// Two warps, eight threads a row.
__device__ void copy_rope(const Expand& t) {
  const Copy& c = t.rope;
  const int thread = threadIdx.x % 64, col = thread % 8 * 8;
  if (col >= c.shape[2]) return;
#pragma unroll 1
  for (Tile tile(t); tile.more(); tile.next()) {
    const int64_t first = tile.row + thread / 8;
    const bf16* from = c.from + first * c.from_stride[0] + col;
    bf16* to = c.to + first * c.to_stride[0] + tile.head * c.to_stride[1] + col;
    const int rows = static_cast<int>(min(c.shape[0] - first, int64_t{kRows}));
#pragma unroll 2
    for (int i = 0; i < rows; i += 8)
      __stcs(reinterpret_cast<uint4*>(to + i * c.to_stride[0]),
             __ldg(reinterpret_cast<const uint4*>(from + i * c.from_stride[0])));
  }
}

template <bool kByColumn>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    decompress_rows(const __grid_constant__ Expand t) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& sm = *reinterpret_cast<SharedMemory*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Ring<kByColumn>::kStages; i++) {
      mb_init(&sm.full[i], 1);
      mb_init(&sm.empty[i], kBlocks * kConsumers / 32);
    }
    fence_barrier_init();
  }
  __syncwarp();
  cluster_meet();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < kConsumers / 32) {
    take_registers<kRegsConsumer>();
    consume<kByColumn>(sm, t);
  } else {
    give_registers<kRegsOther>();
    if (warp >= kThreads / 32 - 2) copy_rope(t);
    else if (threadIdx.x == kConsumers) produce<kByColumn>(sm, t);
    __syncwarp();
  }
  cluster_meet();  // nobody leaves whom the other still sends to
}

template <bool kByColumn>
void launch(Expand& t, const Device& device) {
  constexpr int kBytes = sizeof(SharedMemory);
  static_assert(kBytes <= kMaxSharedBytes);
  const auto kernel = decompress_rows<kByColumn>;
  cuda::keep_error(allow_shared(kernel, kBytes));
  const Product& p = t.p[0];
  const int64_t tiles = ceil_div(p.rows, kBlocks * kRows);
  const int64_t clusters = cuda::multiprocessors(device.index) / kBlocks;
  // The number of shares that takes the fewest heads one after the other, in up to four rounds.
  int64_t best = INT64_MAX;
  for (int64_t rounds = 1; rounds <= 4; rounds++) {
    const int64_t splits = std::clamp<int64_t>(rounds * clusters / tiles, 1, p.heads);
    const int64_t turns = ceil_div(tiles * splits, clusters);
    const int64_t heads = turns * ceil_div(p.heads, splits);
    if (heads < best) {
      best = heads;
      t.splits = static_cast<int>(splits);
    }
  }
  t.row_tiles = static_cast<int>(tiles);
  const int64_t blocks = kBlocks * std::min(tiles * t.splits, clusters);
  kernel<<<static_cast<unsigned>(blocks), kThreads, kBytes, stream_of(device)>>>(t);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace

bool expand_fits(const Params& params) {
  const Product &k = params.products[0], &v = params.products[1];
  const Copy& c = params.copies[0];
  if (params.product_count != 2 || params.copy_count != 1 || k.a != v.a || k.a_head != 0 ||
      v.a_head != 0 || k.a_row != v.a_row || contiguous_depth(k) != contiguous_depth(v) ||
      !multiply_fits(k) || !multiply_fits(v) || !copies_vectors(c))
    return false;
  const auto wide = [](const Product& p) { return p.cols > kCols / 2 && p.cols <= kCols; };
  return k.rows > kRows && k.heads < 1 << 16 && k.depth >= 256 && k.depth <= kSlices * 64 &&
         wide(k) && wide(v) && c.shape[2] <= 64;
}

bool expand(const Params& params) {
  const Product &k = params.products[0], &v = params.products[1];
  const Copy& c = params.copies[0];
  const bool by_column = contiguous_depth(k);
  Expand t{.p = {k, v}, .rope = c};
  if (!describe(t.latent, {k.a, {k.depth, k.rows, 1}, {k.a_row, 0}, kRows})) return false;
  for (int i = 0; i < 2; i++) {
    const Product& p = t.p[i];
    const Boxed weights =
        by_column ? Boxed{p.b, {p.depth, p.cols, p.heads}, {p.b_col, p.b_head}, kCols}
                  : Boxed{p.b, {p.cols, p.depth, p.heads}, {p.b_k, p.b_head}, Ring<false>::kDepth};
    if (!describe(t.weights[i], weights)) return false;
  }
  if (by_column) launch<true>(t, params.device);
  else launch<false>(t, params.device);
  return true;
}

}  // namespace winnow::internal::absorb::sm90
