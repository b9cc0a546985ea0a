// compress on the device, prefills whose entries take up to 8 rows: a team of four warps (up to 128
// values: of one) takes whole windows of one request, four or two rows each, one after the other; a
// thread has four values of every row. A row is read once, stored, and pooled for its own entry;
// with overlap its other half is pooled for the next one and kept, three registers a value. What
// the window before gives to a team's first entry is requested with that entry's own rows, before
// it is known that it is a window. Windows that are no such stream are left to few_sm90.cuh, token
// by token.
//
// The halves of an entry's rows are pooled alone and joined, as few_sm90.cuh does it, so that both
// give the same bits. Budget, C4A: 8 KiB read and 8 KiB written a token; up to
// 48 KiB are on their way to a team's shared memory while it computes, four teams a multiprocessor;
// about 600 instructions a thread and entry, a fifth of what the memory leaves time for.
#include <cuda_runtime.h>

#include "compress/few_sm90.cuh"
#include "compress/kernels_sm90.h"
#include "cuda/copies.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace winnow::internal::compress {

namespace {

// With overlap a row has two parts: for the next entry, and for the one of its own window.
constexpr int parts_of(int ratio) { return ratio == 4 ? 2 : 1; }

// A part of a window's rows on its way to a block: each thread requests its own values and waits
// for them alone, so that they need no barrier and no register.
template <Load kLoad, int kRatio>
struct Slot {
  using Raw = std::conditional_t<kLoad == Load::kBf16, uint2, float4>;
  Raw values[kRatio][kThreads], scores[kRatio][kThreads];

  // `score_bytes`: from a row's values to its scores.
  __device__ __forceinline__ void ask(const std::byte* from, int64_t row_bytes, int score_bytes) {
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      const std::byte* mine = from + i * row_bytes;
      cuda::copy_async<sizeof(Raw)>(&values[i][threadIdx.x], mine);
      cuda::copy_async<sizeof(Raw)>(&scores[i][threadIdx.x], mine + score_bytes);
    }
  }
};
__device__ __forceinline__ Quad quad_of(const float4& raw) { return {raw.x, raw.y, raw.z, raw.w}; }
__device__ __forceinline__ Quad quad_of(const uint2& raw) {
  return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
          __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u)};
}

// Slots of a block, and blocks that share a multiprocessor.
constexpr int kSlots = 3;
constexpr int blocks_of(int ratio) { return ratio == 2 ? 7 : 4; }

