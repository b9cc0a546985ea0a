// compress on the device, C128A: decodes of usual calls (entry_sm90.cuh), whose tokens are alone in
// their runs. Blocks share the values of an entry: as many blocks as give every multiprocessor one,
// so that memory is busy from the first row to the last and every entry is finished once. A thread
// has four values of each of its rows and pools four rows at a time, while the next four are on
// their way: 128 KiB a multiprocessor. Groups of rows meet in shared memory, blocks exchange the
// squares of their values, and each finishes its tiles of the record.
//
// Budget: 512 KiB read an entry. It waits for positions, (paged: the table,) rows, and the cluster
// once. A token that is not alone, such as a draft, is left to take_any().
#include <cuda_runtime.h>

#include "compress/kernels_sm90.h"
#include "compress/long_sm90.cuh"
#include "cuda/device.h"

namespace winnow::internal::compress::many {

namespace {

// How kRanks blocks share an entry.
template <int kRanks>
struct Cut {
  static constexpr int kWidth = R::kDim / kRanks;     // values of a block
  static constexpr int kRowThreads = kWidth / kQuad;  // that share a row
  static constexpr int kThreads = kRanks < 4 ? 512 : 256;
  // Rows of a group that a warp takes at once: of its even and its odd rows, or also of the first
  // and the last half of them.
  static constexpr int kAtOnceRows = kRowThreads < 32 ? 32 / kRowThreads : 1;
  static constexpr int kTeam = kRowThreads < 32 ? 32 : kRowThreads;  // threads that share a group
  static constexpr int kTeams = kThreads / kTeam;
  static constexpr int kTurns = kGroups / kTeams;  // groups of a team
  static constexpr int kOfGroup = 4 / kAtOnceRows;
  static constexpr int kQuarters = kTurns * kOfGroup;  // of groups, four rows each, of a thread
  static constexpr int kAhead = kQuarters < 2 ? kQuarters : 2;  // ... on their way
  // Whether rows come by bulk copies, which few threads ask for, or each thread asks for its own,
  // which is faster where they are short.
  static constexpr bool kBulk = kRanks <= 4;
  // Blocks of a cluster, of one or several entries: its launch takes longer than theirs.
  static constexpr int kCluster = kRanks == 1 ? 1 : 8;
  static_assert(kTurns == 1 || kTurns == 2, "a warp's lanes find the rows of two groups");
};

// Rows on their way in shared memory, values and scores; a barrier counts the bytes of a quarter.
template <int kRanks>
struct BulkMemory {
  using C = Cut<kRanks>;
  alignas(128) float4 rows[C::kTeams][C::kAhead][kAtOnce][2][C::kRowThreads];
  uint64_t arrived[C::kTeams][C::kAhead];
};
struct NoMemory {};

template <int kRanks>
struct DecodeMemory {
  using C = Cut<kRanks>;
  std::conditional_t<C::kBulk, BulkMemory<kRanks>, NoMemory> bulk;
  GroupPools<C::kWidth> pools;
  alignas(16) float pooled[C::kWidth];
  Squares squares;
  uint64_t inbox;  // counts the bytes that other blocks send
};

template <int kRanks>
__device__ __forceinline__ void init(DecodeMemory<kRanks>& shared) {
  cuda::mb_init(&shared.inbox, 1);
  if constexpr (Cut<kRanks>::kBulk)
    for (auto& team : shared.bulk.arrived)
      for (uint64_t& barrier : team) cuda::mb_init(&barrier, 1);
  cuda::fence_barrier_init();
}

// A thread's place in the cluster.
template <int kRanks>
struct Seat {
  using C = Cut<kRanks>;
  int thread, lane, rank, team;
  int part;  // of the warp's lanes, that have the same row
  int quad;  // of the block's values
  int at;    // the first of its four values

