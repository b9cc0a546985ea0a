// compress on the device, C128A's decodes: how the blocks of an entry take its rows and finish it
// (long_decode_sm90.cu says which entries). A thread has four values of each of its rows and pools
// four rows at a time, while the next four are on their way: 128 KiB a multiprocessor. Groups of
// rows meet in shared memory, blocks exchange the squares of their values, and each finishes its
// tiles of the record.
#pragma once

#include <cuda_runtime.h>

#include "compress/kernels_sm90.h"
#include "compress/long_sm90.cuh"

namespace winnow::internal::compress::many {

inline constexpr int kMostBlocks = 8;  // of an entry, and of a cluster

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
  // Whether rows come by bulk copies, which few threads request, or each thread requests its own,
  // which is faster where they are short.
  static constexpr bool kBulk = kRanks <= 4;
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

// ... or to shared memory, requested by a team's first warp. `turn` counts the entries.
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
  // Waits for what was requested first.
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
      // Two blocks of an entry are a cluster or a part of one of eight; more are a part of eight.
      const int here = kRanks == 2 ? static_cast<int>(cuda::cluster_rank())
                                   : static_cast<int>(blockIdx.x) % kMostBlocks;
      const int peer = here - me.rank + me.lane;
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

}  // namespace winnow::internal::compress::many
