// compress on the device, C128A: decodes of usual calls (entry_sm90.cuh), whose tokens are alone in
// their runs. Blocks share the values of an entry: as many blocks as give every multiprocessor one,
// so that memory is busy from the first row to the last and every entry is finished once
// (long_decode_sm90.cuh).
//
// Budget: 512 KiB read an entry. It waits for positions, (paged: the table,) rows, and the cluster
// once. A token that is not alone, such as a draft, is left to take_any().
#include "compress/long_decode_sm90.cuh"

#include "core/tuning_h200.h"
#include "cuda/device.h"

namespace winnow::internal::compress::many {

namespace {

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
  if (missing) mine.from = own_row(p, token);  // which can be requested
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

// Reads arguments that are needed after the first wait during that wait: each first read of a line
// of the arguments is a wait of its own.
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
  if (missing) mine.from = own;  // which can be requested
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

template <int kRanks, int kCluster>
__global__ void __cluster_dims__(kCluster)
    __launch_bounds__(Cut<kRanks>::kThreads, 512 / Cut<kRanks>::kThreads)
        c128a_decode(const __grid_constant__ Call call) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<DecodeMemory<kRanks>*>(memory);
  const int64_t token = blockIdx.x / kRanks;
  if (token >= call.p.tokens) return;
  if (!take_alone<kRanks>(known(call), shared, token)) take_any<kRanks>(call, shared, token);
}

// A cluster's blocks are of one entry or of several: its launch takes longer than theirs.
template <int kRanks, int kCluster>
void launch(const Call& call) {
  constexpr size_t kBytes = sizeof(DecodeMemory<kRanks>);
  const auto kernel = c128a_decode<kRanks, kCluster>;
  cuda::keep_error(cuda::allow_shared(kernel, kBytes));
  const auto blocks = static_cast<unsigned>(round_up(call.p.tokens * kRanks, int64_t{kCluster}));
  cudaLaunchConfig_t config = cuda::launch_config(dim3(blocks), Cut<kRanks>::kThreads, kBytes,
                                                  cuda::stream_of(call.p.device));
  cuda::keep_error(cudaLaunchKernelEx(&config, kernel, call));
}

}  // namespace

void long_decode(const Call& call) noexcept {
  const int64_t units = cuda::multiprocessors(call.p.device.index);
  const int64_t tokens = call.p.tokens;
  // As many blocks as multiprocessors, nearly. Blocks that have a multiprocessor each would wait
  // for the last cluster of eight, since these find fewer of them.
  const int64_t units_of_eights = units * core::tuning_h200::kClustersAtOnceElevenths / 11;
  if (8 * tokens <= units) launch<8, 8>(call);
  else if (4 * tokens <= units) launch<4, 8>(call);
  else if (2 * tokens <= units_of_eights) launch<2, 8>(call);
  else if (2 * tokens <= units) launch<2, 2>(call);
  else launch<1, 1>(call);
}

}  // namespace winnow::internal::compress::many
