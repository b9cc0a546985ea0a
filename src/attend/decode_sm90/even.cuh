// Decode on Hopper: tokens whose blocks lie in several CTAs' ranges (Way::kEven).
//
// A range may begin and end in the middle of a token. The part of a token that begins in the middle
// is the first one of its CTA: its sums go to the workspace, then its flag is set. The part that
// begins the token is the last one of its CTA, which adds the other parts' sums to its own and
// writes the output. By then the others have usually been stored. A CTA waits only for CTAs that
// were launched before it, and none of these waits before it has set its flag, so the CTAs need not
// all run at once. A kernel that this one may overlap clears the flags; this kernel waits for it
// before it uses the first of them.
#pragma once

#include "attend/decode_sm90/exchange.cuh"
#include "attend/decode_sm90/out.cuh"

namespace winnow::internal::attend::decode_sm90 {

// Sums of a part in units, as in Received, and the statistics of its heads.
template <int kHeads>
struct EvenPart {
  uint4 units[kHeads][64];
  // Reference, row sum, largest logit.
  float4 statistics[kHeads];
};
static_assert(sizeof(EvenPart<8>) == even_part_bytes(8));

__device__ __forceinline__ int part_index(const Args& args, int range) {
  return range * args.groups + static_cast<int>(blockIdx.x);
}
template <int kHeads>
__device__ __forceinline__ EvenPart<kHeads>& part_of_range(const Args& args, int range) {
  return reinterpret_cast<EvenPart<kHeads>*>(args.exchange +
                                             kEvenFlagBytes)[part_index(args, range)];
}
__device__ __forceinline__ uint32_t* flag_of_range(const Args& args, int range) {
  return reinterpret_cast<uint32_t*>(args.exchange) + part_index(args, range);
}

// Stores a thread's parts of all units, to the workspace or to shared memory.
template <int kHeads>
__device__ __forceinline__ void store_units(uint4 (*units)[64], const float (&o)[4][kHeads / 2]) {
  const int thread = thread_here();
  uint4* to = &units[thread / 128 * (kHeads / 2) + (thread / 64 & 1)][thread & 63];
#pragma unroll
  for (int tile = 0; tile < 4; tile += 2)
#pragma unroll
    for (int j = 0; j < kHeads / 8; j++, to += 2 * 64) *to = part_of_unit<kHeads>(o, tile, j);
}
template <int kHeads>
__device__ __forceinline__ void set_to_zero(float (&o)[4][kHeads / 2]) {
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
#pragma unroll
    for (int c = 0; c < kHeads / 2; c++) o[tile][c] = 0;
    hold(o[tile]);
  }
}

// Sets this range's flag, after the weigh warpgroups have stored its sums and statistics.
__device__ __forceinline__ void raise_flag(const Args& args) {
  bar<kWeighing, 256>();
  if (thread_here() == 0) {
    wait_for_previous();
    fence_device();
    asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(flag_of_range(args, range_here())),
                 "r"(1)
                 : "memory");
  }
}

// Where the CTA's own sums of its last part are: in the ring, whose rows have all been read.
template <class Row, int kHeads>
__device__ __forceinline__ auto own_units(Smem<Row, kHeads>& smem) {
  static_assert(sizeof smem.ring >= kHeads * 1024);
  return reinterpret_cast<uint4(*)[64]>(smem.ring);
}

// Ranges after this CTA's that hold parts of the token, where this one holds its beginning; else 0.
__device__ __forceinline__ int later_parts(const Args& args, int token) {
  const int token_begin = token * args.token_blocks;
  const int token_end = token_begin + args.token_blocks;
  int count = 0;
  if (range_begin(args, range_here()) > token_begin) return count;
#pragma unroll
  for (int k = 1; k <= kMaxLaterParts; k++)
    count += range_begin(args, range_here() + k) < token_end;
  return count;
}

// Waits until the first lanes have seen the flags of the next `count` ranges.
__device__ __forceinline__ void wait_for_parts(const Args& args, int count) {
  if ((thread_here() & 31) == 0) {
    wait_for_previous();
#pragma unroll 1
    for (int k = 1; k <= count; k++) {
      const uint32_t* flag = flag_of_range(args, range_here() + k);
      uint32_t there;
      do asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(there) : "l"(flag) : "memory");
      while (there == 0);
    }
  }
  __syncwarp();
}

