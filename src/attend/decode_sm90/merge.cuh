// Decode on Hopper: log-sum-exp, maximum and output factor of a head (finish_head()), and the merge
// of the splits that form a cluster (Way::kCluster). Each CTA sends its units of O^T to the CTA
// that adds them up and its statistics to all: Epilogue::send_to_cluster(). Meanwhile the score
// warpgroup makes the weights of the splits, then the weigh warpgroups add up units: merge().
#pragma once

#include <cfloat>

#include "attend/decode_sm90/span.cuh"

namespace winnow::internal::attend::decode_sm90 {

// Makes the compiler read two arguments here, before a wait: a launch finds them in no cache.
__device__ __forceinline__ void touch(const void* a, const void* b) {
  asm volatile("" ::"l"(a), "l"(b) : "memory");
}

// Writes lse and max_logit of head `head` where asked to. The reference stays finite when a logit
// is +inf, and `max_logit` passes over a NaN, so both outputs take NaN from the row sum.
__device__ __forceinline__ void write_statistics(const Args& args, int token, int head,
                                                 float reference, float row_sum, float max_logit) {
  if (head >= args.heads) return;
  const bool some = row_sum != 0;
  const bool nan = row_sum != row_sum;
  const float lse = reference == FLT_MAX && !nan ? INFINITY : (log2f(row_sum) + reference) * kLn2;
  if (args.lse)
    args.lse[token * args.lse_token_stride + head * args.lse_head_stride +
             block_of(args, head) * args.lse_block_gap] = some ? lse : args.empty_lse;
  if (args.max_logit)
    args.max_logit[token * args.max_token_stride + head * args.max_head_stride] =
        nan    ? row_sum
        : some ? max_logit * kLn2
               : -INFINITY;
}
// What O of head `head` is to be multiplied by.
__device__ __forceinline__ float output_factor(const Args& args, int head, float reference,
                                               float row_sum) {
  if (head >= args.heads || row_sum == 0) return 0.f;
  const float sink = args.sink ? ex2(args.sink[head] * kLog2e - reference) : 0.f;
  return 1.f / (row_sum + sink);
}
// Does both: writes the statistics of a head and returns what its O is to be multiplied by.
__device__ __forceinline__ float finish_head(const Args& args, int token, int head, float reference,
                                             float row_sum, float max_logit, bool write) {
  if (write) write_statistics(args, token, head, reference, row_sum, max_logit);
  return output_factor(args, head, reference, row_sum);
}

// What a split's CTA receives from all splits: units of their sums, and statistics. A unit is 64
// columns (two tiles of two warps) of eight heads, so there are kHeads units. Unit u is added up by
// CTA u mod splits, where its place is u / splits.
template <class Row, int kHeads>
struct Received {
  // As the threads send them: a pair of columns a word, two heads, two tiles.
  uint4 units[kHeads + 16][64];
  // Reference, row sum and largest logit of a split's heads.
  float4 statistics[16][kHeads];
  float weight[16][kHeads];
  static_assert(sizeof(Smem<Row, kHeads>::q) + sizeof(Smem<Row, kHeads>::p) +
                    sizeof(Smem<Row, kHeads>::log2_p) + sizeof(Smem<Row, kHeads>::ring) >=
                (kHeads + 16) * 1024 + 16 * kHeads * 20);
};

// A thread's part of a unit: its sums of tiles `tile` and the next, of eight j of the heads, as
// bf16.
template <int kHeads>
__device__ __forceinline__ uint4 part_of_unit(const float (&o)[4][kHeads / 2], int tile, int j) {
  const auto two = [&](int t, int c) { return pack<true>(o[t][4 * j + c], o[t][4 * j + c + 2]); };
  return make_uint4(two(tile, 0), two(tile, 1), two(tile + 1, 0), two(tile + 1, 1));
}

// Bytes of the units that reach CTA `split` from the others.
template <int kHeads>
__device__ __forceinline__ uint32_t received_unit_bytes(const Args& args, unsigned split) {
  const unsigned splits = args.splits;
  return (splits - 1) * (over_splits(args, kHeads - split + splits - 1) * 1024);
}

// The weigh warpgroups send the statistics to every CTA of the cluster, before their units.
template <class Row, int kHeads>
__device__ __forceinline__ void send_statistics(Smem<Row, kHeads>& smem, int split, int splits) {
  auto& received = *reinterpret_cast<Received<Row, kHeads>*>(smem.q);
#pragma unroll 1
  for (int i = thread_here(); i < splits * kHeads; i += 256) {
    const int to = i / kHeads;
    const int head = i % kHeads;
    peer_put(peer(s32(&received.statistics[split][head]), to),
             make_float4(smem.reference[head], smem.row_sum[head], smem.max_logit[head], 0.f),
             peer(s32(&smem.statistics_full), to));
  }
}

// What the sums of a split are multiplied by. 16 lanes have the statistics of a head's splits, in
// the order of Received.
__device__ __forceinline__ float split_weight(const Args& args, const Span& span, int head,
                                              float4 statistics, bool write) {
  float reference = statistics.y != 0 ? statistics.x : -INFINITY;
  float max_logit = statistics.z;
#pragma unroll
  for (int d = 1; d < 16; d *= 2) {
    reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, d));
    max_logit = fmaxf(max_logit, __shfl_xor_sync(~0u, max_logit, d));
  }
  const float weight = statistics.y != 0 ? ex2(statistics.x - reference) : 0.f;
  float row_sum = statistics.y * weight;
