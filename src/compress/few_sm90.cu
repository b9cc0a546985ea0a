// compress on the device, entries of up to 8 rows: a team of four warps (up to 128 values: of one)
// takes a token, or neighbouring ones of a prefill; a thread has four values of every row.
//
// one token   Its position, those of the tokens around it, its slot and its own row are asked for
//             at once; then the rows of the entry that it closes, weights and angles; the row is
//             stored while they come.
// stream      Whole windows of one request, four or two rows each: a row is read once, stored, and
//             pooled for its own entry; with overlap its other half is pooled for the next one and
//             kept, three registers a value.
//
// Both pool the rows of a window's halves alone and join the two, so that they give the same bits.
// Budget, C4A: 8 KiB read and 8 KiB written a token, 32 KiB in flight a team, four teams a
// multiprocessor; about 600 instructions a thread and entry, a fifth of what the memory leaves time
// for. A decode waits for positions, (paged: the table,) and rows.
#include <cuda_runtime.h>

#include "compress/entry_sm90.cuh"
#include "compress/kernels_sm90.h"
#include "compress/order_sm90.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace winnow::internal::compress {

namespace {

constexpr int kThreads = 128;
constexpr int kHalf = 4;  // rows of a window that are pooled at once

template <class T>
__device__ __forceinline__ T* from_lane(T* pointer, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(pointer);
  return reinterpret_cast<T*>(__shfl_sync(~0u, bits, lane));
}

// The threads that share a row.
template <int kWarps>
struct Team {
  int lane, warp, at;
  float (*sums)[kWarps];  // [2][kWarps], in turns
  int turn = 0;

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

// Makes the entry that `token` closes. kAtOnce: all rows are asked for at once; else one by one, in
// few registers. `between` runs when they have been asked for.
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
  // A row's values (part 0) or scores, the bias added.
  const auto load = [&](int h, int i, bool are_scores) {
    const int row = (h * second + i) % 32;
    const bool called_row = of_call >> row & 1;
    const void* from = from_lane(mine, row);
    const int64_t column = (p.overlap ? h * p.width : 0) + at;
    if (i >= counts[h] || at >= p.width) return Quad{};
    return load_quad<kLoad>(from, bf16_rows && called_row,
                            are_scores ? values_of(p) + column : column);
  };
  const auto biased = [&](int h, int i, Quad scores) {
    const int row = (h * second + i) % 32;
    if (p.bias != nullptr && i < counts[h] && at < p.width && (of_call >> row & 1))
      add_bias<kLoad>(scores, p.bias + (p.overlap ? i : row) * p.bias_stride,
                      (p.overlap ? h * p.width : 0) + at);
    return scores;
  };
  const auto load_steps = [&] {
    load_weights(call, at, steps);
    if (goal.record && p.rope.table != nullptr) load_angles(p, a.position - p.ratio + 1, at, steps);
  };
  if constexpr (kAtOnce) {
    load_steps();
    Quad values[2][kHalf], scores[2][kHalf];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        values[h][i] = load(h, i, false);
        scores[h][i] = load(h, i, true);
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
        const Quad scores = biased(h, i, load(h, i, true));
#pragma unroll
        for (int k = 0; k < kQuad; ++k) pool.of[k].largest = fmaxf(pool.of[k].largest, scores.v[k]);
      }
#pragma unroll 1
      for (int i = 0; i < counts[h]; ++i) {
        const Quad scores = biased(h, i, load(h, i, true));
        const Quad values = load(h, i, false);
#pragma unroll
        for (int k = 0; k < kQuad; ++k) add_row(pool.of[k], values.v[k], scores.v[k]);
      }
      if (h == 0) pools[0] = pool;
      else pools[1] = pool;
    }
    load_steps();
  }
  finish(call, steps, mean_of(pools[0], pools[1]), token, goal, at,
         [&](float x) { return team.sum(x); });
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

// Brings rows of the call into L2, by all lanes of a team.
template <int kWarps, int kRows, int kRowBytes>
__device__ __forceinline__ void ask_for_rows(const std::byte* first, int64_t stride,
                                             const Team<kWarps>& team) {
  constexpr int kLine = 128;
  constexpr int kLines = kRowBytes / kLine;
#pragma unroll
  for (int i = 0; i < kRows * kLines; i += 32 * kWarps) {
    const int line = i + team.warp * 32 + team.lane;
    if (line < kRows * kLines)
      cuda::prefetch_l2(first + line / kLines * stride + line % kLines * kLine);
  }
}

