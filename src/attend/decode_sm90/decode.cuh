// Sparse decode attention on Hopper: O = softmax(Q K^T) V over the rows that each token's lists
// name, straight from the pages of the cache. A CTA takes one token, up to 64 heads and a part of
// its lists, or one token after the other (Way). Who does what:
// - the last warpgroup, or the last two (CrewOf), copies records as they are stored into a ring of
//   16-row stages, one bulk copy a row; a warp of it finds where later rows are and describes the
//   blocks that have arrived for the others (gather.cuh, describe.cuh);
// - warpgroup 2, with 32 heads or fewer also 3, each every other block, reads rows as matrix
//   fragments, dequantises them in registers (fp8 to fp16, scales divided by the row's power of
//   two), computes S^T = K Q^T with heads on the N side, and stores log2 P (score.cuh);
// - warpgroups 0 and 1 make P of half of the heads each, read the same rows transposed, dequantise
//   them again, and compute O^T += V^T P^T, 256 columns each (weigh.cuh, epilogue.cuh).
// The splits of a token form a cluster and merge through distributed shared memory, each sending
// its sums to their owner (merge.cuh), or they merge through a workspace (exchange.cuh). Budget for
// 64 rows and 64 heads: 2,200 cycles of matrix work, 2,050 of shared memory, 3,300 to gather
// 656-byte rows at the memory's rate. Measurements: docs/decode-sm90.md.
#pragma once

#include <algorithm>
#include <atomic>

#include "attend/decode_sm90/gather.cuh"
#include "attend/decode_sm90/launch.h"
#include "attend/decode_sm90/query.cuh"
#include "attend/decode_sm90/score.cuh"
#include "attend/decode_sm90/weigh.cuh"
#include "cuda/launch.h"

