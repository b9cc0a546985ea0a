// index_query on the device: half a warp per head, 8 values a lane, each thread four heads of its
// token at once, so that they share the angles it has loaded. Budget: 256 B read and 128 B written
// a head, and 256 B of angles a token; everything between stays in registers.
#include <cuda_runtime.h>

#include "cuda/prologue.h"
#include "index_query/kernel.h"

namespace winnow::internal::index_query {

namespace {

constexpr int kThreads = 256, kEach = 4;
constexpr int kLanes = kWidth / cuda::kPiece;  // of a head

struct Call {
  Params p;
  uint32_t blocks;        // of a token
  bool q_wide, out_wide;  // 16 B in; 16 or 8 B out
};

__device__ __forceinline__ void store_codes(uint8_t* to, bool wide, const uint2& codes) {
  if (wide) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
#pragma unroll
  for (int i = 0; i < cuda::kPiece; ++i)
    to[i] = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> (i % 4 * 8));
}

__global__ void __launch_bounds__(kThreads) prepare(const __grid_constant__ Call call) {
  const Params& p = call.p;
  const int64_t t = blockIdx.x / call.blocks;
  const int64_t position = p.positions[t * p.position_stride];
  if (!core::in_table(p.rope, position)) return;
  const int lane = threadIdx.x % kLanes;
  const int at = lane * cuda::kPiece;
  const int rows = static_cast<int>(blockDim.x) / kLanes;  // heads that are taken at a time
  const int64_t first = blockIdx.x % call.blocks * rows * kEach + threadIdx.x / kLanes;
  uint4 piece[kEach];
  float weight[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t h = first + i * rows;
    piece[i] = {};
    weight[i] = 0;
    if (h >= p.heads) continue;
    piece[i] = cuda::load_piece(p.q + t * p.q_token + h * p.q_head, at, kWidth, call.q_wide);
    weight[i] = weight_of(p, t, h);
  }
  const cuda::Turn turn = cuda::turn_of(p.rope, position, lane % cuda::kRopeLanes);
  const int64_t rope = core::rope_begin(p.rope, kWidth);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t h = first + i * rows;
    const uint4 turned = cuda::rotated(p.rope.half, turn, piece[i]);
    uint4 x = at >= rope && at < rope + kRopeDim ? turned : piece[i];
    if (p.hadamard) x = cuda::hadamard(x, lane);
    const float scale = p.out_is_bf16 ? 1.0f : cuda::tile_scale<kLanes>(p.quantizer, x);
    if (h >= p.heads) continue;
    const int64_t to = t * p.out_token + h * p.out_head;
    if (p.out_is_bf16)
      cuda::store_piece(static_cast<bf16*>(p.out) + to, at, kWidth, call.out_wide, x);
    else
      store_codes(static_cast<uint8_t*>(p.out) + to + at, call.out_wide,
                  cuda::codes_of(p.quantizer, scale, x));
    if (lane == 0)
      p.out_weights[t * p.out_weight_token + h * p.out_weight_head] =
          __fmul_rn(__fmul_rn(weight[i], scale), p.factor);
  }
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens * p.heads == 0) return;
  // Whole warps, as few as four heads a thread allow.
  const int64_t pairs = core::ceil_div(p.heads, int64_t{2 * kEach});
  const int threads = static_cast<int>(pairs < kThreads / 32 ? pairs * 32 : kThreads);
  const int64_t bytes = p.out_is_bf16 ? 2 : 1;
  const int64_t piece = bytes * cuda::kPiece;
  Call call{p};
  call.blocks = static_cast<uint32_t>(core::ceil_div(p.heads, threads / kLanes * kEach));
  call.q_wide = cuda::is_wide(p.q, p.q_token * 2) && cuda::is_wide(p.q, p.q_head * 2);
  call.out_wide = reinterpret_cast<uintptr_t>(p.out) % piece == 0 &&
                  p.out_token * bytes % piece == 0 && p.out_head * bytes % piece == 0;
  const auto blocks = static_cast<unsigned>(p.tokens * call.blocks);
  prepare<<<blocks, threads, 0, static_cast<cudaStream_t>(p.device.stream)>>>(call);
}

}  // namespace winnow::internal::index_query
