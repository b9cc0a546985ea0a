// compress on the device: from the pooled values of an entry to its latent and record, four values
// a thread. All threads that share a row run this together; the norm's sum is what they exchange.
//
// R is the record of a usual call (is_usual()), whose steps are known when it is compiled, which
// takes a third of the instructions; void: any call.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "compress/quads_sm90.cuh"
#include "cuda/record.h"
#include "model/records.h"

namespace winnow::internal::compress {

// Where an entry goes: to a record at `slot`, to a latent, or nowhere.
struct Goal {
  bool record = false, latent = false;
  int64_t slot = -1;
  __device__ bool any() const { return record || latent; }
};
__device__ __forceinline__ int64_t slot_of(const Params& p, int64_t token) {
  return p.cache.data == nullptr ? -1 : p.slots[token * p.slot_stride];
}
// Of the entry that ends at position `last`.
__device__ __forceinline__ Goal goal_of(const Params& p, int64_t slot, int64_t last) {
  Goal g{false, p.latent != nullptr, slot};
  g.record = slot >= 0 && slot < p.cache.pages * p.cache.page;
  if (p.rope.table != nullptr) g.record = g.record && core::in_table(p.rope, last - p.ratio + 1);
  return g;
}

// What a thread needs for its values after the pool. It is requested before the rows have come.
struct Steps {
  float weight[kQuad];
  float cosine[kQuad], sine[kQuad];  // of lanes whose values RoPE turns
};

// The usual call of V4's and V4.1's layers: RMS with weights, RoPE over pairs in place, last, no
// Hadamard, V4's records, pages of a power of two.
inline bool is_usual(const Call& call) {
  const Params& p = call.p;
  const CacheFormat format = p.cache.format;
  return p.cache.data != nullptr &&
         (format == CacheFormat::kV4Fp8 || format == CacheFormat::kIndexKeys) &&
         (p.cache.page & (p.cache.page - 1)) == 0 && cuda::is_plain(p.norm) &&
         p.rope.table != nullptr && cuda::is_wide(p.rope) && !p.rope.half && !p.rope.first &&
         !p.hadamard && (p.latent == nullptr || call.latent_wide);
}

template <class R>
inline constexpr bool kUsual = !std::is_void_v<R>;
// Values of a usual call's rows.
template <class R>
inline constexpr int kWidthOf = R::kDim;
template <>
inline constexpr int kWidthOf<void> = kMaxWidth;

template <class R>
__device__ __forceinline__ void load_weights(const Call& call, int at, Steps& steps) {
  const core::NormParams& n = call.p.norm;
  const bool there = kUsual<R> || (n.weight != nullptr && at < call.p.width);
  const bool wide = kUsual<R> || call.norm_wide;
  float4 w{1, 1, 1, 1};
  if (there && wide) w = *reinterpret_cast<const float4*>(n.weight + at);
  else if (there) w = {n.weight[at], n.weight[at + 1], n.weight[at + 2], n.weight[at + 3]};
  steps.weight[0] = w.x, steps.weight[1] = w.y, steps.weight[2] = w.z, steps.weight[3] = w.w;
}

// Where a thread's values lie in what RoPE turns: 0 to 60, or not in it.
__device__ __forceinline__ int turned_at(const Params& p, int at) {
  return at - static_cast<int>(core::rope_begin(p.rope, p.width));
}
__device__ __forceinline__ bool is_turned(const Params& p, int at) {
  const int in = turned_at(p, at);
  return p.rope.table != nullptr && at < p.width && in >= 0 && in < kRopeDim;
}

// The angles of an entry's position, with the sine's sign for a value's place in its pair.
__device__ __forceinline__ void load_any_angles(const Params& p, int64_t position, int at,
                                                Steps& steps) {
#pragma unroll
  for (int k = 0; k < kQuad; ++k) steps.cosine[k] = steps.sine[k] = 0;
  if (!is_turned(p, at)) return;
  const int in = turned_at(p, at);
  if (p.rope.half) {
    cuda::load_turns(p.rope, position, in % core::kPairs, steps.cosine, steps.sine);
    const bool second = in >= core::kPairs;
#pragma unroll
    for (float& s : steps.sine) s = second != p.rope.inverse ? s : -s;
    return;
  }
  const float* cosines =
      p.rope.table + position * p.rope.position_stride + in / 2 * p.rope.pair_stride;
#pragma unroll
  for (int k = 0; k < kQuad; k += 2) {
    const float s = cosines[p.rope.sine_stride + k / 2 * p.rope.pair_stride];
    steps.cosine[k] = steps.cosine[k + 1] = cosines[k / 2 * p.rope.pair_stride];
    steps.sine[k] = p.rope.inverse ? s : -s;
    steps.sine[k + 1] = -steps.sine[k];
  }
}
// The same; of a usual call the first two are those of the thread's pairs.
template <class R>
__device__ __forceinline__ void load_angles(const Params& p, int64_t position, int at,
                                            Steps& steps) {
  if constexpr (!kUsual<R>) {
    load_any_angles(p, position, at, steps);
  } else if (const int in = at - (R::kDim - kRopeDim); in >= 0) {
    const float* cosines = p.rope.table + position * p.rope.position_stride + in / 2;
    const float2 cosine = *reinterpret_cast<const float2*>(cosines);
    const float2 sine = *reinterpret_cast<const float2*>(cosines + p.rope.sine_stride);
    steps.cosine[0] = cosine.x, steps.cosine[1] = cosine.y;
    steps.sine[0] = sine.x, steps.sine[1] = sine.y;
  }
}

// bf16 pairs of four values.
struct Packed {
  uint32_t pairs[2];
};
__device__ __forceinline__ Packed packed(const Quad& q) {
  return {cuda::pack<true>(q.v[0], q.v[1]), cuda::pack<true>(q.v[2], q.v[3])};
}
__device__ __forceinline__ Quad unpacked(const Packed& x) {
  return {__uint_as_float(x.pairs[0] << 16), __uint_as_float(x.pairs[0] & 0xffff0000u),
          __uint_as_float(x.pairs[1] << 16), __uint_as_float(x.pairs[1] & 0xffff0000u)};
}

// `sum(x)` adds a value of every thread that shares the row.
template <class R, class Sum>
__device__ __forceinline__ Packed normed(const Params& p, const Steps& steps, Quad x, int at,
                                         Sum sum) {
  const core::NormParams& n = p.norm;
  if (!kUsual<R> && n.kind == NormKind::kNone) return packed(x);
  const bool there = kUsual<R> || at < p.width;
  const auto count = kUsual<R> ? static_cast<float>(kWidthOf<R>) : static_cast<float>(p.width);
  if (!kUsual<R> && n.kind == NormKind::kLayer) {
    const float mean =
        cuda::mean_of(sum(there ? cuda::joined(x.v[0], x.v[1], x.v[2], x.v[3]) : 0.0f), count);
#pragma unroll
    for (float& v : x.v) v = __fsub_rn(v, mean);
  }
  float squares = 0;
#pragma unroll
  for (const float v : x.v) squares = __fmaf_rn(v, v, squares);
  const float inverse = cuda::inverse_of(n, sum(there ? squares : 0.0f), count);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    x.v[k] = __fmul_rn(__fmul_rn(x.v[k], inverse), steps.weight[k]);
    if (!kUsual<R> && n.bias != nullptr && there) x.v[k] = __fadd_rn(x.v[k], n.bias[at + k]);
  }
  return packed(x);
}

