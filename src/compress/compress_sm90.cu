// compress on the device: a block, or a cluster that shares the values, for one token or a few that
// follow each other. It pools the entries that its tokens close, then stores its tokens' rows.
//
// pool      A thread takes 4 values of 8 rows at once, 16 B each, so that a window of C4A (32 KiB)
//           is in flight in one block, one of C128A (512 KiB) in a cluster of 8. Windows of more
//           than 8 rows are shared by 16 groups of threads, whose partial sums meet in shared
//           memory.
// finish    One warp takes the pooled row: norm, RoPE, Hadamard, record (cuda/prologue.h).
//
// Budget, C4A: 8 KiB read and 8 KiB written a token; what a window's entry reads again it finds in
// L1 or L2. A call of few tokens waits for its positions, then for its neighbours' and the table,
// then for the rows.
//
// Entries must see the rows that were stored before the call. A paged state has a place for every
// position, so one launch does both. In a ring that is not longer than the call's tokens and a
// window, a row may take the place of one that an entry needs: entries and rows are two launches.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "compress/kernel.h"
#include "cuda/prologue.h"
#include "model/records.h"

namespace winnow::internal::compress {

namespace {

constexpr int kQuad = 4;          // values of a thread
constexpr int kRowsEach = 8;      // rows that a thread has in flight
constexpr int kManyGroups = 16;   // of threads, for windows of more than 8 rows
constexpr int kQuadsOfRank = 16;  // ... which then take 64 values of a row, a block of a cluster
constexpr int kMaxThreads = kManyGroups * kQuadsOfRank;
constexpr int kMaxTokens = 32;  // of a block
constexpr int kPieces = kMaxWidth / cuda::kWarpValues;

struct Call {
  Params p;
  int tokens = 1;                    // of a block or cluster
  bool entries = true, rows = true;  // what is stored
  bool wide = false;                 // rows, state and bias are read four values at a time
  bool norm_wide = false, latent_wide = false;
};

struct Shared {
  Row rows[kMaxRows];                   // of the entry
  float* places[kMaxTokens];            // of the tokens' own rows
  alignas(16) float pooled[kMaxWidth];  // in the first block of a cluster
  float largest[kManyGroups][kQuadsOfRank * kQuad];
  float whole[kManyGroups][kQuadsOfRank * kQuad];
  float sum[kManyGroups][kQuadsOfRank * kQuad];
};

struct Quad {
  float v[kQuad];
};

__device__ __forceinline__ Quad load_quad(const void* data, bool is_bf16, bool wide, int64_t at) {
  if (is_bf16) {
    const bf16* from = static_cast<const bf16*>(data) + at;
    if (!wide) return {to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
    const uint2 pairs = *reinterpret_cast<const uint2*>(from);
    return {__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
            __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u)};
  }
  const float* from = static_cast<const float*>(data) + at;
  if (!wide) return {from[0], from[1], from[2], from[3]};
  const float4 all = *reinterpret_cast<const float4*>(from);
  return {all.x, all.y, all.z, all.w};
}

// A softmax over some of the rows, value by value.
struct Pool {
  float largest[kQuad], whole[kQuad], sum[kQuad];
};

// Rows [first, first + 8) below `count` join the pool; `at` is the thread's first value.
__device__ __forceinline__ void add_rows(Pool& pool, const Row* rows, int first, int count,
                                         int64_t at, bool wide) {
  Quad values[kRowsEach], scores[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    if (first + i >= count) continue;
    const Row& row = rows[first + i];
    values[i] = load_quad(row.values, row.are_bf16, wide, at);
    scores[i] = load_quad(row.scores, row.are_bf16, wide, at);
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    if (first + i >= count) continue;
    const float* bias = rows[first + i].bias;
    if (bias == nullptr) continue;
    const Quad added = load_quad(bias, false, wide, at);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) scores[i].v[k] = __fadd_rn(scores[i].v[k], added.v[k]);
  }
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    float largest = pool.largest[k];
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i)
      if (first + i < count) largest = fmaxf(largest, scores[i].v[k]);
    const float kept = largest == pool.largest[k] ? 1.0f : expf(pool.largest[k] - largest);
    float whole = __fmul_rn(pool.whole[k], kept);
    float sum = __fmul_rn(pool.sum[k], kept);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i)
      if (first + i < count) {
        const float weight = expf(scores[i].v[k] - largest);
        sum = __fmaf_rn(weight, values[i].v[k], sum);
        whole = __fadd_rn(whole, weight);
      }
    pool.largest[k] = largest;
    pool.whole[k] = whole;
    pool.sum[k] = sum;
  }
}

