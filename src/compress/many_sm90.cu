// compress on the device, entries of more than 8 rows, any call (many_sm90.cuh; long_sm90.cu has
// C128A's). A warp takes 16 rows of the block's columns, two at a time, four values a lane, and
// pools them; its rows are on their way to shared memory, each thread's own. The warps' pools meet
// in shared memory, the blocks' values in the first block, four warps of which finish the entry
// (entry_sm90.cuh).
#include "compress/many_sm90.cuh"

#include <cuda_runtime.h>

#include "compress/kernels_sm90.h"
#include "cuda/copies.h"

namespace winnow::internal::compress::many {

namespace {

constexpr int kEach = 2;                    // rows of a lane's step
constexpr int kStep = kRowsAtOnce * kEach;  // rows of a warp's step
constexpr int kTurn = 16;                   // rows that a warp takes before the next one's
constexpr int kRound = kWarps * kTurn;      // rows of all warps
static_assert(2 * kRound >= kMaxRows, "a lane finds a row of each of two rounds");

// kStages: steps whose rows are on their way, each thread's own.
template <int kStages>
struct Shared {
  float4 values[kStages][kEach][kThreads], scores[kStages][kEach][kThreads];
  alignas(16) float pooled[kMaxWidth];  // in the first block
  float sums[2][kWarps];
  TokensMemory tokens;
};

// The row of an entry that a lane has found for its warp.
struct Found {
  const std::byte* row = nullptr;
  float* place = nullptr;  // where it is stored, too
  bool needed = false, called = false;
};

// Which of the entry's rows lane `lane` of a warp finds: the first 16 lanes of the first round.
__device__ __forceinline__ int found_row(int warp, int lane) {
  return lane / kTurn * kRound + warp * kTurn + lane % kTurn;
}

__device__ __forceinline__ float4 as_float4(const Quad& q) {
  return {q.v[0], q.v[1], q.v[2], q.v[3]};
}

// The pool of the rows of both, where either may be empty.
__device__ __forceinline__ Pool joined_any(const Pool& a, const Pool& b) {
  Pool pool;
  pool.largest = fmaxf(a.largest, b.largest);
  const float of_a = a.largest == pool.largest ? 1.0f : exp_of(__fsub_rn(a.largest, pool.largest));
  const float of_b = b.largest == pool.largest ? 1.0f : exp_of(__fsub_rn(b.largest, pool.largest));
  pool.whole = __fmaf_rn(b.whole, of_b, __fmul_rn(a.whole, of_a));
  pool.sum = __fmaf_rn(b.sum, of_b, __fmul_rn(a.sum, of_a));
  return pool;
}

// The pool of up to kEach rows; bit i of `there`: row i is.
__device__ __forceinline__ Pool pool_there(const float (&values)[kEach],
                                           const float (&scores)[kEach], unsigned there) {
  if (there == (1u << kEach) - 1) return pool_of<kEach>(values, scores, kEach);
  Pool pool;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (there >> i & 1) pool = joined_any(pool, pool_of<1>({values[i]}, {scores[i]}, 1));
  return pool;
}

// A warp's rows of an entry, from where they lie to its lanes' pools.
template <Load kLoad, int kStages>
struct Puller {
  const Params& p;
  Shared<kStages>& shared;
  const Place& me;
  Found mine;
  unsigned needed, called, placed;  // by the lane that found the row

  __device__ Puller(const Params& params, Shared<kStages>& memory, const Place& place,
                    const Found& found)
      : p(params), shared(memory), me(place), mine(found) {
    needed = __ballot_sync(~0u, mine.needed && mine.row != nullptr);
    called = __ballot_sync(~0u, mine.called);
    placed = __ballot_sync(~0u, mine.place != nullptr);
  }

  // The lane that found this lane's row i of a step.
  __device__ int finder(int step, int i) const {
    return step * kStep + i * kRowsAtOnce + me.lane / kLanes;
  }
  // With overlap the entry's own window has the second half.
  __device__ int64_t column_of(int row) const {
    return (p.overlap && row >= p.ratio ? p.width : 0) + me.at;
  }

