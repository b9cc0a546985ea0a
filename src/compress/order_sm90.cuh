// compress on the device: the tokens around a token, and what must be done in order where a row of
// the call may overwrite, in a ring, a row that one of the call's entries reads.
//
// A run is a request's tokens in a call: neighbours at ascending positions. Its rows overwrite
// nothing that is read as long as the run and a window fit into the ring. Most calls have such
// short runs, and every token sees its own by look(). In longer runs the first token makes all
// entries that read the state, and then stores the rows that overwrite what these have read.
#pragma once

#include <cuda_runtime.h>

#include "compress/quads_sm90.cuh"
#include "core/arithmetic.h"

namespace winnow::internal::compress {

// A token, and as much of its run as 31 tokens before it and 32 after it show.
struct Around {
  int64_t position = -1, request = 0;
  int back = 0, ahead = 0;  // tokens of the run
  bool later = false;       // in a ring: the call has a row that will take this one's place
};

// By all lanes of a warp, in one wait.
__device__ __forceinline__ Around look(const Params& p, int64_t token, int lane) {
  constexpr int kBefore = 31;
  const int64_t before = token - kBefore + lane;
  const int64_t behind = token + 1 + lane;
  const int64_t over = token + p.block;
  const bool in_before = before >= 0;
  const bool in_behind = behind < p.tokens;
  const bool in_over = p.ring && over < p.tokens;
  const int64_t position_before = in_before ? position_of(p, before) : 0;
  const int64_t position_behind = in_behind ? position_of(p, behind) : 0;
  const int64_t position_over = in_over ? position_of(p, over) : 0;
  const int64_t request_before = in_before ? request_of(p, before) : 0;
  const int64_t request_behind = in_behind ? request_of(p, behind) : 0;
  const int64_t request_over = in_over ? request_of(p, over) : 0;
  Around a;
  a.position = __shfl_sync(~0u, position_before, kBefore);
  a.request = __shfl_sync(~0u, request_before, kBefore);
  const unsigned backwards =
      __ballot_sync(~0u, in_before && position_before == a.position - kBefore + lane &&
                             request_before == a.request);
  const unsigned forwards = __ballot_sync(
      ~0u, in_behind && position_behind == a.position + 1 + lane && request_behind == a.request);
  a.back = __clz(static_cast<int>(~backwards)) - 1;
  a.ahead = forwards == ~0u ? 32 : __ffs(static_cast<int>(~forwards)) - 1;
  a.later = in_over && position_over == a.position + p.block && request_over == a.request;
  return a;
}

// A token, and whether the call continues its run beside it.
struct Near {
  int32_t position = -1, request = 0;
  bool has_before = false, has_behind = false;  // the run's tokens next to it
  bool later = false;                           // as in Around
};
// By all lanes of a warp, in one wait and a third of look()'s instructions; `between` runs when
// positions are requested, before they are waited for.
template <class Between>
__device__ __forceinline__ Near look_near(const Params& p, int64_t token, int lane,
                                          Between between) {
  constexpr int kBefore = 0, kOwn = 1, kBehind = 2, kOver = 3;  // lanes
  const int64_t away = lane == kOver ? p.block : lane - kOwn;
  const bool asked = lane < kOver || (lane == kOver && p.ring);
  const bool inside = asked && token + away >= 0 && token + away < p.tokens;
  const int64_t other = inside ? token + away : token;
  const int32_t position = load_now(p.positions + other * p.position_stride);
  int32_t request = 0;
  if (p.requests != nullptr) request = load_now(p.requests + other * p.request_stride);
  between();
  Near near;
  near.position = __shfl_sync(~0u, position, kOwn);
  near.request = __shfl_sync(~0u, request, kOwn);
  const unsigned found =
      __ballot_sync(~0u, inside && position == near.position + away && request == near.request);
  near.has_before = found >> kBefore & 1;
  near.has_behind = found >> kBehind & 1;
  near.later = found >> kOver & 1;
  return near;
}

// state_row() of a call that has a state.
__device__ __forceinline__ float* state_row_of(const Call& call, int32_t request,
                                               int32_t position) {
  const Params& p = call.p;
  if (position < 0 || request < 0) return nullptr;
  const uint32_t block = call.block.quotient(static_cast<uint32_t>(position));
  const uint32_t row = static_cast<uint32_t>(position) - block * call.block.by;
  int64_t at = request;
  if (p.table != nullptr) {
    const int64_t column = p.ring ? 0 : block;
    if (request >= p.table_rows || column >= p.table_width) return nullptr;
    at = p.table[request * p.table_stride + column];
  }
  if (at < 0 || at >= p.blocks) return nullptr;
  return p.state + at * p.block_stride + row * p.state_stride;
}

// own_state_row() of a call that has a state.
__device__ __forceinline__ float* own_row_of(const Call& call, int64_t token, int64_t position) {
  const Params& p = call.p;
  if (p.ring && is_neighbour(p, token, token + p.block, position + p.block)) return nullptr;
  return state_row_of(call, static_cast<int32_t>(request_of(p, token)),
                      static_cast<int32_t>(position));
}

// Whether look() has seen the token's run whole, and it is too short to overwrite what an entry
// reads.
__device__ __forceinline__ bool is_short(const Params& p, const Around& a) {
  return a.back < 31 && a.ahead < 32 && a.back + a.ahead + rows_of_entry(p) <= p.block;
}

// The first position whose row an entry takes.
__device__ __forceinline__ int64_t entry_begin(const Params& p, int64_t last) {
  const int64_t begin = last - rows_of_entry(p) + 1;
  return begin > 0 ? begin : 0;
}

// How many tokens before (direction -1) or behind (1) a token continue its run, by all lanes of a
// warp. They ascend, so that 32 at a time suffice, then every 32nd, and so on.
__device__ __forceinline__ int64_t continued(const Params& p, int64_t token, int direction) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t position = position_of(p, token);
  int64_t known = 0, step = 1;
  while (true) {
    const int64_t away = direction * (known + (lane + 1) * step);
    const unsigned there =
        __ballot_sync(~0u, is_neighbour(p, token, token + away, position + away));
    if (there == ~0u) {
      known += 32 * step;
      step *= 32;
      continue;
    }
    known += (__ffs(static_cast<int>(~there)) - 1) * step;
    if (step == 1) return known;
    step /= 32;
  }
}

