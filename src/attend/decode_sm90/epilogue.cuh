// Decode on Hopper: what a thread of the weigh warpgroups has, and the end of a token: row sums,
// statistics, and the output or the hand-over to the other splits.
#pragma once

#include "attend/decode_sm90/helped.cuh"

namespace winnow::internal::attend::decode_sm90 {

// How far a weigh warpgroup is, and its sums O^T: of each of a warp's four tiles of 16 columns,
// kHeads / 2 a thread.
template <int kHeads>
struct WeighProgress : Progress {
  float o[4][kHeads / 2];
};

// What a thread of the weigh warpgroups has, and the end of a token. Weigh derives from it.
template <class Row, int kHeads, Way kWay>
struct Epilogue {
  using Config = ConfigOf<Row, kHeads>;
  using Staging = OutputStaging<Row, kHeads, kWay>;
  // Heads are counted in eights, the N of a matrix tile. This warpgroup makes P of kOwnEights of
  // them from first_eight on; the second warpgroup has one less where their number is odd.
  static constexpr int kOwnEights = (kHeads / 8 + 1) / 2;

  Smem<Row, kHeads>& smem;
  const Args& args;
  const Span& span;
  const int warpgroup;
  WeighProgress<kHeads>& progress;
  float (&o)[4][kHeads / 2];
  const int thread;
  const int lane;
  const int warp;
  // Of a matrix fragment: which pair of columns this lane has, and which row.
  const int quad;
  const int row;
  const int first_eight;
  const int eight_count;
  // Sums of P over this thread's rows, for two heads of each own eight.
  float (&row_sum)[2 * kOwnEights];

  __device__ __forceinline__ Epilogue(Smem<Row, kHeads>& smem, const Args& args, const Span& span,
                                      int warpgroup, int thread, WeighProgress<kHeads>& progress,
                                      float (&row_sum)[2 * kOwnEights])
      : smem(smem),
        args(args),
        span(span),
        warpgroup(warpgroup),
        progress(progress),
        o(progress.o),
        thread(thread),
        lane(thread & 31),
        warp(thread / 32),
        quad(lane & 3),
        row(lane >> 2),
        first_eight(warpgroup * kOwnEights),
        eight_count(kHeads / 8 - first_eight),
        row_sum(row_sum) {}

  __device__ bool has_eight(int j) const {
    return kHeads % 16 == 0 || j + 1 < kOwnEights || j < eight_count;
  }
  __device__ void wait_for_peer() const { bar<kWeighing, Config::kWeighThreads>(); }

  // The head whose statistics this thread keeps. Computed where it is used rather than kept in a
  // register.
  struct KeptHead {
    int head;
    bool exists;
  };
  __device__ KeptHead kept_head() const {
    const int own = thread_here() & 127;
    const int head = 8 * first_eight + own;
    return {head, own < 8 * kOwnEights && head < kHeads};
  }

  // Adds up the row sums of each head over the warpgroup's threads; row_sum_of() has them then.
  __device__ void add_row_sums() {
    const int here = thread_here();
    const int lane = here & 31;
    const int warp = here / 32 & 3;
    const int quad = lane & 3;
    float* const to = &smem.warp_part[warp][8 * (here / 128 * kOwnEights) + 2 * quad];
#pragma unroll
    for (int c = 0; c < 2 * kOwnEights; c++)
#pragma unroll
      for (int d = 4; d < 32; d *= 2) row_sum[c] += __shfl_xor_sync(~0u, row_sum[c], d);
    if (lane < 4) {
#pragma unroll
      for (int j = 0; j < kOwnEights; j++)
        if (has_eight(j))
          *reinterpret_cast<float2*>(to + 8 * j) = make_float2(row_sum[2 * j], row_sum[2 * j + 1]);
    }
    wait_for_peer();
  }
  __device__ float row_sum_of(int head) const {
    return (smem.warp_part[0][head] + smem.warp_part[1][head]) +
           (smem.warp_part[2][head] + smem.warp_part[3][head]);
  }