  __device__ void ask(int step) const {
    const int stage = step % kStages;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int lane = finder(step, i) % 32;
      const auto bits = reinterpret_cast<unsigned long long>(mine.row);
      const auto* row = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, bits, lane));
      if (step * kStep >= 32 || !(needed >> lane & 1) || me.at >= p.width) continue;
      const bool is_bf16 = p.rows_are_bf16 && (called >> lane & 1);
      const int64_t column = column_of(found_row(me.warp, lane));
      const int64_t scores = column + values_of(p);
      float4* to[2] = {&shared.values[stage][i][threadIdx.x],
                       &shared.scores[stage][i][threadIdx.x]};
      if constexpr (kLoad == Load::kAny) {
        *to[0] = as_float4(load_quad<kLoad>(row, is_bf16, column));
        *to[1] = as_float4(load_quad<kLoad>(row, is_bf16, scores));
      } else if (kLoad == Load::kBf16 && is_bf16) {
        cuda::copy_async<8>(to[0], row + column * 2);
        cuda::copy_async<8>(to[1], row + scores * 2);
      } else {
        cuda::copy_async<16>(to[0], row + column * 4);
        cuda::copy_async<16>(to[1], row + scores * 4);
      }
    }
    cuda::copies_commit();
  }

  __device__ Quad taken(const float4& raw, bool is_bf16) const {
    if (kLoad == Load::kBf16 && is_bf16) {
      const uint32_t low = __float_as_uint(raw.x);
      const uint32_t high = __float_as_uint(raw.y);
      return {__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
              __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u)};
    }
    return {raw.x, raw.y, raw.z, raw.w};
  }

  // The rows of a step join the pools; those with a place are stored.
  __device__ void take(int step, QuadPool& pools) const {
    const int stage = step % kStages;
    const bool column_there = me.at < p.width;
    Quad value[kEach], score[kEach];
    unsigned there = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int lane = finder(step, i);
      const bool of_call = called >> lane & 1;
      const bool is_bf16 = p.rows_are_bf16 && of_call;
      const int row = found_row(me.warp, lane);
      if ((needed >> lane & 1) && column_there) there |= 1u << i;
      value[i] = taken(shared.values[stage][i][threadIdx.x], is_bf16);
      score[i] = taken(shared.scores[stage][i][threadIdx.x], is_bf16);
      if (p.bias != nullptr && of_call && column_there)
        add_bias<kLoad>(score[i], p.bias + remainder(row, p.ratio) * p.bias_stride, column_of(row));
    }
    if (placed != 0)
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const auto bits = reinterpret_cast<unsigned long long>(mine.place);
        auto* to = reinterpret_cast<float*>(__shfl_sync(~0u, bits, finder(step, i)));
        if (to == nullptr || !column_there) continue;
        store_quad<kLoad>(to + me.at, value[i]);
        store_quad<kLoad>(to + values_of(p) + me.at, score[i]);
      }
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      float v[kEach], s[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        v[i] = value[i].v[k];
        s[i] = score[i].v[k];
      }
      pools.of[k] = joined_any(pools.of[k], pool_there(v, s, there));
    }
  }
};

// Where a warp's lanes leave their pools, in the memory that their rows came to.
template <int kStages>
__device__ __forceinline__ float4& pool_slot(Shared<kStages>& shared, int part, int thread) {
  return part == 0   ? shared.values[0][0][thread]
         : part == 1 ? shared.scores[0][0][thread]
                     : shared.values[0][1][thread];
}

// The lanes' pools of all warps become the first block's `pooled`. All threads of the cluster come
// here.
template <int kStages>
__device__ __forceinline__ void join_pools(const Params& p, Shared<kStages>& shared,
                                           const Place& me, QuadPool& pools) {
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int apart = kLanes; apart < 32; apart *= 2)
#pragma unroll
    for (Pool& pool : pools.of) {
      const Pool other{__shfl_xor_sync(~0u, pool.largest, apart),
                       __shfl_xor_sync(~0u, pool.whole, apart),
                       __shfl_xor_sync(~0u, pool.sum, apart)};
      pool = me.lane & apart ? joined_any(other, pool) : joined_any(pool, other);
    }
  if (me.lane < kLanes) {
    const Pool(&of)[kQuad] = pools.of;
    pool_slot(shared, 0, thread) = {of[0].largest, of[1].largest, of[2].largest, of[3].largest};
    pool_slot(shared, 1, thread) = {of[0].whole, of[1].whole, of[2].whole, of[3].whole};
    pool_slot(shared, 2, thread) = {of[0].sum, of[1].sum, of[2].sum, of[3].sum};
  }
  __syncthreads();
  cuda::cluster_wait();  // the first block has begun
  const int column = me.rank * kColumns + thread;
  if (thread < kColumns && column < p.width) {
    Pool pool[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto from = [&](int part) {
        return reinterpret_cast<const float*>(&pool_slot(shared, part, w * 32))[thread];
      };
      pool[w] = {from(0), from(1), from(2)};
    }
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2)
#pragma unroll
      for (int w = 0; w < kWarps; w += 2 * step) pool[w] = joined_any(pool[w], pool[w + step]);
    const Pool& all = pool[0];
    const uint32_t to = cuda::peer(cuda::s32(shared.pooled + column), 0);
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(__fdiv_rn(all.sum, all.whole))
                 : "memory");
  }
  cuda::cluster_sync();
}

