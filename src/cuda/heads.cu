// Norm and RoPE of heads: three kernels over rows of 64 values or more.
//
// turn_heads   RoPE alone. 8 lanes take 64 values, each thread four such groups at once; in place
//              only the rotated ones. A token's heads share the angles that a thread has loaded.
// norm_heads   norm, then RoPE: a warp holds a head (up to 512 values) in registers.
// any_heads    rows that are not aligned, or of other widths: a warp per head, the result through
//              memory, a pair of RoPE a lane.
//
// Budget: 2 B read and 2 B written a value, and 256 B of angles a token from L2. A call of few
// tokens waits for its position, then for its angles, beside the rows.
#include <cuda_runtime.h>

#include "cuda/heads.h"
#include "cuda/prologue.h"

namespace winnow::internal::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kEach = 4;  // groups of 64 values that a thread has in flight

// What turn_heads needs to know: groups of a head that are touched, and who takes them.
struct Cut {
  int64_t first = 0;       // value where a head's first group begins
  uint32_t groups = 0;     // of a head
  uint32_t blocks = 0;     // of a token
  int threads = kThreads;  // of a token
};

__global__ void __launch_bounds__(kThreads)
    turn_heads(const __grid_constant__ HeadParams p, const __grid_constant__ Cut cut) {
  const int64_t t =
      int64_t{blockIdx.x / cut.blocks} * (kThreads / cut.threads) + threadIdx.x / cut.threads;
  const int part = threadIdx.x % kRopeLanes;
  const int rows = cut.threads / kRopeLanes;  // groups that are taken at a time
  const uint32_t first =
      blockIdx.x % cut.blocks * rows * kEach + threadIdx.x % cut.threads / kRopeLanes;
  const int64_t position = t < p.tokens ? p.positions[t * p.position_stride] : -1;
  const bool inside = core::in_table(p.rope, position);
  const int64_t rope = core::rope_begin(p.rope, p.width);
  uint4 piece[kEach];
  int64_t head[kEach], at[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint32_t group = first + i * rows;
    head[i] = group / cut.groups;
    at[i] = cut.first + int64_t{group % cut.groups} * kRopeDim;
    piece[i] = {};
    if (inside && head[i] < p.heads)
      piece[i] = *reinterpret_cast<const uint4*>(p.x + t * p.x_token + head[i] * p.x_head + at[i] +
                                                 part * kPiece);
  }
  const Turn turn = turn_of(p.rope, inside ? position : 0, part);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint4 turned = rotated(p.rope.half, turn, piece[i]);
    if (inside && head[i] < p.heads)
      *reinterpret_cast<uint4*>(p.out + t * p.out_token + head[i] * p.out_head + at[i] +
                                part * kPiece) = at[i] == rope ? turned : piece[i];
  }
}

// The head of a warp, counted as token * heads + head; none behind the last.
struct Head {
  int64_t token, head, position;
  bool inside;
};
__device__ __forceinline__ Head head_of(const HeadParams& p) {
  // In 32 bits, which hold any number of heads that fit into memory.
  const uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32;
  const auto heads = static_cast<uint32_t>(p.heads);
  Head h{i / heads, i % heads, -1, false};
  if (h.token < p.tokens) h.position = p.positions[h.token * p.position_stride];
  h.inside = core::in_table(p.rope, h.position);
  return h;
}

template <int kPieces>
__global__ void __launch_bounds__(kThreads) norm_heads(const __grid_constant__ HeadParams p) {
  const Head h = head_of(p);
  if (!h.inside) return;
  const int lane = threadIdx.x % 32;
  const bf16* x = p.x + h.token * p.x_token + h.head * p.x_head;
  bf16* out = p.out + h.token * p.out_token + h.head * p.out_head;
  Held<kPieces> row;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) row.pieces[c] = load_piece(x, piece_at(c, lane), p.width, true);
  const Turn turn = turn_of(p.rope, h.position, lane % kRopeLanes);
  const NormFactors f = norm_factors(p.norm, row, p.width, lane);
  const int64_t rope = core::rope_begin(p.rope, p.width);
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int at = piece_at(c, lane);
    uint4 piece = normed(p.norm, f, row.pieces[c], at, p.width, true);
    const uint4 turned = rotated(p.rope.half, turn, piece);
    if (at >= rope && at < rope + kRopeDim) piece = turned;
    store_piece(out, at, p.width, true, piece);
  }
}

