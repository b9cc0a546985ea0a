// attend_mha for keys of 192 and values of 128, the decompressed ones of V3.2, by wgmma: over
// ranges of keys with or without bits, and over sets of them, by ids or mask.
//
// A block takes 128 tokens of one head and walks the rows that any of them may see, 64 at a time.
// Two warpgroups own 64 tokens each: the queries stay in registers as the first operand of QK^T,
// the weights go from the accumulators straight into the product with V. A block's softmax runs
// beside the product of the one before, and each warpgroup's products under the other's softmax. A
// third warpgroup copies keys and values through a ring of four stages. A token's range and bits
// only mask its scores. Of sets the consumers make bits first, in shared memory, for 4,096 rows at
// a time (mha_dense_sm90_sets.cuh); the copies run on meanwhile.
//
// Budget for a block of keys: 2 x (12 m64n64k16 + 4 m64n128k16) are 1,280 cycles of the tensor
// core for 5.2 MFLOP; shared memory is read for 80 KB and written for 40 KB of them, 94 B a cycle;
// 40 KB come from L2, 4.6 TB/s when all multiprocessors run at 600 TFLOP/s.
//
// What is rare is left to one slow path, a row at a time (mha_dense_sm90_row.cuh): rows whose sums
// are not finite. A NaN or infinity among values that a token does not see, which a weight of 0
// would not keep out, ends there, and so does a logit that is not finite or beyond 2^24.
#include <cuda_runtime.h>

#include <algorithm>
#include <cfloat>

#include "core/arithmetic.h"
#include "core/tuning_h200.h"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/mma.h"
#include "cuda/wgmma_bf16_128.h"
#include "mha/dense_sm90.h"
#include "mha/dense_sm90_row.cuh"

namespace winnow::internal::mha::dense {

namespace {

using namespace internal::cuda;
namespace tuned = tuning_h200::mha;

constexpr int kStages = 4;
constexpr int kTileBytes = kKeys * 128;  // 64 rows of 64 elements
constexpr int kKeyTiles = kKeyDim / 64, kValueTiles = kValueDim / 64;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kHeadGroup = 8;  // heads whose tiles run side by side and share rows in L2
// How far logits may outgrow their reference, log2 units.
constexpr float kLag = 8.f;
// Beyond it a logit's rounding is no longer small against kLag.
constexpr float kExact = 16777216.f;

struct Ranges {};  // in the place of Sets

template <class Set>
struct alignas(1024) SharedMemory {
  uint8_t k[kStages][kKeyTiles][kTileBytes];
  uint8_t v[kStages][kValueTiles][kTileBytes];
  int32_t first[kTokens], last[kTokens];  // rows that a token sees
  int32_t low, high;                      // rows that any of them sees
  uint64_t k_full[kStages], v_full[kStages], k_empty[kStages], v_empty[kStages];
  Set set;
};

struct Place {
  int64_t token, head;  // the first token
};

// Heads in groups, the longest tiles of a causal call first.
__device__ Place place_of(const Task& task) {
  const int64_t per_group = task.tiles * kHeadGroup, group = blockIdx.x / per_group;
  const int64_t heads = min(task.p.heads - group * kHeadGroup, int64_t{kHeadGroup});
  const int64_t at = blockIdx.x - group * per_group;
  return {(task.tiles - 1 - at / heads) * kTokens, group * kHeadGroup + at % heads};
}

template <class Set>
__device__ void find_ranges(SharedMemory<Set>& sm, const Params& p, int64_t token) {
  if (threadIdx.x == 0) {
    sm.low = INT_MAX;
    sm.high = 0;
  }
  __syncthreads();
  if (threadIdx.x < kTokens) {
    const int64_t t = token + threadIdx.x;
    const Range r = t < p.tokens ? range_of(p, t) : Range{0, 0};
    sm.first[threadIdx.x] = r.first;
    sm.last[threadIdx.x] = r.last;
    if (r.last > r.first) {
      atomicMin(&sm.low, r.first);
      atomicMax(&sm.high, r.last);
    }
  }
  __syncthreads();
}

// Copies the rows of each block: eight threads a row, a chunk of every tile each.
template <class Set>
__device__ void produce(SharedMemory<Set>& sm, const Task& task, const Place& at, int blocks) {
  const Params& p = task.p;
  const int t = threadIdx.x - kConsumers, c = t % 8, r = t / 8;
  const bf16* k = p.k + (sm.low + r) * p.k_row_stride + at.head * p.k_head_stride + c * 8;
  const bf16* v = p.v + (sm.low + r) * p.v_row_stride + at.head * p.v_head_stride + c * 8;
  int rows = sm.high - sm.low - r;  // that are left, from this thread's first on
  // What was copied two pieces ago has landed: let the tensor cores see it.
  const auto announce = [&](int piece) {
    fence_async();
    mb_arrive(piece % 2 ? &sm.v_full[piece / 2 % kStages] : &sm.k_full[piece / 2 % kStages]);
  };
#pragma unroll 1
  for (int b = 0; b < blocks; b++) {
    const int s = b % kStages;
    const uint32_t phase = (b / kStages & 1) ^ 1;
    mb_wait(&sm.k_empty[s], phase);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; tile++)
        copy16(s32(sm.k[s][tile]) + swizzled(r + 16 * i, c),
               16 * i < rows ? k + 16 * i * p.k_row_stride + tile * 64 : p.k, 16 * i < rows);
    copy_commit();
    copy_wait<2>();
    if (b > 0) announce(2 * b - 2);
    mb_wait(&sm.v_empty[s], phase);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int tile = 0; tile < kValueTiles; tile++)
        copy16(s32(sm.v[s][tile]) + swizzled(r + 16 * i, c),
               16 * i < rows ? v + 16 * i * p.v_row_stride + tile * 64 : p.v, 16 * i < rows);
    copy_commit();
    copy_wait<2>();
    if (b > 0) announce(2 * b - 1);
    k += kKeys * p.k_row_stride;
    v += kKeys * p.v_row_stride;
    rows -= kKeys;
  }
  copy_wait<0>();
  announce(2 * blocks - 2);
  announce(2 * blocks - 1);
}

