// compress on the device, C128A: usual calls (entry_sm90.cuh) with entries of 128 rows and 512
// values. A cluster of 8 blocks makes an entry, a block 64 values of it, a warp 16 rows, 8 a half
// warp: a lane has four values of 8 rows. All of them are on their way to shared memory at once,
// each thread's own; warps exchange their pools, blocks the squares of their values. A block's 64
// values are a tile of the record, so that each block finishes its own.
//
// Budget: 4 KiB read and 4 KiB written a token, 64 KiB a block, three blocks a multiprocessor.
// About 1,200 instructions a thread. A decode reads 512 KiB an entry: it waits for positions,
// (paged: the table,) rows, and the cluster once.
#include <cuda_runtime.h>

#include "compress/kernels_sm90.h"
#include "compress/many_sm90.cuh"
#include "cuda/copies.h"
#include "cuda/device.h"

namespace winnow::internal::compress::many {

namespace {

using R = V4Fp8;
constexpr int kWindow = 128;
constexpr int kRanks = R::kDim / kColumns;
constexpr int kWarpRows = kWindow / kWarps;
constexpr int kEach = kWarpRows / kRowsAtOnce;  // rows of a lane
constexpr int kScores = R::kDim;                // where a row's scores begin
static_assert(R::kTile == kColumns, "a block finishes a tile");

struct LongMemory {
  float4 values[kEach][kThreads], scores[kEach][kThreads];
  alignas(16) float pooled[kColumns];
  uint2 squares[kRanks][kColumns / 32];  // of each warp's values: a float, by all blocks
  uint64_t inbox;                        // ... and a barrier that counts their bytes
  TokensMemory tokens;
};

// A pool of four values that every warp leaves, in memory where values were.
enum PoolPart : uint8_t { kLargest, kWhole, kSum };

// Rows that a lane has found: of the entry's row `row`, lanes 16 and more the same once more.
struct LongRow {
  const float* from = nullptr;
  float* place = nullptr;
  bool called = false;
};

__device__ __forceinline__ LongRow find_row(const Params& p, int64_t last, int64_t request,
                                            int64_t other, int row, bool inside,
                                            int64_t other_position, int64_t other_request,
                                            int64_t store_from) {
  LongRow found;
  const int64_t position = last - (kWindow - 1) + row;
  found.called = inside && other_position == position && other_request == request;
  if (!found.called) {
    found.from = state_row(p, request, position);
    return found;
  }
  found.from = static_cast<const float*>(p.rows) + other * p.row_stride;
  if (other >= store_from) found.place = own_state_row(p, other);
  return found;
}

// Calls f(std::integral_constant<int, i>) for i = 0 to kCount - 1.
template <int kCount, int kFirst = 0, class F>
__device__ __forceinline__ void static_for(F f) {
  if constexpr (kFirst < kCount) {
    f(std::integral_constant<int, kFirst>());
    static_for<kCount, kFirst + 1>(f);
  }
}

template <class T>
__device__ __forceinline__ T* of_lane(T* pointer, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(pointer);
  return reinterpret_cast<T*>(__shfl_sync(~0u, bits, lane));
}

// The pool of a lane's rows, for each of its four values.
__device__ __forceinline__ QuadPool pool_rows(const LongMemory& shared,
                                              const Quad (&scores)[kEach]) {
  QuadPool pool;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    float largest = scores[0].v[k];
#pragma unroll
    for (int i = 1; i < kEach; ++i) largest = fmaxf(largest, scores[i].v[k]);
    pool.of[k].largest = largest;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float4 value = shared.values[i][threadIdx.x];
    add_row(pool.of[0], value.x, scores[i].v[0]);
    add_row(pool.of[1], value.y, scores[i].v[1]);
    add_row(pool.of[2], value.z, scores[i].v[2]);
    add_row(pool.of[3], value.w, scores[i].v[3]);
  }
  return pool;
}

// The value of column `thread` of the block, from all warps' pools.
__device__ __forceinline__ float join_warps(const LongMemory& shared, int thread) {
  const auto part = [&](PoolPart which, int warp) {
    return reinterpret_cast<const float*>(&shared.values[which][warp * 32])[thread];
  };
  float largest = part(kLargest, 0);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, part(kLargest, w));
  float whole = 0, sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float weight = exp_of(__fsub_rn(part(kLargest, w), largest));
    whole = __fmaf_rn(part(kWhole, w), weight, whole);
    sum = __fmaf_rn(part(kSum, w), weight, sum);
  }
  return __fdiv_rn(sum, whole);
}