// The pool of all groups, for value `column` of this block.
__device__ __forceinline__ float merged(const Shared& shared, int column) {
  float largest = -INFINITY, whole = 0, sum = 0;
#pragma unroll
  for (int g = 0; g < kManyGroups; ++g) largest = fmaxf(largest, shared.largest[g][column]);
#pragma unroll
  for (int g = 0; g < kManyGroups; ++g) {
    const float kept = expf(shared.largest[g][column] - largest);
    whole = __fmaf_rn(shared.whole[g][column], kept, whole);
    sum = __fmaf_rn(shared.sum[g][column], kept, sum);
  }
  return __fdiv_rn(sum, whole);
}

// Where an entry goes.
struct Goal {
  bool record, latent;
  int64_t slot;
};
__device__ __forceinline__ Goal goal_of(const Params& p, int64_t token) {
  Goal g{false, p.latent != nullptr, -1};
  if (p.cache.data == nullptr) return g;
  g.slot = p.slots[token * p.slot_stride];
  g.record = g.slot >= 0 && g.slot < p.cache.pages * p.cache.page;
  if (p.rope.table != nullptr)
    g.record = g.record && core::in_table(p.rope, position_of(p, token) - p.ratio + 1);
  return g;
}

// The pooled row becomes latent and record, by one warp.
template <class R>
__device__ __forceinline__ void finish(const Call& call, const float* pooled, int64_t token,
                                       const Goal& goal, int lane) {
  const Params& p = call.p;
  cuda::HeldFloats<kPieces> floats;
  cuda::Held<kPieces> row;
#pragma unroll
  for (int c = 0; c < kPieces; ++c)
    cuda::load_floats(pooled, cuda::piece_at(c, lane), p.width, true, floats.pieces[c]);
  cuda::NormFactors f;
  if (p.norm.kind != NormKind::kNone) f = cuda::norm_factors(p.norm, floats, p.width, lane);
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int at = cuda::piece_at(c, lane);
    row.pieces[c] = p.norm.kind == NormKind::kNone
                        ? cuda::packed(floats.pieces[c])
                        : cuda::normed(p.norm, f, floats.pieces[c], at, p.width, call.norm_wide);
    if (goal.latent)
      cuda::store_piece(p.latent + token * p.latent_stride, at, p.width, call.latent_wide,
                        row.pieces[c]);
  }
  if (!goal.record) return;
  if (p.rope.table != nullptr) {
    const int64_t rope = core::rope_begin(p.rope, p.width);
    const cuda::Turn turn =
        cuda::turn_of(p.rope, position_of(p, token) - p.ratio + 1, lane % cuda::kRopeLanes);
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int at = cuda::piece_at(c, lane);
      const uint4 turned = cuda::rotated(p.rope.half, turn, row.pieces[c]);
      if (at >= rope && at < rope + kRopeDim) row.pieces[c] = turned;
    }
  }
  if (p.hadamard) row.pieces[0] = cuda::hadamard(row.pieces[0], lane);
  std::byte* page = p.cache.data + goal.slot / p.cache.page * p.cache.stride;
  cuda::store_record<R>(p.quantizer, row, page, goal.slot % p.cache.page, p.cache.page, lane);
}

