// Decode on Hopper: what the kernel's parts share. In this order: how a record is read (RowTraits),
// the arguments (Args), what a CTA takes (Way), the sizes of a CTA (ConfigOf), its warps and their
// registers (CrewOf), its named barriers, its shared memory (Smem) and the mbarriers in that
// (BarrierTable).
//
// Words: a stage is 16 rows of the ring, a block 64 rows (four stages). Lambda is a row's power of
// two: its exponent is that of the row's largest scale less some headroom, so that K / 2^lambda
// fits fp16. log2 P is a logit in log2 units less the head's reference, plus lambda.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <type_traits>

#include "attend/decode_sm90/cut.h"
#include "attend/decode_sm90/parts.h"
#include "attend/device_params.h"
#include "core/arithmetic.h"
#include "cuda/hopper.h"
#include "cuda/wgmma_f16.h"
#include "cuda/wgmma_fp8.h"
#include "model/v32.h"
#include "model/v4.h"

namespace winnow::internal::attend::decode_sm90 {

using namespace internal::cuda;

// A record as the kernel reads it: one bulk copy of kRowBytes, and kSideBytes of scales where they
// lie elsewhere in the page.
template <class Record>
struct RowTraits {
  using Stored = Record;
  using Quantized = std::conditional_t<std::is_base_of_v<V32, Record>, V32Fp8, V4Fp8>;
  static constexpr bool kFp8 = Record::kQuantized;
  static constexpr int kNope = Record::kNope;
  static constexpr int kQk = Record::kDqk;
  static constexpr int kV = Record::kDv;
  static constexpr int kRowBytes = Record::kRowBytes;
  static constexpr int kTile = [] {
    if constexpr (kFp8) return Record::kTile;
    return 0;
  }();
  static constexpr int kScales = [] {
    if constexpr (kFp8) return Record::kTiles;
    return 0;
  }();
  static constexpr int kRopeOffset = [] {
    if constexpr (kFp8) return static_cast<int>(Record::rope(0, 1));
    return kNope * 2;
  }();
  static constexpr int kScaleOffset = [] {
    if constexpr (kFp8) return static_cast<int>(Record::scales(0, 1));
    return 0;
  }();
  static constexpr int kSideBytes = [] {
    if constexpr (kFp8) return kScaleOffset >= kRowBytes ? Record::kScaleBytes : 0;
    return 0;
  }();
  // Whether Q and P are e4m3, and codes are multiplied as they are stored (codes.cuh).
  static constexpr bool kCodes = false;
};

struct Splits {
  // The lists of a token are cut into this many parts.
  int splits;
  // 2^31 / splits, rounded up: over_splits() divides by it.
  uint32_t reciprocal;
  // The workspace where splits meet that are no cluster (all CTAs run at once), or null.
  std::byte* exchange;
};
// An output in fp32 instead of DeviceParams::out, in blocks of heads.
struct F32Output {
  // Null: bf16, to `out`.
  float* out_f32;
  // How much farther than by its head's stride the first head of a block is from the one before
  // it, times the block's number: of the output and of lse.
  int64_t out_block_gap;
  int64_t lse_block_gap;
  // 2^16 / heads of a block, rounded up; 0: one block. Exact for up to 128 heads.
  uint32_t block_reciprocal;
};
struct Args : Splits, DeviceParams, F32Output, HelpedTokens {};

__device__ __forceinline__ int64_t block_of(const Args& args, int head) {
  return static_cast<uint32_t>(head) * args.block_reciprocal >> 16;
}
// The row of a token and head in an fp32 output.
__device__ __forceinline__ float* f32_row(const Args& args, int token, int head) {
  return args.out_f32 + token * args.out_token_stride + head * args.out_head_stride +
         block_of(args, head) * args.out_block_gap;
}

// What a CTA takes. Each way is a kernel of its own, because the first 64 KB of code come with a
// launch and what lies beyond takes 0.3 us a KB where another kernel has run in between.
enum class Way {
  // One token with all of its rows.
  kAlone,
  // One token after the other, with all of their rows.
  kMany,
  // A split of a token's lists. The splits of a token form a cluster (merge.cuh).
  kCluster,
  // The same, but the splits meet in the workspace (exchange.cuh).
  kExchange,
  // The first blocks of a token, or the last blocks of one or more tokens (helped.cuh).
  kHelped,
};
// Whether a CTA may go from token to token: rows, blocks and the phases of barriers are then
// counted over all of its tokens.
constexpr bool walks(Way way) { return way == Way::kMany || way == Way::kHelped; }

// n / splits. Exact below 2^27. Up to 2^29 it may be one more than the whole part, but not where n
// is a multiple of the splits.
__device__ __forceinline__ unsigned over_splits(const Args& args, unsigned n) {
  return static_cast<unsigned>(uint64_t{n} * args.reciprocal >> 31);
}

// Warpgroups 0 and 1 weigh. After them come the score warpgroups, then those of the copying warps.
constexpr int kFirstScoreWarpgroup = 2;

// Sizes of a CTA of kHeads heads.
template <class Row, int kHeads>
struct ConfigOf {
  // Rows of a pipeline stage and of a block.
  static constexpr int kRows = 16, kBlock = 64;
  static_assert(kBlock == kBlockRows);
  static constexpr int kStagesPerBlock = kBlock / kRows;
  // With few heads, one score warpgroup would take longer for a block than the two that weigh it.
  // So two of them take blocks in turn.
  static constexpr int kScoreWarpgroups = kHeads <= 32 && Row::kFp8 ? 2 : 1;
  static constexpr int kFirstCopyWarpgroup = kFirstScoreWarpgroup + kScoreWarpgroups;
  static constexpr int kWeighThreads = 128 * kFirstScoreWarpgroup;
  static constexpr int kScoreThreads = 128 * kScoreWarpgroups;
  static constexpr int kMathThreads = kWeighThreads + kScoreThreads;
  // An odd multiple of 16 bytes, so that ldmatrix has no bank conflicts.
  static constexpr int kPitch = Row::kRowBytes % 128 == 16 ? Row::kRowBytes : Row::kRowBytes + 16;
  static_assert((kPitch / 16) % 2 == 1);
  // Tiles of Q of 128 bytes a head: its NoPE part, and RoPE as the last one.
  static constexpr int kNopeTiles = Row::kNope / (Row::kCodes ? 128 : 64);
  static constexpr int kQTiles = kNopeTiles + 1;
  static constexpr int kStageBytes = kRows * kPitch;
  // Whether RoPE's bf16 columns are part of V: score then makes fp16 of them (rope.cuh).
  static constexpr bool kRopeInV = Row::kFp8 && Row::kV > Row::kNope;
  // Whether there is a second path for scales that fp16 cannot carry (exact.cuh).
  static constexpr bool kHasExactPath = Row::kFp8 && !kRopeInV && !Row::kCodes;
  // Tiles of 8 KB of P: one, or an e4m3 one of half that size for every scale. V4's output, which
  // lies where P is in CTAs of many tokens, needs the room of two (OutputStaging).
  static constexpr int kPTiles = kRopeInV || Row::kCodes ? 2 : 1;
  // Whether score multiplies sums by scales, and not rows: over all columns of a scale, or the
  // growing sums between the columns of two scales (score.cuh).
  static constexpr bool kScaledSums = Row::kFp8 && kHeads <= 16;
  static constexpr bool kRescaledSums =
      Row::kFp8 && Row::kTile == 128 && kHeads > 16 && kHeads <= 32;
  static_assert(!Row::kCodes || kHeads == 64);
  // Factors of a row: one a scale, and one for the RoPE part where score or weigh scales it.
  static constexpr bool kRopeFactor = Row::kFp8 && (kRopeInV || !(kScaledSums || kRescaledSums));
  static constexpr int kFactors = Row::kFp8 && !Row::kCodes ? Row::kScales + kRopeFactor : 1;
  static constexpr int kQBytes = kQTiles * kHeads * 128;
  static constexpr int kPBytes = kPTiles * 64 * 128;
  static constexpr int kLog2PBytes = kHeads * 256;
  static constexpr int kSideStageBytes = Row::kSideBytes ? Row::kSideBytes * kRows : 8;
  // Blocks whose rows are found ahead of the copies.
  static constexpr int kAhead = 3;
  // The ring gets the room that the other fields of Smem leave: nine numbers a head; `place` with
  // its barriers; barriers and words that are there once.
  static constexpr int kOtherBytes = kHeads * 4 * 9 + kAhead * (kBlock * 8 + 8) + 192;
  // A stage also takes its part of `side`, `scales` and `row_lambda`, two barriers and two words.
  static constexpr int kFit =
      (kMaxSharedBytes - kQBytes - kPBytes - kLog2PBytes - kOtherBytes) /
      (kStageBytes + kSideStageBytes + kFactors * kRows * 2 + kRows * 8 + 24);
  static constexpr int kStages = kFit > 20 ? 20 : kFit;
  static_assert(kStages >= 8, "scores run one block ahead of the output");
};

// Threads and registers of a CTA. The last four or eight warps handle rows. Some of them copy rows
// (copiers), one finds the places of later rows, one describes the blocks that have arrived. Of
// eight warps six copy, one finds and one describes; of four three copy and one does both. Eight
// are for many tokens of few heads, where the others wait for copies; a launch of so many warps
// takes longer to begin. There are 65,536 registers: four warpgroups begin with 128 a thread, five
// with 96, six with 80. Converting fp8 records to bf16 rows takes the copying warps a few more.
template <class Row, int kHeads, Way kWay>
struct CrewOf {
  using Config = ConfigOf<Row, kHeads>;
  static constexpr int kCopyWarps = kHeads <= 16 && Row::kFp8 && kWay == Way::kMany ? 8 : 4;
  static constexpr int kCopiers = kCopyWarps == 8 ? 6 : 3;
  static constexpr int kThreads = Config::kMathThreads + 32 * kCopyWarps;
  // Whether a call may have two lists, and block tables.
  static constexpr bool kTwoLists = kWay != Way::kHelped;
  static constexpr bool kBlockTables =
      kWay != Way::kMany || takes_many_tokens(Row::Stored::kFormat, kHeads, true);
  static constexpr bool kManyFp8Heads = Config::kScoreWarpgroups == 1 && Row::kFp8;
  static constexpr int kCopyRegisters = kManyFp8Heads ? 40 : 48;
  static constexpr int kScoreRegisters = kManyFp8Heads ? 104 : 96;
  static constexpr int kWeighRegisters = kThreads == 512 ? 184 : kThreads == 640 ? 120 : 96;
};

// The named barriers of a CTA. 0 is __syncthreads().
enum NamedBarrier : int {
  // All weigh and score threads (kMathThreads), twice when the first Q is loaded: when its largest
  // value is known, and when Q lies in shared memory.
  kQueryLoaded = 1,
  // The score threads (kScoreThreads), when a later token's Q replaces the last one, and before the
  // weights of the splits are written over Q.
  kQueryReplaced = 2,
  // All weigh and score threads (kMathThreads), where splits or parts merge: when the weights of
  // the splits are in shared memory, and in a cluster also before the peers' sums overwrite Q, P
  // and rows.
  kSplitsMerging = 3,
  // The two weigh warpgroups (256 threads), once a block when P is there, and wherever they
  // exchange maxima, sums or parts of the output.
  kWeighing = 4,
};

// Where the scale of row `row` lies among the 16 of a stage. Those of rows 2i, 2i+1, 2i+8 and 2i+9
// lie together, as weigh reads them.
__device__ __forceinline__ constexpr int scale_position(int row) {
  return (row & 6) * 2 + (row >> 3) * 2 + (row & 1);
}
// Output tile `tile` (0 to 3) of a warp in a weigh warpgroup: which 16 of the warpgroup's 256
// columns it has, counted in sixteens. Where a scale covers 128 columns, a warp's tiles are
// neighbours and share it; but where scales are in P, the warps of a product share one.
template <class Row, int kHeads>
__device__ __forceinline__ constexpr int sixteen_of(int warp, int tile) {
  return ConfigOf<Row, kHeads>::kRopeInV || Row::kCodes ? 4 * tile + warp : 4 * warp + tile;
}
// Where a row's record is: its page, -1 if the list entry has no token, and the row in the page.
struct Place {
  int page, offset;
};
// Barriers `block_ready`; block i uses barrier i mod kReady. There are more of them than blocks in
// a ring, so that whoever waits for a phase sees it before the barrier's next phase begins.
constexpr int kReady = 8;

template <class Row, int kHeads>
struct alignas(1024) Smem {
  using Config = ConfigOf<Row, kHeads>;
  uint8_t q[Config::kQBytes];
  // P as [row][head], with a 128-byte swizzle; fp16 with fp8 rows (e4m3: codes.cuh).
  uint8_t p[Config::kPBytes];
  // log2 P of a block, as the score warpgroup's threads hold it: thread t's for eight heads.
  float4 log2_p[kHeads / 8][128];
  // Rows as they are stored.
  uint8_t ring[Config::kStages][Config::kStageBytes];
  // Of each row of a stage: 2^lambda, and lambda itself (-inf: no token).
  float2 row_lambda[Config::kStages][Config::kRows];
  // Scales that lie elsewhere in the page, as they are stored.
  uint8_t side[Config::kStages][Config::kSideStageBytes];
  // Scales / 2^lambda as fp16, at scale_position(row); with kRopeFactor the last one, of the RoPE
  // part, is 2^-lambda as bf16.
  uint16_t scales[Config::kStages][Config::kFactors][Config::kRows];
  // Where the rows of a block are, for the copiers. Block i has entry (i - first_found()) mod
  // kAhead. Of blocks whose rows the copiers find themselves at most the last stage's rows are
  // here.
  Place place[Config::kAhead][Config::kBlock];
  // Statistics of each head: the softmax reference in log2 units; what earlier sums are multiplied
  // by when it moves; maxima or sums of each warp, and in the end of a helped token the weights of
  // its parts.
  float reference[kHeads];
  float rescale[kHeads];
  float warp_part[4][kHeads];
  // How far the reference has moved; after the last block, what the output is multiplied by.
  float factor[kHeads];
  float max_logit[kHeads];
  // During the blocks: whether a logit above -inf has been seen. After them: the row sum.
  float row_sum[kHeads];
  // Of each stage, a bit for each row that has a token.
  uint32_t valid[Config::kStages];
  // Of each stage: kOddRows, kOddBlock (exact.cuh).
  uint32_t odd_scales[Config::kStages];
  // The mbarriers; BarrierTable has their arrivals, in this order.
  uint64_t stage_full[Config::kStages];
  uint64_t stage_empty[Config::kStages];
  uint64_t block_ready[kReady];
  uint64_t places_found[Config::kAhead];
  uint64_t log2_p_full;
  uint64_t log2_p_empty[2];
  uint64_t p_empty;
  uint64_t inbox;
  uint64_t statistics_full;
  uint64_t slots_marked;
  uint64_t peers_marked;
  uint64_t blocks_counted;
  // The bits of the largest value of Q, as bf16.
  uint32_t q_max;
  // Whether weigh has to move the reference before the weights of block i, by i mod 2.
  uint32_t outgrown[2];
  // The same as q_max, of a Q that the score warpgroups load alone, by warp.
  uint32_t q_max_of_warp[4 * Config::kScoreWarpgroups];
  // Blocks of a CTA's only token, or of a helper's first part, found by the copying warps for all
  // roles.
  int blocks;
  // Way::kHelped: the positions of a CTA's parts, by their tokens modulo kMostHelperParts. {0, 0}
  // in a helper: the token is left to its mains.
  Positions part[kMostHelperParts];
  // Whether a main's token is left to its mains, and its parts that other CTAs have.
  bool unhelped;
  int other_parts;
};

// A group of equal mbarriers: how many there are, how many arrivals complete a phase, and whose.
struct BarrierGroup {
  int name;
  int count;
  int arrivals;
  const char* who_arrives;
  const char* who_waits;
};

// The groups in the order of Smem's fields.
enum BarrierName {
  kStageFull,
  kStageEmpty,
  kBlockReady,
  kPlacesFound,
  kLog2PFull,
  kLog2PEmpty,
  kPEmpty,
  kInbox,
  kStatisticsFull,
  kSlotsMarked,
  kPeersMarked,
  kBlocksCounted,
  kBarrierGroups,
};

template <class Row, int kHeads, Way kWay>
struct BarrierTable {
  using Config = ConfigOf<Row, kHeads>;
  static constexpr bool kWalks = walks(kWay);
  static constexpr BarrierGroup kGroups[kBarrierGroups] = {
      {kStageFull, Config::kStages, Row::kSideBytes ? 33 : 32,
       "the lanes of the copying warp (lane 0 for all where none wrote itself), once more for the "
       "bytes of the bulk copies where scales lie aside",
       "the warp that describes blocks"},
      {kStageEmpty, Config::kStages, 8, "each weigh warp when it has read the rows",
       "the copying warps"},
      {kBlockReady, kReady, 32, "the lanes of the warp that has described the block",
       "score; the warps that find rows or mark slots"},
      {kPlacesFound, Config::kAhead, 32, "the lanes of the warp that has found the rows",
       "the copying warps"},
      {kLog2PFull, 1, 128, "the threads of the warpgroup that scored the block", "weigh"},
      {kLog2PEmpty, 2, 256, "the weigh threads; of block i, barrier i mod 2", "score"},
      {kPEmpty, 1, 8, "each weigh warp when its products with P are done", "weigh"},
      // Two meanings: a cluster's CTAs send units; where a CTA has several tokens, the keepers of
      // its heads' statistics have set them back for the next one (statistics_reset()).
      {kInbox, 1, kWalks ? kHeads : 1,
       "the first weigh thread, with the bytes of the units; or the keeper of each head",
       "weigh in a cluster; score where a CTA has several tokens"},
      // Two meanings: of a cluster's splits; or a main's parts that other CTAs have.
      {kStatisticsFull, 1, 1,
       "the first weigh thread, with the bytes of all splits' statistics; or the first score "
       "thread, with the bytes of the others' sums",
       "the first score warpgroup; or weigh"},
      {kSlotsMarked, 1, 10, "each weigh warp, and two warps that copied",
       "weigh, and the warp that tells the other splits"},
      // Two meanings: all splits' slots are marked; or a main's rows are read, and its row sums
      // made.
      {kPeersMarked, 1, 1, "the warp that has heard of all other splits; or the first weigh thread",
       "weigh and the first score warpgroup; or the latter alone"},
      {kBlocksCounted, 1, 1, "the first copying thread", "score and weigh"},
  };
  // The first barrier of a group; of kBarrierGroups, how many there are.
  static constexpr int begin(int group) {
    int first = 0;
    for (int g = 0; g < group; g++) first += kGroups[g].count;
    return first;
  }
  static constexpr int kBarriers = begin(kBarrierGroups);

