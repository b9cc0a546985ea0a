// compress on the device, entries of more than 8 rows: a cluster takes a token, or as many of a
// prefill as an entry has; each of its blocks 64 values of every row. A warp takes 4 rows at a
// time, two values a lane, and pools them; the warps' pools meet in shared memory, the blocks'
// values in the first block, four warps of which finish the entry (entry_sm90.cuh).
//
// Rows that the call has and that are the cluster's to store are stored as they are pooled, so that
// each is read once.
//
// Budget, C128A: 4 KiB read and 4 KiB written a token; 64 KiB a block, of which 16 KiB are on their
// way to registers and the rest to L2, four blocks a multiprocessor. A decode reads 512 KiB an
// entry, by 8 blocks: it waits for positions, (paged: the table,) rows, and the cluster.
#include <cuda_runtime.h>

#include "compress/entry_sm90.cuh"
#include "compress/kernels_sm90.h"
#include "compress/order_sm90.cuh"
#include "cuda/launch.h"

namespace winnow::internal::compress {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kColumns = 64;  // values of a block
constexpr int kBatch = 4;     // rows that a warp has in flight
constexpr int kBlocks = 4;    // that share a multiprocessor
static_assert(kThreads >= kMaxRows, "a thread finds a row");

struct Shared {
  const void* rows[kMaxRows];           // of the entry; bit 0: of the call
  float* places[kMaxRows];              // where they are stored, too; null: not
  alignas(16) float pooled[kMaxWidth];  // in the first block
  alignas(8) float largest[kWarps][kColumns], whole[kWarps][kColumns], sum[kWarps][kColumns];
  float sums[2][kWarps];
  unsigned entries[kWarps];  // bit t: token t of the cluster's closes one that is to be made
  bool stored[kThreads];     // rows of the cluster's tokens
};

// Two values of a row.
struct Pair {
  float v[2];
};
template <Load kLoad>
__device__ __forceinline__ Pair load_pair(const void* data, bool is_bf16, int64_t at) {
  __builtin_assume(__isGlobal(data));
  const float* from = static_cast<const float*>(data) + at;
  const bf16* half = static_cast<const bf16*>(data) + at;
  if constexpr (kLoad == Load::kAny) {
    if (is_bf16) return {to_float(half[0]), to_float(half[1])};
    return {from[0], from[1]};
  }
  if (kLoad == Load::kBf16 && is_bf16) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(half);
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
  const float2 both = *reinterpret_cast<const float2*>(from);
  return {both.x, both.y};
}
template <Load kLoad>
__device__ __forceinline__ void store_pair(float* to, const Pair& pair) {
  __builtin_assume(__isGlobal(to));
  if constexpr (kLoad == Load::kAny) {
    to[0] = pair.v[0];
    to[1] = pair.v[1];
  } else {
    *reinterpret_cast<float2*>(to) = {pair.v[0], pair.v[1]};
  }
}

// A thread's place in the cluster.
struct Place {
  int lane, warp, rank;
  int at;  // the first of its two values; kMaxWidth: none
};

// Rows [first, first + kBatch) below `end` join the pools; those with a place are stored.
template <Load kLoad>
__device__ __forceinline__ void add_rows(const Params& p, const Shared& shared, const Place& me,
                                         int first, int end, Pool (&pools)[2]) {
  const int64_t values = values_of(p);
  const bool there = me.at < p.width;
  Pair value[kBatch], score[kBatch], bias[kBatch];
  const auto column_of = [&](int row) {  // with overlap the entry's own window has the second half
    return (p.overlap && row >= p.ratio ? p.width : 0) + me.at;
  };
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    value[i] = bias[i] = {};
    score[i] = {{-INFINITY, -INFINITY}};
    if (first + i >= end || !there) continue;
    const auto tagged = reinterpret_cast<uintptr_t>(shared.rows[first + i]);
    const auto* row = reinterpret_cast<const void*>(tagged & ~uintptr_t{1});
    const bool is_bf16 = p.rows_are_bf16 && (tagged & 1) != 0;
    value[i] = load_pair<kLoad>(row, is_bf16, column_of(first + i));
    score[i] = load_pair<kLoad>(row, is_bf16, values + column_of(first + i));
    if (p.bias != nullptr && (tagged & 1) != 0)
      bias[i] = load_pair<kLoad>(p.bias + remainder(first + i, p.ratio) * p.bias_stride, false,
                                 column_of(first + i));
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (first + i >= end || !there) continue;
    if (p.bias != nullptr && (reinterpret_cast<uintptr_t>(shared.rows[first + i]) & 1) != 0)
#pragma unroll
      for (int k = 0; k < 2; ++k) score[i].v[k] = __fadd_rn(score[i].v[k], bias[i].v[k]);
    if (float* to = shared.places[first + i]) {
      store_pair<kLoad>(to + me.at, value[i]);
      store_pair<kLoad>(to + values + me.at, score[i]);
    }
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float v[kBatch], s[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      v[i] = value[i].v[k];
      s[i] = score[i].v[k];
    }
    pools[k] = joined(pools[k], pool_of<kBatch>(v, s, end - first));
  }
}

