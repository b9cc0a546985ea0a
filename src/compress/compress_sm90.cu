// compress on the device: a block, or a cluster that shares the values, for one token or a few that
// follow each other. It pools the entries that its tokens close and stores its tokens' rows.
//
// pool      An entry's rows (pool_sm90.cuh).
// finish    One warp takes the pooled row: norm, RoPE, Hadamard, record (cuda/prologue.h). Without
//           a gate nothing is pooled, and a warp per token does all.
// rows      Of many tokens by a kernel of its own behind the entries, which copies at the rate of
//           the memory; of few by the entries' blocks, in the same launch.
//
// Budget, C4A: 8 KiB read and 8 KiB written a token; what a window's entry reads again it finds in
// L1 or L2. A call of few tokens waits for its positions, then for its neighbours' and the table,
// then for the rows.
//
// Order: entries must see the rows that were stored before the call. A paged state has a place for
// every position. In a ring that is not longer than the call's tokens and a window, a row of the
// call may take the place of one that an entry reads (order_sm90.cuh).
#include <cuda_runtime.h>

#include "compress/order_sm90.cuh"
#include "compress/pool_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/record.h"
#include "model/records.h"

namespace winnow::internal::compress {

namespace {

constexpr int kPieces = kMaxWidth / cuda::kWarpValues;

struct Call {
  Params p;
  int tokens = 1;        // of a block or cluster
  bool rows = true;      // are stored, too
  bool ordered = false;  // ... and may take places in the ring that entries read
  bool norm_wide = false, latent_wide = false;
};

// Where an entry goes.
struct Goal {
  bool record, latent;
  int64_t slot;
};
__device__ __forceinline__ Goal goal_of(const Params& p, int64_t token) {
  Goal g{false, p.latent != nullptr, -1};
  if (p.cache.data == nullptr) return g;
  g.slot = p.slots[token * p.slot_stride];
  g.record = g.slot >= 0 && g.slot < p.cache.pages * p.cache.page;
  if (p.rope.table != nullptr)
    g.record = g.record && core::in_table(p.rope, position_of(p, token) - p.ratio + 1);
  return g;
}

// The pooled row becomes latent and record, by one warp.
__device__ __forceinline__ void finish(const Call& call, const cuda::HeldFloats<kPieces>& floats,
                                       int64_t token, const Goal& goal, int lane) {
  const Params& p = call.p;
  cuda::Held<kPieces> row;
  if (p.norm.kind == NormKind::kNone) {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) row.pieces[c] = cuda::packed(floats.pieces[c]);
  } else {
    const cuda::HeldWeights<kPieces> weights(p.norm, p.width, call.norm_wide, lane);
    row = cuda::norm_held(p.norm, weights, floats, p.width, call.norm_wide, lane);
  }
  if (goal.latent)
    cuda::store_row(p.latent + token * p.latent_stride, p.width, call.latent_wide, lane, row);
  if (!goal.record) return;
  if (p.rope.table != nullptr) {
    const cuda::Turn turn =
        cuda::turn_of(p.rope, position_of(p, token) - p.ratio + 1, lane % cuda::kRopeLanes);
    cuda::rotate_held(p.rope, turn, p.width, row, lane);
  }
  if (p.hadamard) row.pieces[0] = cuda::hadamard(row.pieces[0], lane);
  std::byte* page = p.cache.data + goal.slot / p.cache.page * p.cache.stride;
  with_entry(p.cache.format, [&](auto record) {
    cuda::store_record<decltype(record)>(p.quantizer, row, page, goal.slot % p.cache.page,
                                         p.cache.page, lane);
  });
}

// Brings into L2 what the entry that ends at `last` takes behind its rows: weights and angles.
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

// Pools the entry that a token closes and stores it. All threads of the block or cluster come here
// and agree on every branch.
template <Load kLoad, int kGroups>
__device__ __forceinline__ void store_entry(const Call& call, Shared& shared, int64_t token,
                                            int rank) {
  const Params& p = call.p;
  const Goal goal = goal_of(p, token);
  if (!goal.record && !goal.latent) return;
  const int64_t last = position_of(p, token);
  const int64_t begin = entry_begin(p, last);
  const int count = static_cast<int>(last - begin + 1);
  if (rank == 0) ask_for_steps(p, last);
  bool missing = false;
  for (int j = threadIdx.x; j < count; j += blockDim.x) {
    const Row row = row_of(p, token, last, begin + j);
    shared.rows[j] = row;
    missing = missing || row.values == nullptr;
  }
  if (__syncthreads_or(missing)) return;
  pool_rows<kLoad, kGroups>(p, shared, count, rank);
  if (rank == 0 && threadIdx.x < 32) {
    const auto lane = static_cast<int>(threadIdx.x);
    cuda::HeldFloats<kPieces> floats;
#pragma unroll
    for (int c = 0; c < kPieces; ++c)
      cuda::load_floats(shared.pooled, cuda::piece_at(c, lane), p.width, true, floats.pieces[c]);
    finish(call, floats, token, goal, lane);
  }
  // What comes next must wait until this entry's rows are read.
  if constexpr (kGroups == 1) __syncthreads();
  else cg::this_cluster().sync();
}

// The rows of the first `count` of the listed tokens go to their places, each block of a cluster
// storing its share of the columns.
template <Load kLoad>
__device__ __forceinline__ void store_rows(const Params& p, const List& shared, int count, int rank,
                                           int ranks) {
  constexpr int kEach = 4;
  const int values = static_cast<int>(values_of(p));
  const int columns = 2 * values;
  const int quads = ceil_div(columns / kQuad, ranks);  // of a row, in this block
  const auto threads = static_cast<int>(blockDim.x);
  for (int from = static_cast<int>(threadIdx.x); from < quads * count; from += kEach * threads) {
    Quad quad[kEach];
    float* to[kEach];
    int column[kEach];
    int64_t token[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int item = from + i * threads;
      column[i] = (rank * quads + item % quads) * kQuad;
      const bool there = item < quads * count && column[i] < columns;
      to[i] = there ? shared.places[item / quads] : nullptr;
      if (to[i] == nullptr) continue;
      token[i] = shared.tokens[item / quads];
      quad[i] = load_quad<kLoad>(p.rows, p.rows_are_bf16, token[i] * p.row_stride + column[i]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (to[i] == nullptr) continue;
      if (p.bias != nullptr && column[i] >= values) {
        const auto place = static_cast<int>(position_of(p, token[i])) % p.ratio;
        add_bias<kLoad>(quad[i], p.bias + place * p.bias_stride, column[i] - values);
      }
      __builtin_assume(__isGlobal(to[i]));
      store_quad<kLoad>(to[i] + column[i], quad[i]);
    }
  }
}

// What a lane knows of its token.
struct Mine {
  float* place = nullptr;   // where its row goes; null: nowhere, or another block does it
  bool entry = false;       // it closes an entry that this block stores
  bool start = false;       // its request begins with it, and is ordered
  int ahead[2] = {-1, -1};  // entries of that request
};
__device__ __forceinline__ Mine look(const Call& call, int64_t first, int count, int lane) {
  const Params& p = call.p;
  const int64_t token = first + lane;
  Mine mine;
  if (lane < count) {
    if (call.rows) mine.place = own_state_row(p, token);
    mine.entry = closes(p, token);
  }
  if (!call.ordered) return mine;
  const int64_t position = lane < count ? position_of(p, token) : 0;
  mine.start = lane < count && !is_neighbour(p, token, token - 1, position - 1);
  if (mine.entry && reads_state(p, token)) mine.entry = false;
  if (mine.start)
    for (int i = 0; i < 2; ++i) mine.ahead[i] = ordered_entry(p, token, i);
  const unsigned starts = __ballot_sync(~0u, mine.start);
  if (__any_sync(~0u, mine.place != nullptr)) {
    const int64_t before = starts & 1 ? 0 : continued(p, first, -1);
    const unsigned until = starts & (~0u >> (31 - lane));
    const int64_t back = until ? lane - (31 - __clz(static_cast<int>(until))) : lane + before;
    if (takes_place(p, position - back, position)) mine.place = nullptr;
  }
  return mine;
}

template <Load kLoad, int kGroups>
__global__ void __launch_bounds__(kGroups == 1 ? kMaxWidth / kQuad : kMaxThreads,
                                  kGroups == 1 ? 3 : 2)
    compress_tokens(const __grid_constant__ Call call) {
  __shared__ Shared shared;
  const Params& p = call.p;
  int rank = 0, ranks = 1;
  if constexpr (kGroups > 1) {
    rank = static_cast<int>(cg::this_cluster().block_rank());
    ranks = static_cast<int>(cg::this_cluster().num_blocks());
  }
  const int64_t first = int64_t{blockIdx.x / static_cast<unsigned>(ranks)} * call.tokens;
  const int64_t left = p.tokens - first;
  const int count = left < call.tokens ? static_cast<int>(left) : call.tokens;
  // Every warp looks at all tokens of the block, a lane each.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Mine mine = look(call, first, count, lane);
  // Entries: of the block's own tokens, then of the requests that begin with them.
  unsigned closing = __ballot_sync(~0u, mine.entry);
  unsigned nearer = __ballot_sync(~0u, mine.ahead[0] >= 0);
  unsigned further = __ballot_sync(~0u, mine.ahead[1] >= 0);
  // The first block's memory may be written to when it has begun.
  if constexpr (kGroups > 1)
    if ((closing | nearer | further) != 0) cg::this_cluster().sync();
#pragma unroll 1
  while ((closing | nearer | further) != 0) {
    const unsigned some = closing != 0 ? closing : nearer != 0 ? nearer : further;
    const int of = __ffs(static_cast<int>(some)) - 1;
    const int ahead = __shfl_sync(~0u, nearer != 0 ? mine.ahead[0] : mine.ahead[1], of);
    const int64_t token = first + of + (closing != 0 ? 0 : ahead);
    if (closing != 0) closing &= closing - 1;
    else if (nearer != 0) nearer &= nearer - 1;
    else further &= further - 1;
    store_entry<kLoad, kGroups>(call, shared, token, rank);
  }
  if (!call.rows || p.state == nullptr) return;
  // Rows: those that take places of what the entries have read, then the others.
  unsigned starts = __ballot_sync(~0u, mine.start);
  int64_t back = 1;
  bool own = false;
#pragma unroll 1
  while (!own) {
    own = starts == 0;
    bool listed = true;
    if (own) {
      if (threadIdx.x < kMaxTokens) {
        shared.tokens[lane] = first + lane;
        shared.places[lane] = mine.place;
      }
    } else {
      listed = list_ordered(p, shared, first + __ffs(static_cast<int>(starts)) - 1, back);
      back += kMaxTokens;
      if (!listed || back >= rows_of_entry(p)) {
        starts &= starts - 1;
        back = 1;
      }
    }
    if (!listed) continue;
    __syncthreads();  // the list is there
    store_rows<kLoad>(p, shared, own ? count : kMaxTokens, rank, ranks);
    __syncthreads();  // ... and was read
  }
}

constexpr int kRowThreads = 256;

// Rows alone, of call.tokens tokens a block.
template <Load kLoad>
__global__ void __launch_bounds__(kRowThreads) copy_rows(const __grid_constant__ Call call) {
  __shared__ List list;
  const int64_t first = int64_t{blockIdx.x} * call.tokens;
  const int64_t left = call.p.tokens - first;
  const int count = left < call.tokens ? static_cast<int>(left) : call.tokens;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < count) {
    list.tokens[thread] = first + thread;
    list.places[thread] = own_state_row(call.p, first + thread);
  }
  __syncthreads();
  store_rows<kLoad>(call.p, list, count, 0, 1);
}

constexpr int kPlainWarps = 4;

// Without a gate: an entry is its token's row, by a warp.
template <Load kLoad>
__global__ void __launch_bounds__(kPlainWarps * 32) plain(const __grid_constant__ Call call) {
  const Params& p = call.p;
  const int64_t token = int64_t{blockIdx.x} * kPlainWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (token >= p.tokens) return;
  cuda::HeldFloats<kPieces> floats;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int at = cuda::piece_at(c, lane);
    if (p.rows_are_bf16) {
      const bf16* row = static_cast<const bf16*>(p.rows) + token * p.row_stride;
      cuda::unpack(cuda::load_piece(row, at, p.width, false), floats.pieces[c]);
    } else {
      const float* row = static_cast<const float*>(p.rows) + token * p.row_stride;
      cuda::load_floats(row, at, p.width, kLoad == Load::kFloats, floats.pieces[c]);
    }
  }
  if (!closes(p, token)) return;
  const Goal goal = goal_of(p, token);
  if (goal.record || goal.latent) finish(call, floats, token, goal, lane);
}