// A thread's two rows, lane / 4 of its warp and 8 more, and its columns: 8 j + 2 * (lane % 4) and
// the next.
struct Rows {
  int64_t token[2];
  int32_t first[2], last[2];
  float m[2] = {-FLT_MAX, -FLT_MAX};  // reference of the softmax, log2 units
  float l[2] = {0, 0};                // sum of this thread's columns
};

// Of the 64 rows from `row` on, those in a token's range.
__device__ __forceinline__ uint64_t in_range(const Rows& rows, int i, int row) {
  const int from = max(rows.first[i] - row, 0), to = min(rows.last[i] - row, kKeys);
  return from >= to ? 0 : ~uint64_t{0} >> (kKeys - (to - from)) << from;
}

__device__ __forceinline__ void mask(float (&s)[32], uint64_t bits, int i) {
  const int quad = threadIdx.x % 4;
  const uint32_t low = static_cast<uint32_t>(bits) >> 2 * quad;
  const uint32_t high = static_cast<uint32_t>(bits >> 32) >> 2 * quad;
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (!((j < 4 ? low : high) >> (8 * (j & 3) + e) & 1)) s[4 * j + 2 * i + e] = -INFINITY;
}

// Scores to weights, as the fragments of the next product. The reference is the maximum of a row's
// first block and moves only when a logit exceeds it by kLag: then this is true, and `alpha` says
// what earlier sums weigh.
__device__ __forceinline__ bool softmax(float (&s)[32], uint32_t (&w)[16], Rows& rows, float k,
                                        float (&alpha)[2]) {
  float x[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) x[i] = fmaxf(x[i], fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
  const bool up = __any_sync(~0u, x[0] * k > rows.m[0] + kLag || x[1] * k > rows.m[1] + kLag);
  if (up)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float y = x[i] * k;
      y = fmaxf(y, __shfl_xor_sync(~0u, y, 1));
      y = fmaxf(y, __shfl_xor_sync(~0u, y, 2));
      const float m = y > rows.m[i] + kLag ? y : rows.m[i];
      alpha[i] = ex2(rows.m[i] - m);
      rows.m[i] = m;
      rows.l[i] *= alpha[i];
    }
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float a = ex2(fmaf(s[4 * j + 2 * i], k, -rows.m[i]));
      const float b = ex2(fmaf(s[4 * j + 2 * i + 1], k, -rows.m[i]));
      rows.l[i] += a + b;
      w[2 * j + i] = pack<true>(a, b);
    }
  return up;
}

