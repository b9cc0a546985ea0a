// compress on the device: what is done in order where rows of the call may take places in a ring
// that its entries read. All entries of a request that read the state, and then the rows that take
// such places, are left to the block of the request's first token.
#pragma once

#include <cuda_runtime.h>

#include "compress/pool_sm90.cuh"
#include "core/arithmetic.h"

namespace winnow::internal::compress {

// The first position whose row an entry takes.
__device__ __forceinline__ int64_t entry_begin(const Params& p, int64_t last) {
  const int64_t begin = last - rows_of_entry(p) + 1;
  return begin > 0 ? begin : 0;
}

// How many tokens before (direction -1) or behind (1) a token continue its request's positions, by
// all lanes of a warp. They ascend, so that 32 at a time suffice, then every 32nd, and so on.
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

// Whether the row of a position takes the place of one that an entry of the call may read: one of
// those before the request's first position in the call, as far as a window reaches.
__device__ __forceinline__ bool takes_place(const Params& p, int64_t first, int64_t position) {
  const int64_t distance = position - first + 1;
  return round_up(distance, p.block) - distance + 1 < rows_of_entry(p);
}

// The entries that read the state, of a request that begins with `token`: how far ahead the token
// is that closes the first of them (which = 0) or, with overlap, the second; -1: there is none.
__device__ __forceinline__ int ordered_entry(const Params& p, int64_t token, int which) {
  const int64_t first = position_of(p, token);
  const int64_t from = first > 0 ? first : 0;
  const int64_t position = (quotient(from, p.ratio) + 1 + which) * p.ratio - 1;
  const int64_t ahead = position - first;
  const bool there = is_neighbour(p, token, token + ahead, position);
  return there && reads_state(p, token + ahead) ? static_cast<int>(ahead) : -1;
}

// Lists up to 32 rows, from the `back`th place before it on, of a request that begins with `token`
// which take places that its entries read. False if the call's rows take none.
__device__ __forceinline__ bool list_ordered(const Params& p, Shared& shared, int64_t token,
                                             int64_t back) {
  const int64_t first = position_of(p, token);
  const int64_t last = first + continued(p, token, 1);
  const int64_t window = rows_of_entry(p);
  if (last < 0 || last - (first - window + 1) < p.block) return false;
  if (threadIdx.x < kMaxTokens) {
    // The newest position that shares the place of one before the call.
    const int64_t old = first - back - threadIdx.x;
    const int64_t newest = old + (last - old) / p.block * p.block;
    const bool stored = back + threadIdx.x < window && newest >= first;
    shared.tokens[threadIdx.x] = token + newest - first;
    shared.places[threadIdx.x] = stored ? own_state_row(p, token + newest - first) : nullptr;
  }
  return true;
}

}  // namespace winnow::internal::compress