// Asks for kBatch rows that a warp takes after its first ones, so that they come from L2.
__device__ __forceinline__ void ask_for_rows(const Params& p, const Shared& shared, const Place& me,
                                             int first, int end) {
  constexpr int kLine = 32;                 // floats of 128 B
  constexpr int kLines = kColumns / kLine;  // of a row's values in this block, and of its scores
  const int in_batch = me.lane / (2 * kLines);
  if (in_batch >= kBatch || first + in_batch >= end) return;
  const auto tagged = reinterpret_cast<uintptr_t>(shared.rows[first + in_batch]);
  const int64_t size = (tagged & 1) != 0 && p.rows_are_bf16 ? sizeof(bf16) : sizeof(float);
  const int64_t part = p.overlap && first + in_batch >= p.ratio ? p.width : 0;
  const int64_t column = me.rank * kColumns + me.lane % kLines * kLine;
  const int64_t scores = me.lane / kLines % 2 != 0 ? values_of(p) : 0;
  if (column < p.width)
    cuda::prefetch_l2(
        reinterpret_cast<const void*>((tagged & ~uintptr_t{1}) + (part + column + scores) * size));
}

// Pools the rows that shared.rows lists, [begin, end), into the first block's `pooled`. All threads
// of the cluster come here.
template <Load kLoad>
__device__ __forceinline__ void pool_rows(const Params& p, Shared& shared, const Place& me,
                                          int begin, int end) {
  constexpr int kStep = kWarps * kBatch;
  int first = begin + me.warp * kBatch;
#pragma unroll 1
  for (int next = first + kStep; next < end; next += kStep) ask_for_rows(p, shared, me, next, end);
  Pool pools[2];
#pragma unroll 1
  for (; first < end; first += kStep) add_rows<kLoad>(p, shared, me, first, end, pools);
  const auto put = [&](float(&to)[kColumns], float low, float high) {
    *reinterpret_cast<float2*>(to + 2 * me.lane) = {low, high};
  };
  put(shared.largest[me.warp], pools[0].largest, pools[1].largest);
  put(shared.whole[me.warp], pools[0].whole, pools[1].whole);
  put(shared.sum[me.warp], pools[0].sum, pools[1].sum);
  __syncthreads();
  cuda::cluster_wait();  // the first block has begun
  const auto thread = static_cast<int>(threadIdx.x);
  const int column = me.rank * kColumns + thread;
  if (thread < kColumns && column < p.width) {
    Pool pool[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      pool[w] = {shared.largest[w][thread], shared.whole[w][thread], shared.sum[w][thread]};
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2)
#pragma unroll
      for (int w = 0; w < kWarps; w += 2 * step) pool[w] = joined(pool[w], pool[w + step]);
    const Pool& all = pool[0];
    const uint32_t to = cuda::peer(cuda::s32(shared.pooled + column), 0);
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(__fdiv_rn(all.sum, all.whole))
                 : "memory");
  }
  cuda::cluster_sync();
}

