// Decode on Hopper: Q into shared memory, multiplied by one power of two for all heads of the CTA
// and converted to fp16 (fp8 rows; its RoPE part stays bf16), in the order of columns in which rows
// come out as fragments. load_q(): the first token's, by weigh and score. reload_q(): a later
// token's, by score alone, which in some forms loads the first one too (kScoreLoadsQuery).
#pragma once

#include "attend/decode_sm90/span.cuh"

namespace winnow::internal::attend::decode_sm90 {

// The exponent e for which Q times 2^(13 - e) is in fp16's range, from the bits of Q's largest
// value as bf16. An infinity or NaN concerns its own head alone: e is then 9, so that 2^4 keeps the
// others' values up to 4,000. The bound of 100 keeps `unit` in score() finite; with it, values of
// 2^103 and more exceed fp16.
__device__ __forceinline__ int q_exponent(uint32_t max_bits) {
  return max_bits >= 0x7f80 ? 9 : min(max(static_cast<int>(max_bits >> 7) - 127, -60), 100);
}
// The larger of two bf16 each, by size, with any sign; a NaN is the largest.
__device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t x) {
  asm("max.NaN.xorsign.abs.bf16x2 %0,%0,%1;" : "+r"(most) : "r"(x));
  return most;
}
__device__ __forceinline__ uint32_t larger(uint32_t most, const uint4& v) {
  return larger(larger(most, larger(v.x, v.y)), larger(v.z, v.w));
}
// The largest of a warp.
__device__ __forceinline__ uint32_t largest_of_warp(uint32_t most) {
  return __reduce_max_sync(~0u, max(most & 0x7fff, most >> 16 & 0x7fff));
}

