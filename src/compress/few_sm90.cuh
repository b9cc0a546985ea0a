// compress on the device, entries of up to 8 rows: a token by itself, in any call (few_sm90.cu).
#pragma once

#include <cuda_runtime.h>

#include "compress/entry_sm90.cuh"
#include "compress/order_sm90.cuh"

namespace winnow::internal::compress {

inline constexpr int kThreads = 128;
inline constexpr int kHalf = 4;  // rows of a window that are pooled at once

// The threads that share a row.
template <int kWarps>
struct Team {
  static constexpr int kTeam = kWarps * 32;
  int lane, warp;
  int at;                 // the first of a thread's values; kMaxWidth: none
  float (*sums)[kWarps];  // [2][kWarps], in turns
  int turn = 0;

  __device__ explicit Team(float (*shared)[kWarps])
      : lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) % kTeam / 32),
        at(static_cast<int>(threadIdx.x) % kTeam * kQuad),
        sums(shared) {}
  // Which of all teams it is.
  __device__ int64_t unit() const {
    return int64_t{blockIdx.x} * (kThreads / kTeam) + static_cast<int>(threadIdx.x) / kTeam;
  }
  __device__ void sync() const {
    if constexpr (kWarps > 1) __syncthreads();
    else __syncwarp();
  }
  __device__ float sum(float x) {
    x = cuda::warp_sum(x);
    if constexpr (kWarps > 1) {
      float* mine = sums[turn];
      turn ^= 1;
      if (lane == 0) mine[warp] = x;
      __syncthreads();
      x = cuda::joined(mine[0], mine[1], mine[2], mine[3]);
    }
    return x;
  }
};

// Values and scores, of one half or both, of a row of the call.
struct OwnRow {
  Quad values[2], scores[2];
};
template <Load kLoad>
__device__ __forceinline__ OwnRow load_own(const Params& p, int64_t token, int at) {
  OwnRow row;
  const int64_t from = token * p.row_stride + at;
  const int64_t values = values_of(p);
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (at < p.width && (h == 0 || p.overlap)) {
      row.values[h] = load_quad<kLoad>(p.rows, p.rows_are_bf16, from + h * p.width);
      row.scores[h] = load_quad<kLoad>(p.rows, p.rows_are_bf16, from + values + h * p.width);
    }
  return row;
}
template <Load kLoad>
__device__ __forceinline__ void store_own(const Params& p, OwnRow row, int64_t position, float* to,
                                          int at) {
  const float* bias = nullptr;
  if (p.bias != nullptr) bias = p.bias + remainder(position, p.ratio) * p.bias_stride;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (at < p.width && (h == 0 || p.overlap)) {
      const int64_t column = h * p.width + at;
      if (bias != nullptr) add_bias<kLoad>(row.scores[h], bias, column);
      store_quad<kLoad>(to + column, row.values[h]);
      store_quad<kLoad>(to + values_of(p) + column, row.scores[h]);
    }
}

// Makes the entry that `token` closes. kAtOnce: all rows are requested at once; else one by one, in
// few registers. `between` runs when they have been requested.
template <Load kLoad, bool kAtOnce, int kWarps, class Between>
__device__ __forceinline__ void make_entry(const Call& call, Team<kWarps>& team, int64_t token,
                                           const Around& a, const Goal& goal, Between between) {
  const Params& p = call.p;
  const int at = team.at;
  const auto window = static_cast<int>(rows_of_entry(p));
  const bool bf16_rows = p.rows_are_bf16;
  // A lane per row finds it.
  const int64_t position = a.position - (window - 1) + team.lane;
  const int away = window - 1 - team.lane;
  const bool needed = team.lane < window && position >= 0;
  const bool called = away <= a.back;
  const void* mine = nullptr;
  if (needed && !called) mine = state_row(p, a.request, position);
  if (needed && called) {
    const int64_t from = (token - away) * p.row_stride;
    mine = bf16_rows ? static_cast<const void*>(static_cast<const bf16*>(p.rows) + from)
                     : static_cast<const void*>(static_cast<const float*>(p.rows) + from);
  }
  if (__any_sync(~0u, needed && mine == nullptr)) return between();
  const unsigned of_call = __ballot_sync(~0u, needed && called);
  // Of the first half rows 0 to 3; of the second, those of the entry's own window or rows 4 to 7.
  const int second = p.overlap ? p.ratio : kHalf;
  const bool whole = a.position >= window - 1;
  const int first_half = !p.overlap ? (window < kHalf ? window : kHalf) : whole ? p.ratio : 0;
  const int counts[2] = {first_half, window - second};
  Steps steps;
  QuadPool pools[2];
  // A row's values or scores.
  const auto load = [&](int h, int i, const void* from, bool are_scores) {
    const bool called_row = of_call >> (h * second + i) % 32 & 1;
    const int64_t column = (p.overlap ? h * p.width : 0) + at;
    if (i >= counts[h] || at >= p.width) return Quad{};
    return load_quad<kLoad>(from, bf16_rows && called_row,
                            are_scores ? values_of(p) + column : column);
  };
  const auto row_at = [&](int h, int i) { return from_lane(mine, (h * second + i) % 32); };
  const auto biased = [&](int h, int i, Quad scores) {
    const int row = (h * second + i) % 32;
    if (p.bias != nullptr && i < counts[h] && at < p.width && (of_call >> row & 1))
      add_bias<kLoad>(scores, p.bias + (p.overlap ? i : row) * p.bias_stride,
                      (p.overlap ? h * p.width : 0) + at);
    return scores;
  };
  const auto load_steps = [&] {
    load_weights<void>(call, at, steps);
    if (goal.record && p.rope.table != nullptr)
      load_angles<void>(p, a.position - p.ratio + 1, at, steps);
  };
  if constexpr (kAtOnce) {
    load_steps();
    Quad values[2][kHalf], scores[2][kHalf];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const void* from = row_at(h, i);
        values[h][i] = load(h, i, from, false);
        scores[h][i] = load(h, i, from, true);
      }
    between();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) scores[h][i] = biased(h, i, scores[h][i]);
      pools[h] = pool_of(values[h], scores[h], counts[h]);
    }
  } else {
    between();
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      QuadPool pool;
#pragma unroll 1
      for (int i = 0; i < counts[h]; ++i) {
        const Quad scores = biased(h, i, load(h, i, row_at(h, i), true));
#pragma unroll
        for (int k = 0; k < kQuad; ++k) pool.of[k].largest = fmaxf(pool.of[k].largest, scores.v[k]);
      }
#pragma unroll 1
      for (int i = 0; i < counts[h]; ++i) {
        const Quad scores = biased(h, i, load(h, i, row_at(h, i), true));
        const Quad values = load(h, i, row_at(h, i), false);
#pragma unroll
        for (int k = 0; k < kQuad; ++k) add_row(pool.of[k], values.v[k], scores.v[k]);
      }
      if (h == 0) pools[0] = pool;
      else pools[1] = pool;
    }
    load_steps();
  }
  finish<void>(call, steps, mean_of(pools[0], pools[1]), token, goal, at,
               [&](float x) { return team.sum(x); });
}