namespace winnow::internal::attend::decode_sm90 {

// Initialises the mbarriers and the statistics. Every launch waits for this, and an mbarrier takes
// about 70 cycles, so all warps share them: about three each.
template <class Row, int kHeads, Way kWay>
__device__ __forceinline__ void initialize(Smem<Row, kHeads>& smem) {
  using Crew = CrewOf<Row, kHeads, kWay>;
  using Barriers = BarrierTable<Row, kHeads, kWay>;
  using Memory = Smem<Row, kHeads>;
  static_assert(Barriers::agrees());
  static_assert(offsetof(Memory, q_max) - offsetof(Memory, stage_full) == 8 * Barriers::kBarriers);
  const int thread = threadIdx.x;
  if ((thread & 31) == 0) {
#pragma unroll 1
    for (int b = thread / 32; b < Barriers::kBarriers; b += Crew::kThreads / 32)
      mb_init(s32(smem.stage_full) + 8 * b, Barriers::arrivals(b));
    fence_barrier_init();
  }
  if (thread == 0) {
    smem.q_max = smem.outgrown[1] = 0;
    // The first block always sets the reference.
    smem.outgrown[0] = 1;
  }
  if (thread < kHeads) {
    smem.reference[thread] = smem.row_sum[thread] = 0.f;
    smem.max_logit[thread] = -INFINITY;
  }
}

// A score warpgroup's tokens, one after the other, where it loads every Q, also the first, by the
// same code (kScoreLoadsQuery).
template <class Row, int kHeads, Way kWay>
__device__ __forceinline__ void score_tokens(Smem<Row, kHeads>& smem, const Args& args, Span span) {
  Progress progress{thread_here() / 32 & 3};
  float q_unit = 1;
  bool first = true;
  // Whether this token has rows, so that its Q is needed; whether the token before had some.
  bool load = true;
  bool had_blocks = false;
#pragma unroll 1
  for (uint32_t phase = 0;;) {
    // Q is replaced while weigh is still at the last token's last block. Scores wait until weigh
    // has set back the statistics of a token that had rows.
    if (load) q_unit = reload_q(smem, args, span.token, span.head_begin);
    if (first) count_blocks<kWay>(smem, args, span);
    first = false;
    if (had_blocks) {
      mb_wait(statistics_reset(smem), phase);
      phase ^= 1;
    }
    if (first_scorer()) prefetch_next_q<Row, kWay>(args, span);
    score<Row, kHeads>(smem, args, span, q_unit, progress);
    had_blocks = span.blocks > 0;
    if (!next_token<kWay>(smem, args, span)) {
      if constexpr (kWay == Way::kHelped) collect_parts<Row, kHeads>(smem, args, span);
      return;
    }
    load = span.blocks > 0;
  }
}

template <class Row, int kHeads, Way kWay>
__global__ void __launch_bounds__(CrewOf<Row, kHeads, kWay>::kThreads, 1)
    decode(const __grid_constant__ Args args) {
  using Config = ConfigOf<Row, kHeads>;
  using Crew = CrewOf<Row, kHeads, kWay>;
  constexpr bool kWalks = walks(kWay);
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  auto& smem = *reinterpret_cast<Smem<Row, kHeads>*>(raw_smem);
  const int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  // Tokens beyond the last one, where the grid is rounded up along z. A whole cluster returns.
  if (blockIdx.z && token_here() >= args.tokens) return;
  // Request the first indices, and the last one, before anything else: rows wait for them.
  Span ahead{};
  int index = -1;
  int list = 0;
  int last = 0;
  if (warpgroup >= Config::kFirstCopyWarpgroup) {
    ahead = span_here<kHeads, kWay>(args);
    cut<Config, kWay>(args, ahead);
    index = first_index<Config, Crew>(args, ahead, list);
    if constexpr (!kWalks) last = last_index(args, ahead);
    if constexpr (kWay == Way::kHelped) {
      const int warp = copy_warp<Crew>();
      if (warp + 1 < kMostHelperParts) publish_later_part(smem, args, ahead.token + 1 + warp);
      if (thread_here() == 128 * Config::kFirstCopyWarpgroup) publish_first_part(smem, args, ahead);
    }
  }
  // CTAs that share Q bring it to the L2, a part each. (Way::kCluster, kExchange and kHelped.)
  if (kWay >= Way::kCluster && warpgroup == 1) prefetch_q<kHeads>(args);
  // Initialise the barriers. From here on roles meet at the barriers of layout.cuh alone.
  initialize<Row, kHeads, kWay>(smem);
  __syncthreads();
  // The copying warps' code comes out first, next to this: a jump to code that is in no cache takes
  // hundreds of cycles.
  if (warpgroup < kFirstScoreWarpgroup) {
    // Weigh: load the NoPE part of Q, then take blocks.
    Span span = span_here<kHeads, kWay>(args);
    if constexpr (!kScoreLoadsQuery<Row, kHeads, kWay>)
      load_q<Row, kHeads, false>(smem, args, span);
    take_registers<Crew::kWeighRegisters>();
    count_blocks<kWay>(smem, args, span);
    WeighProgress<kHeads> progress{};
    // Keep the zeros in registers from here on: else the compiler makes them anew on the path of a
    // token without blocks.
#pragma unroll
    for (auto& o : progress.o) hold(o);
#pragma unroll 1
    do weigh<Row, kHeads, kWay>(smem, args, span, warpgroup, progress);
    while (kWalks && next_token<kWay>(smem, args, span));
    // Add up what other CTAs have of this token.
    if constexpr (kWay == Way::kHelped) add_parts<Row, kHeads>(smem, args, span.token);
    if constexpr (kWay == Way::kCluster) merge<Row, kHeads>(smem, args, span, split_here(args));
  } else if (warpgroup < Config::kFirstCopyWarpgroup) {
    // Score: load Q or its RoPE part, then take blocks. Six warpgroups begin with fewer registers
    // than score needs.
    if constexpr (Crew::kThreads > 640) take_registers<Crew::kScoreRegisters>();
    else give_registers<Crew::kScoreRegisters>();
    Span span = span_here<kHeads, kWay>(args);
    constexpr bool kLoads = kScoreLoadsQuery<Row, kHeads, kWay>;
    if constexpr (kWalks && kLoads) return score_tokens<Row, kHeads, kWay>(smem, args, span);
    float q_unit;
    if constexpr (kLoads) q_unit = reload_q(smem, args, span.token, span.head_begin);
    else q_unit = load_q<Row, kHeads, true>(smem, args, span);
    count_blocks<kWay>(smem, args, span);
    Progress progress{thread_here() / 32 & 3};
    if constexpr (kWalks) {
      // As in score_tokens(), but weigh has loaded a part of the first Q.
#pragma unroll 1
      for (uint32_t phase = 0;;) {
        if (first_scorer()) prefetch_next_q<Row, kWay>(args, span);
        score<Row, kHeads>(smem, args, span, q_unit, progress);
        const bool had_blocks = span.blocks > 0;
        if (!next_token<kWay>(smem, args, span)) {
          if constexpr (kWay == Way::kHelped) collect_parts<Row, kHeads>(smem, args, span);
          return;
        }
        if (span.blocks > 0) q_unit = reload_q(smem, args, span.token, span.head_begin);
        if (had_blocks) {
          mb_wait(statistics_reset(smem), phase);
          phase ^= 1;
        }
      }
    }
    score<Row, kHeads>(smem, args, span, q_unit, progress);
    // Make the weights of the splits.
    if constexpr (kWay == Way::kExchange) {
      if (first_scorer()) return make_exchanged_weights<Row, kHeads>(smem, args, span);
      // The second score warpgroup meets the others as the first one does.
      bar<kQueryReplaced, Config::kScoreThreads>();
      meet<kSplitsMerging, Config::kMathThreads>();
    } else if constexpr (kWay == Way::kCluster) {
      meet<kSplitsMerging, Config::kMathThreads>();
      cluster_meet();
      if (first_scorer())
        return make_split_weights<Row, kHeads>(smem, args, span, split_here(args));
      meet<kSplitsMerging, Config::kMathThreads>();
    }
  } else {
    give_registers<Crew::kCopyRegisters>();
    // Publish how many blocks the first token has without the padding at its list's end. (Where
    // CTAs take whole tokens, one after the other, every role counts blocks itself.)
    if constexpr (kWay != Way::kMany) {
      if constexpr (!kWalks) trim<Config>(args, ahead, last);
      if (thread_here() == 128 * Config::kFirstCopyWarpgroup) {
        smem.blocks = ahead.blocks;
        mb_arrive(&smem.blocks_counted);
      }
    }
    // Copy rows. The warps that are no copiers find and describe them.
    copy<Row, kHeads, kWay>(smem, args, ahead, index, list);
    if (copy_warp<Crew>() >= Crew::kCopiers) look_ahead<Row, kHeads, kWay>(smem, args, ahead);
    // Meet the other splits.
    if constexpr (kWay == Way::kExchange) {
      const int warp = copy_warp<Crew>();
      // Computed again rather than kept in registers over the loops before.
      Span here = span_here<kHeads>(args);
      here.blocks = ahead.blocks;
      if (warp == 0) meet_peers<Row, kHeads>(smem, args, here);
      if (warp == 1 || warp == 2) mark_units<Row, kHeads>(smem, args, here);
    } else if constexpr (kWay == Way::kCluster) {
      cluster_meet();
    }
  }
}

// Sets the kernel's attributes, once a device.
template <class Row, int kHeads, Way kWay>
cudaError_t prepare() {
  // A bit for each device.
  static std::atomic<uint64_t> done{0};
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  if (const cudaError_t e = allow_shared(decode<Row, kHeads, kWay>, sizeof(Smem<Row, kHeads>)))
    return e;
  if (const cudaError_t e = cudaFuncSetAttribute(decode<Row, kHeads, kWay>,
                                                 cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
    return e;
  done.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

template <class Row, int kHeads, Way kWay>
struct Launch {
  cudaLaunchConfig_t config;
  cudaLaunchAttribute attribute[2];
  cudaError_t ready = prepare<Row, kHeads, kWay>();

  Launch(dim3 grid, cudaStream_t stream)
      : config(launch_config(grid, CrewOf<Row, kHeads, kWay>::kThreads, sizeof(Smem<Row, kHeads>),
                             stream)) {
    config.attrs = attribute;
    config.numAttrs = 0;
  }
  // All CTAs run at once or none.
  void at_once() { add(cudaLaunchAttributeCooperative).cooperative = 1; }
  // CTAs form clusters.
  void in_clusters(unsigned x, unsigned y) {
    if (x * y == 1) return;
    cudaLaunchAttributeValue& value = add(cudaLaunchAttributeClusterDimension);
    value.clusterDim.x = x;
    value.clusterDim.y = y;
    value.clusterDim.z = 1;
  }
  // Lets it begin beside the kernel before it on the stream.
  void overlap() {
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  }

 private:
  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& next = attribute[config.numAttrs++];
    next.id = id;
    return next.val;
  }
};

template <class Row, int kHeads, Way kWay>
cudaError_t launch(const Args& args, unsigned tokens, cudaStream_t stream) {
  const auto splits = static_cast<unsigned>(args.splits);
  const dim3 grid(splits * static_cast<unsigned>(args.groups), std::min<unsigned>(tokens, kTokensY),
                  ceil_div(tokens, kTokensY));
  Launch<Row, kHeads, kWay> launch(grid, stream);
  if (launch.ready) return launch.ready;
  if constexpr (kWay == Way::kExchange) launch.at_once();
  if constexpr (kWay == Way::kCluster) launch.in_clusters(splits, 1);
  if constexpr (kWay == Way::kHelped) {
    // The mains of a token wait for each other.
    launch.in_clusters(1, static_cast<unsigned>(args.mains));
    launch.overlap();
  }
  return cudaLaunchKernelEx(&launch.config, decode<Row, kHeads, kWay>, args);
}

// Chooses the way from what launch.cu has decided. CTAs go from token to token if fewer tokens run
// at once than there are and takes_many_tokens() allows it.
template <class Row, int kHeads>
cudaError_t launch_way(const Args& args, int tokens_at_once, cudaStream_t stream) {
  if constexpr (takes_many_tokens(Row::Stored::kFormat, kHeads, false))
    if (tokens_at_once < args.tokens)
      return launch<Row, kHeads, Way::kMany>(args, tokens_at_once, stream);
  if constexpr (takes_helpers(Row::Stored::kFormat, kHeads) && !Row::kCodes)
    if (args.token_blocks > 0)
      return launch<Row, kHeads, Way::kHelped>(args, tokens_at_once, stream);
  if (args.exchange) return launch<Row, kHeads, Way::kExchange>(args, args.tokens, stream);
  if (args.splits > 1) return launch<Row, kHeads, Way::kCluster>(args, args.tokens, stream);
  return launch<Row, kHeads, Way::kAlone>(args, args.tokens, stream);
}

// Chooses the instantiation whose CTA has share.heads heads.
template <class Row, int kMaxHeads>
cudaError_t launch_share(const Args& args, Share share, cudaStream_t stream) {
  switch (share.heads) {
    case 8: return launch_way<Row, 8>(args, share.tokens, stream);
    case 16: return launch_way<Row, 16>(args, share.tokens, stream);
    case 24: return launch_way<Row, 24>(args, share.tokens, stream);
    case 32: return launch_way<Row, 32>(args, share.tokens, stream);
    case 48: return launch_way<Row, 48>(args, share.tokens, stream);
    default:
      if constexpr (kMaxHeads >= 64) return launch_way<Row, 64>(args, share.tokens, stream);
      else return cudaErrorInvalidConfiguration;
  }
}
template <class Row, int kMaxHeads>
void launch_heads(const Args& args, Share share, cudaStream_t stream) {
  keep_error(launch_share<Row, kMaxHeads>(args, share, stream));
}

}  // namespace winnow::internal::attend::decode_sm90