// Tokens [first, first + count) if they are whole windows of one request; false if they are not.
template <Load kLoad, int kWarps, int kRatio, bool kOverlap>
__device__ __forceinline__ bool stream(const Call& call, Team<kWarps>& team, int64_t first,
                                       int count) {
  const Params& p = call.p;
  const int at = team.at;
  const int lane = team.lane;
  constexpr int kWidth = 32 * kQuad * kWarps;  // of a row's parts: loads know where they lie
  constexpr int kParts = kOverlap ? 2 : 1;
  constexpr int kValues = kParts * kWidth;
  constexpr bool kBf16Rows = kLoad == Load::kBf16;
  const auto called_row = [&](int64_t t) {
    return static_cast<const std::byte*>(p.rows) + t * p.row_stride * (kBf16Rows ? 2 : 4);
  };
  // In L2 when the positions are known to be in order.
  constexpr int kRowBytes = 2 * kValues * (kBf16Rows ? 2 : 4);
  const int64_t row_bytes = p.row_stride * (kBf16Rows ? 2 : 4);
  if (count >= kRatio) ask_for_rows<kWarps, kRatio, kRowBytes>(called_row(first), row_bytes, team);
  const int64_t token = first + (lane < count ? lane : 0);
  const int64_t position = position_of(p, token);
  const int64_t request = request_of(p, token);
  const int64_t slot = slot_of(p, token);
  const int64_t start = __shfl_sync(~0u, position, 0);
  const int64_t of = __shfl_sync(~0u, request, 0);
  const bool follows = lane >= count || (position == start + lane && request == of);
  if (!__all_sync(~0u, follows) || start < 0 || count % kRatio != 0 ||
      remainder(start, kRatio) != 0)
    return false;
  float* place = nullptr;
  if (call.rows && p.state != nullptr && lane < count) place = own_state_row(p, token);
  QuadPool before;  // the first half of the rows of the window before
  bool missing = false;
  if (kOverlap && start > 0) {
    const int away = kRatio - lane;
    const bool needed = lane < kRatio;
    const bool called = needed && is_neighbour(p, first, first - away, start - away);
    const void* mine = nullptr;
    if (called) mine = called_row(first - away);
    else if (needed) mine = state_row(p, of, start - away);
    missing = __any_sync(~0u, needed && mine == nullptr);
    const unsigned of_call = __ballot_sync(~0u, called);
    if (!missing) {
      Quad values[kRatio], scores[kRatio];
#pragma unroll
      for (int i = 0; i < kRatio; ++i) {
        const void* row = from_lane(mine, i);
        const bool is_bf16 = of_call >> i & 1;
        values[i] = load_quad<kLoad>(row, is_bf16, at);
        scores[i] = load_quad<kLoad>(row, is_bf16, kValues + at);
      }
#pragma unroll
      for (int i = 0; i < kRatio; ++i)
        if (p.bias != nullptr && (of_call >> i & 1))
          add_bias<kLoad>(scores[i], p.bias + i * p.bias_stride, at);
      before = pool_of(values, scores, kRatio);
    }
  }
#pragma unroll 1
  for (int s = 0; s < count; s += kRatio) {
    Quad values[kParts][kRatio], scores[kParts][kRatio];
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      const void* row = called_row(first + s + i);
#pragma unroll
      for (int h = 0; h < kParts; ++h) {
        values[h][i] = load_quad<kLoad>(row, kBf16Rows, h * kWidth + at);
        scores[h][i] = load_quad<kLoad>(row, kBf16Rows, kValues + h * kWidth + at);
      }
    }
    if (s + kRatio < count)
      ask_for_rows<kWarps, kRatio, kRowBytes>(called_row(first + s + kRatio), row_bytes, team);
    const int64_t last = start + s + kRatio - 1;
    Goal goal = goal_of(p, __shfl_sync(~0u, slot, s + kRatio - 1), last);
    if (s == 0 && missing) goal = {};
    if (p.bias != nullptr)
#pragma unroll
      for (int i = 0; i < kRatio; ++i)
#pragma unroll
        for (int h = 0; h < kParts; ++h)
          add_bias<kLoad>(scores[h][i], p.bias + i * p.bias_stride, h * kWidth + at);
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      float* to = from_lane(place, s + i);
      if (to == nullptr) continue;
#pragma unroll
      for (int h = 0; h < kParts; ++h) {
        store_quad<kLoad>(to + h * kWidth + at, values[h][i]);
        store_quad<kLoad>(to + kValues + h * kWidth + at, scores[h][i]);
      }
    }
    Quad mean;
    if (goal.any()) mean = mean_of(before, pool_of(values[kParts - 1], scores[kParts - 1], kRatio));
    if constexpr (kOverlap) before = pool_of(values[0], scores[0], kRatio);
    if (!goal.any()) continue;
    Steps steps;
    load_weights(call, at, steps);
    if (goal.record && p.rope.table != nullptr) load_angles(p, last - kRatio + 1, at, steps);
    finish(call, steps, mean, first + s + kRatio - 1, goal, at,
           [&](float x) { return team.sum(x); });
  }
  return true;
}