// All blocks get the sum of a warp's squares. No barrier of the cluster follows: that would wait
// for all that the blocks have stored.
__device__ __forceinline__ void share_squares(LongMemory& shared, const Place& me, float value) {
  const float sum = cuda::warp_sum(__fmul_rn(value, value));
  if (me.lane < kRanks)
    cuda::peer_put(cuda::peer(cuda::s32(&shared.squares[me.rank][me.warp]), me.lane),
                   uint2{__float_as_uint(sum), 0}, cuda::peer(cuda::s32(&shared.inbox), me.lane));
}
__device__ __forceinline__ float sum_of_squares(const LongMemory& shared) {
  float sums[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
    sums[r] =
        __fadd_rn(__uint_as_float(shared.squares[r][0].x), __uint_as_float(shared.squares[r][1].x));
  return __fadd_rn(cuda::joined(sums[0], sums[1], sums[2], sums[3]),
                   cuda::joined(sums[4], sums[5], sums[6], sums[7]));
}

// Brings into L2 what the cluster that may follow this one reads of the state, which is all but its
// own row: half a line's values or scores a lane.
__device__ __forceinline__ void ask_ahead(const Call& call, const Place& me, int64_t token) {
  constexpr int kLine = 32;  // floats of 128 B
  const Params& p = call.p;
  if (token >= p.tokens) return;
  const int64_t last = position_of(p, token);
  const int64_t request = request_of(p, token);
  if (last < 0 || remainder(last + 1, kWindow) != 0) return;
  const int row = me.warp * kWarpRows + me.lane % kWarpRows;
  const float* from = state_row(p, request, last - (kWindow - 1) + row);
  if (from == nullptr) return;
  const int column = me.rank * kColumns + (me.lane < kWarpRows ? 0 : kScores);
#pragma unroll
  for (int at = 0; at < kColumns; at += kLine) cuda::prefetch_l2(from + column + at);
}

// All threads of the cluster come here and agree on every branch. `turn` counts the entries.
__device__ __forceinline__ void make_long_entry(const Call& call, LongMemory& shared,
                                                const Place& me, int64_t token, int64_t store_from,
                                                uint32_t& turn) {
  const Params& p = call.p;
  const auto thread = static_cast<int>(threadIdx.x);
  const int row = me.warp * kWarpRows + me.lane % kWarpRows;
  // In one wait: the token, and what may be its neighbour at this lane's row.
  const int64_t other = token - (kWindow - 1 - row);
  const bool inside = other >= 0;
  const int64_t other_position = inside ? position_of(p, other) : 0;
  const int64_t other_request = inside ? request_of(p, other) : 0;
  const int64_t last = position_of(p, token);
  const int64_t request = request_of(p, token);
  const Goal goal = goal_of(p, slot_of(p, token), last);
  if (last < 0 || remainder(last + 1, kWindow) != 0 || !goal.any()) return;
  cuda::cluster_arrive();  // waited for below
  const LongRow mine =
      find_row(p, last, request, other, row, inside, other_position, other_request, store_from);
  const unsigned called = __ballot_sync(~0u, mine.called);
  const unsigned placed = __ballot_sync(~0u, mine.place != nullptr);
  const bool missing = mine.from == nullptr;
  const int half = me.lane / kLanes;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float* from = of_lane(mine.from, i * kRowsAtOnce + half);
    if (from != nullptr) {
      cuda::copy_async<16>(&shared.values[i][thread], from + me.at);
      cuda::copy_async<16>(&shared.scores[i][thread], from + kScores + me.at);
    }
    cuda::copies_commit();
  }
  if (call.tokens == 1) ask_ahead(call, me, token + call.ahead);
  Steps steps;
  const int at = thread < kLanes ? me.at : kMaxWidth;
  if (thread < kLanes) {
    load_weights<R>(call, at, steps);
    if (goal.record) load_angles<R>(p, last - kWindow + 1, at, steps);
  }
  if (__syncthreads_or(missing)) {
    cuda::copies_wait<0>();
    return cuda::cluster_wait();
  }
  if (mine.called && other >= store_from) shared.tokens.stored[other - store_from] = true;
  // Rows are stored as they come, while later ones are still on their way.
  const auto load_bias = [&](int i) {
    const int found = i * kRowsAtOnce + half;
    if (p.bias == nullptr || !(called >> found & 1)) return Quad{};
    return load_quad<Load::kFloats>(p.bias, false,
                                    (me.warp * kWarpRows + found) * p.bias_stride + me.at);
  };
  Quad scores[kEach];
  Quad next = load_bias(0);
  static_for<kEach>([&](auto row_of_lane) {
    constexpr int i = row_of_lane;
    const int found = i * kRowsAtOnce + half;
    const bool biased = p.bias != nullptr && (called >> found & 1);
    const Quad added = next;
    if (i + 1 < kEach) next = load_bias(i + 1);
    cuda::copies_wait<kEach - 1 - i>();
    const float4 score = shared.scores[i][thread];
    scores[i] = {score.x, score.y, score.z, score.w};
    if (biased)
#pragma unroll
      for (int k = 0; k < kQuad; ++k) scores[i].v[k] = __fadd_rn(scores[i].v[k], added.v[k]);
    if (placed == 0) return;
    float* to = of_lane(mine.place, found);
    if (to == nullptr) return;
    const float4 value = shared.values[i][thread];
    store_quad<Load::kFloats>(to + me.at, {value.x, value.y, value.z, value.w});
    store_quad<Load::kFloats>(to + kScores + me.at, scores[i]);
  });
  QuadPool pool = pool_rows(shared, scores);
#pragma unroll
  for (Pool& of : pool.of) {
    const Pool far{__shfl_xor_sync(~0u, of.largest, kLanes), __shfl_xor_sync(~0u, of.whole, kLanes),
                   __shfl_xor_sync(~0u, of.sum, kLanes)};
    of = joined(of, far);  // of the first half's lanes, which are taken
  }
  __syncwarp();  // the lanes' values are read
  if (half == 0) {
    const Pool(&of)[kQuad] = pool.of;
    shared.values[kLargest][thread] = {of[0].largest, of[1].largest, of[2].largest, of[3].largest};
    shared.values[kWhole][thread] = {of[0].whole, of[1].whole, of[2].whole, of[3].whole};
    shared.values[kSum][thread] = {of[0].sum, of[1].sum, of[2].sum, of[3].sum};
  }
  __syncthreads();
  float value = 0;
  if (thread < kColumns) {
    value = join_warps(shared, thread);
    shared.pooled[thread] = value;
  }
  cuda::cluster_wait();  // all blocks have begun, and have read what they got for the entry before
  if (thread == 0) cuda::mb_expect(&shared.inbox, sizeof(shared.squares));
  if (thread < kColumns) share_squares(shared, me, value);
  __syncthreads();  // the block's values are there
  if (me.warp == 0) {
    cuda::mb_wait_cluster(&shared.inbox, turn & 1);
    Quad pooled{};
    if (thread < kLanes) {
      const float4 all = *reinterpret_cast<const float4*>(shared.pooled + thread * kQuad);
      pooled = {all.x, all.y, all.z, all.w};
    }
    finish<R>(call, steps, pooled, token, goal, at, [&](float) { return sum_of_squares(shared); });
  }
  ++turn;
  __syncthreads();  // what the blocks exchanged is read
}