// The first block's part behind the pool.
__device__ __forceinline__ void finish_entry(const Call& call, Shared& shared, const Place& me,
                                             int64_t token) {
  const Params& p = call.p;
  const int64_t last = position_of(p, token);
  const Goal goal = goal_of(p, slot_of(p, token), last);
  const auto thread = static_cast<int>(threadIdx.x);
  int at = thread * kQuad;
  if (at >= p.width) at = kMaxWidth;
  Steps steps;
  load_weights(call, at, steps);
  if (goal.record && p.rope.table != nullptr) load_angles(p, last - p.ratio + 1, at, steps);
  Quad pooled{};
  if (at < p.width) {
    const float4 all = *reinterpret_cast<const float4*>(shared.pooled + at);
    pooled = {all.x, all.y, all.z, all.w};
  }
  int turn = 0;
  finish(call, steps, pooled, token, goal, at, [&](float x) {
    float* sums = shared.sums[turn];
    turn ^= 1;
    x = cuda::warp_sum(x);
    if (me.lane == 0) sums[me.warp] = x;
    __syncthreads();
    return cuda::joined(cuda::joined(sums[0], sums[1], sums[2], sums[3]),
                        cuda::joined(sums[4], sums[5], sums[6], sums[7]), 0, 0);
  });
}

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

// Brings into L2 what an entry takes behind its rows.
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

// Makes the entry that `token` closes, if it closes one that is to be made, and stores those rows
// that it takes of the call from token `store_from` on. All threads of the cluster come here and
// agree on every branch.
template <Load kLoad>
__device__ __forceinline__ void make_entry(const Call& call, Shared& shared, const Place& me,
                                           int64_t token, int64_t store_from) {
  const Params& p = call.p;
  const auto window = static_cast<int>(rows_of_entry(p));
  const auto row = static_cast<int>(threadIdx.x);
  // In one wait: the token, and what may be its neighbour at this thread's row.
  const int64_t other = token - (window - 1 - row);
  const bool inside = row < window && other >= 0;
  const int64_t other_position = inside ? position_of(p, other) : 0;
  const int64_t other_request = inside ? request_of(p, other) : 0;
  const int64_t last = position_of(p, token);
  const int64_t request = request_of(p, token);
  const int64_t slot = slot_of(p, token);
  if (last < 0 || remainder(last + 1, p.ratio) != 0 || !goal_of(p, slot, last).any()) return;
  cuda::cluster_arrive();  // pool_rows() waits
  const int64_t position = last - (window - 1) + row;
  const bool needed = row < window && position >= 0;
  const bool called = needed && inside && other_position == position && other_request == request;
  if (me.rank == 0) ask_for_steps(p, last);
  const void* from = nullptr;
  float* place = nullptr;
  if (called) {
    const auto at = reinterpret_cast<uintptr_t>(p.rows) +
                    other * p.row_stride * (p.rows_are_bf16 ? sizeof(bf16) : sizeof(float));
    from = reinterpret_cast<const void*>(at | 1);
    if (other >= store_from) place = own_state_row(p, other);
  } else if (needed) {
    from = state_row(p, request, position);
  }
  if (row < window) {
    shared.rows[row] = from;
    shared.places[row] = place;
  }
  if (__syncthreads_or(needed && from == nullptr)) return cuda::cluster_wait();
  if (called && other >= store_from) shared.stored[other - store_from] = true;
  const int begin = last >= window - 1 ? 0 : window - static_cast<int>(last) - 1;
  pool_rows<kLoad>(p, shared, me, begin, window);
  if (me.rank == 0) finish_entry(call, shared, me, token);
  __syncthreads();  // the lists are read
}

