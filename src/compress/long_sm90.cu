// compress on the device, C128A: prefills of usual calls (entry_sm90.cuh), entries of 128 rows and
// 512 values. A cluster of 8 blocks makes an entry, a block 64 values of it, a warp 16 rows, 8 a
// half warp: a lane has four values of 8 rows, which it pools four at a time. They are on their way
// to shared memory, each thread's own; warps exchange their pools, blocks the squares of their
// values. A block's 64 values are a tile of the record, so that each block finishes its own.
//
// Few entries have all of their rows on their way at once, three blocks a multiprocessor. Of many,
// six of a lane's eight rows are, so that four blocks share a multiprocessor: 64 entries, 8,192
// tokens, run at once. Rows are requested before it is known that they are a window.
//
// Budget: 4 KiB read and 4 KiB written a token.
#include <cuda_runtime.h>

#include "compress/kernels_sm90.h"
#include "compress/long_sm90.cuh"
#include "cuda/copies.h"
#include "cuda/device.h"

namespace winnow::internal::compress::many {

namespace {

constexpr int kRanks = R::kDim / kColumns;
constexpr int kEach = kGroupRows / kRowsAtOnce;  // rows of a lane
static_assert(R::kTile == kColumns && kWarps == kGroups,
              "a block finishes a tile, a warp has a group");

using Pools = GroupPools<kColumns>;

// kStages: rows of a lane that are on their way.
template <int kStages>
struct LongMemory {
  float4 values[kStages][kThreads], scores[kStages][kThreads];
  alignas(16) float pooled[kColumns];
  Squares squares;
  uint64_t inbox;  // counts the bytes of the squares
  union {
    Pools pools;
    TokensMemory tokens;  // of take_any(), whose pools take the place of rows
  };
};

// The entry's row that a lane finds for its warp; lanes 16 and more the same once more.
__device__ __forceinline__ int found_row(const Place& me) {
  return me.warp * kGroupRows + me.lane % kGroupRows;
}

// A lane's row i is on its way to the thread's slot. `mine`: the row that the lane has found for
// its warp.
template <int kStages, int i>
__device__ __forceinline__ void ask_row(LongMemory<kStages>& shared, const Place& me,
                                        const float* mine) {
  constexpr int kRowBytes = sizeof(shared.values[0]);
  constexpr int kSlot = i % kStages * kRowBytes;
  const float* from = from_lane(mine, i * kRowsAtOnce + me.lane / kLanes) + me.at;
  const uint32_t slot = cuda::s32(&shared.values[0][threadIdx.x]);
  cuda::copy_async_behind<kSlot, 0>(slot, from);
  cuda::copy_async_behind<kStages * kRowBytes + kSlot, kScores * sizeof(float)>(slot, from);
  cuda::copies_commit();
}
template <int kStages>
__device__ __forceinline__ void ask_first(LongMemory<kStages>& shared, const Place& me,
                                          const float* mine) {
  static_for<kStages>([&](auto i) { ask_row<kStages, i>(shared, me, mine); });
}

// The pool of a lane's rows, for each of its four values. Rows are stored as they come, while later
// ones are still on their way.
template <int kStages>
__device__ __forceinline__ QuadPool pool_rows(const Params& p, LongMemory<kStages>& shared,
                                              const Place& me, const LongRow& mine) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int half = me.lane / kLanes;
  const unsigned called = __ballot_sync(~0u, mine.called);
  const unsigned placed = __ballot_sync(~0u, mine.place != nullptr);
  QuadPool pools;
  static_for<2>([&](auto part) {
    constexpr int kFirst = part * kAtOnce;
    Quad scores[kAtOnce];  // first the bias, then with the score
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int found = (kFirst + i) * kRowsAtOnce + half;
      scores[i] = {};
      if (p.bias != nullptr && (called >> found & 1))
        scores[i] = load_quad<Load::kFloats>(
            p.bias, false, (me.warp * kGroupRows + found) * p.bias_stride + me.at);
    }
    static_for<kAtOnce>([&](auto row_of_part) {
      constexpr int i = row_of_part;
      constexpr int kRow = kFirst + i;
      const int found = kRow * kRowsAtOnce + half;
      cuda::copies_wait<(kFirst == 0 ? kStages : kEach) - 1 - kRow>();
      const float4 score = shared.scores[kRow % kStages][thread];
      scores[i].v[0] = __fadd_rn(score.x, scores[i].v[0]);
      scores[i].v[1] = __fadd_rn(score.y, scores[i].v[1]);
      scores[i].v[2] = __fadd_rn(score.z, scores[i].v[2]);
      scores[i].v[3] = __fadd_rn(score.w, scores[i].v[3]);
      if (placed == 0) return;
      float* to = from_lane(mine.place, found);
      if (to == nullptr) return;
      const float4 value = shared.values[kRow % kStages][thread];
      store_quad<Load::kFloats>(to + me.at, {value.x, value.y, value.z, value.w});
      store_quad<Load::kFloats>(to + kScores + me.at, scores[i]);
    });
    Quad values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float4 value = shared.values[(kFirst + i) % kStages][thread];
      values[i] = {value.x, value.y, value.z, value.w};
    }
    if constexpr (kFirst == 0)
      static_for<kEach - kStages>(
          [&](auto i) { ask_row<kStages, kStages + i>(shared, me, mine.from); });
    const QuadPool pool = pool_of(values, scores, kAtOnce);
#pragma unroll
    for (int k = 0; k < kQuad; ++k)
      pools.of[k] = kFirst == 0 ? pool.of[k] : joined(pools.of[k], pool.of[k]);
  });
  return pools;
}