// The result of this thread's rows; those that are not finite again, slowly.
template <class Set>
__device__ __forceinline__ void finish(const Task& task, const Place& at, float (&o)[64],
                                       Rows& rows, Set& set) {
  const Params& p = task.p;
  float factor[2];
  bf16* row[2];
  bool redo[2] = {false, false};
#pragma unroll
  for (int j = 0; j < 64; j++) redo[j / 2 % 2] |= !(fabsf(o[j]) <= FLT_MAX);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float l = rows.l[i];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const bool empty = l == 0;
    redo[i] |= !(l <= FLT_MAX) || (rows.m[i] != -FLT_MAX && fabsf(rows.m[i]) > kExact);
    const float sink = p.sink ? ex2(p.sink[at.head] * kLog2e - rows.m[i]) : 0.f;
    factor[i] = empty ? 0.f : 1.f / (l + sink);
    const int64_t t = rows.token[i];
    row[i] = t < p.tokens ? p.out + t * p.out_token_stride + at.head * p.out_head_stride : nullptr;
    if (p.lse && row[i] && threadIdx.x % 4 == 0)
      p.lse[t * p.lse_token_stride + at.head * p.lse_head_stride] =
          empty ? p.empty_lse : (log2f(l) + rows.m[i]) * kLn2;
  }
  store_rows(o, factor, row, kValueDim);
  __syncwarp();  // what is stored again is stored after it
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    uint32_t left = __ballot_sync(~0u, (i ? redo[1] : redo[0]) && (i ? row[1] : row[0]));
#pragma unroll 1
    while (left) {
      const int lane = __ffs(left) - 1;  // a row is that of four lanes
      left &= ~(0xfu << (lane & ~3));
      attend_row(task, __shfl_sync(~0u, i ? rows.token[1] : rows.token[0], lane), at.head, set);
    }
  }
}