// Blocks that share a multiprocessor.
constexpr int blocks_of(int ratio) { return ratio == 0 ? 3 : 4; }

// Tokens one by one, apart from the registers of what calls it.
template <Load kLoad, bool kAlone, int kWarps>
__device__ __noinline__ void tokens_alone(const Call& call, Team<kWarps> team, int64_t first,
                                          int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) one_token<kLoad, kAlone>(call, team, first + i);
}

// kRatio: windows of a prefill that are streamed, 4 with overlap or 2 without; 0: none.
template <Load kLoad, int kWarps, int kRatio>
__global__ void __launch_bounds__(kThreads, blocks_of(kRatio))
    few_rows(const __grid_constant__ Call call) {
  __shared__ float sums[2][kWarps];
  constexpr int kTeam = kWarps * 32;
  const auto thread = static_cast<int>(threadIdx.x);
  const int in_team = thread % kTeam;
  Team<kWarps> team{in_team % 32, in_team / 32, in_team * kQuad, sums};
  if (team.at >= call.p.width) team.at = kMaxWidth;
  const int64_t unit = int64_t{blockIdx.x} * (kThreads / kTeam) + thread / kTeam;
  const int64_t first = unit * call.tokens;
  const int64_t left = call.p.tokens - first;
  if (left <= 0) return;
  const int count = left < call.tokens ? static_cast<int>(left) : call.tokens;
  if constexpr (kRatio > 0)
    if (stream<kLoad, kWarps, kRatio, kRatio == 4>(call, team, first, count)) return;
  if constexpr (kRatio == 0) one_token<kLoad, true>(call, team, first);
  else tokens_alone<kLoad, false>(call, team, first, count);
}

template <Load kLoad, int kWarps, int kRatio>
void launch(Call call) {
  constexpr int64_t kTeams = kThreads / 32 / kWarps;  // of a block
  if constexpr (kRatio > 0) {
    // Windows of a team: so many that all teams run at once, and that a lane knows each token.
    const int64_t room = cuda::multiprocessors(call.p.device.index) * blocks_of(kRatio) * kTeams;
    const int64_t windows = ceil_div(ceil_div(call.p.tokens, int64_t{kRatio}), room);
    const int64_t most = 32 / kRatio;
    call.tokens = static_cast<int>((windows < most ? windows : most) * kRatio);
  }
  const int64_t units = ceil_div(call.p.tokens, int64_t{call.tokens});
  const auto blocks = static_cast<unsigned>(ceil_div(units, kTeams));
  few_rows<kLoad, kWarps, kRatio><<<blocks, kThreads, 0, cuda::stream_of(call.p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

template <Load kLoad, int kWarps>
void launch_for(const Call& call, bool streamed) {
  const Params& p = call.p;
  streamed = streamed && p.width == 32 * kQuad * kWarps;
  if constexpr (kLoad != Load::kAny) {
    if (streamed && p.overlap && p.ratio == 4) return launch<kLoad, kWarps, 4>(call);
    if constexpr (kWarps == 4)
      if (streamed && !p.overlap && p.ratio == 2) return launch<kLoad, kWarps, 2>(call);
  }
  launch<kLoad, kWarps, 0>(call);
}

template <Load kLoad>
void launch_for(const Call& call, bool streamed) {
  if (call.p.width <= 32 * kQuad) launch_for<kLoad, 1>(call, streamed);
  else launch_for<kLoad, 4>(call, streamed);
}

}  // namespace

void few_rows(const Call& call, Load load, bool streamed) noexcept {
  switch (load) {
    case Load::kFloats: return launch_for<Load::kFloats>(call, streamed);
    case Load::kBf16: return launch_for<Load::kBf16>(call, streamed);
    case Load::kAny: return launch_for<Load::kAny>(call, streamed);
  }
}

}  // namespace winnow::internal::compress
