// write, join and quantize on the device: passes over memory, one warp per tile or row.
//
// write: a block per token, a warp per tile of its record and one for RoPE; 8 or 4 bytes per lane
// in, 4 or 2 out, the tile's maximum by shuffles. Bytes are the budget: 1,152 in and 656 out per
// token of V3.2.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cfloat>

#include "cuda/device.h"
#include "cuda/launch.h"
#include "model/records.h"
#include "write/kernel.h"

namespace winnow::internal::write::sm90 {

namespace {

cudaStream_t stream_of(const Device& d) { return static_cast<cudaStream_t>(d.stream); }

// to_e4m3(scaled) by the conversion unit. Arithmetic drops a NaN's sign, so it comes from x itself.
__device__ __forceinline__ uint8_t quantized(float x, float scaled) {
  if (isnan(x)) return signbit(x) ? 0xff : 0x7f;
  return __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float magnitude(float x) {
  return isnan(x) ? 0.0f : fminf(fabsf(x), FLT_MAX);
}

__device__ __forceinline__ float warp_max(float x) {
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

template <class R>
constexpr int write_warps() {
  if constexpr (R::kQuantized) return R::kTiles + (R::kRope > 0);
  return 4;
}

template <class R>
__global__ void write_records(const __grid_constant__ Params p) {
  const int64_t t = blockIdx.x;
  const int64_t slot = p.slots[t * p.slot_stride];
  if (slot < 0 || slot >= p.cache.pages * p.cache.page) return;
  std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
  const int64_t off = slot % p.cache.page;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bf16* kv = p.kv + t * p.kv_stride;
  if constexpr (R::kQuantized) {
    if (warp < R::kTiles) {
      constexpr int kEach = R::kTile / 32;
      float x[kEach], amax = 0.0f;
      for (int i = 0; i < kEach; ++i) {
        x[i] = to_float(kv[warp * R::kTile + lane * kEach + i]);
        amax = fmaxf(amax, magnitude(x[i]));
      }
      const float s = scale_of(p.quantizer, warp_max(amax));
      auto* codes = reinterpret_cast<uint8_t*>(page + R::row(off, p.cache.page));
      for (int i = 0; i < kEach; ++i)
        codes[warp * R::kTile + lane * kEach + i] = quantized(x[i], __fdiv_rn(x[i], s));
      if (lane == 0) {
        std::byte* scales = page + R::scales(off, p.cache.page);
        put_scale(reinterpret_cast<typename R::Scale*>(scales) + warp, s);
        // Bytes behind the last scale are zero.
        if (warp == R::kTiles - 1)
          for (int b = R::kTiles * sizeof(typename R::Scale); b < R::kScaleBytes; ++b)
            scales[b] = std::byte{0};
      }
    } else if constexpr (R::kRope > 0) {
      auto* rope = reinterpret_cast<bf16*>(page + R::rope(off, p.cache.page));
      for (int i = lane; i < R::kRope; i += 32) rope[i] = p.rope_part[t * p.rope_stride + i];
    }
  } else {
    auto* row = reinterpret_cast<bf16*>(page + R::row(off, p.cache.page));
    for (int i = threadIdx.x; i < R::kDim; i += blockDim.x)
      row[i] = i < R::kNope ? kv[i] : p.rope_part[t * p.rope_stride + i - R::kNope];
  }
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
    amax = fmaxf(amax, magnitude(value_at(p, i)));
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
    p.out[i].bits = quantized(value_at(p, i), value_at(p, i) * s);
}

__global__ void finish_scale(float* scale) { *scale = __fdiv_rn(1.0f, factor(*scale)); }

}  // namespace

void write(const Params& p) noexcept {
  if (p.tokens == 0) return;
  with_record(p.cache.format, [&](auto record) {
    using R = decltype(record);
    write_records<R>
        <<<static_cast<unsigned>(p.tokens), 32 * write_warps<R>(), 0, stream_of(p.device)>>>(p);
    cuda::keep_error(cudaGetLastError());
  });
}

void join(const JoinParams& p) noexcept {
  if (p.tokens * p.heads == 0) return;
  join_heads<<<static_cast<unsigned>(p.tokens * p.heads), 128, 0, stream_of(p.device)>>>(p);
  cuda::keep_error(cudaGetLastError());
}

void quantize(const QuantizeParams& p) noexcept {
  const cudaStream_t stream = stream_of(p.device);
  const int64_t wanted = (p.count + kQuantizeThreads - 1) / kQuantizeThreads;
  const int64_t most = 4 * cuda::multiprocessors(p.device.index);
  const unsigned blocks = static_cast<unsigned>(wanted < 1 ? 1 : wanted < most ? wanted : most);
  cuda::keep_error(cudaMemsetAsync(p.scale, 0, sizeof(float), stream));
  find_largest<<<blocks, kQuantizeThreads, 0, stream>>>(p);
  cuda::keep_error(cudaGetLastError());
  quantize_all<<<blocks, kQuantizeThreads, 0, stream>>>(p);
  cuda::keep_error(cudaGetLastError());
  finish_scale<<<1, 1, 0, stream>>>(p.scale);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::write::sm90