  // Way::kExchange: marks the slots of this CTA's statistics as empty, before the first block.
  __device__ __forceinline__ void mark_own_statistics() {
    if (const auto [head, exists] = kept_head(); exists) mark_statistics<kHeads>(args, span, head);
    __syncwarp();
    if (lane == 0) mb_arrive(&smem.slots_marked);
  }
  // Way::kExchange: publishes the statistics before the last block's products.
  __device__ __forceinline__ void send_statistics_early() {
    add_row_sums();
    if (const auto [head, exists] = kept_head(); exists)
      publish_statistics<Row, kHeads>(smem, args, span_here<kHeads>(args), head, row_sum_of(head));
  }

  // The end of a token, when all of its products are done: `kv_stage` is the stage and `block_end`
  // the block after its last.
  __device__ __forceinline__ void epilogue(int kv_stage, int block_end) {
    if (kWay == Way::kExchange && args.exchange) return exchange(block_end);
    if constexpr (kWay == Way::kExchange) return;
    add_row_sums();
    progress.kv_stage = kv_stage;
    progress.block = block_end;
    if constexpr (kWay == Way::kMany) finish_one_of_many(kv_stage, block_end);
    else if constexpr (kWay == Way::kHelped) finish_part(block_end);
    else if constexpr (kWay == Way::kAlone) finish_alone();
    else send_to_cluster();
  }

  // Way::kExchange: stores this split's sums in the workspace, and adds up this CTA's share of all
  // splits' sums.
  __device__ __forceinline__ void exchange(int block_end) {
    // Computed again rather than kept in registers over the loop of blocks.
    const Span here = span_here<kHeads>(args);
    mb_wait(&smem.slots_marked, 0);
    publish_units<kHeads>(args, here, o);
    // send_statistics_early() did not run if there was no block.
    if (const auto [head, exists] = kept_head(); exists && block_end == progress.block)
      publish_statistics<Row, kHeads>(smem, args, here, head, 0.f);
    collect_units<Row, kHeads>(smem, args, here);
  }

  // Sets a head's statistics back for the next token, and lets its first scores begin.
  __device__ __forceinline__ void reset_statistics(int head, int block_end) {
    if (span.blocks == 0) return;
    smem.reference[head] = smem.row_sum[head] = 0.f;
    smem.max_logit[head] = -INFINITY;
    if (head == 0) smem.outgrown[block_end & 1] = 1;
    mb_arrive(statistics_reset(smem));
  }

  // The end of a part of a helped token. In a main, add_parts() follows.
  __device__ __forceinline__ void finish_part(int block_end) {
    const int cta = cta_number();
    const bool helps = cta >= args.main_ctas;
    if (helps && smem.part[span.token % kMostHelperParts].end == 0) return;
    const bool stores = helps || args.mains == 2;
    const int part = part_of(args, CtaNumber{}, span.token);
    if (const auto [head, exists] = kept_head(); exists) {
      const float sum = row_sum_of(head);
      smem.row_sum[head] = sum;
      if (stores)
        statistics_of<kHeads>(args, part)[head] =
            make_float4(smem.reference[head], sum, smem.max_logit[head], 0.f);
      if (helps) reset_statistics(head, block_end);
    }
    // Lets a main's score warpgroup bring sums to where the rows were, and make the parts' weights.
    const auto announce = [&] {
      if (!helps && thread_here() == 0) mb_arrive(&smem.peers_marked);
    };
    if (!stores) {
      wait_for_peer();
      announce();
    }
    // Whether this CTA adds up this warpgroup's columns: then they stay in its shared memory.
    const bool adds = !helps && (args.mains == 1 || warpgroup == (cta & 1));
    store_units<kHeads>(
        adds ? own_half(smem, args, warpgroup) : half_of<kHeads>(args, part, warpgroup), o);
    if (helps) set_to_zero<kHeads>(o);
    if (stores) {
      wait_for_peer();
      announce();
      if (thread_here() == 0) raise_flag(args, part);
    }
  }

