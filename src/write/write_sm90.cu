// write, join and quantize on the device: passes over memory.
//
// write: a warp per token holds its row in registers, 16 B a lane and piece, through norm, RoPE and
// Hadamard (cuda/prologue.h); the maximum of a tile by shuffles. Bytes are the budget: 1,152 in and
// 656 out per token of V3.2.
#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/prologue.h"
#include "model/records.h"
#include "write/kernel.h"

namespace winnow::internal::write::sm90 {

namespace {

cudaStream_t stream_of(const Device& d) { return static_cast<cudaStream_t>(d.stream); }

__device__ __forceinline__ float warp_max(float x) {
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

constexpr int kWarps = 4;

struct WriteCall {
  Params p;
  bool kv_wide, rope_wide;  // 16 B at a time
  bool norm_wide;           // ... of its weights
};

// Norm, RoPE and Hadamard of a row; false if the token's position is outside the table.
template <class R, int kPieces>
__device__ __forceinline__ bool prepare(const WriteCall& call, int64_t t, cuda::Held<kPieces>& row,
                                        int lane) {
  const Params& p = call.p;
  const int64_t position = p.rope.table ? p.positions[t * p.position_stride] : 0;
  if (p.rope.table && !in_table(p.rope, position)) return false;
  cuda::Turn turn;
  if (p.rope.table) turn = cuda::turn_of(p.rope, position, lane % cuda::kRopeLanes);
  if (p.norm.kind != NormKind::kNone) {
    constexpr int kNormed = R::kDim > V32::kNope ? V32::kNope : R::kDim;  // the others are k_pe
    constexpr int kNormedPieces = (kNormed + cuda::kWarpValues - 1) / cuda::kWarpValues;
    cuda::Held<kNormedPieces> normed;
#pragma unroll
    for (int c = 0; c < kNormedPieces; ++c) normed.pieces[c] = row.pieces[c];
    const cuda::NormFactors f = cuda::norm_factors(p.norm, normed, kNormed, lane);
#pragma unroll
    for (int c = 0; c < kNormedPieces; ++c)
      row.pieces[c] =
          cuda::normed(p.norm, f, row.pieces[c], cuda::piece_at(c, lane), kNormed, call.norm_wide);
  }
  if (p.rope.table) {
    const int64_t rope = rope_begin(p.rope, R::kDim);
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int at = cuda::piece_at(c, lane);
      const uint4 turned = cuda::rotated(p.rope.half, turn, row.pieces[c]);
      if (at >= rope && at < rope + kRopeDim) row.pieces[c] = turned;
    }
  }
  if constexpr (R::kDim == kIndexDim)
    if (p.hadamard) row.pieces[0] = cuda::hadamard(row.pieces[0], lane);
  return true;
}

template <class R>
__global__ void __launch_bounds__(kWarps * 32)
    write_records(const __grid_constant__ WriteCall call) {
  const Params& p = call.p;
  const int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (t >= p.tokens) return;
  const int lane = threadIdx.x % 32;
  constexpr int kPieces = (R::kDim + cuda::kWarpValues - 1) / cuda::kWarpValues;
  cuda::Held<kPieces> row;
  const int64_t slot = p.slots[t * p.slot_stride];
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int at = cuda::piece_at(c, lane);
    row.pieces[c] = cuda::load_piece(p.kv + t * p.kv_stride, at, R::kNope, call.kv_wide);
    if constexpr (R::kRope > 0)
      if (at >= R::kNope)
        row.pieces[c] = cuda::load_piece(p.rope_part + t * p.rope_stride, at - R::kNope, R::kRope,
                                         call.rope_wide);
  }
  if (slot < 0 || slot >= p.cache.pages * p.cache.page) return;
  if (p.prologue && !prepare<R>(call, t, row, lane)) return;
  std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
  cuda::store_record<R>(p.quantizer, row, page, slot % p.cache.page, p.cache.page, lane);
}

__global__ void join_heads(const __grid_constant__ JoinParams p) {
  const int64_t t = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
  for (int64_t i = threadIdx.x; i < p.out.width; i += blockDim.x) {
    const View3& from = i < p.latent.width ? p.latent : p.rope;
    const int64_t at = i < p.latent.width ? i : i - p.latent.width;
    p.out.data[t * p.out.token_stride + h * p.out.head_stride + i * p.out.stride] =
        from.data[t * from.token_stride + h * from.head_stride + at * from.stride];
  }
}

__device__ __forceinline__ float value_at(const QuantizeParams& p, int64_t i) {
  return p.is_bf16 ? to_float(static_cast<const bf16*>(p.x)[i]) : static_cast<const float*>(p.x)[i];
}

constexpr int kQuantizeThreads = 512;

// The largest magnitude, kept in *p.scale: floats >= 0 compare like their bits, so an integer
// maximum does it, in any order.
__global__ void find_largest(const __grid_constant__ QuantizeParams p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kQuantizeThreads;
  float amax = 0.0f;
  for (int64_t i = blockIdx.x * kQuantizeThreads + threadIdx.x; i < p.count; i += step)
    amax = fmaxf(amax, cuda::magnitude(value_at(p, i)));
  amax = warp_max(amax);
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(p.scale), __float_as_int(amax));
}

__device__ __forceinline__ float factor(float amax) {
  return __fdiv_rn(kE4m3Max, fmaxf(amax, 1e-10f));
}

__global__ void quantize_all(const __grid_constant__ QuantizeParams p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kQuantizeThreads;
  const float s = factor(*p.scale);
  for (int64_t i = blockIdx.x * kQuantizeThreads + threadIdx.x; i < p.count; i += step)
    p.out[i].bits = cuda::quantized(value_at(p, i), value_at(p, i) * s);
}

__global__ void finish_scale(float* scale) { *scale = __fdiv_rn(1.0f, factor(*scale)); }

}  // namespace

void write(const Params& p) noexcept {
  if (p.tokens == 0) return;
  const WriteCall call{p, cuda::is_wide(p.kv, p.kv_stride * 2),
                       cuda::is_wide(p.rope_part, p.rope_stride * 2), cuda::is_wide(p.norm)};
  const auto blocks = static_cast<unsigned>(ceil_div(p.tokens, int64_t{kWarps}));
  with_record(p.cache.format, [&](auto record) {
    write_records<decltype(record)><<<blocks, kWarps * 32, 0, stream_of(p.device)>>>(call);
  });
}

void join(const JoinParams& p) noexcept {
  if (p.tokens * p.heads == 0) return;
  join_heads<<<static_cast<unsigned>(p.tokens * p.heads), 128, 0, stream_of(p.device)>>>(p);
}

void quantize(const QuantizeParams& p) noexcept {
  const cudaStream_t stream = stream_of(p.device);
  const int64_t wanted = (p.count + kQuantizeThreads - 1) / kQuantizeThreads;
  const int64_t most = 4 * cuda::multiprocessors(p.device.index);
  const unsigned blocks = static_cast<unsigned>(wanted < 1 ? 1 : wanted < most ? wanted : most);
  cudaMemsetAsync(p.scale, 0, sizeof(float), stream);
  find_largest<<<blocks, kQuantizeThreads, 0, stream>>>(p);
  quantize_all<<<blocks, kQuantizeThreads, 0, stream>>>(p);
  finish_scale<<<1, 1, 0, stream>>>(p.scale);
}

}  // namespace winnow::internal::write::sm90