// Whether the entry that a token closes takes rows from the state.
__device__ __forceinline__ bool reads_state(const Params& p, int64_t token) {
  const int64_t last = position_of(p, token);
  const int64_t begin = entry_begin(p, last);
  return !is_neighbour(p, token, token - (last - begin), begin);
}

// Whether the row of a position overwrites one that an entry of the call may read: one before the
// run's first position, as far as a window reaches.
__device__ __forceinline__ bool takes_place(const Params& p, int64_t first, int64_t position) {
  const int64_t distance = position - first + 1;
  return round_up(distance, p.block) - distance + 1 < rows_of_entry(p);
}

// The entries that read the state, of a run that begins with `token`: how far ahead the token is
// that closes the first of them (which = 0) or, with overlap, the second; -1: there is none.
__device__ __forceinline__ int64_t ordered_entry(const Params& p, int64_t token, int which) {
  const int64_t first = position_of(p, token);
  const int64_t from = first > 0 ? first : 0;
  const int64_t position = (quotient(from, p.ratio) + 1 + which) * p.ratio - 1;
  const int64_t ahead = position - first;
  const bool there = is_neighbour(p, token, token + ahead, position);
  return there && reads_state(p, token + ahead) ? ahead : -1;
}

// The rows that a token of a run that is not short stores: those that take places which the entries
// of the run have read, if it is the first one, and its own if it takes none. Calls row(t) for
// each.
template <class Row>
__device__ __forceinline__ void ordered_rows(const Params& p, int64_t token, const Around& a,
                                             Row row) {
  const int64_t window = rows_of_entry(p);
  int64_t last = -1;
  if (a.back == 0) last = a.position + continued(p, token, 1);
  const bool taking = last >= 0 && last - (a.position - window + 1) >= p.block;
  const int64_t before = a.back < 31 ? a.back : continued(p, token, -1);
  const bool own = !takes_place(p, a.position - before, a.position);
#pragma unroll 1
  for (int64_t back = taking ? window - 1 : 0; back >= 0; --back) {
    // The newest position that shares the place of one before the call; last, the token's own.
    const int64_t old = a.position - back;
    const int64_t newest = back > 0 ? old + (last - old) / p.block * p.block : a.position;
    if (back > 0 ? newest >= a.position : own) row(token + newest - a.position);
  }
}

}  // namespace winnow::internal::compress