  // Way::kMany: writes the output of one of the CTA's tokens.
  __device__ __forceinline__ void finish_one_of_many(int kv_stage, int block_end) {
    const auto [head, exists] = kept_head();
    float reference = 0;
    float sum = 0;
    float max_logit = 0;
    if (exists) {
      reference = smem.reference[head];
      max_logit = smem.max_logit[head];
      sum = row_sum_of(head);
      smem.factor[head] =
          output_factor(args, span_here<kHeads>(args).head_begin + head, reference, sum);
      reset_statistics(head, block_end);
    }
    const auto write_rest = [&] {
      if (exists)
        write_statistics(args, span.token, span_here<kHeads>(args).head_begin + head, reference,
                         sum, max_logit);
    };
    wait_for_peer();
    if constexpr (Staging::kUsed) {
      if (span.blocks > 0) send_staged(kv_stage, block_end);
      else put_zeros<kHeads>(args, span.token);
      write_rest();
      const bool last_token = args.tokens - span.token <= static_cast<int>(gridDim.y);
      if (last_token) wait_for_reads();
    } else {
      write_rest();
      write_out<Row, kHeads, true>(smem, args, span.token, o, warpgroup);
    }
  }

  // Sends the output by bulk copies (OutputStaging). Heads that lie over log2 P leave first, since
  // score waits for that place.
  __device__ __forceinline__ void send_staged(int kv_stage, int block_end) {
    if constexpr (Staging::kOverLog2P) {
      stage_output<Staging::kEights, kHeads / 8>(Staging(smem, kv_stage), smem, o, warpgroup);
      wait_for_peer();
      send_output<Staging::kEights, kHeads / 8>(Staging(smem, kv_stage), args, span.token);
    }
    stage_output<0, Staging::kEights>(Staging(smem, kv_stage), smem, o, warpgroup);
    if constexpr (Staging::kOverLog2P) {
      wait_for_reads();
      mb_arrive(&smem.log2_p_empty[(block_end - 1) & 1]);
    }
    wait_for_peer();
    send_output<0, Staging::kEights>(Staging(smem, kv_stage), args, span.token);
  }

  // Way::kAlone: writes the output of the CTA's only token. The launch of the tokens after the last
  // full wave may begin meanwhile, but not earlier: it would find less of its code in the caches.
  __device__ __forceinline__ void finish_alone() {
    let_next_start();
    const auto [head, exists] = kept_head();
    // With weights as e4m3 no register is left to keep it over the loop of blocks.
    const Span here = Row::kCodes ? span_here<kHeads>(args) : span;
    if (exists) {
      smem.row_sum[head] = row_sum_of(head);
      smem.factor[head] =
          finish_head(args, here.token, here.head_begin + head, smem.reference[head],
                      smem.row_sum[head], smem.max_logit[head], true);
    }
    wait_for_peer();
    if (args.out_f32) return write_out_f32<Row, kHeads>(smem, args, here.token, o);
    write_out<Row, kHeads, false>(smem, args, here.token, o, warpgroup);
  }

  // Way::kCluster: sends the sums as bf16 to the CTAs of the cluster that add them up, over their
  // dead Q, P and rows. That is off by 2^-9 sum p|v| at most, as much as the output's own rounding
  // adds, and halves what the merge waits for: distributed shared memory takes 14 bytes a cycle.
  __device__ __forceinline__ void send_to_cluster() {
    const auto [head, exists] = kept_head();
    if (exists) smem.row_sum[head] = row_sum_of(head);
    meet<kSplitsMerging, Config::kMathThreads>();
    const int rank = split_here(args);
    const int splits = args.splits;
    if (warpgroup == 0 && thread == 0) {
      mb_expect(&smem.inbox, received_unit_bytes<kHeads>(args, rank));
      mb_expect(&smem.statistics_full, splits * (kHeads * 16));
    }
    cluster_meet();
    send_statistics<Row, kHeads>(smem, rank, splits);
    // Unit u goes to CTA u mod splits, where its place is u / splits.
    const int first = warpgroup * (kHeads / 2) + warp / 2;
    int place = static_cast<int>(over_splits(args, first));
    int owner = first - place * splits;
    auto& received = *reinterpret_cast<Received<Row, kHeads>*>(smem.q);
#pragma unroll
    for (int tile = 0; tile < 4; tile += 2)
#pragma unroll
      for (int j = 0; j < kHeads / 8; j++) {
        const uint4 part = part_of_unit<kHeads>(o, tile, j);
        uint4* to = &received.units[place * splits + rank][thread & 63];
        if (owner == rank) *to = part;
        else peer_put(peer(s32(to), owner), part, peer(s32(&smem.inbox), owner));
        owner += 2;
        if (owner >= splits) {
          owner -= splits;
          place++;
        }
      }
  }
};

}  // namespace winnow::internal::attend::decode_sm90