__global__ void __launch_bounds__(kThreads) any_heads(const __grid_constant__ HeadParams p) {
  const Head h = head_of(p);
  if (!h.inside) return;
  const int lane = threadIdx.x % 32;
  const bf16* x = p.x + h.token * p.x_token + h.head * p.x_head;
  bf16* out = p.out + h.token * p.out_token + h.head * p.out_head;
  const Streamed row{x, p.width, lane, false};
  const bool norm = p.norm.kind != NormKind::kNone;
  NormFactors f;
  if (norm) f = norm_factors(p.norm, row, p.width, lane);
  if (norm || out != x)
    for (int c = 0; c < row.count(); ++c) {
      const int64_t at = (int64_t{c} * 32 + lane) * kPiece;
      uint4 piece = row.piece(c);
      if (norm) piece = normed(p.norm, f, piece, at, p.width, false);
      store_piece(out, at, p.width, false, piece);
    }
  __syncwarp();  // the row is written
  const float* angles =
      p.rope.table + h.position * p.rope.position_stride + lane * p.rope.pair_stride;
  const float cosine = angles[0];
  const float sine = p.rope.inverse ? -angles[p.rope.sine_stride] : angles[p.rope.sine_stride];
  bf16* slice = out + core::rope_begin(p.rope, p.width);
  bf16* first = slice + (p.rope.half ? lane : 2 * lane);
  bf16* second = p.rope.half ? first + core::kPairs : first + 1;
  const float u = to_float(*first);
  const float v = to_float(*second);
  *first = to_bf16(__fsub_rn(__fmul_rn(u, cosine), __fmul_rn(v, sine)));
  *second = to_bf16(__fadd_rn(__fmul_rn(v, cosine), __fmul_rn(u, sine)));
}

// A head is whole groups of 64 aligned values.
bool is_even(const HeadParams& p) {
  return p.width % kRopeDim == 0 && is_wide(p.x, p.x_token * 2) &&
         is_wide(p.out, p.out_token * 2) && p.x_head % kPiece == 0 && p.out_head % kPiece == 0 &&
         is_wide(p.norm);
}

Cut cut_of(const HeadParams& p) {
  const bool in_place = p.x == p.out && p.x_token == p.out_token && p.x_head == p.out_head;
  Cut cut;
  cut.first = in_place ? core::rope_begin(p.rope, p.width) : 0;
  cut.groups = in_place ? 1 : static_cast<uint32_t>(p.width / kRopeDim);
  const int64_t groups = p.heads * cut.groups;  // of a token
  cut.threads = kRopeLanes;
  while (cut.threads < kThreads && cut.threads / kRopeLanes * kEach < groups) cut.threads *= 2;
  cut.blocks = static_cast<uint32_t>(core::ceil_div(groups, cut.threads / kRopeLanes * kEach));
  return cut;
}

}  // namespace

void prepare_heads(const HeadParams& p) noexcept {
  const int64_t heads = p.tokens * p.heads;
  if (heads == 0 || p.rope.positions == 0) return;
  const auto stream = static_cast<cudaStream_t>(p.device.stream);
  const auto warps = static_cast<unsigned>(core::ceil_div(heads, int64_t{kWarps}));
  const bool even = is_even(p);
  if (even && p.norm.kind == NormKind::kNone) {
    const Cut cut = cut_of(p);
    const int64_t groups = core::ceil_div(p.tokens, int64_t{kThreads / cut.threads});
    turn_heads<<<static_cast<unsigned>(groups * cut.blocks), kThreads, 0, stream>>>(p, cut);
  } else if (even && p.width <= kWarpValues) {
    norm_heads<1><<<warps, kThreads, 0, stream>>>(p);
  } else if (even && p.width <= 2 * kWarpValues) {
    norm_heads<2><<<warps, kThreads, 0, stream>>>(p);
  } else {
    any_heads<<<warps, kThreads, 0, stream>>>(p);
  }
}

}  // namespace winnow::internal::cuda