// Tokens [first, first + count) if they are whole windows of one request; false if they are not.
template <Load kLoad, int kWarps, int kRatio, class R>
__device__ __forceinline__ bool stream(const Call& call, Team<kWarps>& team, int64_t first,
                                       int count) {
  extern __shared__ float4 slot_memory[];
  auto* slots = reinterpret_cast<Slot<kLoad, kRatio>*>(slot_memory);
  const Params& p = call.p;
  const int at = team.at;
  const int lane = team.lane;
  constexpr int kWidth = 32 * kQuad * kWarps;  // of a row's parts
  constexpr int kParts = parts_of(kRatio);
  constexpr int kValues = kParts * kWidth;
  constexpr int kBytes = kLoad == Load::kBf16 ? 2 : 4;
  const int64_t row_bytes = p.row_stride * kBytes;
  const auto* rows = static_cast<const std::byte*>(p.rows) + first * row_bytes + at * kBytes;
  // Part `turn` in the order in which they are taken: with overlap what the window before gives to
  // the first entry, then each window's part for its own entry and that for the next.
  constexpr int kLead = kParts - 1;
  const auto ask = [&](int turn) {
    const int window = (turn - kLead) / kParts;
    const int part = kParts - 1 - (turn - kLead) % kParts;
    if (turn < kLead && first >= kRatio)
      slots[turn % kSlots].ask(rows - kRatio * row_bytes, row_bytes, kValues * kBytes);
    if (turn >= kLead && (window + 1) * kRatio <= count)
      slots[turn % kSlots].ask(rows + window * kRatio * row_bytes + part * kWidth * kBytes,
                               row_bytes, kValues * kBytes);
    cuda::copies_commit();
  };
  // Before it is known whether they are windows: they are rows of the call.
#pragma unroll
  for (int turn = 0; turn < kSlots; ++turn) ask(turn);
  const int64_t token = first + (lane < count ? lane : 0);
  const int64_t position = position_of(p, token);
  const int64_t request = request_of(p, token);
  const int64_t slot = slot_of(p, token);
  // ... and of the window before.
  const int64_t other = first - kRatio + lane;
  const bool leads = kLead > 0 && first >= kRatio && lane < kRatio;
  const int64_t other_position = leads ? position_of(p, other) : 0;
  const int64_t other_request = leads ? request_of(p, other) : 0;
  const int64_t start = __shfl_sync(~0u, position, 0);
  const int64_t of = __shfl_sync(~0u, request, 0);
  const bool follows = lane >= count || (position == start + lane && request == of);
  if (!__all_sync(~0u, follows) || start < 0 || count % kRatio != 0 ||
      remainder(start, kRatio) != 0) {
    cuda::copies_wait<0>();
    return false;
  }
  float* place = nullptr;
  if (call.rows && p.state != nullptr && lane < count) place = own_row_of(call, token, position);
  // A slot's rows, with the bias of part h.
  Quad values[kRatio], scores[kRatio];
  const auto read = [&](int turn, int h) {
    const Slot<kLoad, kRatio>& from = slots[turn % kSlots];
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      values[i] = quad_of(from.values[i][threadIdx.x]);
      scores[i] = quad_of(from.scores[i][threadIdx.x]);
      if (p.bias != nullptr)
        add_bias<kLoad>(scores[i], p.bias + i * p.bias_stride, h * kWidth + at);
    }
  };
  QuadPool before;
  bool missing = false;
  if constexpr (kLead > 0) {
    const bool follow = leads && other_position == start - kRatio + lane && other_request == of;
    const bool all_follow = __all_sync(~0u, follow || lane >= kRatio);
    cuda::copies_wait<kSlots - 1>();
    if (start > 0 && all_follow) {
      read(0, 0);
      before = pool_of(values, scores, kRatio);
    } else if (start > 0) {
      missing = !pool_before<kLoad, kRatio>(p, first, start, of, lane, at, before);
    }
    ask(kSlots);
  }
#pragma unroll 1
  for (int s = 0; s < count; s += kRatio) {
    const int64_t last = start + s + kRatio - 1;
    Goal goal = goal_of(p, __shfl_sync(~0u, slot, s + kRatio - 1), last);
    if (s == 0 && missing) goal = {};
    Steps steps;
    if (goal.any()) {
      load_weights<R>(call, at, steps);
      if (goal.record && p.rope.table != nullptr) load_angles<R>(p, last - kRatio + 1, at, steps);
    }
    // Stores row i of part h.
    const auto store = [&](int i, int h, const Quad& value, const Quad& score) {
      float* to = from_lane(place, s + i);
      if (to == nullptr) return;
      store_quad<kLoad>(to + h * kWidth + at, value);
      store_quad<kLoad>(to + kValues + h * kWidth + at, score);
    };
    // Stores the rows' part h and requests what comes next to its slot; values and scores are then
    // those of the part.
    const auto take = [&](int h) {
      const int turn = kLead + s / kRatio * kParts + kParts - 1 - h;
      cuda::copies_wait<kSlots - 1>();
      read(turn, h);
#pragma unroll
      for (int i = 0; i < kRatio; ++i) store(i, h, values[i], scores[i]);
      ask(turn + kSlots);
    };
    take(kParts - 1);
    const bool last_window = s + kRatio >= count;
    if (kParts > 1 && last_window) {  // nothing is made of its other part: stored before the rest
      cuda::copies_wait<0>();
      const Slot<kLoad, kRatio>& from = slots[(kLead + s / kRatio * kParts + kParts - 1) % kSlots];
#pragma unroll
      for (int i = 0; i < kRatio; ++i) {
        Quad score = quad_of(from.scores[i][threadIdx.x]);
        if (p.bias != nullptr) add_bias<kLoad>(score, p.bias + i * p.bias_stride, at);
        store(i, 0, quad_of(from.values[i][threadIdx.x]), score);
      }
    }
    const Quad mean = mean_of(before, pool_of(values, scores, kRatio));
    if (kParts > 1 && !last_window) {
      take(0);
      before = pool_of(values, scores, kRatio);
    }
    if (!goal.any()) continue;
    finish<R>(call, steps, mean, first + s + kRatio - 1, goal, at,
              [&](float x) { return team.sum(x); });
  }
  return true;
}