  __device__ Seat()
      : thread(static_cast<int>(threadIdx.x)),
        lane(thread % 32),
        rank(static_cast<int>(blockIdx.x) % kRanks),
        team(thread / C::kTeam),
        part(C::kAtOnceRows > 1 ? lane / C::kRowThreads : 0),
        quad(thread % C::kRowThreads),
        at(rank * C::kWidth + quad * kQuad) {}
  // The entry's row that this lane finds.
  __device__ int found_row() const {
    const int group = C::kTurns == 2 ? team + lane / kGroupRows * C::kTeams : team;
    return group * kGroupRows + lane % kGroupRows;
  }
};

// Four rows of a thread.
struct Quarter {
  Quad values[kAtOnce], scores[kAtOnce];
};
// Which rows these are: the lane that found row i of quarter q of lanes of a part.
template <int kRanks>
__device__ __forceinline__ constexpr int finder(int part, int q, int i) {
  using C = Cut<kRanks>;
  const int quarter = part * C::kOfGroup + q % C::kOfGroup;
  return q / C::kOfGroup * kGroupRows + (quarter % 2 * kAtOnce + i) * 2 + quarter / 2;
}

// A thread's quarters of an entry's rows, in order; kAhead of them are on their way: to registers
// ...
template <int kRanks>
struct RegisterRows {
  using C = Cut<kRanks>;
  const Seat<kRanks>& me;
  Quarter quarters[C::kAhead];

  __device__ RegisterRows(DecodeMemory<kRanks>&, const Seat<kRanks>& seat, uint32_t) : me(seat) {}
  template <int q>
  __device__ __forceinline__ void ask(const LongRow& mine) {
    Quarter& to = quarters[q % C::kAhead];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float* from = from_lane(mine.from, finder<kRanks>(me.part, q, i)) + me.at;
      to.values[i] = load_now(from);
      to.scores[i] = load_now(from + kScores);
    }
  }
  template <int q>
  __device__ __forceinline__ Quarter take(const LongRow&) {
    static_assert(C::kAhead == C::kQuarters);
    return quarters[q];
  }
  __device__ __forceinline__ void drop() {}
};

// ... or to shared memory, asked for by a team's first warp. `turn` counts the entries.
template <int kRanks>
struct BulkRows {
  using C = Cut<kRanks>;
  BulkMemory<kRanks>& memory;
  const Seat<kRanks>& me;
  uint32_t turn;

  __device__ BulkRows(DecodeMemory<kRanks>& shared, const Seat<kRanks>& seat, uint32_t entry)
      : memory(shared.bulk), me(seat), turn(entry) {}
  template <int q>
  __device__ __forceinline__ void ask(const LongRow& mine) {
    if (me.thread % C::kTeam >= 32) return;
    constexpr uint32_t kBytes = C::kWidth * sizeof(float);
    uint64_t* arrived = &memory.arrived[me.team][q % C::kAhead];
    if (me.lane == 0) cuda::mb_expect(arrived, kAtOnce * 2 * kBytes);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      auto& slot = memory.rows[me.team][q % C::kAhead][i];
      const float* row = from_lane(mine.from, finder<kRanks>(0, q, i)) + me.rank * C::kWidth;
      const auto from = reinterpret_cast<uint64_t>(row);
      constexpr bool kWhole = kRanks == 1;  // scores follow the values
      cuda::bulk_copy_one(cuda::s32(slot), from, kWhole ? 2 * kBytes : kBytes, cuda::s32(arrived));
      if (!kWhole)
        cuda::bulk_copy_one(cuda::s32(slot[1]), from + kScores * sizeof(float), kBytes,
                            cuda::s32(arrived));
    }
  }
  template <int q>
  __device__ __forceinline__ void wait() {
    const uint32_t before = turn * (C::kQuarters / C::kAhead) + q / C::kAhead;
    cuda::mb_wait(&memory.arrived[me.team][q % C::kAhead], before & 1);
  }
  template <int q>
  __device__ __forceinline__ Quarter take(const LongRow& mine) {
    wait<q>();
    Quarter of;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const auto& row = memory.rows[me.team][q % C::kAhead][i];
      const float4 value = row[0][me.quad];
      const float4 score = row[1][me.quad];
      of.values[i] = {value.x, value.y, value.z, value.w};
      of.scores[i] = {score.x, score.y, score.z, score.w};
    }
    if constexpr (q + C::kAhead < C::kQuarters) {
      meet_team();  // the place is read
      ask<q + C::kAhead>(mine);
    }
    return of;
  }
  // Waits for what was asked for first.
  __device__ __forceinline__ void drop() {
    static_for<C::kAhead>([&](auto q) { wait<q>(); });
  }
  __device__ __forceinline__ void meet_team() const {
    if constexpr (C::kTeam == 32) __syncwarp();
    else cuda::bar<C::kTeam>(1 + me.team);
  }
};