  // A constant, since device code must not index the table, which is in the host's memory.
  template <BarrierName kName>
  static constexpr int kArrivals = kGroups[kName].arrivals;

  // Arrivals of a barrier, as kGroups has them. A chain of comparisons, since a launch would find
  // the table in no cache.
  static constexpr __device__ int arrivals(int barrier) {
    constexpr int kFirst = begin(kLog2PFull);
    if (barrier < begin(kStageEmpty)) return kArrivals<kStageFull>;
    const int k = barrier - kFirst;
    if (k == begin(kInbox) - kFirst && kWalks) return kArrivals<kInbox>;
    return barrier < begin(kBlockReady)        ? kArrivals<kStageEmpty>
           : k < 0                             ? kArrivals<kBlockReady>
           : k == 0                            ? kArrivals<kLog2PFull>
           : k < begin(kPEmpty) - kFirst       ? kArrivals<kLog2PEmpty>
           : k == begin(kPEmpty) - kFirst      ? kArrivals<kPEmpty>
           : k == begin(kSlotsMarked) - kFirst ? kArrivals<kSlotsMarked>
                                               : 1;
  }
  // Whether the table is in order and the chain says the same.
  static constexpr bool agrees() {
    for (int g = 0; g < kBarrierGroups; g++) {
      if (kGroups[g].name != g) return false;
      for (int barrier = begin(g); barrier < begin(g + 1); barrier++)
        if (arrivals(barrier) != kGroups[g].arrivals) return false;
    }
    return true;
  }
};

// In CTAs that go from token to token no units arrive at the inbox. There the barrier says that
// weigh has set the statistics back for the next token.
template <class Row, int kHeads>
__device__ __forceinline__ uint64_t* statistics_reset(Smem<Row, kHeads>& smem) {
  return &smem.inbox;
}

// Some row has an odd scale, one that fp16 does not carry (exact.cuh): a row of this stage, of this
// block.
constexpr uint32_t kOddRows = 1;
constexpr uint32_t kOddBlock = 2;
// A reference moves up when log2 P exceeds kLag: by the block's largest log2 P, rounded up for fp8
// rows, less kTop, so that the largest P is then about 2^kTop. +inf weighs 2^kTop, against a
// reference that stays finite. With e4m3 products a weight is multiplied by its
// record's scale over 2^lambda, which is below 2^7: the product stays below 2^8, and the largest is
// at least 2^3 when the reference has moved.
template <class Row>
constexpr float kTop = Row::kCodes ? -2.f : 4.f;
template <class Row>
constexpr float kLag = Row::kCodes ? 1.f : 12.f;

// How far a score or weigh warpgroup is: the stage of the ring where its next block begins (a score
// warp's own stage of it), and the block's number.
struct Progress {
  int kv_stage, block;
};

}  // namespace winnow::internal::attend::decode_sm90