// Puts the weighted mean of an entry's rows into the first block's `pooled`.
template <int kGroups>
__device__ __forceinline__ void pool_rows(const Call& call, Shared& shared, int count, int rank) {
  const Params& p = call.p;
  const int group = kGroups == 1 ? 0 : static_cast<int>(threadIdx.x) / kQuadsOfRank;
  const int quad = kGroups == 1
                       ? static_cast<int>(threadIdx.x)
                       : rank * kQuadsOfRank + static_cast<int>(threadIdx.x) % kQuadsOfRank;
  const int at = quad * kQuad;
  if (!p.gate) {  // an entry is its token's row
    if (at < p.width)
      for (int k = 0; k < kQuad; ++k)
        shared.pooled[at + k] =
            load_quad(shared.rows[0].values, shared.rows[0].are_bf16, call.wide, at).v[k];
    __syncthreads();
    return;
  }
  Pool pool;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) pool.largest[k] = -INFINITY, pool.whole[k] = pool.sum[k] = 0;
  if (at < p.width)
    for (int first = group * kRowsEach; first < count; first += kGroups * kRowsEach)
      add_rows(pool, shared.rows, first, count, at, call.wide);
  if constexpr (kGroups == 1) {
    if (at < p.width)
#pragma unroll
      for (int k = 0; k < kQuad; ++k) shared.pooled[at + k] = __fdiv_rn(pool.sum[k], pool.whole[k]);
    __syncthreads();
  } else {
    namespace cg = cooperative_groups;
    const int column = at - rank * kQuadsOfRank * kQuad;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      shared.largest[group][column + k] = pool.largest[k];
      shared.whole[group][column + k] = pool.whole[k];
      shared.sum[group][column + k] = pool.sum[k];
    }
    __syncthreads();
    const int value = rank * kQuadsOfRank * kQuad + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kQuadsOfRank * kQuad && value < p.width)
      cg::this_cluster().map_shared_rank(shared.pooled, 0)[value] =
          merged(shared, static_cast<int>(threadIdx.x));
    cg::this_cluster().sync();
  }
}

// Pools the entry that a token closes and stores it. All threads of the block or cluster come here
// and agree on every branch.
template <class R, int kGroups>
__device__ __forceinline__ void store_entry(const Call& call, Shared& shared, int64_t token,
                                            int rank) {
  const Params& p = call.p;
  const Goal goal = goal_of(p, token);
  if (!goal.record && !goal.latent) return;
  const int64_t last = position_of(p, token);
  const int64_t reach = last - rows_of_entry(p) + 1;
  const int64_t begin = reach > 0 ? reach : 0;
  const int count = static_cast<int>(last - begin + 1);
  bool missing = false;
  for (int j = threadIdx.x; j < count; j += blockDim.x) {
    const Row row = row_of(p, token, last, begin + j);
    shared.rows[j] = row;
    missing = missing || row.values == nullptr;
  }
  if (__syncthreads_or(missing)) return;
  pool_rows<kGroups>(call, shared, count, rank);
  if (rank == 0 && threadIdx.x < 32)
    finish<R>(call, shared.pooled, token, goal, static_cast<int>(threadIdx.x));
  // The next entry's rows must wait until this one's are read.
  if constexpr (kGroups == 1) __syncthreads();
  else cooperative_groups::this_cluster().sync();
}

// The rows of tokens [first, first + count) go to their places in the state, each block of a
// cluster storing its share of the columns.
__device__ __forceinline__ void store_rows(const Call& call, Shared& shared, int64_t first,
                                           int count, int rank, int ranks) {
  const Params& p = call.p;
  if (static_cast<int>(threadIdx.x) < count)
    shared.places[threadIdx.x] = own_state_row(p, first + threadIdx.x);
  __syncthreads();
  const int values = static_cast<int>(values_of(p));
  const int columns = 2 * values;
  const int quads = ceil_div(columns / kQuad, ranks);  // of a row, in this block
  const int all = quads * count;
  const auto threads = static_cast<int>(blockDim.x);
  constexpr int kEach = 4;
  for (int from = static_cast<int>(threadIdx.x); from < all; from += kEach * threads) {
    Quad quad[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int item = from + i * threads;
      const int column = (rank * quads + item % quads) * kQuad;
      if (item >= all || column >= columns || shared.places[item / quads] == nullptr) continue;
      const int64_t token = first + item / quads;
      quad[i] = load_quad(p.rows, p.rows_are_bf16, call.wide, token * p.row_stride + column);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int item = from + i * threads;
      const int column = (rank * quads + item % quads) * kQuad;
      if (item >= all || column >= columns || shared.places[item / quads] == nullptr) continue;
      const int64_t token = first + item / quads;
      if (p.bias != nullptr && column >= values) {
        const auto place = static_cast<int>(position_of(p, token)) % p.ratio;
        const Quad bias =
            load_quad(p.bias + place * p.bias_stride, false, call.wide, column - values);
#pragma unroll
        for (int k = 0; k < kQuad; ++k) quad[i].v[k] = __fadd_rn(quad[i].v[k], bias.v[k]);
      }
      float* to = shared.places[item / quads] + column;
      if (call.wide)
        *reinterpret_cast<float4*>(to) = {quad[i].v[0], quad[i].v[1], quad[i].v[2], quad[i].v[3]};
      else
        for (int k = 0; k < kQuad; ++k) to[k] = quad[i].v[k];
    }
  }
}

