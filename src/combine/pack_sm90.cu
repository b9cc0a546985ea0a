// combine's packing on the device: a warp copies a row of a token and head to its rank's block, in
// fp32 or rounded to bf16. Memory-bound: every value is read and written once, four a lane at a
// time where addresses allow it.
#include <cuda_runtime.h>

#include "combine/kernel.h"
#include "core/arithmetic.h"
#include "core/formats.h"
#include "cuda/hopper.h"
#include "cuda/launch.h"

namespace winnow::internal::combine {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

template <bool kFours>
__global__ void __launch_bounds__(kThreads) pack_rows(const __grid_constant__ Packing p) {
  const int64_t task = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (task >= p.tokens * p.heads) return;
  const int lane = threadIdx.x % 32;
  const int64_t t = task / p.heads, h = task % p.heads;
  const float* const from = p.out + p.from(p.out_stride, t, h);
  std::byte* const block = p.send + static_cast<size_t>(h / p.own_heads) * p.block_bytes;
  const int64_t row = t * p.own_heads + h % p.own_heads;
  float* const wide = reinterpret_cast<float*>(block) + row * p.d_v;
  bf16* const narrow = reinterpret_cast<bf16*>(block) + row * p.d_v;
  if constexpr (kFours) {
    for (int64_t d = lane * 4; d < p.d_v; d += 128) {
      const float4 x = *reinterpret_cast<const float4*>(from + d);
      if (p.bf16_wire)
        *reinterpret_cast<uint2*>(narrow + d) =
            make_uint2(cuda::pack<true>(x.x, x.y), cuda::pack<true>(x.z, x.w));
      else *reinterpret_cast<float4*>(wide + d) = x;
    }
  } else {
    for (int64_t d = lane; d < p.d_v; d += 32) {
      if (p.bf16_wire) narrow[d] = to_bf16(from[d]);
      else wide[d] = from[d];
    }
  }
  if (lane == 0)
    reinterpret_cast<float*>(block + p.lse_offset)[row] = p.lse[p.from(p.lse_stride, t, h)];
}

}  // namespace

void pack_sm90(const Packing& p) noexcept {
  const int64_t rows = p.tokens * p.heads;
  if (rows == 0) return;
  bool fours = p.d_v % 4 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  for (const int64_t stride : p.out_stride) fours = fours && stride % 4 == 0;
  const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(rows, kWarps));
  const cudaStream_t stream = cuda::stream_of(p.device);
  if (fours) pack_rows<true><<<blocks, kThreads, 0, stream>>>(p);
  else pack_rows<false><<<blocks, kThreads, 0, stream>>>(p);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::combine