// Windows of each team; the first `longer` ones have one more.
struct Cut {
  int windows, longer;
};

template <Load kLoad, int kWarps, int kRatio, class R>
__global__ void __launch_bounds__(kThreads, blocks_of(kRatio))
    stream_rows(const __grid_constant__ Call call, const Cut cut) {
  __shared__ float sums[2][kWarps];
  Team<kWarps> team(sums);
  const auto unit = static_cast<int>(team.unit());
  const int before = unit * cut.windows + (unit < cut.longer ? unit : cut.longer);
  const int64_t first = int64_t{before} * kRatio;
  const int64_t left = call.p.tokens - first;
  if (left <= 0) return;
  const int most = (cut.windows + (unit < cut.longer ? 1 : 0)) * kRatio;
  const int count = left < most ? static_cast<int>(left) : most;
  if (count == 0 || stream<kLoad, kWarps, kRatio, R>(call, team, first, count)) return;
  tokens_alone<kLoad>(call, team, first, count);
}

template <Load kLoad, int kWarps, int kRatio, class R>
void launch(const Call& call) {
  constexpr int64_t kTeams = kThreads / 32 / kWarps;  // of a block
  constexpr int64_t kMost = 32 / kRatio;              // windows of a team: a lane knows each token
  const int64_t room =
      int64_t{cuda::multiprocessors(call.p.device.index)} * blocks_of(kRatio) * kTeams;
  const int64_t windows = ceil_div(call.p.tokens, int64_t{kRatio});
  // All teams run at once, if they can.
  const int64_t wanted = windows < room ? windows : room;
  const int64_t needed = ceil_div(windows, kMost);
  const int64_t teams = wanted < needed ? needed : wanted;
  const Cut cut{static_cast<int>(windows / teams), static_cast<int>(windows % teams)};
  const auto blocks = static_cast<unsigned>(ceil_div(teams, kTeams));
  const auto kernel = stream_rows<kLoad, kWarps, kRatio, R>;
  constexpr size_t kBytes = kSlots * sizeof(Slot<kLoad, kRatio>);
  cuda::keep_error(cuda::allow_shared(kernel, kBytes));
  kernel<<<blocks, kThreads, kBytes, cuda::stream_of(call.p.device)>>>(call, cut);
  cuda::keep_error(cudaGetLastError());
}

template <Load kLoad, int kWarps, int kRatio>
void launch_for(const Call& call) {
  if constexpr (kLoad == Load::kFloats && kWarps > 1)  // index keys: overlap_sm90.cu
    if (is_usual(call)) return launch<kLoad, kWarps, kRatio, V4Fp8>(call);
  launch<kLoad, kWarps, kRatio, void>(call);
}

template <Load kLoad>
bool launch_for(const Call& call) {
  const Params& p = call.p;
  const bool quads = p.ratio == 4 && p.overlap;
  const bool pairs = p.ratio == 2 && !p.overlap;
  if (p.width == 128 && quads) launch_for<kLoad, 1, 4>(call);
  else if (p.width == 512 && quads) launch_for<kLoad, 4, 4>(call);
  else if (p.width == 512 && pairs) launch_for<kLoad, 4, 2>(call);
  else return false;
  return true;
}

}  // namespace

bool stream_rows(const Call& call, Load load) noexcept {
  switch (load) {
    case Load::kFloats: return launch_for<Load::kFloats>(call);
    case Load::kBf16: return launch_for<Load::kBf16>(call);
    case Load::kAny: return false;
  }
  return false;
}

}  // namespace winnow::internal::compress