// Rows of `count` tokens from `first` on go to their places, those that are not stored yet.
template <Load kLoad>
__device__ __forceinline__ void store_rows(const Params& p, Shared& shared, const Place& me,
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
  shared.rows[thread] = bias;
  if (!__syncthreads_or(place != nullptr) || me.at >= p.width) return;
#pragma unroll 2
  for (int i = me.warp; i < count; i += kWarps) {
    float* to = shared.places[i];
    if (to == nullptr) continue;
    const auto* added = static_cast<const float*>(shared.rows[i]);
    const int64_t from = (first + i) * p.row_stride;
#pragma unroll 1
    for (int64_t at = me.at; at < values; at += p.width) {
      const Pair value = load_pair<kLoad>(p.rows, p.rows_are_bf16, from + at);
      Pair score = load_pair<kLoad>(p.rows, p.rows_are_bf16, from + values + at);
      if (added != nullptr) {
        const Pair more = load_pair<kLoad>(added, false, at);
#pragma unroll
        for (int k = 0; k < 2; ++k) score.v[k] = __fadd_rn(score.v[k], more.v[k]);
      }
      store_pair<kLoad>(to + at, value);
      store_pair<kLoad>(to + values + at, score);
    }
  }
}

// Which of the cluster's tokens, or in order of those behind it, close entries that it makes.
__device__ __forceinline__ void list_entries(const Params& p, Shared& shared, const Place& me,
                                             int64_t first, int count, bool ordered, bool start) {
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
  if (me.lane == 0) shared.entries[me.warp] = mask;
  __syncthreads();
}

template <Load kLoad>
__global__ void __launch_bounds__(kThreads, kBlocks) many_rows(const __grid_constant__ Call call) {
  __shared__ Shared shared;
  const Params& p = call.p;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto ranks = static_cast<int>(ceil_div(p.width, int64_t{kColumns}));
  Place me{thread % 32, thread / 32, static_cast<int>(blockIdx.x) % ranks, 0};
  me.at = me.rank * kColumns + me.lane * 2;
  if (me.at >= p.width) me.at = kMaxWidth;
  const int64_t first = int64_t{blockIdx.x / static_cast<unsigned>(ranks)} * call.tokens;
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
  if (count > 1 || ordered) list_entries(p, shared, me, first, count, ordered, a.back == 0);
  else if (thread < kWarps)
    shared.entries[thread] = thread == 0;  // it says itself if it closes one
  __syncthreads();
  // With overlap a row has more than its entry takes of it.
  const bool fused = rows && !p.overlap && !ordered;
#pragma unroll 1
  for (int w = 0; w < kWarps; ++w)
#pragma unroll 1
    for (unsigned bits = shared.entries[w]; bits != 0; bits &= bits - 1) {
      const int64_t token = first + w * 32 + __ffs(static_cast<int>(bits)) - 1;
      make_entry<kLoad>(call, shared, me, token, fused ? first : p.tokens);
    }
  if (!rows) return;
  if (ordered)
    ordered_rows(p, first, a, [&](int64_t t) { store_rows<kLoad>(p, shared, me, t, 1); });
  else store_rows<kLoad>(p, shared, me, first, count);
}

template <Load kLoad>
void launch(const Call& call) {
  const Params& p = call.p;
  const auto ranks = static_cast<unsigned>(ceil_div(p.width, int64_t{kColumns}));
  const auto units = static_cast<unsigned>(ceil_div(p.tokens, int64_t{call.tokens}));
  // Room for all blocks that the registers let in.
  cuda::keep_error(
      cudaFuncSetAttribute(many_rows<kLoad>, cudaFuncAttributePreferredSharedMemoryCarveout, 40));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {ranks, 1, 1};
  cudaLaunchConfig_t config =
      cuda::launch_config(dim3(units * ranks), kThreads, 0, cuda::stream_of(p.device));
  config.attrs = &cluster;
  config.numAttrs = 1;
  cuda::keep_error(cudaLaunchKernelEx(&config, many_rows<kLoad>, call));
}

}  // namespace

void many_rows(const Call& call, Load load) noexcept {
  switch (load) {
    case Load::kFloats: return launch<Load::kFloats>(call);
    case Load::kBf16: return launch<Load::kBf16>(call);
    case Load::kAny: return launch<Load::kAny>(call);
  }
}

}  // namespace winnow::internal::compress