// The entry that `token` closes at position `last`, whose first rows are on their way. All threads
// of the cluster come here, after they have arrived at its barrier. `turn` counts the entries.
// kOfWindow: it is a prefill's window; else one of take_any().
template <bool kOfWindow, int kStages>
__device__ __forceinline__ void make_of_rows(const Call& call, LongMemory<kStages>& shared,
                                             const Place& me, const LongRow& mine, const Goal& goal,
                                             int64_t token, int64_t last, uint32_t turn) {
  const Params& p = call.p;
  const auto thread = static_cast<int>(threadIdx.x);
  // Pools of a window have a place of their own.
  Pools& pools = kOfWindow ? shared.pools : *reinterpret_cast<Pools*>(shared.values);
  QuadPool pool = pool_rows(p, shared, me, mine);
  Steps steps;
  const int at = thread < kLanes ? me.at : kMaxWidth;
  if (thread < kLanes) {
    load_weights<R>(call, at, steps);
    if (goal.record) load_angles<R>(p, last - kWindow + 1, at, steps);
  }
#pragma unroll
  for (Pool& of : pool.of) {
    const Pool far{__shfl_xor_sync(~0u, of.largest, kLanes), __shfl_xor_sync(~0u, of.whole, kLanes),
                   __shfl_xor_sync(~0u, of.sum, kLanes)};
    of = joined(of, far);  // of the first half's lanes, which are taken
  }
  if (!kOfWindow) __syncthreads();  // the rows of all warps are read
  if (me.lane < kLanes) pools.put(me.warp, me.lane, pool);
  __syncthreads();
  float value = 0;
  if (thread < kColumns) {
    value = pools.joined(thread);
    shared.pooled[thread] = value;
  }
  cuda::cluster_wait();  // all blocks have begun, and have read what they got for the entry before
  if (thread == 0) cuda::mb_expect(&shared.inbox, sizeof(shared.squares));
  if (thread < kColumns) {
    // No barrier of the cluster follows: that would wait for all that the blocks have stored.
    const float sum = cuda::warp_sum(__fmul_rn(value, value));
    const uint32_t mailbox = cuda::s32(&shared.squares.of[me.rank * (kColumns / 32) + me.warp]);
    if (me.lane < kRanks)
      cuda::peer_put(cuda::peer(mailbox, me.lane), sum,
                     cuda::peer(cuda::s32(&shared.inbox), me.lane));
  }
  __syncthreads();  // the block's values are there
  if (me.warp > 0) return;
  cuda::mb_wait_cluster(&shared.inbox, turn & 1);
  Quad pooled{};
  if (thread < kLanes) {
    const float4 all = *reinterpret_cast<const float4*>(shared.pooled + thread * kQuad);
    pooled = {all.x, all.y, all.z, all.w};
  }
  finish<R>(call, steps, pooled, token, goal, at, [&](float) { return shared.squares.sum(); });
}