// By all lanes of a warp; `half` pairs are eight lanes apart.
__device__ __forceinline__ Packed any_turned(const Params& p, const Steps& steps, const Packed& row,
                                             int at) {
  const Quad own = unpacked(row);
  Quad partner = {own.v[1], own.v[0], own.v[3], own.v[2]};
  if (p.rope.half) {
    constexpr int kApart = core::kPairs / kQuad;
    partner = unpacked(
        {__shfl_xor_sync(~0u, row.pairs[0], kApart), __shfl_xor_sync(~0u, row.pairs[1], kApart)});
  }
  if (!is_turned(p, at)) return row;
  Quad out;
#pragma unroll
  for (int k = 0; k < kQuad; ++k)
    out.v[k] =
        __fadd_rn(__fmul_rn(own.v[k], steps.cosine[k]), __fmul_rn(partner.v[k], steps.sine[k]));
  return packed(out);
}
template <class R>
__device__ __forceinline__ Packed turned(const Params& p, const Steps& steps, const Packed& row,
                                         int at) {
  if constexpr (!kUsual<R>) {
    return any_turned(p, steps, row, at);
  } else {
    if (at < kWidthOf<R> - kRopeDim) return row;
    const Quad own = unpacked(row);
    Quad out;
#pragma unroll
    for (int k = 0; k < kQuad; k += 2) {
      const float cosine = steps.cosine[k / 2];
      const float sine = p.rope.inverse ? -steps.sine[k / 2] : steps.sine[k / 2];
      out.v[k] = __fsub_rn(__fmul_rn(own.v[k], cosine), __fmul_rn(own.v[k + 1], sine));
      out.v[k + 1] = __fadd_rn(__fmul_rn(own.v[k + 1], cosine), __fmul_rn(own.v[k], sine));
    }
    return packed(out);
  }
}

