// Decode on Hopper: tokens whose own CTAs, their mains, are helped by others (Way::kHelped).
//
// A token has one main CTA or two, each with as many of its first blocks. The rest of it lies with
// one helper or two; a helper has parts of several tokens, one after the other. Helpers store the
// sums of every part in the workspace, then set its flag. Of two mains each adds up 256 columns: it
// stores its sums of the other's columns, sets its flag, and adds the others' to its own. A single
// main adds up all. By then the helpers' sums have usually been stored.
//
// A main waits for helpers, which were launched before it, and for the other main, which runs at
// the same time, since both form a cluster. Helpers wait for nobody. So the CTAs need not all run
// at once. A kernel that this one may overlap clears the flags; this kernel waits for it before it
// uses the first of them.
#pragma once

#include "attend/decode_sm90/exchange.cuh"
#include "attend/decode_sm90/out.cuh"

namespace winnow::internal::attend::decode_sm90 {

// The number of a part: a main's is that of its CTA, after the mains come the helpers' parts, token
// by token. (A step to the next part is one to the next token, to the next helper, or both.)
__device__ __forceinline__ int helper_part(const Args& args, int helper, int token) {
  return args.main_ctas + helper + token;
}
__device__ __forceinline__ int own_part(const Args& args, int token) {
  const int range = range_here();
  return range < args.main_ctas ? range : helper_part(args, range - args.main_ctas, token);
}
// Where a part is in the workspace. A token's only main stores nothing.
__device__ __forceinline__ int place_of_part(const Args& args, int part) {
  return (part - args.first_stored) * args.groups + static_cast<int>(blockIdx.x);
}
__device__ __forceinline__ uint32_t* flag_of(const Args& args, int part) {
  return reinterpret_cast<uint32_t*>(args.exchange) + place_of_part(args, part);
}
// Reference, row sum and largest logit of the part's heads.
template <int kHeads>
__device__ __forceinline__ float4* statistics_of(const Args& args, int part) {
  return reinterpret_cast<float4*>(args.exchange + kPartFlagBytes) +
         place_of_part(args, part) * kHeads;
}
// The part's sums of 256 columns in units, as in Received. A main stores those of one half alone, a
// helper both.
template <int kHeads>
using HalfUnits = uint4[kHeads / 2][64];
template <int kHeads>
__device__ __forceinline__ HalfUnits<kHeads>& half_of(const Args& args, int part, int half) {
  const int place = place_of_part(args, part);
  const int stored_mains = (args.main_ctas - args.first_stored) * args.groups;
  const int index = part < args.main_ctas ? place : 2 * place - stored_mains + half;
  return reinterpret_cast<HalfUnits<kHeads>*>(args.exchange + kPartFlagBytes +
                                              kMostParts * kHeads * sizeof(float4))[index];
}

// Stores a thread's parts of its warpgroup's units, to the workspace or to shared memory.
template <int kHeads>
__device__ __forceinline__ void store_units(HalfUnits<kHeads>& units,
                                            const float (&o)[4][kHeads / 2]) {
  const int thread = thread_here();
  uint4* to = &units[thread / 64 & 1][thread & 63];
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

// Sets a part's flag, after the weigh warpgroups have stored its sums and statistics.
__device__ __forceinline__ void raise_flag(const Args& args, int part) {
  bar<kWeighing, 256>();
  if (thread_here() == 0) {
    wait_for_previous();
    fence_device();
    asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(flag_of(args, part)), "r"(1)
                 : "memory");
  }
}

// Where a main's own sums are: in the ring, whose rows have all been read.
template <class Row, int kHeads>
__device__ __forceinline__ HalfUnits<kHeads>& own_half(Smem<Row, kHeads>& smem, int half) {
  static_assert(sizeof smem.ring >= kHeads * 1024);
  return reinterpret_cast<HalfUnits<kHeads>*>(smem.ring)[half];
}

// The parts of a main's token in the order in which they are added up: mains, then helpers.
struct TokenParts {
  int first_main, mains, first_helper, count;
  __device__ __forceinline__ TokenParts(const Args& args, int token)
      : first_main(token * args.mains), mains(args.mains) {
    // The helpers of the rest's first and last block.
    const unsigned helpers = args.helpers;
    const unsigned first = ((token * args.rest_blocks + 1) * helpers - 1) /
                           static_cast<unsigned>(args.tokens * args.rest_blocks);
    const unsigned last = ((token + 1) * helpers - 1) / static_cast<unsigned>(args.tokens);
    first_helper = helper_part(args, static_cast<int>(first), token);
    count = mains + static_cast<int>(last - first) + 1;
  }
  __device__ __forceinline__ int part(int k) const {
    return k < mains ? first_main + k : first_helper + k - mains;
  }
};

// Waits until the lanes have seen the flags of all parts but the CTA's own.
__device__ __forceinline__ void wait_for_parts(const Args& args, const TokenParts& parts) {
  const int lane = thread_here() & 31;
  if (lane < parts.count && parts.part(lane) != range_here()) {
    wait_for_previous();
    const uint32_t* flag = flag_of(args, parts.part(lane));
    uint32_t there;
    do asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(there) : "l"(flag) : "memory");
    while (there == 0);
  }
  __syncwarp();
}