__device__ __forceinline__ void get_shared(uint32_t* x, uint32_t from) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3},[%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void put_shared(uint32_t to, uint32_t x, uint32_t y, uint32_t z,
                                           uint32_t u) {
  asm volatile("st.shared.v4.b32 [%0],{%1,%2,%3,%4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(u)
               : "memory");
}

// Q's largest value becomes one of this exponent. fp16 leaves room for sums of products; as e4m3
// the largest value is below 2^8.
template <class Row>
constexpr int kQExponent = Row::kCodes ? 7 : 13;
// 2^(kQExponent - e) as bf16, twice: what Q is multiplied by, exactly.
template <class Row>
__device__ __forceinline__ uint32_t q_factor(int exponent) {
  return (127 + kQExponent<Row> - exponent) * 0x800080u;
}
// Two values of Q times the factor, as fp16.
__device__ __forceinline__ uint32_t convert_q(uint32_t two, uint32_t factor) {
  const uint32_t x = mul_b2(two, factor);
  return pack<false>(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
}

// Two values as e4m3, rounded to the nearest. Values that are not finite become NaN.
__device__ __forceinline__ uint32_t e4m3_of(float lo, float hi) {
  uint32_t codes;
  asm("{\n.reg .b16 x;\ncvt.rn.satfinite.e4m3x2.f32 x,%1,%2;\ncvt.u32.u16 %0,x;\n}"
      : "=r"(codes)
      : "f"(fmaf(hi, 0.f, hi)), "f"(fmaf(lo, 0.f, lo)));
  return codes;
}
// Eight columns of a head as e4m3 codes, in their order.
template <class Row, int kHeads>
__device__ __forceinline__ void put_codes(Smem<Row, kHeads>& smem, int head, int chunk,
                                          const uint4& v, uint32_t factor) {
  const uint32_t x[4] = {v.x, v.y, v.z, v.w};
  uint32_t codes[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const uint32_t two = mul_b2(x[k], factor);
    codes[k] = e4m3_of(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000));
  }
  uint8_t* to = smem.q + (chunk >> 4) * (kHeads * 128) + head * 128 +
                (((chunk >> 1 & 7) ^ (head & 7)) << 4) + (chunk & 1) * 8;
  *reinterpret_cast<uint2*>(to) = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
}

// Puts eight columns of Q, times the factor, into shared memory. Columns are permuted to match the
// rows' fragments. `chunk`: which eight columns of the part.
template <class Row, int kHeads, bool kRopePart>
__device__ __forceinline__ void put_q(Smem<Row, kHeads>& smem, int head, int chunk, const uint4& v,
                                      uint32_t factor) {
  using Config = ConfigOf<Row, kHeads>;
  if constexpr (Row::kCodes && !kRopePart)
    return put_codes<Row, kHeads>(smem, head, chunk, v, factor);
  uint8_t* to =
      smem.q + (kRopePart ? Config::kNopeTiles : chunk >> 3) * (kHeads * 128) + head * 128;
  uint32_t x[4] = {v.x, v.y, v.z, v.w};
  if constexpr (Row::kFp8) {
#pragma unroll
    for (int k = 0; k < 4; k++) x[k] = kRopePart ? mul_b2(x[k], factor) : convert_q(x[k], factor);
  }
  if constexpr (Row::kFp8 && !kRopePart) {
    // A 16-column step reads columns 4t, 4t+1 as its k = 2t, 2t+1, and columns 4t+2, 4t+3 as its
    // k = 2t+8, 2t+9.
    const int step = (chunk & 7) >> 1;
    const int half = chunk & 1;
    *reinterpret_cast<uint2*>(to + (((step * 2) ^ (head & 7)) << 4) + half * 8) =
        make_uint2(x[0], x[2]);
    *reinterpret_cast<uint2*>(to + (((step * 2 + 1) ^ (head & 7)) << 4) + half * 8) =
        make_uint2(x[1], x[3]);
  } else {
    *reinterpret_cast<uint4*>(to + (((chunk & 7) ^ (head & 7)) << 4)) =
        make_uint4(x[0], x[1], x[2], x[3]);
  }
}

// Prefetches a part of Q into the L2. Splits share Q, and 16 CTAs that miss the same lines at once
// wait 6,000 cycles for them. So each split requests a part first, and the L2 has Q when all read
// it. `token` is the CTA's y: with Way::kHelped, or after kTokensY tokens, these are not its Q's
// lines, and the prefetch is of no use.
template <int kHeads>
__device__ __forceinline__ void prefetch_q(const Args& args) {
  // Read here, because roles share no register.
  unsigned block, token;
  asm volatile("mov.u32 %0,%%ctaid.x;\nmov.u32 %1,%%ctaid.y;" : "=r"(block), "=r"(token));
  const int group = static_cast<int>(over_splits(args, block));
  const int split = block - group * args.splits;
  const int head_count = min(args.heads - group * kHeads, kHeads);
  const int i = split * 128 + (thread_here() & 127);
  const auto prefetch = [&](const bf16* q, int64_t stride, int head, int line) {
    if (head < head_count)
      asm volatile(
          "prefetch.global.L2 [%0];" ::"l"(q + (group * kHeads + head) * stride + line * 64));
  };
  if (i < kHeads * 8)
    prefetch(args.q + token * args.q_token_stride, args.q_head_stride, i / 8, i % 8);
  if (i < kHeads)
    prefetch(args.q_rope + token * args.rope_token_stride, args.rope_head_stride, i, 0);
}

// Loads Q of the first token, and returns what the products with it are to be multiplied by. The
// weigh warps take the NoPE part (a warp: heads w, w+8, ...), the score warps the RoPE part (a
// warp: four heads a load).
template <class Row, int kHeads, bool kRopePart>
__device__ __forceinline__ float load_q(Smem<Row, kHeads>& smem, const Args& args,
                                        const Span& span) {
  using Config = ConfigOf<Row, kHeads>;
  const int thread = thread_here();
  const int lane = thread & 31;
  const int warp = (thread / 32) & 7;
  // Heads of which one load of all score warps brings the RoPE part.
  constexpr int kRopeHeads = Config::kScoreThreads / 8;
  constexpr int kLoads = kRopePart ? ceil_div(kHeads, kRopeHeads) : kHeads / 4;
  const int first_head = kRopePart ? warp % (kRopeHeads / 4) * 4 + lane / 8 : warp;
  uint4 v[kLoads];
  const int64_t stride = kRopePart ? args.rope_head_stride : args.q_head_stride;
  const bf16* from = (kRopePart ? args.q_rope + span.token * args.rope_token_stride + (lane & 7) * 8
                                : args.q + span.token * args.q_token_stride + lane * 8) +
                     (span.head_begin + first_head) * stride;
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    const int head = kRopePart ? first_head + kRopeHeads * i : first_head + 8 * (i / 2);
    const int half = kRopePart ? 0 : i & 1;
    v[i] = make_uint4(0, 0, 0, 0);
    if (head < span.head_count && (kRopePart || lane + 32 * half < Row::kNope / 8))
      v[i] = __ldg(reinterpret_cast<const uint4*>(from) + 32 * half);
    if (kRopePart || half) from += (kRopePart ? kRopeHeads : 8) * stride;
  }
  uint32_t factor = 0;
  float q_unit = 1;
  if constexpr (Row::kFp8) {
    // One power of two for all heads brings Q into fp16's range.
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kLoads; i++) most = larger(most, v[i]);
    most = largest_of_warp(most);
    if (lane == 0) atomicMax(&smem.q_max, most);
    meet<kQueryLoaded, Config::kMathThreads>();
    const int exponent = q_exponent(smem.q_max);
    factor = q_factor<Row>(exponent);
    q_unit = pow2i(exponent - kQExponent<Row>);
  }
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    const int head = kRopePart ? first_head + kRopeHeads * i : first_head + 8 * (i / 2);
    const int chunk = kRopePart ? lane & 7 : lane + 32 * (i & 1);
    if (head < kHeads && (kRopePart || chunk < Row::kNope / 8))
      put_q<Row, kHeads, kRopePart>(smem, head, chunk, v[i], factor);
  }
  fence_async();
  meet<kQueryLoaded, Config::kMathThreads>();
  return q_unit;
}