// 128 values in a warp, by sums and differences of pairs 1, 2, 4 ... apart.
__device__ __forceinline__ Packed hadamard(const Packed& row, int lane) {
  Quad x = unpacked(row);
#pragma unroll
  for (int step = 1; step < kQuad; step *= 2)
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      if (k & step) continue;
      const float low = x.v[k];
      const float high = x.v[k + step];
      x.v[k] = __fadd_rn(low, high);
      x.v[k + step] = __fsub_rn(low, high);
    }
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
#pragma unroll
    for (float& v : x.v) {
      const float other = __shfl_xor_sync(~0u, v, step);
      v = lane & step ? __fsub_rn(other, v) : __fadd_rn(v, other);
    }
#pragma unroll
  for (float& v : x.v) v = __fmul_rn(v, cuda::kHadamardFactor);
  return packed(x);
}

__device__ __forceinline__ void store_pairs(void* to, const Packed& row) {
  cuda::store8(to, {row.pairs[0], row.pairs[1]});
}

// A thread's part of a record, by all lanes of a warp; those after the row have none.
template <class R, bool kEvenPages>
__device__ __forceinline__ void store_record(const Params& p, const Packed& row, int64_t slot,
                                             int at) {
  const auto [page, offset] = cuda::spot_of<kEvenPages>(p.cache, slot);
  if constexpr (R::kQuantized) {
    const cuda::Quantizer quantizer = cuda::quantizer_for<R>(p.quantizer);
    const float scale = cuda::tile_scale<R::kTile / kQuad>(quantizer, cuda::largest(row.pairs));
    std::byte* scales = page + R::scales(offset, p.cache.page);
    if (at < R::kNope) {
      uint32_t codes[1];
      cuda::codes_of(quantizer, cuda::scale_inverse(quantizer, scale), row.pairs, codes);
      *reinterpret_cast<uint32_t*>(page + R::row(offset, p.cache.page) + at) = codes[0];
      if (at % R::kTile == 0)
        core::put_scale(reinterpret_cast<typename R::Scale*>(scales) + at / R::kTile, scale);
    }
    if constexpr (R::kRope > 0)
      if (at >= R::kNope && at < R::kDim)
        store_pairs(page + R::rope(offset, p.cache.page) + (at - R::kNope) * 2, row);
    if constexpr (R::kScaleBytes > R::kTiles * static_cast<int>(sizeof(typename R::Scale)))
      if (at == 0)  // bytes after the last scale are zero
        for (int b = R::kTiles * sizeof(typename R::Scale); b < R::kScaleBytes; ++b)
          scales[b] = std::byte{0};
  } else {
    if (at < R::kDim) store_pairs(page + R::row(offset, p.cache.page) + at * 2, row);
  }
}

// The pooled values at `at` (kMaxWidth: none) become latent and record. Whole warps come here.
template <class R, class Sum>
__device__ __forceinline__ void finish(const Call& call, const Steps& steps, const Quad& pooled,
                                       int64_t token, const Goal& goal, int at, Sum sum) {
  const Params& p = call.p;
  Packed row = normed<R>(p, steps, pooled, at, sum);
  if (goal.latent && at < p.width) {
    bf16* latent = p.latent + token * p.latent_stride + at;
    if (kUsual<R> || call.latent_wide) store_pairs(latent, row);
    else
#pragma unroll
      for (int k = 0; k < kQuad; ++k)
        latent[k] = {static_cast<uint16_t>(row.pairs[k / 2] >> (k % 2 * 16))};
  }
  if (!goal.record) return;
  if (kUsual<R> || p.rope.table != nullptr) row = turned<R>(p, steps, row, at);
  if constexpr (kUsual<R>) {
    store_record<R, true>(p, row, goal.slot, at);
  } else {
    if (p.hadamard) row = hadamard(row, static_cast<int>(threadIdx.x) % 32);
    with_entry(p.cache.format,
               [&](auto record) { store_record<decltype(record), false>(p, row, goal.slot, at); });
  }
}

}  // namespace winnow::internal::compress
