// compress on the device: four values of a row, 16 B, and a softmax over rows of them.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "compress/kernel.h"
#include "cuda/prologue.h"

namespace winnow::internal::compress {

inline constexpr int kQuad = 4;  // values of a thread

// How rows are read. State and bias are always floats.
enum class Load : uint8_t {
  kFloats,  // four at a time
  kBf16,    // rows of bf16, state and bias as above
  kAny,     // one at a time: something is not aligned
};

// A divisor of positions, which are below 2^31: their quotient is a product's upper half. A
// division by a number that only the device knows takes 30 instructions, one after the other.
struct Divisor {
  uint32_t by = 1, factor = 0;  // 0: a power of two
  uint32_t shift = 0;

  static Divisor of(int64_t number) {
    Divisor d{static_cast<uint32_t>(number)};
    uint32_t bits = 0;  // 2^bits >= number
    while (uint64_t{1} << bits < d.by) ++bits;
    d.shift = bits;
    if ((d.by & (d.by - 1)) == 0) return d;
    d.factor = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + d.by - 1) / d.by);
    --d.shift;
    return d;
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t position) const {
    return (factor == 0 ? position : __umulhi(position, factor)) >> shift;
  }
};

// How a call is done on the device.
struct Call {
  Params p;
  Divisor block;         // of p.block
  int tokens = 1;        // that a team of threads, or a cluster, takes
  bool rows = true;      // are stored, too
  bool ordered = false;  // ... and may take places in the ring that entries read
  bool norm_wide = false, latent_wide = false;
};

struct Quad {
  float v[kQuad];
};

using cuda::load_now;  // as this one: what is requested here, not where it is used, a wait later
__device__ __forceinline__ Quad load_now(const float* from) {
  Quad quad;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(quad.v[0]), "=f"(quad.v[1]), "=f"(quad.v[2]), "=f"(quad.v[3])
               : "l"(from));
  return quad;
}
template <Load kLoad>
__device__ __forceinline__ Quad load_quad(const void* data, bool is_bf16, int64_t at) {
  __builtin_assume(__isGlobal(data));  // otherwise each load first finds out the address space
  const float* from = static_cast<const float*>(data) + at;
  const bf16* half = static_cast<const bf16*>(data) + at;
  if constexpr (kLoad == Load::kAny) {
    Quad quad;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) quad.v[k] = is_bf16 ? to_float(half[k]) : from[k];
    return quad;
  }
  if (kLoad == Load::kBf16 && is_bf16) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(half);
    return {__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
            __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u)};
  }
  const float4 all = *reinterpret_cast<const float4*>(from);
  return {all.x, all.y, all.z, all.w};
}

template <Load kLoad>
__device__ __forceinline__ void store_quad(float* to, const Quad& quad) {
  __builtin_assume(__isGlobal(to));
  if constexpr (kLoad == Load::kAny) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) to[k] = quad.v[k];
  } else {
    *reinterpret_cast<float4*>(to) = {quad.v[0], quad.v[1], quad.v[2], quad.v[3]};
  }
}

template <Load kLoad>
__device__ __forceinline__ void add_bias(Quad& scores, const float* bias, int64_t at) {
  const Quad added = load_quad<kLoad>(bias, false, at);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) scores.v[k] = __fadd_rn(scores.v[k], added.v[k]);
}

// e^x by the hardware: off by 2^-22 and by 2^-23 of x; what is below 2^-126 is 0.
__device__ __forceinline__ float exp_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 1.4426950408889634f)));
  return y;
}

// A lane's pointer, by all lanes of a warp.
template <class T>
__device__ __forceinline__ T* from_lane(T* pointer, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(pointer);
  return reinterpret_cast<T*>(__shfl_sync(~0u, bits, lane));
}

// A softmax over some rows, for one value.
struct Pool {
  float largest = -INFINITY, whole = 0, sum = 0;
};

// A row joins; the largest score is known.
__device__ __forceinline__ void add_row(Pool& pool, float value, float score) {
  const float weight = exp_of(__fsub_rn(score, pool.largest));
  pool.sum = __fmaf_rn(weight, value, pool.sum);
  pool.whole = __fadd_rn(pool.whole, weight);
}

// Of the first `count` of kRows rows.
template <int kRows>
__device__ __forceinline__ Pool pool_of(const float (&values)[kRows], const float (&scores)[kRows],
                                        int count) {
  Pool pool;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (i < count) pool.largest = fmaxf(pool.largest, scores[i]);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (i < count) add_row(pool, values[i], scores[i]);
  return pool;
}

// The pool of the rows of both; an empty one changes no bit.
__device__ __forceinline__ Pool joined(const Pool& a, const Pool& b) {
  Pool pool;
  pool.largest = fmaxf(a.largest, b.largest);
  const float of_a = exp_of(__fsub_rn(a.largest, pool.largest));
  const float of_b = exp_of(__fsub_rn(b.largest, pool.largest));
  pool.whole = __fmaf_rn(b.whole, of_b, __fmul_rn(a.whole, of_a));
  pool.sum = __fmaf_rn(b.sum, of_b, __fmul_rn(a.sum, of_a));
  return pool;
}

// The mean, off by 3 u. The sum of the weights lies between 1 and the number of rows, so that no
// branch is needed for what the hardware's inverse cannot take.
__device__ __forceinline__ float quotient_of(const Pool& pool) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(pool.whole));
  return __fmul_rn(pool.sum, inverse);
}

// Pools of a quad's four values.
struct QuadPool {
  Pool of[kQuad];
};
template <int kRows>
__device__ __forceinline__ QuadPool pool_of(const Quad (&values)[kRows],
                                            const Quad (&scores)[kRows], int count) {
  QuadPool pool;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    float v[kRows], s[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      v[i] = values[i].v[k];
      s[i] = scores[i].v[k];
    }
    pool.of[k] = pool_of<kRows>(v, s, count);
  }
  return pool;
}
__device__ __forceinline__ Quad mean_of(const QuadPool& a, const QuadPool& b) {
  Quad mean;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    const Pool both = joined(a.of[k], b.of[k]);
    mean.v[k] = quotient_of(both);
  }
  return mean;
}

}  // namespace winnow::internal::compress
