// Decode on Hopper: tokens whose own CTAs, their mains, are helped by others (Way::kHelped).
//
// A token has one main CTA or two, each with as many of its first blocks. One helper or two have
// the rest; a helper has parts of several tokens, one after the other (parts.h). Helpers store the
// sums of every part in the workspace, then set the part's flag. A single main adds up all 512
// columns. Of two mains each adds up 256: it stores its sums of the other's columns and sets its
// flag. A list that is too short for helpers to gain anything is left to the mains.
//
// The main's score warpgroup waits for the flags, while weigh may still be at the last blocks. It
// has bulk copies bring the others' sums, over Q as long as weigh needs the rest of shared memory,
// and makes the weights of all parts. Weigh adds up what lies in shared memory by a short loop,
// since code that runs once is in no cache.
//
// A main waits for helpers, which were launched before it, and for the other main, which runs at
// the same time, since both form a cluster. Helpers wait for nobody. So the CTAs need not all run
// at once. All CTAs of a token must read the same length of its list: nobody may change lengths or
// indices during the call, or a main waits for a part that no helper has.
//
// A kernel that this one may overlap clears the flags; this kernel waits for it before it uses the
// first of them.
#pragma once

#include "attend/decode_sm90/exchange.cuh"
#include "attend/decode_sm90/out.cuh"