// The weights of all parts of a head: the sums of part k times smem.warp_part[k] are the output.
template <class Row, int kHeads>
__device__ __forceinline__ void weigh_parts(Smem<Row, kHeads>& smem, const Args& args,
                                            const Span& span, int head, const TokenParts& parts) {
  uint4 part[kMostTokenParts];
#pragma unroll
  for (int k = 0; k < kMostTokenParts; k++) {
    if (k < parts.count && parts.part(k) != range_here())
      part[k] = get(&statistics_of<kHeads>(args, parts.part(k))[head]);
    else
      part[k] = make_uint4(
          __float_as_uint(smem.reference[head]),
          k < parts.count ? __float_as_uint(smem.row_sum[head]) : 0,
          __float_as_uint(smem.max_logit[head]), 0);
  }
  float largest = -INFINITY;
  float max_logit = -INFINITY;
  float total = 0;
#pragma unroll
  for (int k = 0; k < kMostTokenParts; k++) {
    if (__uint_as_float(part[k].y) != 0) largest = fmaxf(largest, __uint_as_float(part[k].x));
    max_logit = fmaxf(max_logit, __uint_as_float(part[k].z));
  }
  float weight[kMostTokenParts];
#pragma unroll
  for (int k = 0; k < kMostTokenParts; k++) {
    const float sum = __uint_as_float(part[k].y);
    weight[k] = sum != 0 ? ex2(__uint_as_float(part[k].x) - largest) : 0.f;
    total = fmaf(sum, weight[k], total);
  }
  const float factor = finish_head(args, span.token, span.head_begin + head, largest, total,
                                   max_logit, parts.first_main == range_here());
#pragma unroll
  for (int k = 0; k < kMostTokenParts; k++) smem.warp_part[k][head] = weight[k] * factor;
}

// Adds up the sums of 256 columns, this CTA's, which lie over the rows, and those of the other
// parts, times their weights, and writes the output.
template <class Row, int kHeads>
__device__ __forceinline__ void add_parts(Smem<Row, kHeads>& smem, const Args& args,
                                          const Span& span, const TokenParts& parts, int half) {
  // Units that a thread takes together, every fourth one: first every second group of eight heads,
  // then the next two tiles. Their addresses differ by constants and by rows.
  constexpr int kAtOnce = 8;
  static_assert(kHeads == 64);
  const int thread = thread_here();
  const int sender = thread & 63;
  const int first_unit = thread / 64;
  const auto units_of_part = [&](int k) -> const uint4* {
    const int part = parts.part(k);
    return &(part == range_here() ? own_half(smem, half)
                                  : half_of<kHeads>(args, part, half))[first_unit][sender];
  };
  const float* weight = &smem.warp_part[0][8 * (first_unit / 2) + 2 * (sender & 3)];
  uint4 next[kAtOnce];
  const auto load = [&](int k) {
    const uint4* from = units_of_part(k);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) next[i] = *(from + 4 * 64 * i);
  };
  float sum[kAtOnce][2][4] = {};
  load(0);
#pragma unroll 1
  for (int k = 0; k < parts.count; k++, weight += kHeads) {
    uint4 part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) part[i] = next[i];
    if (k + 1 < parts.count) load(k + 1);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const float2 by = *reinterpret_cast<const float2*>(weight + 16 * (i % 4));
      add_part(sum[i][0], part[i].x, part[i].y, by);
      add_part(sum[i][1], part[i].z, part[i].w, by);
    }
  }
  const MergedOutput<Row, kHeads> output(half * (kHeads / 2) + first_unit, 2 * sender);
  bf16* const to = output.address(args, span);
#pragma unroll
  for (int i = 0; i < kAtOnce; i++)
#pragma unroll
    for (int two = 0; two < 2; two++)
      output.put(args, span, to, 16 * (i % 4), i / 4 * 2 + two, sum[i][two]);
}

// The end of a main CTA; run by the weigh warpgroups.
template <class Row, int kHeads>
__device__ __forceinline__ void merge_parts(Smem<Row, kHeads>& smem, const Args& args, int token) {
  if (range_here() >= args.main_ctas) return;
  Span span = span_here<kHeads>(args);
  span.token = token;
  const int thread = thread_here();
  const TokenParts parts(args, token);
  wait_for_parts(args, parts);
  bar<kWeighing, 256>();
  if (thread < kHeads) weigh_parts(smem, args, span, thread, parts);
  bar<kWeighing, 256>();
  const int rank = range_here() - parts.first_main;
#pragma unroll 1
  for (int half = rank; half < 2; half += parts.mains) add_parts(smem, args, span, parts, half);
}

}  // namespace winnow::internal::attend::decode_sm90