template <class R, int kGroups>
__global__ void __launch_bounds__(kGroups == 1 ? kMaxWidth / kQuad : kMaxThreads)
    compress_tokens(const __grid_constant__ Call call) {
  __shared__ Shared shared;
  const Params& p = call.p;
  int rank = 0, ranks = 1;
  if constexpr (kGroups > 1) {
    rank = static_cast<int>(cooperative_groups::this_cluster().block_rank());
    ranks = static_cast<int>(cooperative_groups::this_cluster().num_blocks());
  }
  const int64_t first = int64_t{blockIdx.x / static_cast<unsigned>(ranks)} * call.tokens;
  const int64_t left = p.tokens - first;
  const int count = left < call.tokens ? static_cast<int>(left) : call.tokens;
  if (call.entries) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    unsigned closing = __ballot_sync(~0u, lane < count && closes(p, first + lane));
    for (; closing != 0; closing &= closing - 1)
      store_entry<R, kGroups>(call, shared, first + __ffs(static_cast<int>(closing)) - 1, rank);
  }
  if (call.rows && p.state != nullptr) store_rows(call, shared, first, count, rank, ranks);
}

template <class R, int kGroups>
void launch(const Call& call) {
  const Params& p = call.p;
  const int64_t values = kQuadsOfRank * kQuad;
  const auto ranks = static_cast<unsigned>(kGroups == 1 ? 1 : ceil_div(p.width, values));
  const auto blocks = static_cast<unsigned>(ceil_div(p.tokens, int64_t{call.tokens}));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {ranks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {blocks * ranks, 1, 1};
  config.blockDim = {kGroups == 1 ? static_cast<unsigned>(round_up(p.width / kQuad, 32))
                                  : static_cast<unsigned>(kMaxThreads),
                     1, 1};
  config.stream = static_cast<cudaStream_t>(p.device.stream);
  config.attrs = &cluster;
  config.numAttrs = ranks > 1 ? 1 : 0;
  cudaLaunchKernelEx(&config, compress_tokens<R, kGroups>, call);
}

template <class R>
void launch_for(const Call& call) {
  if (rows_of_entry(call.p) <= kRowsEach) launch<R, 1>(call);
  else launch<R, kManyGroups>(call);
}

// Four values of any row, state and bias lie together.
bool is_wide(const Params& p) {
  const auto aligned = [](const void* data, int64_t stride, int64_t size) {
    return reinterpret_cast<uintptr_t>(data) % (kQuad * size) == 0 && stride % kQuad == 0;
  };
  return aligned(p.rows, p.row_stride, p.rows_are_bf16 ? 2 : 4) &&
         aligned(p.bias, p.bias_stride, 4) && aligned(p.state, p.state_stride, 4) &&
         p.block_stride % kQuad == 0;
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens == 0) return;
  Call call{p};
  // Few tokens: each by itself, for the shortest wait. Many: enough work for a block.
  if (p.tokens > 512) call.tokens = rows_of_entry(p) <= kRowsEach ? 4 : 16;
  call.wide = is_wide(p);
  call.norm_wide = cuda::is_wide(p.norm);
  call.latent_wide = cuda::is_wide(p.latent, p.latent_stride * 2);
  const auto run = [&] {
    with_entry(p.cache.format, [&](auto record) { launch_for<decltype(record)>(call); });
  };
  // Positions of one request in the call and in the windows before them share no place.
  if (!p.ring || p.tokens + rows_of_entry(p) - 1 <= p.block) return run();
  call.rows = false;
  run();
  call.entries = false;
  call.rows = true;
  run();
}

}  // namespace winnow::internal::compress