// Copies 16 bytes into shared memory, zeros where nothing `exists`.
__device__ __forceinline__ void copy_16(uint32_t to, const bf16* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(exists * 16)
               : "memory");
}

// Q of a later token, by the score warpgroups alone while the others are still at the last token.
// Three steps: request() copies all of it by cp.async to where it will be, find_exponent() looks
// for its largest value as it comes, convert() converts it in place. A warp has heads 2w and 2w+1
// of every eight, a lane two chunks of eight columns of one of them; of two warpgroups each has
// every other eight. Some 1,000 instructions a warp.
template <class Row, int kHeads>
struct QueryReload {
  using Config = ConfigOf<Row, kHeads>;
  static_assert(Row::kFp8 && kHeads % 16 == 0);
  static constexpr int kTile = kHeads * 128;
  // Turns of 16 heads, and how many eights of them this warpgroup has.
  static constexpr int kTurns = kHeads / 16;
  static constexpr int kEights = 2 / Config::kScoreWarpgroups;

  Smem<Row, kHeads>& smem;
  const int lane;
  const int warp;
  const int scorer;
  const int first_head;
  // Where this lane's RoPE chunks are, and its pairs of chunks of the NoPE part.
  uint32_t rope;
  uint32_t pairs;

  __device__ __forceinline__ explicit QueryReload(Smem<Row, kHeads>& smem)
      : QueryReload(smem, thread_here() & 127) {}

  // Of two warpgroups the second has the first 16 heads' RoPE.
  __device__ bool has_rope(int turn) const {
    return Config::kScoreWarpgroups == 1 || (turn & 1) != scorer;
  }

  // Calls f with the addresses of this lane's pairs of chunks in a turn, 32 bytes at a time.
  template <class F>
  __device__ void for_pairs(uint32_t turn, F f) const {
#pragma unroll
    for (int k = 0; k < 2 * kEights; k++)
      if (k % 2 == 0 || (lane >> 3) + 4 < Config::kNopeTiles)
        f(turn + k / 2 * 1024 + (k & 1) * 4 * kTile);
  }

  // Requests all of Q, in a group of copies for each turn of the NoPE part and one for RoPE.
  __device__ __forceinline__ void request(const Args& args, int token, int head_begin) {
    const int head_count = min(args.heads - head_begin, kHeads);
    // All warps' products with the last Q are done.
    bar<kQueryReplaced, Config::kScoreThreads>();
    // Chunk `lane` of a head, and the one 32 further. Those of odd heads lie 16 bytes aside.
    const bf16* from = args.q + token * args.q_token_stride +
                       (head_begin + first_head + 2 * warp) * args.q_head_stride + lane * 8;
    uint32_t to = s32(smem.q) + (lane >> 3) * kTile + (first_head + 2 * warp) * 128 +
                  (((lane & 7) ^ (2 * warp)) << 4);
#pragma unroll 1
    for (int head = first_head + 2 * warp; head < kHeads; head += 16) {
      // Heads h and h + 1; of both eights also h + 8 and h + 9.
#pragma unroll
      for (int k = 0; k < 2 * kEights; k++) {
        const bool exists = head + k % 2 + k / 2 * 8 < head_count;
        const uint32_t chunk = (k & 1 ? (to ^ 16) + 128 : to) + k / 2 * 1024;
        copy_16(chunk, from, exists);
        if (lane + 32 < Row::kNope / 8) copy_16(chunk + 4 * kTile, from + 256, exists);
        from += (k & 1 ? 8 * Config::kScoreWarpgroups - 1 : 1) * args.q_head_stride;
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      to += 2048;
    }
    const int rope_head = warp * 4 + lane / 8;
    rope = s32(smem.q) + Config::kNopeTiles * kTile + rope_head * 128 +
           (((lane & 7) ^ (rope_head & 7)) << 4);
    from = args.q_rope + token * args.rope_token_stride +
           (head_begin + rope_head) * args.rope_head_stride + (lane & 7) * 8;
#pragma unroll
    for (int i = 0; i < kTurns; i++)
      if (has_rope(i))
        copy_16(rope + i * 2048, from + i * 16 * args.rope_head_stride,
                rope_head + 16 * i < head_count);
    const int pair_head = 2 * warp + (lane >> 2 & 1);
    pairs = s32(smem.q) + (lane >> 3) * kTile + (first_head + pair_head) * 128 +
            (((lane & 3) * 2 ^ pair_head) << 4);
  }

  // The exponent of Q's largest value, found as Q arrives.
  __device__ __forceinline__ int find_exponent() {
    uint32_t most = 0;
    uint32_t x[8];
    uint32_t to = pairs;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; turn++, to += 2048) {
      asm volatile("cp.async.commit_group;\ncp.async.wait_group %0;" ::"n"(kTurns) : "memory");
      __syncwarp();
      for_pairs(to, [&](uint32_t pair) {
        get_shared(x, pair);
        get_shared(x + 4, pair ^ 16);
        most = larger(larger(most, make_uint4(x[0], x[1], x[2], x[3])),
                      make_uint4(x[4], x[5], x[6], x[7]));
      });
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kTurns; i++)
      if (has_rope(i)) {
        get_shared(x, rope + i * 2048);
        most = larger(most, make_uint4(x[0], x[1], x[2], x[3]));
      }
    most = largest_of_warp(most);
    if (lane == 0) smem.q_max_of_warp[4 * scorer + warp] = most;
    bar<kQueryReplaced, Config::kScoreThreads>();
#pragma unroll
    for (int k = 0; k < 4 * Config::kScoreWarpgroups; k++) most = max(most, smem.q_max_of_warp[k]);
    return q_exponent(most);
  }