namespace winnow::internal::attend::decode_sm90 {

__device__ __forceinline__ int group_here() { return static_cast<int>(blockIdx.x); }
// A part's flag in the workspace, for this CTA's group of heads.
__device__ __forceinline__ uint32_t* flag_of(const Args& args, int part) {
  return reinterpret_cast<uint32_t*>(args.exchange) + place_of_part(args, part, group_here());
}
// Reference, row sum and largest logit of the part's heads.
template <int kHeads>
__device__ __forceinline__ float4* statistics_of(const Args& args, int part) {
  return reinterpret_cast<float4*>(args.exchange + kPartFlagBytes) +
         place_of_part(args, part, group_here()) * kHeads;
}
// The part's sums of 256 columns in units, as in Received.
template <int kHeads>
using HalfUnits = uint4[kHeads / 2][64];
template <int kHeads>
__device__ __forceinline__ HalfUnits<kHeads>& half_of(const Args& args, int part, int half) {
  return reinterpret_cast<HalfUnits<kHeads>*>(
      args.exchange + kPartFlagBytes +
      kMostParts * kHeads * sizeof(float4))[place_of_half(args, part, group_here(), half)];
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

// Sets a part's flag, when the weigh warpgroups have stored its sums and statistics; by one thread.
__device__ __forceinline__ void raise_flag(const Args& args, int part) {
  wait_for_previous();
  fence_device();
  asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(flag_of(args, part)), "r"(1) : "memory");
}

// Where the sums lie in a main's shared memory, in bytes from the begin of Q: those of the other
// CTAs, one after the other, part_bytes() each, and from kOwnSums on its own. The first args.mains
// of the others' lie over Q alone, which is dead earlier than what follows it.
template <int kHeads>
__device__ __forceinline__ int part_bytes(const Args& args) {
  return args.mains == 1 ? kHeads * 1024 : kHeads * 512;
}
constexpr int kOwnSums = 128 * 1024;
template <class Row, int kHeads>
__device__ __forceinline__ uint8_t* sums_at(Smem<Row, kHeads>& smem, int offset) {
  using Memory = Smem<Row, kHeads>;
  static_assert(offsetof(Memory, p) >= kHeads * 1024 && offsetof(Memory, ring) <= kOwnSums &&
                offsetof(Memory, row_lambda) >= kOwnSums + kHeads * 1024);
  return smem.q + offset;
}
// The units of a main's own sums of a half that it adds up.
template <class Row, int kHeads>
__device__ __forceinline__ HalfUnits<kHeads>& own_half(Smem<Row, kHeads>& smem, const Args& args,
                                                       int half) {
  const int place = args.mains == 1 ? half : 0;
  return *reinterpret_cast<HalfUnits<kHeads>*>(sums_at(smem, kOwnSums + place * (kHeads * 512)));
}

// Waits for the flags of the other CTAs' parts, and requests the sums of each by a bulk copy; by
// one thread.
template <class Row, int kHeads>
__device__ __forceinline__ void bring_sums(Smem<Row, kHeads>& smem, const Args& args,
                                           const OtherParts& others) {
  const int bytes = part_bytes<kHeads>(args);
  // Of two mains each takes one half, which the other main stores alone.
  const int half = args.mains == 1 ? 0 : cta_number() & 1;
  mb_expect(&smem.statistics_full, others.count * bytes);
  wait_for_previous();
#pragma unroll 1
  for (int i = 0; i < others.count; i++) {
    const int part = others.part(i, CtaNumber{});
    uint32_t there;
    do
      asm volatile("ld.acquire.gpu.global.u32 %0,[%1];"
                   : "=r"(there)
                   : "l"(flag_of(args, part))
                   : "memory");
    while (there == 0);
    // The next sums lie over more than Q: weigh must have read its rows.
    if (i == args.mains) mb_wait(&smem.peers_marked, 0);
    // The copy engine must see what the other CTA has stored, and come after what this CTA has
    // stored in the place of the sums.
    asm volatile("fence.proxy.async;" ::: "memory");
    bulk_copy(s32(sums_at(smem, i * bytes)), half_of<kHeads>(args, part, half), bytes,
              s32(&smem.statistics_full));
  }
}

// The end of a main's score warpgroup: brings the other parts' sums, and makes the weights of all
// parts. The output is then the main's own sums times smem.warp_part[0], plus the sums of other
// part i times smem.warp_part[i + 1].
template <class Row, int kHeads>
__device__ __forceinline__ void collect_parts(Smem<Row, kHeads>& smem, const Args& args,
                                              const Span& span) {
  using Config = ConfigOf<Row, kHeads>;
  if (!is_main(args)) return;
  OtherParts others(args, span.token);
  if (smem.unhelped) others.leave_out_helpers();
  const int head = min(thread_here() & 127, kHeads - 1);
  touch(args.lse, args.sink);
  // All products with Q are done.
  bar<kQueryReplaced, Config::kScoreThreads>();
  if ((thread_here() & 127) == 0) {
    smem.other_parts = others.count;
    bring_sums(smem, args, others);
  }
  bar<kQueryReplaced, Config::kScoreThreads>();
  // Reference, row sum and largest logit of each part.
  uint4 of_part[kMostTokenParts];
#pragma unroll
  for (int k = 1; k < kMostTokenParts; k++)
    of_part[k] = k <= others.count
                     ? get(&statistics_of<kHeads>(args, others.part(k - 1, CtaNumber{}))[head])
                     : make_uint4(0, 0, __float_as_uint(-INFINITY), 0);
  mb_wait(&smem.peers_marked, 0);
  of_part[0] =
      make_uint4(__float_as_uint(smem.reference[head]), __float_as_uint(smem.row_sum[head]),
                 __float_as_uint(smem.max_logit[head]), 0);
  float largest = -INFINITY;
  float max_logit = -INFINITY;
  float total = 0;
#pragma unroll
  for (int k = 0; k < kMostTokenParts; k++) {
    if (__uint_as_float(of_part[k].y) != 0) largest = fmaxf(largest, __uint_as_float(of_part[k].x));
    max_logit = fmaxf(max_logit, __uint_as_float(of_part[k].z));
  }
  float weight[kMostTokenParts];
#pragma unroll
  for (int k = 0; k < kMostTokenParts; k++) {
    const float sum = __uint_as_float(of_part[k].y);
    weight[k] = sum != 0 ? ex2(__uint_as_float(of_part[k].x) - largest) : 0.f;
    total = fmaf(sum, weight[k], total);
  }
  // The first main writes lse and max_logit.
  const bool write = (thread_here() & 127) < kHeads && (cta_number() & (args.mains - 1)) == 0;
  const float factor =
      finish_head(args, span.token, span.head_begin + head, largest, total, max_logit, write);
#pragma unroll
  for (int k = 0; k < kMostTokenParts; k++) smem.warp_part[k][head] = weight[k] * factor;
  meet<kSplitsMerging, Config::kMathThreads>();
}

// The end of a main's weigh warpgroups: adds up all parts' sums, of 256 columns where there are two
// mains, and writes the output.
template <class Row, int kHeads>
__device__ __forceinline__ void add_parts(Smem<Row, kHeads>& smem, const Args& args, int token) {
  if (!is_main(args)) return;
  Span span = span_here<kHeads>(args);
  span.token = token;
  const int bytes = part_bytes<kHeads>(args);
  const int sender = thread_here() & 63;
  const int begin = args.mains == 1 ? 0 : (cta_number() & 1) * (kHeads / 2);
  touch(args.out, reinterpret_cast<const void*>(args.out_head_stride));
  meet<kSplitsMerging, ConfigOf<Row, kHeads>::kMathThreads>();
  const int count = smem.other_parts;
  mb_wait(&smem.statistics_full, 0);
  // Two units at once; the second one's heads are 16 further.
  const int first_unit = thread_here() / 64;
#pragma unroll 1
  for (int i = first_unit; i < bytes / 1024; i += 8) {
    const MergedOutput<Row, kHeads> output(begin + i, 2 * sender);
    const int place = i * 1024 + sender * 16;
    uint4 part[kMostTokenParts][2] = {};
#pragma unroll
    for (int k = 0; k < kMostTokenParts; k++)
      if (k <= count) {
        const int from = (k == 0 ? kOwnSums : (k - 1) * bytes) + place;
        part[k][0] = *reinterpret_cast<const uint4*>(sums_at(smem, from));
        part[k][1] = *reinterpret_cast<const uint4*>(sums_at(smem, from + 4 * 1024));
      }
    float sum[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < kMostTokenParts; k++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const float2 by =
            *reinterpret_cast<const float2*>(&smem.warp_part[k][output.head + 16 * u]);
        add_part(sum[u][0], part[k][u].x, part[k][u].y, by);
        add_part(sum[u][1], part[k][u].z, part[k][u].w, by);
      }
    bf16* const to = output.address(args, span);
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int tile = 0; tile < 2; tile++) output.put(args, span, to, 16 * u, tile, sum[u][tile]);
  }
}

}  // namespace winnow::internal::attend::decode_sm90