// The first block's part after the pool.
template <int kStages>
__device__ __forceinline__ void finish_entry(const Call& call, Shared<kStages>& shared,
                                             const Place& me, int64_t token) {
  const Params& p = call.p;
  const int64_t last = position_of(p, token);
  const Goal goal = goal_of(p, slot_of(p, token), last);
  const auto thread = static_cast<int>(threadIdx.x);
  const int at = thread * kQuad < p.width ? thread * kQuad : kMaxWidth;
  Steps steps;
  const int from = at < p.width ? at : 0;
  load_weights<void>(call, from, steps);
  if (goal.record && p.rope.table != nullptr) load_angles<void>(p, last - p.ratio + 1, from, steps);
  Quad pooled{};
  if (at < p.width) {
    const float4 all = *reinterpret_cast<const float4*>(shared.pooled + at);
    pooled = {all.x, all.y, all.z, all.w};
  }
  int turn = 0;
  finish<void>(call, steps, pooled, token, goal, at, [&](float x) {
    float* sums = shared.sums[turn];
    turn ^= 1;
    x = cuda::warp_sum(x);
    if (me.lane == 0) sums[me.warp] = x;
    __syncthreads();
    return cuda::joined(cuda::joined(sums[0], sums[1], sums[2], sums[3]),
                        cuda::joined(sums[4], sums[5], sums[6], sums[7]), 0, 0);
  });
}

// Makes the entry that `token` closes, if it closes one that is to be made, and stores those rows
// that it takes of the call from token `store_from` on. All threads of the cluster come here and
// agree on every branch.
template <Load kLoad, int kStages>
__device__ __forceinline__ void make_entry(const Call& call, Shared<kStages>& shared,
                                           const Place& me, int64_t token, int64_t store_from) {
  const Params& p = call.p;
  const auto window = static_cast<int>(rows_of_entry(p));
  const int row = found_row(me.warp, me.lane);
  // In one wait: the token, and what may be its neighbour at this lane's row.
  const int64_t other = token - (window - 1 - row);
  const bool inside = row < window && other >= 0;
  const int64_t other_position = inside ? position_of(p, other) : 0;
  const int64_t other_request = inside ? request_of(p, other) : 0;
  const int64_t last = position_of(p, token);
  const int64_t request = request_of(p, token);
  const int64_t slot = slot_of(p, token);
  if (last < 0 || remainder(last + 1, p.ratio) != 0 || !goal_of(p, slot, last).any()) return;
  cuda::cluster_arrive();  // join_pools() waits
  const int64_t position = last - (window - 1) + row;
  Found found;
  found.needed = row < window && position >= 0;
  found.called = found.needed && inside && other_position == position && other_request == request;
  const bool stores = found.called && other >= store_from;
  if (found.called) {
    found.row =
        static_cast<const std::byte*>(p.rows) +
        other * p.row_stride * static_cast<int64_t>(p.rows_are_bf16 ? sizeof(bf16) : sizeof(float));
    if (stores) found.place = own_state_row(p, other);
  } else if (found.needed) {
    found.row = reinterpret_cast<const std::byte*>(state_row(p, request, position));
  }
  const Puller<kLoad, kStages> puller(p, shared, me, found);
#pragma unroll
  for (int i = 0; i < kStages; ++i) puller.ask(i);
  if (me.rank == 0) ask_for_steps(p, last);
  if (__syncthreads_or(found.needed && found.row == nullptr)) {
    cuda::copies_wait<0>();
    return cuda::cluster_wait();
  }
  if (stores) shared.tokens.stored[other - store_from] = true;
  const int steps = window > kRound ? 32 / kStep : kTurn / kStep;
  QuadPool pools;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cuda::copies_wait<kStages - 1>();
    puller.take(step, pools);
    puller.ask(step + kStages);
  }
  join_pools(p, shared, me, pools);
  if (me.rank == 0) finish_entry(call, shared, me, token);
  __syncthreads();  // the pools are read
}

constexpr int kStages = 4;
constexpr int kBlocks = 3;  // that share a multiprocessor

template <Load kLoad>
__global__ void __launch_bounds__(kThreads, kBlocks) any_rows(const __grid_constant__ Call call) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<Shared<kStages>*>(memory);
  const Place me = place_of(call.p);
  take_tokens<kLoad>(call, shared.tokens, me, first_of(call), [&](int64_t token, int64_t from) {
    make_entry<kLoad>(call, shared, me, token, from);
  });
}

template <Load kLoad>
void launch(const Call& call) {
  launch_clusters(any_rows<kLoad>, call, sizeof(Shared<kStages>));
}

}  // namespace

}  // namespace winnow::internal::compress::many

namespace winnow::internal::compress {

void many_rows(const Call& call, Load load) noexcept {
  if (long_rows(call, load)) return;
  switch (load) {
    case Load::kFloats: return many::launch<Load::kFloats>(call);
    case Load::kBf16: return many::launch<Load::kBf16>(call);
    case Load::kAny: return many::launch<Load::kAny>(call);
  }
}

}  // namespace winnow::internal::compress