template <class Set>
__device__ void consume(SharedMemory<Set>& sm, const Task& task, const Place& at, int blocks) {
  constexpr bool kSets = std::is_same_v<Set, Sets>;
  const Params& p = task.p;
  const int lane = threadIdx.x % 32;
  const int mine = threadIdx.x / 32 * 16 + lane / 4;
  const float k = fmaxf(fabsf(p.scale) * kLog2e, FLT_MIN);  // 0 keeps masked scores at -inf
  const bool negative = p.scale < 0;
  const int low = sm.low;

  // The queries as fragments; zeros after the last token.
  Rows rows;
  uint32_t q[kKeyDim / 16][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    rows.token[i] = at.token + mine + 8 * i;
    rows.first[i] = sm.first[mine + 8 * i];
    rows.last[i] = sm.last[mine + 8 * i];
    const bool there = rows.token[i] < p.tokens;
    const bf16* from = p.q + at.head * p.q_head_stride + lane % 4 * 2;
    if (there) from += rows.token[i] * p.q_token_stride;
#pragma unroll
    for (int d = 0; d < kKeyDim / 8; d++)
      q[d / 2][d % 2 * 2 + i] = there ? *reinterpret_cast<const uint32_t*>(from + 8 * d) : 0;
  }
  // Rows that all tokens of this warp see need no mask.
  const int from = __reduce_max_sync(~0u, max(rows.first[0], rows.first[1]));
  const int to = __reduce_min_sync(~0u, min(rows.last[0], rows.last[1]));

  float o[64], s[32], alpha[2];
#pragma unroll
  for (int i = 0; i < 64; i++) o[i] = 0;
  const auto scores = [&](int b) {
    mb_wait(&sm.k_full[b % kStages], b / kStages & 1);
    const uint32_t kd = fresh(desc(s32(sm.k[b % kStages]), 16));
    wg_fence();
#pragma unroll
    for (int d = 0; d < kKeyDim / 16; d++)
      wgmma_rs<64, true, 0>(s, q[d], kd + (d / 4 * kTileBytes + d % 4 * 32) / 16, d > 0);
    wg_commit();
  };
  const auto release = [&](uint64_t* barrier) {
    if (lane == 0) mb_arrive(barrier);
  };
  // The tokens' bits of block b, requested before its scores and not looked at before these are
  // done: whole words where rows lie so, which `words` counts.
  const uint64_t* words_at[2];
  int words[2];
  uint64_t bits[2];
  if constexpr (!kSets)
#pragma unroll
    for (int i = 0; i < 2; i++) words_at[i] = words_of(task, rows.token[i], low, words[i]);
  const auto ask = [&](int b) {
    if (!kSets && !p.bits) return;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if constexpr (kSets) bits[i] = sm.set.bits[mine + 8 * i][b % Sets::kBlocks];
      else
        bits[i] =
            b < words[i] ? __ldg(words_at[i] + b)
            : rows.token[i] < p.tokens
                ? sm90::bits_of(p, rows.token[i], low + b * kKeys - start_of(p, rows.token[i]))
                : 0;
  };
  // Weights of block b, whose scores are done.
  const auto weights = [&](uint32_t(&w)[16], int b) {
    hold(s);
    release(&sm.k_empty[b % kStages]);
    if (negative)
#pragma unroll
      for (int i = 0; i < 32; i++) s[i] = -s[i];
    const int row = low + b * kKeys;
    const bool masked = kSets ? !__all_sync(~0u, (bits[0] & bits[1]) == ~uint64_t{0})
                              : p.bits || row < from || row + kKeys > to;
    if (masked)
#pragma unroll
      for (int i = 0; i < 2; i++)
        mask(s, kSets ? bits[i] : in_range(rows, i, row) & (p.bits ? bits[i] : ~uint64_t{0}), i);
    return softmax(s, w, rows, k, alpha);
  };
  const auto add = [&](const uint32_t(&w)[16], int b) {
    mb_wait(&sm.v_full[b % kStages], b / kStages & 1);
    const uint32_t vd = fresh(desc(s32(sm.v[b % kStages]), kTileBytes));
    wg_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma128(o, w + 4 * i, vd + (i * 2048 >> 4));
    wg_commit();
  };
  // Adds block b; the scores of the next one run before it and its softmax beside it. No branch
  // stands between a product and the wait for it: ptxas would serialise them (C7514).
  const auto step = [&](const uint32_t(&w)[16], uint32_t(&next)[16], int b) {
    ask(b + 1);
    scores(b + 1);
    add(w, b);
    wg_wait<1>();
    const bool up = weights(next, b + 1);
    wg_wait<0>();
    hold(o);
    release(&sm.v_empty[b % kStages]);
    if (up)
#pragma unroll
      for (int j = 0; j < 64; j++) o[j] *= alpha[j / 2 % 2];
  };
  if (blocks > 0) {
    uint32_t w0[16], w1[16];
    if constexpr (kSets) build(sm.set, p, at.token, low, 0);
    ask(0);
    scores(0);
    wg_wait<0>();
    weights(w0, 0);
    int b = 0;
#pragma unroll 1
    for (; b + 2 < blocks; b += 2) {
      step(w0, w1, b);
      if constexpr (kSets)
        if ((b + 2) % Sets::kBlocks == 0) build(sm.set, p, at.token, low, (b + 2) / Sets::kBlocks);
      step(w1, w0, b + 1);
    }
    if (b + 1 < blocks) {
      step(w0, w1, b);
      add(w1, b + 1);
    } else {
      add(w0, b);
    }
    wg_wait<0>();
    hold(o);
    if constexpr (kSets) drain(sm.set, (blocks - 1) / Sets::kBlocks);
  }
  if constexpr (kSets)  // again: held all along, they would be spilled
#pragma unroll
    for (int i = 0; i < 2; i++)
      rows.token[i] = at.token + thread_here() / 32 * 16 + thread_here() % 32 / 4 + 8 * i;
  finish(task, at, o, rows, sm.set);
}

