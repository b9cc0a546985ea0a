// compress on the device, entries of up to 8 rows: a team of four warps (up to 128 values: of one)
// takes a token; a thread has four values of every row. Its position, those of the tokens around
// it, its slot and its own row are requested at once; then the rows of the entry that it closes,
// weights and angles; the row is stored while they come. Prefills are streamed where they can be
// (stream_sm90.cu, and of C4A's indexer overlap_sm90.cu).
//
// A usual call (entry_sm90.cuh) of one token a request has a kernel of its own: it holds what a
// decode runs and nothing else, because one token's time is that of its instructions, one after the
// other, and of loading them. Budget: waits for positions, (paged: the table,) and rows.
#include "compress/few_sm90.cuh"

#include <cuda_runtime.h>

#include "compress/kernels_sm90.h"
#include "cuda/launch.h"

namespace winnow::internal::compress {

namespace {

template <Load kLoad, int kWarps>
__global__ void __launch_bounds__(kThreads, 3) few_rows(const __grid_constant__ Call call) {
  __shared__ float sums[2][kWarps];
  Team<kWarps> team(sums);
  if (team.at >= call.p.width) team.at = kMaxWidth;
  const int64_t token = team.unit();
  if (token < call.p.tokens) one_token<kLoad, true>(call, team, token);
}

// A token that is not alone in its request, or whose row must wait for entries.
template <int kWarps>
__device__ __noinline__ void token_in_order(const Call& call, Team<kWarps> team, int64_t token) {
  one_token<Load::kFloats, true>(call, team, token);
}

// A token of a usual call with entries of kRatio rows; of twice as many with overlap, which ratio 4
// has.
template <int kWarps, int kRatio, class R>
__global__ void __launch_bounds__(kThreads, 3) decode_rows(const __grid_constant__ Call call) {
  __shared__ float sums[2][kWarps];
  constexpr Load kLoad = Load::kFloats;
  constexpr int kParts = kRatio == 4 ? 2 : 1;
  constexpr int kWindow = kParts * kRatio;
  constexpr int kWidth = R::kDim;
  constexpr int kValues = kParts * kWidth;
  const Params& p = call.p;
  Team<kWarps> team(sums);
  const int at = team.at;
  const int lane = team.lane;
  const int64_t token = team.unit();
  if (token >= p.tokens) return;
  const auto* row = static_cast<const float*>(p.rows) + token * p.row_stride + at;
  int64_t slot = -1;
  Quad own[2][kParts], weight;  // values, scores
  const Near near = look_near(p, token, lane, [&] {
    slot = load_now(p.slots + token * p.slot_stride);
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
      own[0][h] = load_now(row + h * kWidth);
      own[1][h] = load_now(row + kValues + h * kWidth);
    }
    weight = load_now(p.norm.weight + at);
  });
  Steps steps;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) steps.weight[k] = weight.v[k];
  if (near.has_before || (call.ordered && near.has_behind))
    return token_in_order<kWarps>(call, team, token);
  if (near.position < 0) return;
  // The entry's rows before this one, a lane each.
  const bool closing = (static_cast<uint32_t>(near.position) + 1) % kRatio == 0;
  const Goal goal = goal_of(p, slot, near.position);
  const bool makes = closing && goal.any();
  const bool whole = near.position >= kWindow - 1;
  const int32_t position = near.position - (kWindow - 1) + lane;
  const bool needed = makes && lane < kWindow && position >= 0;
  float* mine = nullptr;
  if (needed || lane == kWindow - 1) mine = state_row_of(call, near.request, position);
  float* place = near.later ? nullptr : from_lane(mine, kWindow - 1);
  const bool missing = __any_sync(~0u, needed && lane < kWindow - 1 && mine == nullptr);
  Quad values[kParts][kRatio], scores[kParts][kRatio];
  if (makes && !missing) {
    if (goal.record) load_angles<R>(p, near.position - kRatio + 1, at, steps);
#pragma unroll
    for (int h = 0; h < kParts; ++h)
#pragma unroll
      for (int i = 0; i < kRatio; ++i) {
        if (h * kRatio + i == kWindow - 1) continue;
        const float* from = from_lane(mine, h * kRatio + i) + at;
        if (h + 1 < kParts && !whole) continue;
        values[h][i] = load_quad<kLoad>(from, false, h * kWidth);
        scores[h][i] = load_quad<kLoad>(from, false, kValues + h * kWidth);
      }
  }
  if (p.bias != nullptr)
#pragma unroll
    for (int h = 0; h < kParts; ++h)
      add_bias<kLoad>(own[1][h], p.bias + near.position % kRatio * p.bias_stride, h * kWidth + at);
  // In a ring of kWindow - 1 rows this is the first row's place: the thread has requested its
  // values above, and nobody else takes them.
  if (place != nullptr)
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
      store_quad<kLoad>(place + h * kWidth + at, own[0][h]);
      store_quad<kLoad>(place + kValues + h * kWidth + at, own[1][h]);
    }
  if (!makes || missing) return;
  values[kParts - 1][kRatio - 1] = own[0][kParts - 1];
  scores[kParts - 1][kRatio - 1] = own[1][kParts - 1];
  QuadPool before;
  if (kParts > 1 && whole) before = pool_of(values[0], scores[0], kRatio);
  const Quad mean = mean_of(before, pool_of(values[kParts - 1], scores[kParts - 1], kRatio));
  finish<R>(call, steps, mean, token, goal, at, [&](float x) { return team.sum(x); });
}

template <int kWarps>
unsigned blocks_of(const Call& call) {
  return static_cast<unsigned>(ceil_div(call.p.tokens, int64_t{kThreads / 32 / kWarps}));
}

template <Load kLoad, int kWarps>
void launch(const Call& call) {
  few_rows<kLoad, kWarps>
      <<<blocks_of<kWarps>(call), kThreads, 0, cuda::stream_of(call.p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}
template <int kWarps, int kRatio, class R>
void launch_decode(const Call& call) {
  decode_rows<kWarps, kRatio, R>
      <<<blocks_of<kWarps>(call), kThreads, 0, cuda::stream_of(call.p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

template <Load kLoad>
void launch_for(const Call& call) {
  const Params& p = call.p;
  if constexpr (kLoad == Load::kFloats) {
    const bool usual = is_usual(call) && call.rows && p.state != nullptr;
    const bool quads = p.ratio == 4 && p.overlap;
    if (usual && quads && p.width == 128) return launch_decode<1, 4, IndexKeys>(call);
    if (usual && quads && p.width == 512) return launch_decode<4, 4, V4Fp8>(call);
    if (usual && p.ratio == 2 && !p.overlap && p.width == 512)
      return launch_decode<4, 2, V4Fp8>(call);
  }
  if (p.width <= 32 * kQuad) launch<kLoad, 1>(call);
  else launch<kLoad, 4>(call);
}

}  // namespace

void few_rows(const Call& call, Load load, bool many) noexcept {
  if (many && (overlap_rows(call, load) || stream_rows(call, load))) return;
  switch (load) {
    case Load::kFloats: return launch_for<Load::kFloats>(call);
    case Load::kBf16: return launch_for<Load::kBf16>(call);
    case Load::kAny: return launch_for<Load::kAny>(call);
  }
}

}  // namespace winnow::internal::compress
