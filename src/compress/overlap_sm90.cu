// compress on the device, prefills of C4A's indexer in usual calls (entry_sm90.cuh): windows of
// four rows of 128 values, whose first part belongs to the next window's entry. A warp takes a
// window, a block four that follow each other: a warp pools the part for the next entry, too, and
// hands that over in shared memory. So a row is read once, straight to registers, requested before
// it is known that it belongs to a window; of the window before the block's the first part is read
// again. A thread has four values of each part of a row. Windows that are none are left to
// few_sm90.cuh, token by token.
//
// Budget: 2 KiB read and 2 KiB written a token, 8 KiB a warp and 128 KiB a multiprocessor on their
// way; 8,192 tokens run at once. Parts are pooled and joined as few_sm90.cuh does it, so that both
// give the same bits.
#include <cuda_runtime.h>

#include "compress/few_sm90.cuh"
#include "compress/kernels_sm90.h"
#include "cuda/copies.h"
#include "cuda/launch.h"

namespace winnow::internal::compress {

namespace {

using R = IndexKeys;
constexpr Load kLoad = Load::kFloats;
constexpr int kRatio = 4;
constexpr int kWidth = R::kDim;
constexpr int kValues = 2 * kWidth;
constexpr int kWindows = 4;  // of a block, a warp each
constexpr int kBlocks = 4;   // of a multiprocessor
static_assert(kWindows * 32 == kThreads && kWidth == 32 * kQuad);

// Pools on their way from one warp to the next.
struct Handed {
  float4 largest[32], whole[32], sum[32];

  __device__ __forceinline__ void put(int lane, const QuadPool& pool) {
    const Pool(&of)[kQuad] = pool.of;
    largest[lane] = {of[0].largest, of[1].largest, of[2].largest, of[3].largest};
    whole[lane] = {of[0].whole, of[1].whole, of[2].whole, of[3].whole};
    sum[lane] = {of[0].sum, of[1].sum, of[2].sum, of[3].sum};
  }
  __device__ __forceinline__ QuadPool get(int lane) const {
    const float4 l = largest[lane];
    const float4 w = whole[lane];
    const float4 s = sum[lane];
    return {{{l.x, w.x, s.x}, {l.y, w.y, s.y}, {l.z, w.z, s.z}, {l.w, w.w, s.w}}};
  }
};

struct WindowsMemory {
  float4 before[2][kRatio][32];  // values and scores of the window before the block's: its part
  Handed handed[kWindows];       // for each window's entry
};

// What a warp knows of its window and of the one before: lanes 0 to 3 have the tokens of the one
// before, lanes 4 to 7 its own.
struct Windows {
  int64_t token;
  int32_t position = -1, request = 0;
  int32_t start, of;  // first position and request of the window
  bool whole;         // a window of one request
  bool follows;       // so is the one before, and it is its predecessor

  __device__ __forceinline__ Windows(const Params& p, int64_t unit, int lane)
      : token((unit - 1) * kRatio + lane) {
    const bool inside = lane < 2 * kRatio && token >= 0 && token < p.tokens;
    if (inside) position = static_cast<int32_t>(position_of(p, token));
    if (inside) request = static_cast<int32_t>(request_of(p, token));
    start = __shfl_sync(~0u, position, kRatio);
    of = __shfl_sync(~0u, request, kRatio);
    const unsigned same =
        __ballot_sync(~0u, inside && position == start - kRatio + lane && request == of);
    constexpr unsigned kAll = (1u << kRatio) - 1;
    whole = (same >> kRatio & kAll) == kAll && start >= 0 && start % kRatio == 0;
    follows = whole && (same & kAll) == kAll && start > 0;
  }
};

__device__ __forceinline__ Quad quad_of(const float4& raw) { return {raw.x, raw.y, raw.z, raw.w}; }

// What the window at token `first` takes of rows before it that are no window of the call; false:
// one of them is missing. Out of line: it would take registers from what is common.
__device__ __noinline__ bool hand_stored(const Params& p, int64_t first, int32_t start,
                                         int32_t request, int lane, Handed& handed) {
  QuadPool before;
  if (!pool_before<kLoad, kRatio>(p, first, start, request, lane, lane * kQuad, before))
    return false;
  handed.put(lane, before);
  return true;
}

// The values and scores of a part of the window's rows.
struct Part {
  Quad values[kRatio], scores[kRatio];