template <class Set>
__global__ void __launch_bounds__(kConsumers + kProducers, 1)
    attend_dense(const __grid_constant__ Task task) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& sm = *reinterpret_cast<SharedMemory<Set>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      mb_init(&sm.k_full[i], kProducers);
      mb_init(&sm.v_full[i], kProducers);
      mb_init(&sm.k_empty[i], kConsumers / 32);
      mb_init(&sm.v_empty[i], kConsumers / 32);
    }
    if constexpr (std::is_same_v<Set, Sets>) init(sm.set);
    fence_barrier_init();
  }
  if constexpr (std::is_same_v<Set, Sets>) {
    __syncwarp();
    cluster_sync();
  }
  const Place at = place_of(task);
  find_ranges(sm, task.p, at.token);
  const int blocks = sm.high > sm.low ? ceil_div(sm.high - sm.low, kKeys) : 0;
  if (__shfl_sync(~0u, threadIdx.x / 128, 0) == 2) {
    give_registers<kProducerRegisters>();
    if (blocks > 0) produce(sm, task, at, blocks);
  } else {
    take_registers<kConsumerRegisters>();
    consume(sm, task, at, blocks);
  }
}

// Heads that share the bits of a tile; a group of heads has whole clusters. Ids are read the least
// by eight, but of an H200's 132 multiprocessors clusters of eight take 120: no loss where tiles
// differ in length, as in a causal call, and less than the gain where there are many.
unsigned cluster_of(const Task& task) {
  static_assert(kHeadGroup % 8 == 0);
  const Params& p = task.p;
  const bool differ = p.lengths && p.rows <= 2 * p.tokens;
  if (p.heads % 8 == 0 && (differ || task.tiles * p.heads >= tuned::kTilesForClustersOfEight))
    return 8;
  return p.heads % 2 == 0 ? 2 : 1;
}

template <class Set>
void launch(const Task& task, unsigned cluster) {
  constexpr int kBytes = sizeof(SharedMemory<Set>);
  static_assert(kBytes <= kMaxSharedBytes);
  cuda::keep_error(allow_shared(attend_dense<Set>, kBytes));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  const dim3 grid(static_cast<unsigned>(task.tiles * task.p.heads));
  cudaLaunchConfig_t config =
      launch_config(grid, kConsumers + kProducers, kBytes, stream_of(task.p.device));
  config.attrs = &attribute;
  config.numAttrs = cluster > 1;
  cuda::keep_error(cudaLaunchKernelEx(&config, attend_dense<Set>, task));
}

}  // namespace

const char* fits(const Shape& s) {
  if (s.d_qk != kKeyDim || s.d_v != kValueDim) return "keys are not 192 wide, or values not 128";
  if (s.bias) return "a bias";
  if (!s.aligned) return "rows that do not begin on 16-byte boundaries";
  return s.rows <= INT32_MAX - kKeys ? nullptr : "too many rows";
}

const char* slower(const Shape& s) {
  // Every row is read here. The kernel by sets leaves out those that none of its 64 tokens wants,
  // and takes about twelve times as long for the others (docs/prefill-sm90.md).
  const int64_t wanted = std::min<int64_t>(s.tokens, 64) * s.topk;
  const bool few = s.topk >= 0 && tuned::kSetRowCost * wanted < s.rows;
  return few ? "few of the rows are wanted" : nullptr;
}

void attend(const Params& p) noexcept {
  Task task{p};
  task.tiles = ceil_div(p.tokens, kTokens);
  task.whole_words = reinterpret_cast<uintptr_t>(p.bits) % 8 == 0 && p.bits_stride % 8 == 0;
  if (p.ids || p.mask) launch<Sets>(task, cluster_of(task));
  else launch<Ranges>(task, 1);
}

}  // namespace winnow::internal::mha::dense