// The part of the rows before token `first` that its entry takes: of the window before;
// false: one of them is missing.
template <Load kLoad, int kRatio>
__device__ __forceinline__ bool pool_before(const Params& p, int64_t first, int64_t start,
                                            int64_t request, int lane, int at, QuadPool& before) {
  const int64_t values_width = values_of(p);
  const int away = kRatio - lane;
  const bool needed = lane < kRatio;
  const bool called = needed && is_neighbour(p, first, first - away, start - away);
  const void* mine = nullptr;
  if (called)
    mine = static_cast<const std::byte*>(p.rows) +
           (first - away) * p.row_stride * (kLoad == Load::kBf16 ? 2 : 4);
  else if (needed) mine = state_row(p, request, start - away);
  if (__any_sync(~0u, needed && mine == nullptr)) return false;
  const unsigned of_call = __ballot_sync(~0u, called);
  Quad values[kRatio], scores[kRatio];
#pragma unroll
  for (int i = 0; i < kRatio; ++i) {
    const void* row = from_lane(mine, i);
    const bool is_bf16 = of_call >> i & 1;
    values[i] = load_quad<kLoad>(row, is_bf16, at);
    scores[i] = load_quad<kLoad>(row, is_bf16, values_width + at);
  }
#pragma unroll
  for (int i = 0; i < kRatio; ++i)
    if (p.bias != nullptr && (of_call >> i & 1))
      add_bias<kLoad>(scores[i], p.bias + i * p.bias_stride, at);
  before = pool_of(values, scores, kRatio);
  return true;
}

// kAlone: for the shortest wait; else one of many, in fewer registers, and never in order.
template <Load kLoad, bool kAlone, int kWarps>
__device__ __forceinline__ void one_token(const Call& call, Team<kWarps>& team, int64_t token) {
  const Params& p = call.p;
  const bool rows = call.rows && p.state != nullptr;
  OwnRow own;
  if (kAlone && rows) own = load_own<kLoad>(p, token, team.at);
  const int64_t slot = slot_of(p, token);
  if (kAlone && team.at < p.width && team.lane % 8 == 0) {  // lines that an entry would wait for
    if (p.norm.weight != nullptr) cuda::prefetch_l2(p.norm.weight + team.at);
    if (p.bias != nullptr)
      cuda::prefetch_l2(p.bias + (p.ratio - 1) * p.bias_stride + values_of(p) - p.width + team.at);
  }
  const Around a = look(p, token, team.lane);
  const bool ordered = kAlone && call.ordered && !is_short(p, a);
  float* place = rows && !ordered && !a.later ? state_row(p, a.request, a.position) : nullptr;
  const auto store = [&] {
    if (place == nullptr) return;
    if (!kAlone) own = load_own<kLoad>(p, token, team.at);
    store_own<kLoad>(p, own, a.position, place, team.at);
    place = nullptr;
  };
  const bool closing = a.position >= 0 && remainder(a.position + 1, p.ratio) == 0;
  int64_t next = closing && !(ordered && reads_state(p, token)) ? 0 : -1;  // tokens ahead
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    if (next >= 0) {
      Around of = a;
      of.position += next;
      of.back += static_cast<int>(next);
      const Goal goal = goal_of(p, next == 0 ? slot : slot_of(p, token + next), of.position);
      if (goal.any()) make_entry<kLoad, kAlone>(call, team, token + next, of, goal, store);
    }
    if (!ordered || a.back > 0) break;
    if (i < 2) next = ordered_entry(p, token, i);
  }
  store();
  if (!ordered) return;
  team.sync();  // what the entries read is read
  ordered_rows(p, token, a, [&](int64_t t) {
    float* to = own_state_row(p, t);
    if (to != nullptr)
      store_own<kLoad>(p, load_own<kLoad>(p, t, team.at), position_of(p, t), to, team.at);
  });
}

// Tokens one by one, apart from the registers of what calls it.
template <Load kLoad, int kWarps>
__device__ __noinline__ void tokens_alone(const Call& call, Team<kWarps> team, int64_t first,
                                          int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) one_token<kLoad, false>(call, team, first + i);
}

}  // namespace winnow::internal::compress