template <int kRanks>
using Rows = std::conditional_t<Cut<kRanks>::kBulk, BulkRows<kRanks>, RegisterRows<kRanks>>;

template <int kRanks>
__device__ __forceinline__ void ask_first(Rows<kRanks>& rows, const LongRow& mine) {
  static_for<Cut<kRanks>::kAhead>([&](auto q) { rows.template ask<q>(mine); });
}

// Rows of the call take their bias, whatever their place in the window.
template <int kRanks>
__device__ __forceinline__ void add_biases(const Params& p, const Seat<kRanks>& me, int q,
                                           unsigned called, Quarter& of) {
  using C = Cut<kRanks>;
  if (p.bias == nullptr) return;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int found = finder<kRanks>(me.part, q, i);
    const int row = (me.team + q / C::kOfGroup * C::kTeams) * kGroupRows + found % kGroupRows;
    if (called >> found & 1)
      add_bias<Load::kFloats>(of.scores[i], p.bias + row * p.bias_stride, me.at);
  }
}
// The window's last row alone: the call's, of a token that is alone. Its bias is at hand.
template <int kRanks>
__device__ __forceinline__ void take_own(const Seat<kRanks>& me, const LongRow& mine,
                                         const Quad& bias, Quarter& of) {
  constexpr int kOwn = kAtOnce - 1;
  float* to = from_lane(mine.place, finder<kRanks>(me.part, Cut<kRanks>::kQuarters - 1, kOwn));
#pragma unroll
  for (int k = 0; k < kQuad; ++k) of.scores[kOwn].v[k] = __fadd_rn(of.scores[kOwn].v[k], bias.v[k]);
  if (to == nullptr) return;
  store_quad<Load::kFloats>(to + me.at, of.values[kOwn]);
  store_quad<Load::kFloats>(to + kScores + me.at, of.scores[kOwn]);
}

__device__ __forceinline__ QuadPool joined(const QuadPool& a, const QuadPool& b) {
  QuadPool both;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) both.of[k] = compress::joined(a.of[k], b.of[k]);
  return both;
}

// With the pool of the lane kAway away, of later rows, for the lanes that stand before those.
template <int kAway>
__device__ __forceinline__ QuadPool joined_far(const QuadPool& near) {
  QuadPool far;
#pragma unroll
  for (int k = 0; k < kQuad; ++k)
    far.of[k] = {__shfl_xor_sync(~0u, near.of[k].largest, kAway),
                 __shfl_xor_sync(~0u, near.of[k].whole, kAway),
                 __shfl_xor_sync(~0u, near.of[k].sum, kAway)};
  return joined(near, far);
}