#pragma unroll
  for (int d = 1; d < 16; d *= 2) row_sum += __shfl_xor_sync(~0u, row_sum, d);
  return weight * finish_head(args, span.token, span.head_begin + head, reference, row_sum,
                              max_logit, write);
}

// While units travel, the score warpgroup makes the weights of the splits.
template <class Row, int kHeads>
__device__ __forceinline__ void make_split_weights(Smem<Row, kHeads>& smem, const Args& args,
                                                   const Span& span, int split) {
  auto& received = *reinterpret_cast<Received<Row, kHeads>*>(smem.q);
  const int thread = thread_here() & 127;
  const int from = thread & 15;
  touch(args.lse, args.sink);
  mb_wait_cluster(&smem.statistics_full, 0);
#pragma unroll 1
  for (int head = thread / 16; head < kHeads; head += 8) {
    float4 statistics = make_float4(0.f, 0.f, -INFINITY, 0.f);
    if (from < args.splits) statistics = received.statistics[from][head];
    received.weight[from][head] =
        split_weight(args, span, head, statistics, split == 0 && from == 0);
  }
  meet<kSplitsMerging, ConfigOf<Row, kHeads>::kMathThreads>();
}

// Adds a split's part of two columns (a word) of two heads, times the heads' weights.
__device__ __forceinline__ void add_part(float (&sum)[4], uint32_t head0, uint32_t head1,
                                         float2 weight) {
  sum[0] = fmaf(__uint_as_float(head0 << 16), weight.x, sum[0]);
  sum[1] = fmaf(__uint_as_float(head0 & 0xffff0000), weight.x, sum[1]);
  sum[2] = fmaf(__uint_as_float(head1 << 16), weight.y, sum[2]);
  sum[3] = fmaf(__uint_as_float(head1 & 0xffff0000), weight.y, sum[3]);
}

// Writes two columns of two heads, from `head` of the CTA on, to an output in fp32; the columns are
// neighbours (`apart` 1) or eight apart. It is called, so that its code lies after the kernel's.
inline __device__ __noinline__ void put_merged_f32(const Args& args, int token, int head_begin,
                                                   int head, int column, int apart, float a,
                                                   float b, float c, float d) {
  const float sum[4] = {a, b, c, d};
#pragma unroll 1
  for (int k = 0; k < 2; k++) {
    if (head_begin + head + k >= args.heads) return;
    float* const to = f32_row(args, token, head_begin + head + k) + column;
    to[0] = k ? sum[2] : sum[0];
    to[apart] = k ? sum[3] : sum[1];
  }
}

// Where a thread writes what it has added up of the i-th of the 128 halves of a unit: two columns
// of two neighbouring heads. Other tiles and heads lie constants and strides further.
template <class Row, int kHeads>
struct MergedOutput {
  static constexpr bool kRopeInV = ConfigOf<Row, kHeads>::kRopeInV;
  // From a tile's columns to those of the next one of the same warpgroup.
  static constexpr int kTileColumns =
      16 * (sixteen_of<Row, kHeads>(0, 1) - sixteen_of<Row, kHeads>(0, 0));
  int tile;
  // The first of the tile's 16 columns, and the row of the fragment.
  int column, row;
  // The first of the two heads, of the CTA's.
  int head;