template <Load kLoad>
void launch_plain(const Call& call) {
  const auto blocks = static_cast<unsigned>(ceil_div(call.p.tokens, int64_t{kPlainWarps}));
  plain<kLoad><<<blocks, kPlainWarps * 32, 0, cuda::stream_of(call.p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

template <Load kLoad>
void launch_rows(Call call) {
  const int64_t quads = 2 * values_of(call.p) / kQuad;
  const int64_t rows = 8 * kRowThreads / quads;  // 8 quads a thread
  call.tokens = static_cast<int>(rows < 1 ? 1 : rows < kMaxTokens ? rows : kMaxTokens);
  const auto blocks = static_cast<unsigned>(ceil_div(call.p.tokens, int64_t{call.tokens}));
  copy_rows<kLoad><<<blocks, kRowThreads, 0, cuda::stream_of(call.p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

template <Load kLoad, int kGroups>
void launch(const Call& call) {
  const Params& p = call.p;
  constexpr int64_t kValues = kQuadsOfRank * kQuad;
  const auto ranks = static_cast<unsigned>(kGroups == 1 ? 1 : ceil_div(p.width, kValues));
  const auto blocks = static_cast<unsigned>(ceil_div(p.tokens, int64_t{call.tokens}));
  const auto threads =
      static_cast<unsigned>(kGroups == 1 ? round_up(p.width / kQuad, 32) : int64_t{kMaxThreads});
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {ranks, 1, 1};
  cudaLaunchConfig_t config =
      cuda::launch_config(dim3(blocks * ranks), threads, 0, cuda::stream_of(p.device));
  config.attrs = &cluster;
  config.numAttrs = ranks > 1 ? 1 : 0;
  cuda::keep_error(cudaLaunchKernelEx(&config, compress_tokens<kLoad, kGroups>, call));
}

template <Load kLoad>
void launch_for(const Call& call) {
  if (!call.p.gate) return launch_plain<kLoad>(call);
  if (rows_of_entry(call.p) <= kFewRows) launch<kLoad, 1>(call);
  else launch<kLoad, kManyGroups>(call);
  if (!call.rows && call.p.state != nullptr) launch_rows<kLoad>(call);
}

// Whether four values of any row, of the state and of the bias lie together.
bool is_wide(const Params& p) {
  const auto aligned = [](const void* data, int64_t stride, int64_t size) {
    return reinterpret_cast<uintptr_t>(data) % (kQuad * size) == 0 && stride % kQuad == 0;
  };
  return aligned(p.rows, p.row_stride, p.rows_are_bf16 ? 2 : 4) &&
         aligned(p.bias, p.bias_stride, 4) && aligned(p.state, p.state_stride, 4) &&
         p.block_stride % kQuad == 0;
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens == 0) return;
  Call call{p};
  // Few tokens: each by itself and in one launch, for the shortest wait. Of many, those of an
  // entry.
  if (p.tokens > 512) {
    call.rows = false;
    call.tokens = p.ratio < kMaxTokens ? p.ratio : kMaxTokens;
  }
  // Positions of one request in the call and in the windows before them share no place.
  call.ordered = call.rows && p.ring && p.tokens + rows_of_entry(p) - 1 > p.block;
  call.norm_wide = cuda::is_wide(p.norm);
  call.latent_wide = cuda::is_wide(p.latent, p.latent_stride * 2);
  if (!is_wide(p)) launch_for<Load::kAny>(call);
  else if (p.rows_are_bf16) launch_for<Load::kBf16>(call);
  else launch_for<Load::kFloats>(call);
}

}  // namespace winnow::internal::compress