// The weights of all parts of a head: own sums times smem.warp_part[0]
// and the sums of the k-th later part times smem.warp_part[k] are the output.
template <class Row, int kHeads>
__device__ __forceinline__ void weigh_parts(Smem<Row, kHeads>& smem, const Args& args,
                                            const Span& span, int head, int count) {
  const auto part = [&](int k) {
    if (k > 0) return get(&part_of_range<kHeads>(args, range_here() + k).statistics[head]);
    return make_uint4(__float_as_uint(smem.reference[head]), __float_as_uint(smem.row_sum[head]),
                      __float_as_uint(smem.max_logit[head]), 0);
  };
  float largest = -INFINITY;
  float max_logit = -INFINITY;
#pragma unroll 1
  for (int k = 0; k <= count; k++) {
    const uint4 statistics = part(k);
    if (__uint_as_float(statistics.y) != 0) largest = fmaxf(largest, __uint_as_float(statistics.x));
    max_logit = fmaxf(max_logit, __uint_as_float(statistics.z));
  }
  float total = 0;
#pragma unroll 1
  for (int k = 0; k <= count; k++) {
    const uint4 statistics = part(k);
    const float sum = __uint_as_float(statistics.y);
    const float weight = sum != 0 ? ex2(__uint_as_float(statistics.x) - largest) : 0.f;
    total = fmaf(sum, weight, total);
    smem.warp_part[k][head] = weight;
  }
  const float factor =
      finish_head(args, span.token, span.head_begin + head, largest, total, max_logit, true);
#pragma unroll 1
  for (int k = 0; k <= count; k++) smem.warp_part[k][head] *= factor;
}

// Adds up this CTA's sums, which lie over the rows, and those of the next `count` ranges, times
// their weights, and writes the output.
template <class Row, int kHeads>
__device__ __forceinline__ void add_parts(Smem<Row, kHeads>& smem, const Args& args,
                                          const Span& span, int count) {
  // Units that a thread takes together, every fourth one: first every second group of eight heads,
  // then the next two tiles. Their addresses differ by constants and by rows.
  constexpr int kAtOnce = 8;
  static_assert(kHeads == 64);
  const int thread = thread_here();
  const int sender = thread & 63;
#pragma unroll 1
  for (int unit = thread / 64; unit < kHeads; unit += 4 * kAtOnce) {
    const float* weight = &smem.warp_part[0][8 * (unit / 2 % (kHeads / 8)) + 2 * (sender & 3)];
    const uint4* from = &own_units(smem)[unit][sender];
    const uint4* later = &part_of_range<kHeads>(args, range_here() + 1).units[unit][sender];
    float sum[kAtOnce][2][4] = {};
#pragma unroll 1
    for (int k = 0; k <= count; k++, weight += kHeads) {
      uint4 part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) part[i] = *(from + 4 * 64 * i);
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const float2 by = *reinterpret_cast<const float2*>(weight + 16 * (i % 4));
        add_part(sum[i][0], part[i].x, part[i].y, by);
        add_part(sum[i][1], part[i].z, part[i].w, by);
      }
      from = later;
      later += args.groups * static_cast<int>(sizeof(EvenPart<kHeads>) / sizeof(uint4));
    }
    const MergedOutput<Row, kHeads> output(unit, 2 * sender);
    bf16* const to = output.address(args, span);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        output.put(args, span, to, 16 * (i % 4), i / 4 * 2 + half, sum[i][half]);
  }
}

// The end of a CTA whose last token, `token`, continues in later ranges; run by the weigh
// warpgroups.
template <class Row, int kHeads>
__device__ __forceinline__ void merge_parts(Smem<Row, kHeads>& smem, const Args& args, int token) {
  const int count = later_parts(args, token);
  if (count == 0) return;
  Span span = span_here<kHeads>(args);
  span.token = token;
  const int thread = thread_here();
  wait_for_parts(args, count);
  bar<kWeighing, 256>();
  if (thread < kHeads) weigh_parts(smem, args, span, thread, count);
  bar<kWeighing, 256>();
  add_parts(smem, args, span, count);
}

}  // namespace winnow::internal::attend::decode_sm90