// Makes the entry that `token` closes, if it closes one that is to be made, and stores those rows
// that it takes of the call from token `store_from` on. All threads of the cluster agree on every
// branch.
template <int kStages>
__device__ __forceinline__ void make_long_entry(const Call& call, LongMemory<kStages>& shared,
                                                const Place& me, int64_t token, int64_t store_from,
                                                uint32_t& turn) {
  const Params& p = call.p;
  const int row = found_row(me);
  // In one wait: the token, and what may be its neighbour at this lane's row.
  const int64_t other = token - (kWindow - 1 - row);
  const bool inside = other >= 0;
  const int64_t other_position = inside ? position_of(p, other) : 0;
  const int64_t other_request = inside ? request_of(p, other) : 0;
  const int64_t last = position_of(p, token);
  const int64_t request = request_of(p, token);
  const Goal goal = goal_of(p, slot_of(p, token), last);
  if (last < 0 || remainder(last + 1, kWindow) != 0 || !goal.any()) return;
  cuda::cluster_arrive();
  const int64_t position = last - (kWindow - 1) + row;
  LongRow mine;
  mine.called = inside && other_position == position && other_request == request;
  const bool stores = mine.called && other >= store_from;
  if (mine.called) mine.from = static_cast<const float*>(p.rows) + other * p.row_stride;
  else mine.from = state_row(p, request, position);
  if (stores) mine.place = own_state_row(p, other);
  const bool missing = mine.from == nullptr;  // its own row can be requested
  if (missing) mine.from = static_cast<const float*>(p.rows) + token * p.row_stride;
  ask_first(shared, me, mine.from);
  if (__syncthreads_or(missing)) {
    cuda::copies_wait<0>();
    return cuda::cluster_wait();
  }
  if (stores) shared.tokens.stored[other - store_from] = true;
  make_of_rows<false>(call, shared, me, mine, goal, token, last, turn);
  ++turn;
  __syncthreads();  // what the blocks exchanged is read
}

// The tokens of a cluster that are no window.
template <int kStages>
__device__ __noinline__ void take_any(const Call& call, LongMemory<kStages>& shared, Place me) {
  uint32_t turn = 0;
  take_tokens<Load::kFloats>(
      call, shared.tokens, me, first_of(call),
      [&](int64_t token, int64_t from) { make_long_entry(call, shared, me, token, from, turn); });
}

// The tokens of a window, as in a prefill; false: they are none, and nothing is done.
template <int kStages>
__device__ __forceinline__ bool take_window(const Call& call, LongMemory<kStages>& shared,
                                            const Place& me) {
  const Params& p = call.p;
  const int64_t first = int64_t{blockIdx.x / kRanks} * kWindow;
  const int64_t token = first + kWindow - 1;
  if (token >= p.tokens) return false;
  const int row = found_row(me);
  LongRow mine;
  mine.from = static_cast<const float*>(p.rows) + (first + row) * p.row_stride;
  mine.called = true;
  ask_first(shared, me, mine.from);
  const auto position = static_cast<int32_t>(position_of(p, first + row));
  const auto request = static_cast<int32_t>(request_of(p, first + row));
  const auto last = static_cast<int32_t>(position_of(p, token));
  const auto of = static_cast<int32_t>(request_of(p, token));
  const Goal goal = goal_of(p, slot_of(p, token), last);
  const bool follows = static_cast<uint32_t>(last) - static_cast<uint32_t>(position) ==
                           static_cast<uint32_t>(kWindow - 1 - row) &&
                       request == of && last >= 0 &&
                       (static_cast<uint32_t>(last) + 1) % kWindow == 0 && goal.any();
  if (call.rows) {
    const int64_t over = first + row + p.block;
    const bool later = p.ring && is_neighbour(p, first + row, over, position + p.block);
    if (!later) mine.place = state_row_of(call, request, position);
  }
  if (!__syncthreads_and(follows)) {
    cuda::copies_wait<0>();
    return false;
  }
  cuda::cluster_arrive();
  make_of_rows<true>(call, shared, me, mine, goal, token, last, 0);
  return true;
}

template <int kStages, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    c128a_windows(const __grid_constant__ Call call) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<LongMemory<kStages>*>(memory);
  const Call of = known(call);
  const Place me = place_of(of.p);
  if (threadIdx.x == 0) {
    cuda::mb_init(&shared.inbox, 1);
    cuda::fence_barrier_init();
  }
  if (!take_window(of, shared, me)) take_any(call, shared, me);
}

template <int kStages, int kBlocks>
void launch(const Call& call) {
  launch_clusters(c128a_windows<kStages, kBlocks>, call, sizeof(LongMemory<kStages>));
}

}  // namespace

}  // namespace winnow::internal::compress::many

namespace winnow::internal::compress {

bool long_rows(const Call& call, Load load) noexcept {
  const Params& p = call.p;
  if (load != Load::kFloats || p.ratio != many::kWindow || p.overlap || !is_usual(call) ||
      p.cache.format != many::R::kFormat)
    return false;
  if (p.state == nullptr) return false;
  if (call.tokens == 1) {
    many::long_decode(call);
    return true;
  }
  constexpr int kFew = 3, kMany = 4;  // blocks of a multiprocessor
  const int units = cuda::multiprocessors(p.device.index) / many::kRanks;
  const int64_t needed = ceil_div(p.tokens, int64_t{call.tokens});
  if (needed <= kFew * units) many::launch<many::kEach, kFew>(call);
  else many::launch<6, kMany>(call);
  return true;
}

}  // namespace winnow::internal::compress