  __device__ __forceinline__ void load(const Params& p, int64_t first, int column) {
    const int64_t from = first * p.row_stride + column;
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      values[i] = load_quad<kLoad>(p.rows, false, from + i * p.row_stride);
      scores[i] = load_quad<kLoad>(p.rows, false, from + i * p.row_stride + kValues);
    }
  }
  __device__ __forceinline__ void add_biases(const Params& p, int column) {
    if (p.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < kRatio; ++i) add_bias<kLoad>(scores[i], p.bias + i * p.bias_stride, column);
  }
  // `place`: of the row that lane kRatio + i knows.
  __device__ __forceinline__ void store(float* place, int column) const {
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      float* to = from_lane(place, kRatio + i);
      if (to == nullptr) continue;
      store_quad<kLoad>(to + column, values[i]);
      store_quad<kLoad>(to + kValues + column, scores[i]);
    }
  }
};

__global__ void __launch_bounds__(kThreads, kBlocks)
    overlap_rows(const __grid_constant__ Call call) {
  __shared__ WindowsMemory shared;
  const Params& p = call.p;
  __shared__ float sums[2][1];  // of a team of one warp, which takes none
  Team<1> team(sums);
  const int lane = team.lane;
  const int at = team.at;
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t unit = int64_t{blockIdx.x} * kWindows + warp;
  const int64_t first = unit * kRatio;
  const bool inside = first + kRatio <= p.tokens;
  const bool reads_before = inside && warp == 0 && unit > 0;
  Part next, own;  // for the next window's entry, and for the window's own
  if (inside) {
    next.load(p, first, at);
    own.load(p, first, kWidth + at);
  }
  if (reads_before) {
    const float* row = static_cast<const float*>(p.rows) + (first - kRatio) * p.row_stride + at;
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      cuda::copy_async<16>(&shared.before[0][i][lane], row + i * p.row_stride);
      cuda::copy_async<16>(&shared.before[1][i][lane], row + i * p.row_stride + kValues);
    }
    cuda::copies_commit();
  }
  const Windows w(p, unit, lane);
  const int64_t slot = inside ? slot_of(p, first + kRatio - 1) : -1;
  float* place = nullptr;
  if (w.whole && call.rows && lane / kRatio == 1 &&
      !(p.ring && is_neighbour(p, w.token, w.token + p.block, w.position + p.block)))
    place = state_row_of(call, w.request, w.position);
  Goal goal{};
  if (w.whole) goal = goal_of(p, slot, w.start + kRatio - 1);
  Steps steps;
  if (goal.any()) {
    load_weights<R>(call, at, steps);
    if (goal.record) load_angles<R>(p, w.start, at, steps);
  }
  QuadPool pool;
  if (w.whole) {
    next.add_biases(p, at);
    next.store(place, at);
    if (warp + 1 < kWindows)
      shared.handed[warp + 1].put(lane, pool_of(next.values, next.scores, kRatio));
    own.add_biases(p, kWidth + at);
    own.store(place, kWidth + at);
    pool = pool_of(own.values, own.scores, kRatio);
  }
  cuda::copies_wait<0>();
  if (warp == 0 && w.follows) {
    Part before;
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      before.values[i] = quad_of(shared.before[0][i][lane]);
      before.scores[i] = quad_of(shared.before[1][i][lane]);
    }
    before.add_biases(p, at);
    shared.handed[0].put(lane, pool_of(before.values, before.scores, kRatio));
  }
  __syncthreads();  // pools are handed over
  if (!w.whole) {
    const int64_t left = p.tokens - first;
    if (left > 0)
      tokens_alone<kLoad>(call, team, first, left < kRatio ? static_cast<int>(left) : kRatio);
    return;
  }
  bool there = true;
  if (w.start > 0 && !w.follows)
    there = hand_stored(p, first, w.start, w.of, lane, shared.handed[warp]);
  QuadPool before;
  if (w.start > 0 && there) before = shared.handed[warp].get(lane);
  if (there && goal.any())
    finish<R>(call, steps, mean_of(before, pool), first + kRatio - 1, goal, at,
              [&](float x) { return team.sum(x); });
}

}  // namespace

bool overlap_rows(const Call& call, Load load) noexcept {
  const Params& p = call.p;
  if (p.ratio != kRatio || !p.overlap || p.width != kWidth || load != kLoad || !is_usual(call))
    return false;
  const auto blocks = static_cast<unsigned>(ceil_div(p.tokens, int64_t{kWindows * kRatio}));
  overlap_rows<<<blocks, kThreads, 0, cuda::stream_of(p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
  return true;
}

}  // namespace winnow::internal::compress