// All rows of an entry become the groups' pools. `asked` runs before they are waited for.
template <int kRanks, bool kAny, class Asked>
__device__ __forceinline__ void pool_rows(const Params& p, DecodeMemory<kRanks>& shared,
                                          const Seat<kRanks>& me, const LongRow& mine,
                                          Rows<kRanks>& rows, Asked asked) {
  using C = Cut<kRanks>;
  const unsigned called = __ballot_sync(~0u, mine.called);
  const bool has_own = me.team == C::kTeams - 1 && me.part == C::kAtOnceRows - 1;
  Quad bias{};
  if (!kAny && has_own && p.bias != nullptr)
    bias = load_now(p.bias + (kWindow - 1) * p.bias_stride + me.at);
  asked();
  QuadPool low, even, pool;
  static_for<C::kQuarters>([&](auto quarter) {
    constexpr int q = quarter;
    Quarter of = rows.template take<q>(mine);
    if constexpr (kAny) add_biases(p, me, q, called, of);
    else if constexpr (q == C::kQuarters - 1) take_own(me, mine, bias, of);
    pool = pool_of(of.values, of.scores, kAtOnce);
    constexpr int kOf = q % C::kOfGroup;
    if constexpr (C::kOfGroup == 1) pool = joined_far<C::kRowThreads>(pool);
    else if constexpr (kOf % 2 == 0) low = pool;
    else pool = joined(low, pool);
    if constexpr (kOf != C::kOfGroup - 1) {
      if constexpr (kOf == 1) even = pool;
      return;
    }
    if constexpr (C::kOfGroup == 4) pool = joined(even, pool);
    else pool = joined_far<16>(pool);
    if (me.part == 0) shared.pools.put(me.team + q / C::kOfGroup * C::kTeams, me.quad, pool);
  });
}

// The entry that `token` closes at position `last`, whose first rows are on their way. All threads
// of the cluster come here, after they have arrived at its barrier. `turn` counts the entries.
template <int kRanks, bool kAny>
__device__ __forceinline__ void make(const Call& call, DecodeMemory<kRanks>& shared,
                                     const Seat<kRanks>& me, const LongRow& mine,
                                     Rows<kRanks>& rows, const Goal& goal, int64_t token,
                                     int64_t last, uint32_t turn) {
  using C = Cut<kRanks>;
  constexpr int kWarpSums = C::kWidth / 32;
  const bool finishes = me.thread < C::kRowThreads;
  const int at = finishes ? me.at : kMaxWidth;
  Steps steps;
  pool_rows<kRanks, kAny>(call.p, shared, me, mine, rows, [&] {
    if (!finishes) return;
    load_weights<R>(call, at, steps);
    if (goal.record) load_angles<R>(call.p, last - kWindow + 1, at, steps);
  });
  __syncthreads();
  float value = 0;
  if (me.thread < C::kWidth) {
    value = shared.pools.joined(me.thread);
    shared.pooled[me.thread] = value;
  }
  const int warp = me.thread / 32;
  if constexpr (kRanks > 1) {
    cuda::cluster_wait();  // all blocks have begun, and have read what they got for the entry
                           // before
    if (me.thread == 0) cuda::mb_expect(&shared.inbox, sizeof(Squares));
  }
  if (me.thread < C::kWidth) {
    const float squares = cuda::warp_sum(__fmul_rn(value, value));
    float* mailbox = &shared.squares.of[me.rank * kWarpSums + warp];
    if constexpr (kRanks == 1) {
      if (me.lane == 0) *mailbox = squares;
    } else if (me.lane < kRanks) {
      // No barrier of the cluster follows: that would wait for all that the blocks have stored.
      const int peer = static_cast<int>(blockIdx.x) % C::kCluster - me.rank + me.lane;
      cuda::peer_put(cuda::peer(cuda::s32(mailbox), peer), squares,
                     cuda::peer(cuda::s32(&shared.inbox), peer));
    }
  }
  __syncthreads();  // the block's values are there
  if (warp * 32 >= C::kRowThreads) return;
  if constexpr (kRanks > 1) cuda::mb_wait_cluster(&shared.inbox, turn & 1);
  Quad pooled{};
  if (finishes) {
    const float4 all = *reinterpret_cast<const float4*>(shared.pooled + me.quad * kQuad);
    pooled = {all.x, all.y, all.z, all.w};
  }
  finish<R>(call, steps, pooled, token, goal, at, [&](float) { return shared.squares.sum(); });
}