  __device__ __forceinline__ MergedOutput(int unit, int i) {
    const int sender = i / 2;
    const int warp = unit % 2 * 2 + sender / 32;
    tile = unit / 2 / (kHeads / 8) * 2 + (i & 1);
    column = tile / 4 * 256 + sixteen_of<Row, kHeads>(warp, tile % 4) * 16;
    row = (sender & 31) >> 2;
    head = 8 * (unit / 2 % (kHeads / 8)) + 2 * (sender & 3);
  }
  // Whether the two columns are neighbours. Otherwise they are eight apart.
  __device__ __forceinline__ bool neighbours(int tiles_further) const {
    if constexpr (!Row::kFp8) return false;
    return !kRopeInV || tile + tiles_further < 7;
  }
  __device__ __forceinline__ int column_of(int tiles_further) const {
    return column + tiles_further * kTileColumns + (neighbours(tiles_further) ? 2 * row : row);
  }
  // The output of the first head and tile.
  __device__ __forceinline__ bf16* address(const Args& args, const Span& span) const {
    return args.out + span.token * args.out_token_stride +
           (span.head_begin + head) * args.out_head_stride;
  }
  // Writes to heads and tiles that lie so much further than `to`, which address() gave.
  __device__ __forceinline__ void put(const Args& args, const Span& span, bf16* to,
                                      int heads_further, int tiles_further,
                                      const float (&sum)[4]) const {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if (head + heads_further + k >= span.head_count) break;
      bf16* const at = to + (heads_further + k) * args.out_head_stride + column_of(tiles_further);
      const uint32_t two = pack<true>(sum[2 * k], sum[2 * k + 1]);
      if (neighbours(tiles_further)) {
        *reinterpret_cast<uint32_t*>(at) = two;
      } else {
        reinterpret_cast<uint16_t*>(at)[0] = two & 0xffff;
        reinterpret_cast<uint16_t*>(at)[8] = two >> 16;
      }
    }
  }
};

// Writes kHalves halves of a unit, from the i-th of its 128 on, to the output.
template <class Row, int kHeads, int kHalves>
__device__ __forceinline__ void put_merged(const Args& args, const Span& span, int unit, int i,
                                           const float (&sum)[kHalves][4]) {
  const MergedOutput<Row, kHeads> output(unit, i);
  if (args.out_f32) {
#pragma unroll
    for (int h = 0; h < kHalves; h++)
      put_merged_f32(args, span.token, span.head_begin, output.head, output.column_of(h),
                     output.neighbours(h) ? 1 : 8, sum[h][0], sum[h][1], sum[h][2], sum[h][3]);
    return;
  }
  bf16* const to = output.address(args, span);
#pragma unroll
  for (int h = 0; h < kHalves; h++) output.put(args, span, to, 0, h, sum[h]);
}

// The weigh warpgroups add up the CTA's share of the output, in the order of the splits.
template <class Row, int kHeads>
__device__ __forceinline__ void merge(Smem<Row, kHeads>& smem, const Args& args, const Span& span,
                                      int split) {
  auto& received = *reinterpret_cast<Received<Row, kHeads>*>(smem.q);
  const int thread = thread_here();
  const int splits = args.splits;
  touch(args.out, reinterpret_cast<const void*>(args.out_head_stride));
  mb_wait_cluster(&smem.inbox, 0);
  // The weights are there.
  meet<kSplitsMerging, ConfigOf<Row, kHeads>::kMathThreads>();
  const int units = static_cast<int>(over_splits(args, kHeads - split + splits - 1));
  // A thread has two columns of two heads. The loop is short, since its code is in no cache.
#pragma unroll 1
  for (int i = thread; i < units * 128; i += 256) {
    const int place = i / 128;
    const int sender = i / 2 & 63;
    const int unit = place * splits + split;
    const uint2* part = reinterpret_cast<const uint2*>(received.units[place * splits]) + (i & 127);
    const float* weight = &received.weight[0][8 * (unit / 2 % (kHeads / 8)) + 2 * (sender & 3)];
    float sum[1][4] = {};
#pragma unroll 4
    for (int s = 0; s < splits; s++, part += 128, weight += kHeads)
      add_part(sum[0], part->x, part->y, *reinterpret_cast<const float2*>(weight));
    put_merged<Row, kHeads>(args, span, unit, i & 127, sum);
  }
}

}  // namespace winnow::internal::attend::decode_sm90
