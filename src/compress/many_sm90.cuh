// compress on the device, entries of more than 8 rows: what a cluster does with its tokens. It
// takes one, or as many of a prefill as an entry has; each of its blocks 64 values of every row.
// Rows that the call has and that are the cluster's to store are stored as they are pooled, so that
// each is read once; the others after the entries.
#pragma once

#include <cuda_runtime.h>

#include "compress/entry_sm90.cuh"
#include "compress/order_sm90.cuh"
#include "cuda/launch.h"

namespace winnow::internal::compress::many {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kColumns = 64;              // values of a block
inline constexpr int kLanes = kColumns / kQuad;  // of a row
inline constexpr int kRowsAtOnce = 32 / kLanes;  // rows that a warp reads at once
static_assert(kThreads >= kMaxRows, "a thread has a token");

// What every block has in shared memory, besides the rows of an entry.
struct TokensMemory {
  float* places[kThreads];        // of rows that are stored after the entries, ...
  const float* biases[kThreads];  // ... and what their scores take
  unsigned entries[kWarps];       // bit t: token t of the cluster's closes one that is to be made
  bool stored[kThreads];          // rows of the cluster's tokens
};

// A thread's place in the cluster.
struct Place {
  int lane, warp, rank;
  int at;  // the first of its four values; kMaxWidth: none
};

// Brings into L2 what a token that closes an entry takes wherever it stands: its slot, its own row
// and the bias of that, weights.
template <Load kLoad>
__device__ __forceinline__ void ask_for_token(const Params& p, int64_t token, const Place& me) {
  const int64_t column = me.rank * kColumns + me.lane % 2 * 32;
  if (me.warp > 0 || me.lane >= 8 || column >= p.width) return;
  const int64_t size = kLoad == Load::kBf16 ? sizeof(bf16) : sizeof(float);
  const int64_t from = token * p.row_stride + column + (me.lane / 2 % 2 != 0 ? values_of(p) : 0);
  if (me.lane < 4) cuda::prefetch_l2(static_cast<const std::byte*>(p.rows) + from * size);
  else if (me.lane < 6 && p.bias != nullptr)
    cuda::prefetch_l2(p.bias + (p.ratio - 1) * p.bias_stride + column);
  else if (me.lane == 6 && p.cache.data != nullptr)
    cuda::prefetch_l2(p.slots + token * p.slot_stride);
}

// Brings into L2 what an entry takes after its rows.
__device__ __forceinline__ void ask_for_steps(const Params& p, int64_t last) {
  constexpr int kLine = 32;  // floats of 128 B
  const auto thread = static_cast<int>(threadIdx.x);
  const int at = thread * kLine;
  if (p.norm.weight != nullptr && at < p.width) cuda::prefetch_l2(p.norm.weight + at);
  const int64_t position = last - p.ratio + 1;
  if (thread < 2 && core::in_table(p.rope, position))
    cuda::prefetch_l2(p.rope.table + position * p.rope.position_stride +
                      thread * p.rope.sine_stride);
}

// Rows of `count` tokens from `first` on go to their places, those that are not stored yet.
template <Load kLoad>
__device__ __forceinline__ void store_rows(const Params& p, TokensMemory& shared, const Place& me,
                                           int64_t first, int count) {
  const int64_t values = values_of(p);
  const auto thread = static_cast<int>(threadIdx.x);
  __syncthreads();  // the list before was read
  float* place = nullptr;
  const float* bias = nullptr;
  if (thread < count && !shared.stored[thread]) place = own_state_row(p, first + thread);
  if (place != nullptr && p.bias != nullptr)
    bias = p.bias + remainder(position_of(p, first + thread), p.ratio) * p.bias_stride;
  shared.places[thread] = place;
  shared.biases[thread] = bias;
  if (!__syncthreads_or(place != nullptr) || me.at >= p.width) return;
#pragma unroll 2
  for (int i = me.warp * kRowsAtOnce + me.lane / kLanes; i < count; i += kWarps * kRowsAtOnce) {
    float* to = shared.places[i];
    if (to == nullptr) continue;
    const float* added = shared.biases[i];
    const int64_t from = (first + i) * p.row_stride;
#pragma unroll 1
    for (int64_t at = me.at; at < values; at += p.width) {
      const Quad value = load_quad<kLoad>(p.rows, p.rows_are_bf16, from + at);
      Quad score = load_quad<kLoad>(p.rows, p.rows_are_bf16, from + values + at);
      if (added != nullptr) add_bias<kLoad>(score, added, at);
      store_quad<kLoad>(to + at, value);
      store_quad<kLoad>(to + values + at, score);
    }
  }
}

// Which of the cluster's tokens, or in order of those after it, close entries that it makes.
__device__ __forceinline__ void list_entries(const Params& p, unsigned (&entries)[kWarps],
                                             const Place& me, int64_t first, int count,
                                             bool ordered, bool start) {
  const auto thread = static_cast<int>(threadIdx.x);
  bool made = thread < count && closes(p, first + thread);
  if (ordered) {
    made = made && !reads_state(p, first);
    if (start)
#pragma unroll 1
      for (int which = 0; which < 2; ++which)
        if (ordered_entry(p, first, which) == thread) made = true;
  }
  const unsigned mask = __ballot_sync(~0u, made);
  if (me.lane == 0) entries[me.warp] = mask;
  __syncthreads();
}

// The tokens of a cluster, by all of its threads; make(token, store_from) makes the entry that a
// token closes, if it closes one that is to be made, and stores those rows of it that the call has
// from token `store_from` on.
template <Load kLoad, class Make>
__device__ __forceinline__ void take_tokens(const Call& call, TokensMemory& shared, const Place& me,
                                            int64_t first, Make make) {
  const Params& p = call.p;
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t left = p.tokens - first;
  const int count = left < call.tokens ? static_cast<int>(left) : call.tokens;
  const bool rows = call.rows && p.state != nullptr;
  shared.stored[thread] = false;
  if (count == 1) ask_for_token<kLoad>(p, first, me);
  Around a;
  bool ordered = false;
  if (call.ordered) {  // one token
    a = look(p, first, me.lane);
    ordered = !is_short(p, a);
  }
  if (count > 1 || ordered) list_entries(p, shared.entries, me, first, count, ordered, a.back == 0);
  else if (thread < kWarps)
    shared.entries[thread] = thread == 0;  // it says itself if it closes one
  __syncthreads();
  // With overlap a row has more than its entry takes of it.
  const bool fused = rows && !p.overlap && !ordered;
#pragma unroll 1
  for (int w = 0; w < kWarps; ++w)
#pragma unroll 1
    for (unsigned bits = shared.entries[w]; bits != 0; bits &= bits - 1)
      make(first + w * 32 + __ffs(static_cast<int>(bits)) - 1, fused ? first : p.tokens);
  if (!rows) return;
  if (ordered)
    ordered_rows(p, first, a, [&](int64_t t) { store_rows<kLoad>(p, shared, me, t, 1); });
  else store_rows<kLoad>(p, shared, me, first, count);
}

// A thread's place, in a grid of clusters whose blocks share the rows.
__device__ __forceinline__ Place place_of(const Params& p) {
  const auto thread = static_cast<int>(threadIdx.x);
  const auto ranks = static_cast<int>(ceil_div(p.width, int64_t{kColumns}));
  Place me{thread % 32, thread / 32, static_cast<int>(blockIdx.x) % ranks, 0};
  me.at = me.rank * kColumns + me.lane % kLanes * kQuad;
  if (me.at >= p.width) me.at = kMaxWidth;
  return me;
}
// The first token of the cluster.
__device__ __forceinline__ int64_t first_of(const Call& call) {
  const auto ranks = static_cast<unsigned>(ceil_div(call.p.width, int64_t{kColumns}));
  return int64_t{blockIdx.x / ranks} * call.tokens;
}

inline void launch_clusters(void (*kernel)(Call), const Call& call, size_t bytes) {
  const auto ranks = static_cast<unsigned>(ceil_div(call.p.width, int64_t{kColumns}));
  const auto units = static_cast<unsigned>(ceil_div(call.p.tokens, int64_t{call.tokens}));
  cuda::keep_error(cuda::allow_shared(kernel, bytes));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {ranks, 1, 1};
  cudaLaunchConfig_t config =
      cuda::launch_config(dim3(units * ranks), kThreads, bytes, cuda::stream_of(call.p.device));
  config.attrs = &cluster;
  config.numAttrs = 1;
  cuda::keep_error(cudaLaunchKernelEx(&config, kernel, call));
}

}  // namespace winnow::internal::compress::many