// The block's part of a token's own row goes to the state.
template <int kRanks>
__device__ __forceinline__ void store_own(const Params& p, const Seat<kRanks>& me, const float* row,
                                          int64_t position, float* place) {
  using C = Cut<kRanks>;
  if (place == nullptr || me.thread >= 2 * C::kRowThreads) return;
  const bool scores = me.thread >= C::kRowThreads;
  const int column = me.at + (scores ? kScores : 0);
  Quad own = load_quad<Load::kFloats>(row, false, column);
  if (scores && p.bias != nullptr)
    add_bias<Load::kFloats>(own, p.bias + remainder(position, kWindow) * p.bias_stride, me.at);
  store_quad<Load::kFloats>(place + column, own);
}
__device__ __forceinline__ const float* own_row(const Params& p, int64_t token) {
  return static_cast<const float*>(p.rows) + token * p.row_stride;
}

// Makes the entry that `token` closes, if it is to be made, of rows of the call and the state. All
// threads of the cluster agree on every branch.
template <int kRanks>
__device__ __forceinline__ void make_any(const Call& call, DecodeMemory<kRanks>& shared,
                                         const Seat<kRanks>& me, int64_t token, uint32_t& turn) {
  const Params& p = call.p;
  const int row = me.found_row();
  const int64_t last = position_of(p, token);
  const int64_t request = request_of(p, token);
  const Goal goal = goal_of(p, slot_of(p, token), last);
  if (!goal.any()) return;
  if constexpr (kRanks > 1) cuda::cluster_arrive();
  const int64_t position = last - (kWindow - 1) + row;
  const int64_t other = token - (kWindow - 1 - row);
  LongRow mine;
  mine.called = is_neighbour(p, token, other, position);
  if (mine.called) mine.from = own_row(p, other);
  else mine.from = state_row(p, request, position);
  const bool missing = mine.from == nullptr;
  if (missing) mine.from = own_row(p, token);  // which can be asked for
  if (__syncthreads_or(missing)) {
    if constexpr (kRanks > 1) cuda::cluster_wait();
    return;
  }
  Rows<kRanks> rows(shared, me, turn);
  ask_first<kRanks>(rows, mine);
  make<kRanks, true>(call, shared, me, mine, rows, goal, token, last, turn);
  ++turn;
  __syncthreads();  // what the blocks exchanged is read
}

// A token that is not alone in its run, or whose row must wait for entries (order_sm90.cuh).
template <int kRanks>
__device__ __noinline__ void take_any(const Call& call, DecodeMemory<kRanks>& shared,
                                      int64_t token) {
  const Params& p = call.p;
  const Seat<kRanks> me;
  uint32_t turn = 0;
  Around a;
  if (call.ordered) a = look(p, token, me.lane);
  const bool ordered = call.ordered && !is_short(p, a);
  const bool own = closes(p, token) && !(ordered && reads_state(p, token));
  const auto store = [&](int64_t t) {
    store_own(p, me, own_row(p, t), position_of(p, t), own_state_row(p, t));
  };
  if (own) make_any<kRanks>(call, shared, me, token, turn);
  if (!ordered) return store(token);
  if (a.back == 0)
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const int64_t ahead = ordered_entry(p, token, which);
      if (ahead >= 0) make_any<kRanks>(call, shared, me, token + ahead, turn);
    }
  __syncthreads();  // what the entries read is read
  ordered_rows(p, token, a, store);
}

// What is taken of the call behind the first wait is looked at during it: each of the call's first
// looks at a line of its arguments waits by itself.
__device__ __forceinline__ void touch(const Call& call) {
  const Params& p = call.p;
  asm volatile("" ::"r"(call.block.factor), "l"(p.table), "l"(p.state), "l"(p.norm.weight),
               "l"(p.rope.table), "l"(p.cache.data),
               "r"(static_cast<int>(p.quantizer.power_of_two)), "l"(p.bias), "l"(p.latent),
               "l"(p.table_width));
}