constexpr int kBlocks = 3;  // that share a multiprocessor

__global__ void __launch_bounds__(kThreads, kBlocks) c128a_rows(const __grid_constant__ Call call) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<LongMemory*>(memory);
  Call known = call;  // the compiler puts in what is known and leaves the rest where it is
  known.p.ratio = kWindow;
  known.p.width = R::kDim;
  known.p.overlap = false;
  known.p.rows_are_bf16 = false;
  const Place me = place_of(known.p);
  if (threadIdx.x == 0) {
    cuda::mb_init(&shared.inbox, 1);
    cuda::fence_barrier_init();
  }
  uint32_t turn = 0;
  take_tokens<Load::kFloats>(
      known, shared.tokens, me, first_of(known),
      [&](int64_t token, int64_t from) { make_long_entry(known, shared, me, token, from, turn); });
}

}  // namespace

}  // namespace winnow::internal::compress::many

namespace winnow::internal::compress {

bool long_rows(Call call, Load load) noexcept {
  const Params& p = call.p;
  if (load != Load::kFloats || p.ratio != many::kWindow || p.overlap || !is_usual(call) ||
      p.cache.format != many::R::kFormat)
    return false;
  call.ahead = cuda::multiprocessors(p.device.index) * many::kBlocks / many::kRanks;
  many::launch_clusters(many::c128a_rows, call, sizeof(many::LongMemory));
  return true;
}

}  // namespace winnow::internal::compress