  // Converts Q where it lies.
  __device__ __forceinline__ void convert(uint32_t factor) {
    uint32_t x[8];
    uint32_t to = pairs;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; turn++, to += 2048)
      for_pairs(to, [&](uint32_t pair) {
        get_shared(x, pair);
        get_shared(x + 4, pair ^ 16);
#pragma unroll
        for (int c = 0; c < 8; c++) x[c] = convert_q(x[c], factor);
        put_shared(pair, x[0], x[2], x[4], x[6]);
        put_shared(pair ^ 16, x[1], x[3], x[5], x[7]);
      });
#pragma unroll
    for (int i = 0; i < kTurns; i++)
      if (has_rope(i)) {
        get_shared(x, rope + i * 2048);
        put_shared(rope + i * 2048, mul_b2(x[0], factor), mul_b2(x[1], factor),
                   mul_b2(x[2], factor), mul_b2(x[3], factor));
      }
    fence_async();
    bar<kQueryReplaced, Config::kScoreThreads>();
  }

 private:
  __device__ __forceinline__ QueryReload(Smem<Row, kHeads>& smem, int thread)
      : smem(smem),
        lane(thread & 31),
        warp(thread / 32),
        scorer(Config::kScoreWarpgroups == 1 ? 0 : thread_here() / 128 & 1),
        first_head(8 * scorer) {}
};

// Whether the score warpgroups load the first Q too. With weigh's help Q is there 0.7 us sooner,
// but that takes 7 to 12 KB of code, for which a CTA waits longer at a token's end.
template <class Row, int kHeads, Way kWay>
constexpr bool kScoreLoadsQuery =
    Row::kFp8 && !Row::kCodes && kHeads == 64 &&
    (kWay == Way::kExchange || kWay == Way::kMany || kWay == Way::kHelped);

// Replaces Q by a later token's, and returns what the products with it are to be multiplied by.
template <class Row, int kHeads>
__device__ __forceinline__ float reload_q(Smem<Row, kHeads>& smem, const Args& args, int token,
                                          int head_begin) {
  QueryReload<Row, kHeads> reload(smem);
  reload.request(args, token, head_begin);
  const int exponent = reload.find_exponent();
  reload.convert(q_factor<Row>(exponent));
  return pow2i(exponent - kQExponent<Row>);
}

// Prefetches the next token's Q into the L2, long before it is read. By 128 threads.
template <class Row, Way kWay>
__device__ __forceinline__ void prefetch_next_q(const Args& args, const Span& span) {
  if (kWay == Way::kHelped && is_main(args)) return;
  const int64_t token = int64_t{span.token} + (kWay == Way::kHelped ? 1 : gridDim.y);
  if (token >= args.tokens) return;
  const int thread = thread_here() & 127;
  const int line = thread & 7;
#pragma unroll 1
  for (int head = thread / 8; head < span.head_count; head += 16) {
    if (line * 64 < Row::kNope)
      prefetch_l2(args.q + token * args.q_token_stride +
                  (span.head_begin + head) * args.q_head_stride + line * 64);
    if (line == 7)
      prefetch_l2(args.q_rope + token * args.rope_token_stride +
                  (span.head_begin + head) * args.rope_head_stride);
  }
}

}  // namespace winnow::internal::attend::decode_sm90