// A token that is alone in its run, as in a decode; false: it is not, and nothing is done.
template <int kRanks>
__device__ __forceinline__ bool take_alone(const Call& call, DecodeMemory<kRanks>& shared,
                                           int64_t token) {
  const Params& p = call.p;
  const Seat<kRanks> me;
  int64_t slot = -1;
  const Near near = look_near(p, token, me.lane, [&] {
    slot = load_now(p.slots + token * p.slot_stride);
    touch(call);
    if (me.thread == 0) init(shared);
    if (Cut<kRanks>::kBulk) __syncthreads();  // barriers are there
  });
  // In a ring of fewer rows than a window its own row takes the place of one that its entry reads.
  if (near.has_before || (call.ordered && (near.has_behind || p.block < kWindow))) return false;
  if (near.position < 0) return true;
  const float* own = own_row(p, token);
  const auto store = [&] {
    float* place = near.later ? nullptr : state_row_of(call, near.request, near.position);
    store_own(p, me, own, near.position, place);
    return true;
  };
  if ((static_cast<uint32_t>(near.position) + 1) % kWindow != 0) return store();
  if constexpr (kRanks > 1) cuda::cluster_arrive();
  const int row = me.found_row();
  float* stored = state_row_of(call, near.request, near.position - (kWindow - 1) + row);
  LongRow mine{stored};
  if (row == kWindow - 1) mine = {own, near.later ? nullptr : stored, true};
  const bool missing = mine.from == nullptr;
  if (missing) mine.from = own;  // which can be asked for
  Rows<kRanks> rows(shared, me, 0);
  ask_first<kRanks>(rows, mine);
  const Goal goal = goal_of(p, slot, near.position);
  if (__syncthreads_or(missing) || !goal.any()) {  // the row is stored, and no entry made
    rows.drop();
    if constexpr (kRanks > 1) cuda::cluster_wait();
    return store();
  }
  make<kRanks, false>(call, shared, me, mine, rows, goal, token, near.position, 0);
  return true;
}

template <int kRanks>
__global__ void __cluster_dims__(Cut<kRanks>::kCluster)
    __launch_bounds__(Cut<kRanks>::kThreads, 512 / Cut<kRanks>::kThreads)
        c128a_decode(const __grid_constant__ Call call) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<DecodeMemory<kRanks>*>(memory);
  const int64_t token = blockIdx.x / kRanks;
  if (token >= call.p.tokens) return;
  if (!take_alone<kRanks>(known(call), shared, token)) take_any<kRanks>(call, shared, token);
}

template <int kRanks>
void launch(const Call& call) {
  constexpr size_t kBytes = sizeof(DecodeMemory<kRanks>);
  const auto kernel = c128a_decode<kRanks>;
  cuda::keep_error(cuda::allow_shared(kernel, kBytes));
  const auto blocks =
      static_cast<unsigned>(round_up(call.p.tokens * kRanks, int64_t{Cut<kRanks>::kCluster}));
  cudaLaunchConfig_t config = cuda::launch_config(dim3(blocks), Cut<kRanks>::kThreads, kBytes,
                                                  cuda::stream_of(call.p.device));
  cuda::keep_error(cudaLaunchKernelEx(&config, kernel, call));
}

}  // namespace

void long_decode(const Call& call) noexcept {
  const int64_t units = cuda::multiprocessors(call.p.device.index);
  // As many blocks as multiprocessors, nearly.
  if (8 * call.p.tokens <= units) launch<8>(call);
  else if (4 * call.p.tokens <= units) launch<4>(call);
  else if (2 * call.p.tokens <= units) launch<2>(call);
  else launch<1>(call);
}

}  // namespace winnow::internal::compress::many
