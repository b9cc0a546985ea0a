// Decode on Hopper: merges splits that are no cluster, through global memory that stays in the L2
// (Way::kExchange). Clusters of 8 CTAs would leave multiprocessors idle: 15 clusters fit on 132.
//
// All CTAs run at once (a cooperative launch). Nothing is cleared before the launch: the workspace
// may hold anything, although a replayed graph has the same arguments and the same grid id each
// time. What split A does, for each other split B:
//
//   while rows are on their way (meet_peers(), mark_units(), mark_statistics()):
//     draw a fresh launch id a, launch_id[A] = a
//     read launch_id[B] until there is a reply of B that contains a: B's id b is beside it
//     reply to B with {b, a}
//     fill the own slots for statistics and units with sentinels, then marked[A] = a
//     wait until marked[B] is b: now B's slots hold sentinels or what B has stored in this launch
//   before and after the last block's products (publish_statistics(), publish_units()):
//     store statistics, then units
//   then (make_exchanged_weights(), collect_units()):
//     poll B's slots until no sentinel remains; so no fence or flag follows the sums
#pragma once

#include "attend/decode_sm90/merge.cuh"

namespace winnow::internal::attend::decode_sm90 {

// What a split answers another one: the other's launch id as this split has read it, and its own.
struct alignas(16) Reply {
  uint64_t yours;
  uint64_t mine;
};
// A launch id in a line of its own, which is written once.
struct alignas(128) PublishedId {
  uint64_t id;
};
// Where the splits of a token's kHeads heads meet in the workspace. Their sums lie after it,
// units[kHeads][splits][64] of uint4, as in Received.
template <int kHeads>
struct Exchange {
  // Each split's launch id.
  uint64_t launch_id[kMaxExchanged];
  // Replies to a split, from each.
  Reply reply[kMaxExchanged][kMaxExchanged];
  // Each split's launch id, once its slots are marked.
  PublishedId marked[kMaxExchanged];
  // Reference, row sum, largest logit, and a word that is no sentinel.
  float4 statistics[kMaxExchanged][kHeads];
};
static_assert(sizeof(Exchange<8>) == exchange_bytes(8, 0));

// Marks a word as empty. Read as two bf16 it is two NaNs of a kind that no conversion makes, so no
// sum has these bits.
constexpr uint32_t kSentinel = ~0u;

template <int kHeads>
__device__ __forceinline__ Exchange<kHeads>* exchange_of(const Args& args, const Span& span) {
  const int64_t group = static_cast<int64_t>(span.token) * args.groups + span.head_begin / kHeads;
  return reinterpret_cast<Exchange<kHeads>*>(args.exchange +
                                             group * exchange_bytes(kHeads, args.splits));
}
template <int kHeads>
__device__ __forceinline__ uint4* units_of(Exchange<kHeads>* exchange) {
  return reinterpret_cast<uint4*>(exchange + 1);
}

// Loads and stores of words that other CTAs write or read at the same time.
__device__ __forceinline__ void put(uint64_t* to, uint64_t x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(to), "l"(x) : "memory");
}
__device__ __forceinline__ uint64_t get(const uint64_t* from) {
  uint64_t x;
  asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ uint64_t get_acquired(const uint64_t* from) {
  uint64_t x;
  asm volatile("ld.acquire.gpu.global.u64 %0,[%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ uint4 get(const void* from) {
  uint4 x;
  asm volatile(
      "{\n.reg .b64 a,b;\n.reg .b128 t;\nld.relaxed.gpu.global.b128 t,[%4];\nmov.b128 {a,b},t;\n"
      "mov.b64 {%0,%1},a;\nmov.b64 {%2,%3},b;\n}"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(from)
      : "memory");
  return x;
}
__device__ __forceinline__ void get(const void* from, uint32_t (&x)[4]) {
  const uint4 v = get(from);
  x[0] = v.x;
  x[1] = v.y;
  x[2] = v.z;
  x[3] = v.w;
}
__device__ __forceinline__ void get(const void* from, uint32_t (&x)[2]) {
  const uint64_t v = get(static_cast<const uint64_t*>(from));
  x[0] = static_cast<uint32_t>(v);
  x[1] = static_cast<uint32_t>(v >> 32);
}
// Both ids of a reply at once.
__device__ __forceinline__ void put(Reply* to, Reply x) {
  asm volatile(
      "{\n.reg .b128 t;\nmov.b128 t,{%1,%2};\nst.relaxed.gpu.global.b128 [%0],t;\n}" ::"l"(to),
      "l"(x.yours), "l"(x.mine)
      : "memory");
}
__device__ __forceinline__ Reply get(const Reply* from) {
  Reply x;
  asm volatile("{\n.reg .b128 t;\nld.relaxed.gpu.global.b128 t,[%2];\nmov.b128 {%0,%1},t;\n}"
               : "=l"(x.yours), "=l"(x.mine)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ void put(void* to, uint4 x) {
  asm volatile(
      "{\n.reg .b64 a,b;\n.reg .b128 t;\nmov.b64 a,{%1,%2};\nmov.b64 b,{%3,%4};\n"
      "mov.b128 t,{a,b};\nst.relaxed.gpu.global.b128 [%0],t;\n}" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}
__device__ __forceinline__ uint4 sentinels() {
  return make_uint4(kSentinel, kSentinel, kSentinel, kSentinel);
}

// A number that no launch has used before, from time and clock; the same for all lanes.
__device__ __forceinline__ uint64_t fresh_launch_id() {
  uint64_t time;
  asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(time));
  return __shfl_sync(~0u, time << 16 | (clock64() & 0xfffe) | 1, 0);
}

// Exchanges launch ids with the other splits, a split a lane, while rows are on their way. Run by a
// warp that has nothing left to copy. An id that is read too early may be of an old launch. But a
// reply that contains this CTA's id was written in this launch, so the other id in it is of this
// launch too. Then the warp publishes that this CTA's slots are marked as empty, and waits until
// all others' are. (Replies in place of `marked`, a line that all others write while it is read,
// took 1,500 cycles more.)
template <class Row, int kHeads>
__device__ __forceinline__ void meet_peers(Smem<Row, kHeads>& smem, const Args& args,
                                           const Span& span) {
  const int lane = thread_here() & 31;
  const int split = split_here(args);
  Exchange<kHeads>* exchange = exchange_of<kHeads>(args, span);
  // The other's id to which this lane has replied.
  uint64_t answered = 0;
  const uint64_t mine = fresh_launch_id();
  if (lane == 0) put(&exchange->launch_id[split], mine);
  const bool is_peer = lane < args.splits && lane != split;
  Reply back{};
  for (bool done = !is_peer; !done; done = back.yours == mine) {
    const uint64_t theirs = get(&exchange->launch_id[lane]);
    back = get(&exchange->reply[split][lane]);
    if (theirs != answered) {
      answered = theirs;
      put(&exchange->reply[lane][split], {theirs, mine});
    }
  }
  // Reply to the other's id of this launch, if the loop ended before that.
  if (is_peer && back.mine != answered) put(&exchange->reply[lane][split], {back.mine, mine});
  __syncwarp();
  mb_wait(&smem.slots_marked, 0);
  // Orders all of the CTA's sentinels before the id.
  fence_device();
  if (lane == 0) put(&exchange->marked[split].id, mine);
  if (is_peer) {
    uint64_t theirs;
    do theirs = get_acquired(&exchange->marked[lane].id);
    while (theirs != back.mine);
  }
  __syncwarp();
  if (lane == 0) mb_arrive(&smem.peers_marked);
}

// Stores the statistics of a head, by the thread that keeps it. The last word is no sentinel.
template <class Row, int kHeads>
__device__ __forceinline__ void publish_statistics(Smem<Row, kHeads>& smem, const Args& args,
                                                   const Span& span, int head, float row_sum) {
  put(&exchange_of<kHeads>(args, span)->statistics[split_here(args)][head],
      make_uint4(__float_as_uint(smem.reference[head]), __float_as_uint(row_sum),
                 __float_as_uint(smem.max_logit[head]), 0));
}

// Fills the slots of this CTA's units with sentinels. Two warps that have nothing left to copy do
// it, when the first rows are there: earlier, these stores delay the rows. Done by more warps, in
// turns with pauses, or by weigh, they delay the scores.
template <class Row, int kHeads>
__device__ __forceinline__ void mark_units(Smem<Row, kHeads>& smem, const Args& args,
                                           const Span& span) {
  const int thread = thread_here() & 63;
  uint4* to = units_of(exchange_of<kHeads>(args, span)) + split_here(args) * 64 + thread;
  // With more than kReady blocks the barrier might be a phase further, which looks like none. Then
  // the wait is left out: the warp has copied so many rows that the first ones are there.
  if (span.blocks > 0 && span.blocks <= kReady)
    mb_wait(&smem.block_ready[min(span.blocks, 2) - 1], 0);
#pragma unroll 1
  for (int unit = 0; unit < kHeads; unit++, to += 64 * args.splits) put(to, sentinels());
  __syncwarp();
  if ((thread & 31) == 0) mb_arrive(&smem.slots_marked);
}
// Fills the slot of a head's statistics with sentinels, by the thread that keeps it.
template <int kHeads>
__device__ __forceinline__ void mark_statistics(const Args& args, const Span& span, int head) {
  put(&exchange_of<kHeads>(args, span)->statistics[split_here(args)][head], sentinels());
}

// The weigh warpgroups store their sums.
template <int kHeads>
__device__ __forceinline__ void publish_units(const Args& args, const Span& span,
                                              const float (&o)[4][kHeads / 2]) {
  const int thread = thread_here();
  const int warpgroup = thread / 128;
  const int warp = thread / 32 & 3;
  uint4* to = units_of(exchange_of<kHeads>(args, span)) +
              ((warpgroup * (kHeads / 2) + warp / 2) * args.splits + split_here(args)) * 64 +
              (thread & 63);
#pragma unroll
  for (int tile = 0; tile < 4; tile += 2)
#pragma unroll
    for (int j = 0; j < kHeads / 8; j++) {
      put(to, part_of_unit<kHeads>(o, tile, j));
      to += 2 * 64 * args.splits;
    }
}

// Where the splits' weights of each head are: over Q, since weigh may still be at the last rows.
template <class Row, int kHeads>
__device__ __forceinline__ auto weights_of(Smem<Row, kHeads>& smem) {
  static_assert(sizeof smem.q >= kMaxExchanged * kHeads * sizeof(float));
  return reinterpret_cast<float(*)[kHeads]>(smem.q);
}

// The score warpgroup makes the weights of the splits when the statistics of every split are there.
// Two lanes have eight splits of a head each.
template <class Row, int kHeads>
__device__ __forceinline__ void make_exchanged_weights(Smem<Row, kHeads>& smem, const Args& args,
                                                       const Span& span) {
  using Config = ConfigOf<Row, kHeads>;
  const auto weight = weights_of(smem);
  const int thread = thread_here() & 127;
  const int head = min(thread / 2, kHeads - 1);
  const int first = 8 * (thread & 1);
  const int splits = args.splits;
  const float4* statistics = &exchange_of<kHeads>(args, span)->statistics[0][head];
  touch(args.lse, args.sink);
  mb_wait(&smem.peers_marked, 0);
  uint4 part[8];
#pragma unroll
  for (int j = 0; j < 8; j++) part[j].w = kSentinel;
  for (bool again = true; again;) {
    again = false;
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (part[j].w == kSentinel) part[j] = get(statistics + min(first + j, splits - 1) * kHeads);
#pragma unroll
    for (int j = 0; j < 8; j++) again |= part[j].w == kSentinel;
    again = __any_sync(~0u, again);
  }
  // Each split's reference, then its weight.
  float of_split[8];
  float row_sum[8];
  float reference = -INFINITY;
  float max_logit = -INFINITY;
  float total = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    of_split[j] = __uint_as_float(part[j].x);
    row_sum[j] = first + j < splits ? __uint_as_float(part[j].y) : 0.f;
    if (row_sum[j] != 0) reference = fmaxf(reference, of_split[j]);
    max_logit = fmaxf(max_logit, __uint_as_float(part[j].z));
  }
  reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, 1));
  max_logit = fmaxf(max_logit, __shfl_xor_sync(~0u, max_logit, 1));
#pragma unroll
  for (int j = 0; j < 8; j++) {
    of_split[j] = row_sum[j] != 0 ? ex2(of_split[j] - reference) : 0.f;
    total = fmaf(row_sum[j], of_split[j], total);
  }
  total += __shfl_xor_sync(~0u, total, 1);
  // The first split's CTA writes lse and max_logit.
  const bool write =
      blockIdx.x == span.head_begin / kHeads * splits && thread < 2 * kHeads && first == 0;
  const float factor =
      finish_head(args, span.token, span.head_begin + head, reference, total, max_logit, write);
  // The last products with Q are done.
  bar<kQueryReplaced, Config::kScoreThreads>();
#pragma unroll
  for (int j = 0; j < 8; j++)
    weight[first + j][head] = first + j < splits ? of_split[j] * factor : 0.f;
  meet<kSplitsMerging, Config::kMathThreads>();
}

// The weigh warpgroups add up this CTA's units in the order of the splits. A thread has kWords
// words of a unit's part from each split. All parts that fit its registers are requested at once:
// 16 of one unit, or eight of each of two units where there are at most eight splits.
template <class Row, int kHeads, int kWords>
__device__ __forceinline__ void add_units(Smem<Row, kHeads>& smem, const Args& args,
                                          const Span& span, int count) {
  // Threads of a unit, and units at once.
  constexpr int kThreads = 256 / kWords;
  constexpr int kUnits = 256 / kThreads;
  const auto weight = weights_of(smem);
  const int thread = thread_here();
  const int half = thread % kThreads * (kWords / 2);
  const int splits = args.splits;
  const int split = split_here(args);
  // Whether two units are taken at once.
  const bool two = splits <= 8;
  bool weights_there = false;
#pragma unroll 1
  for (int k = thread / kThreads; k < count || !weights_there; k += two ? 2 * kUnits : kUnits) {
    // The parts of unit `first`; then of unit `last`, or the ninth and later ones of the same.
    const int first = k * splits + split;
    const int last = two ? first + kUnits * splits : first;
    const uint2* a =
        reinterpret_cast<const uint2*>(units_of(exchange_of<kHeads>(args, span))) + half;
    const uint2* b = a + (two ? last * splits : first * splits + 8) * 128;
    a += first * splits * 128;
    // So that the addresses of parts differ by constants.
    asm volatile("" : "+l"(a), "+l"(b));
    // How many parts `a` and `b` have. None: the thread only meets the others below.
    const int in_a = k < count ? splits : 0;
    const int in_b = !two ? in_a - 8 : k + kUnits < count ? splits : 0;
    // Mark what is awaited as empty, then poll until no sentinel remains. A part is stored as a
    // whole, so its first word stands for all.
    uint32_t part[16][kWords] = {};
#pragma unroll
    for (int s = 0; s < 8; s++) {
      if (s < in_a) part[s][0] = kSentinel;
      if (s < in_b) part[8 + s][0] = kSentinel;
    }
    for (bool again = true; again;) {
      again = false;
#pragma unroll
      for (int s = 0; s < 8; s++) {
        if (part[s][0] == kSentinel) get(a + s * 128, part[s]);
        if (part[8 + s][0] == kSentinel) get(b + s * 128, part[8 + s]);
      }
#pragma unroll
      for (int s = 0; s < 16; s++) again |= part[s][0] == kSentinel;
      again = __any_sync(~0u, again);
    }
    // Meet the score warpgroups once: the weights of the splits are in shared memory.
    if (!weights_there) meet<kSplitsMerging, ConfigOf<Row, kHeads>::kMathThreads>();
    weights_there = true;
    // Add eight parts, then the other eight, which move up in the registers: so both take the same
    // code.
    float sum[kWords / 2][4] = {};
    int unit = first;
    int parts = in_a;
    const auto weights = [&] {
      return &weight[0][8 * (unit / 2 % (kHeads / 8)) + 2 * (half / 2 & 3)];
    };
    const float* by = weights();
#pragma unroll 1
    for (int turn = 0; parts > 0 && turn < 2; turn++) {
#pragma unroll
      for (int s = 0; s < 8; s++) {
#pragma unroll
        for (int c = 0; c < kWords; c += 2)
          add_part(sum[c / 2], part[s][c], part[s][c + 1],
                   *reinterpret_cast<const float2*>(by + s * kHeads));
#pragma unroll
        for (int c = 0; c < kWords; c++) part[s][c] = part[8 + s][c];
      }
      if (two || turn == 1) {
        put_merged<Row, kHeads>(args, span, unit, half, sum);
#pragma unroll
        for (int c = 0; c < 2 * kWords; c++) sum[c / 4][c % 4] = 0.f;
      }
      parts = in_b;
      unit = last;
      by = two ? weights() : by + 8 * kHeads;
    }
  }
}

// The weigh warpgroups wait until all slots are marked, then poll for the parts of their units.
template <class Row, int kHeads>
__device__ __forceinline__ void collect_units(Smem<Row, kHeads>& smem, const Args& args,
                                              const Span& span) {
  const int count =
      static_cast<int>(over_splits(args, kHeads - split_here(args) + args.splits - 1));
  touch(args.out, reinterpret_cast<const void*>(args.out_head_stride));
  mb_wait(&smem.peers_marked, 0);
  // With many heads there are more than two units a CTA, and no code for fewer.
  if (kHeads > 2 * kMaxExchanged || count > 2)
    return add_units<Row, kHeads, 4>(smem, args, span, count);
  if constexpr (kHeads <= 2 * kMaxExchanged) add_units<Row, kHeads, 2>(smem, args, span, count);
}

}  // namespace winnow::internal::attend::decode_sm90
