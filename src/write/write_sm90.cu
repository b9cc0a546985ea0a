// write, join and quantize on the device: passes over memory.
#include "write/write_sm90.cuh"

#include "cuda/device.h"
#include "cuda/launch.h"

namespace winnow::internal::write::sm90 {

namespace {

__device__ __forceinline__ float warp_max(float x) {
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

constexpr int kWarps = 4;

template <class R>
__global__ void __launch_bounds__(kWarps * 32)
    write_records(const __grid_constant__ WriteCall call) {
  write_token<R>(call, int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, threadIdx.x % 32);
}

__device__ __forceinline__ uint32_t warp_of_grid() {
  return blockIdx.x * kWarps + threadIdx.x / 32;
}

// Plain calls. Two tokens of a prefill share a warp: 8,192 of them run at once.
template <class R>
__global__ void __launch_bounds__(kWarps * 32, 8)
    write_plain_pairs(const __grid_constant__ WriteCall call) {
  write_plain<R, 16, false>(call, warp_of_grid(), threadIdx.x % 32);
}
template <class R>
__global__ void __launch_bounds__(kWarps * 32)
    write_plain_records(const __grid_constant__ WriteCall call) {
  write_plain<R, 32, true>(call, warp_of_grid(), threadIdx.x % 32);
}
__global__ void __launch_bounds__(kWarps * 32) write_keys(const __grid_constant__ WriteCall call) {
  write_plain_keys<true>(call, warp_of_grid(), threadIdx.x % 32);
}
// V3.2's, of many tokens: more of them at once instead of weights held.
__global__ void __launch_bounds__(kWarps * 32, 10)
    write_many_keys(const __grid_constant__ WriteCall call) {
  write_plain_keys<false, true>(call, warp_of_grid(), threadIdx.x % 32);
}

// The kernel of a call, and how many tokens a warp takes.
template <class R>
auto kernel_of(const WriteCall& call, int64_t& each) {
  void (*kernel)(WriteCall) = write_records<R>;
  each = 1;
  if (!is_plain(call)) return kernel;
  constexpr int64_t kMany = 1024;  // tokens
  if constexpr (R::kFormat == CacheFormat::kIndexKeys) {
    each = kKeysOfWarp;
    kernel = call.p.tokens >= kMany && are_v32_keys(call.p) ? write_many_keys : write_keys;
  } else if constexpr (R::kQuantized && R::kDim > kIndexDim) {
    const bool many = call.p.tokens >= kMany;
    each = many ? 2 : 1;
    kernel = many ? write_plain_pairs<R> : write_plain_records<R>;
  }
  return kernel;
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
  const WriteCall call = call_of(p);
  with_record(p.cache.format, [&](auto record) {
    int64_t each = 1;
    const auto kernel = kernel_of<decltype(record)>(call, each);
    const auto blocks = static_cast<unsigned>(ceil_div(p.tokens, each * kWarps));
    kernel<<<blocks, kWarps * 32, 0, cuda::stream_of(p.device)>>>(call);
    cuda::keep_error(cudaGetLastError());
  });
}

void join(const JoinParams& p) noexcept {
  if (p.tokens * p.heads == 0) return;
  join_heads<<<static_cast<unsigned>(p.tokens * p.heads), 128, 0, cuda::stream_of(p.device)>>>(p);
  cuda::keep_error(cudaGetLastError());
}

void quantize(const QuantizeParams& p) noexcept {
  const cudaStream_t stream = cuda::stream_of(p.device);
  const int64_t wanted = ceil_div(p.count, int64_t{kQuantizeThreads});
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
