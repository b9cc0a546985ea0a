// Decode on Hopper: what the kernel's parts share (row traits, arguments, shared memory).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "attend/device_params.h"
#include "cuda/hopper.h"
#include "cuda/wgmma_f16.h"
#include "model/v32.h"
#include "model/v4.h"

namespace winnow::internal::attend::decode_sm90 {

using namespace internal::cuda;

// A record as the kernel reads it: one bulk copy of kRowBytes, and kSideBytes of scales when they
// lie elsewhere in the page.
template <class Record>
struct Row {
  using Stored = Record;
  using Quantized = std::conditional_t<std::is_base_of_v<V32, Record>, V32Fp8, V4Fp8>;
  static constexpr bool kFp8 = Record::kQuantized;
  static constexpr int kNope = Record::kNope, kQk = Record::kDqk, kV = Record::kDv;
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
};

struct Splits {
  int splits;           // that the lists are cut in: a cluster
  uint32_t share;       // 2^31 / splits, rounded up: what divides by them
  std::byte* exchange;  // where splits meet that are no cluster, all CTAs running at once; or null
};
struct Args : Splits, Call {};

// What a CTA has: a token, one token after the other, or a part of a token's lists, whose splits
// are a cluster or meet in memory. A kernel each, since 64 KB of code come with a launch, and what
// lies behind them takes 0.3 us a KB where another kernel has run in between.
enum class Way { kAlone, kMany, kCluster, kExchange };

// Whether CTAs of n heads may take several tokens, one after the other: a kernel more to compile,
// so where that gains 2 % and more. 64 heads of V3.2 gain nothing, and of V4 the warp that finds
// rows has no registers left for block tables.
constexpr bool goes_on(CacheFormat format, int n, bool tables) {
  const bool v4 = format == CacheFormat::kV4Fp8;
  return (v4 || format == CacheFormat::kV32Fp8) &&
         (n == 16 || n == 32 || (v4 && n == 64 && !tables));
}

// Bytes in which the splits of a token's n heads meet.
constexpr int kMaxExchanged = 16;  // splits
constexpr size_t exchange_bytes(int n, int splits) {
  return kMaxExchanged * (sizeof(uint64_t) + 2 * sizeof(uint64_t) * kMaxExchanged + 128) +
         static_cast<size_t>(n) * (sizeof(float4) * kMaxExchanged + splits * 1024);
}

// n / splits. Exact below 2^27; up to 2^29 it may be one more than the whole part, but not where n
// is a multiple of the splits.
__device__ __forceinline__ unsigned over_splits(const Args& p, unsigned n) {
  return static_cast<unsigned>(uint64_t{n} * p.share >> 31);
}

template <class R, int N>
struct Config {
  static constexpr int kRows = 16, kBlock = 64;
  // Score warpgroups, which take blocks in turn: with few heads one of them is longer at a block
  // than the two that weigh it. Behind them come the copying warps.
  static constexpr int kScorers = N <= 32 && R::kFp8 ? 2 : 1, kCopy = 2 + kScorers;
  static constexpr int kScore = 128 * kScorers, kMath = 256 + kScore;
  static constexpr int kPitch =
      R::kRowBytes % 128 == 16 ? R::kRowBytes : R::kRowBytes + 16;  // conflict-free ldmatrix
  static_assert((kPitch / 16) % 2 == 1);
  static constexpr int kQTiles = R::kQk / 64, kNopeTiles = R::kNope / 64;
  static constexpr int kStageBytes = kRows * kPitch;
  static constexpr bool kRopeInV =
      R::kFp8 && R::kV > R::kNope;  // one output tile needs bf16 P beside fp16 P
  static constexpr bool kExactly = R::kFp8 && !kRopeInV;  // has a path for strange scales
  static constexpr int kPKinds = kRopeInV ? 2 : 1;
  static constexpr int kSc = R::kFp8 ? R::kScales + 1 : 1;  // the RoPE part's factor is one more
  static constexpr int kQBytes = kQTiles * N * 128, kPBytes = kPKinds * 64 * 128;
  static constexpr int kYBytes = N * 256;
  static constexpr int kSide = R::kSideBytes ? R::kSideBytes * kRows : 8;
  static constexpr int kAhead = 3;  // blocks whose rows are found ahead
  static constexpr int kMisc = N * 4 * 9 + kAhead * (kBlock * 8 + 8) + 192;
  static constexpr int kLimit = 232448;
  static constexpr int kFit = (kLimit - kQBytes - kPBytes - kYBytes - kMisc) /
                              (kStageBytes + kSide + kSc * kRows * 2 + kRows * 8 + 24);
  static constexpr int kStages = kFit > 20 ? 20 : kFit;
  static_assert(kStages >= 8, "scores run one block ahead of the output");
};
// Who works at it. The last four or eight warps copy, or find rows and describe them: of eight one
// finds, one describes, and six copy; of four one does both. Eight are for many tokens of few
// heads, where copies are what the others wait for; a launch of so many takes longer to begin.
// Registers: 65,536 in all, of which five warpgroups begin with 96 a thread, six with 80. Making
// bf16 rows takes the copying warps a few more.
template <class R, int N, Way W>
struct Crew {
  using K = Config<R, N>;
  static constexpr int kCopyWarps = N <= 16 && R::kFp8 && W == Way::kMany ? 8 : 4;
  static constexpr int kCopiers = kCopyWarps == 8 ? 6 : 3, kThreads = K::kMath + 32 * kCopyWarps;
  static constexpr bool kTables = W != Way::kMany || goes_on(R::Stored::kFormat, N, true);
  static constexpr int kRegsCopy = K::kScorers == 1 && R::kFp8 ? 40 : 48;
  static constexpr int kRegsScore = K::kScorers == 1 && R::kFp8 ? 104 : 96;
  static constexpr int kRegsWeigh = kThreads == 512 ? 184 : kThreads == 640 ? 120 : 96;
};
// Where a stage's scale of row r is: those of rows 2i, 2i+1, 2i+8, 2i+9 lie together, as weigh
// reads them.
__device__ __forceinline__ constexpr int scale_at(int r) {
  return (r & 6) * 2 + (r >> 3) * 2 + (r & 1);
}
// Tile m of warp w in a weigh warpgroup: which of the 16 sixteens of its columns. Where a scale has
// 128 columns, a warp's tiles are neighbours, and share it.
template <class R, int N>
__device__ __forceinline__ constexpr int sixteen(int w, int m) {
  return Config<R, N>::kRopeInV ? 4 * m + w : 4 * w + m;
}
// Where a row's record is: a page, -1 where there is no token, and the place in it.
struct Place {
  int page, offset;
};
// More than the blocks a ring holds, so that a barrier's phase is read before the next begins.
constexpr int kReady = 8;

template <class R, int N>
struct alignas(1024) Smem {
  using K = Config<R, N>;
  uint8_t q[K::kQBytes];
  uint8_t p[K::kPKinds][64 * 128];  // [token][head], 128-byte swizzle
  float4 y[N / 8][128];             // log2 P as the score warpgroup's threads hold it
  uint8_t ring[K::kStages][K::kStageBytes];
  // what is known of a stage's rows: 2^lambda and lambda (-inf: no token), and scales / 2^lambda as
  // fp16, after them 2^-lambda as bf16
  float2 row[K::kStages][K::kRows];
  uint8_t side[K::kStages][K::kSide];
  uint16_t sc[K::kStages][K::kSc][K::kRows];
  // of block i: i - first_told() mod kAhead; of the second block, the last stage's at most
  Place place[K::kAhead][K::kBlock];
  float m[N], alpha[N], warp[4][N], factor[N], top[N], sum[N];  // warp: each warp's maxima or sums
  uint32_t valid[K::kStages];
  uint32_t odd[K::kStages];  // kOddRows, kOddBlock
  uint64_t full[K::kStages], empty[K::kStages];
  uint64_t ready[kReady];  // of block i, the barrier i mod kReady: its rows are there and described
  uint64_t placed[K::kAhead];
  uint64_t yfull, yempty[2], pempty;  // log2 P, P: made, taken over; yempty of block i: i mod 2
  uint64_t inbox, notes;              // units, statistics that the splits of the cluster send
  uint64_t marked, open;              // the place of this split's sums is marked, of all splits' is
  uint64_t counted;                   // `blocks` is there
  uint32_t qmax, moved[2];            // moved: whether block i moves the reference, by i mod 2
  uint32_t qpart[4 * K::kScorers];    // largest of a later token's Q, by warp
  int blocks;  // of a CTA's only token: what the copying warps tell the others
  // The barriers from `full` on, in their order, and how many arrive at the b-th.
  static constexpr int kBarriers = 2 * K::kStages + kReady + K::kAhead + 9;
  // Where a CTA has several tokens, the keepers of its heads' sums arrive at `inbox` when they have
  // set them back.
  static constexpr __device__ int arrivals(int b, Way way) {
    if (b < K::kStages) return R::kSideBytes ? 33 : 32;
    const int k = b - 2 * K::kStages - kReady - K::kAhead;
    if (k == 4 && way == Way::kMany) return N;
    return b < 2 * K::kStages ? 8
           : k < 0            ? 32
           : k == 0           ? 128
           : k <= 2           ? 256
           : k == 3           ? 8
           : k == 6           ? 10  // the weigh warps, two that copied
                              : 1;
  }
};

// fp16 does not carry the scales of some row: of this stage, of this block.
constexpr uint32_t kOddRows = 1, kOddBlock = 2;
constexpr float kLog2e = 1.44269504088896f;
constexpr float kLag = 12.f;  // log2 P may be this far above the reference before that moves

// What a CTA works on.
struct Span {
  int token, head0, heads;  // of its N heads, those that exist
  int n0, total;            // positions of the first list, of both
  int begin, end, blocks;   // this split's first position, the one behind its last, block count
};

// Which token and heads a CTA begins with: clusters go over the groups of a token's heads first.
// The grid is groups x splits, tokens up to kTokensY, the rest of them: no division before the
// first load.
constexpr int kTokensY = 32768;
__device__ __forceinline__ int token_here() {
  return static_cast<int>(blockIdx.z) * kTokensY + static_cast<int>(blockIdx.y);
}
__device__ __forceinline__ int split_here(const Args& p) {  // the rank in a cluster
  return static_cast<int>(blockIdx.x - over_splits(p, blockIdx.x) * p.splits);
}
template <int N>
__device__ __forceinline__ Span job(const Args& p) {
  Span sp{};
  sp.token = token_here();
  sp.head0 = static_cast<int>(over_splits(p, blockIdx.x)) * N;
  sp.heads = min(p.heads - sp.head0, N);
  return sp;
}

// This split's part of the token's lists.
template <class K>
__device__ __forceinline__ void cut_list(const Args& p, Span& sp) {
  const unsigned split = split_here(p);
  sp.n0 = sp.total = columns(p.lists[0], sp.token);
  if (p.list_count > 1) sp.total += columns(p.lists[1], sp.token);
  // at most 2^25 blocks and 16 splits
  const unsigned nb = (static_cast<unsigned>(sp.total) + K::kBlock - 1) / K::kBlock,
                 first = over_splits(p, nb * split), last = over_splits(p, nb * (split + 1));
  sp.begin = static_cast<int>(first) * K::kBlock;
  sp.blocks = static_cast<int>(last - first);
  sp.end = min(sp.total, sp.begin + sp.blocks * K::kBlock);
}

// The last index of a split, asked for early; none is -1 where lengths end the lists, or there are
// two.
__device__ __forceinline__ int last_index(const Args& p, const Span& sp) {
  const ListView& list = p.lists[0];
  if (p.list_count > 1 || list.lengths || sp.blocks == 0) return 0;
  return __ldg(list.indices + sp.token * list.index_stride + (sp.end - 1));
}
// Leaves out what stands behind the last index that is one.
template <class K>
__device__ __forceinline__ void trim(const Args& p, Span& sp, int last) {
  if (__builtin_expect(last >= 0, 1)) return;
  const int32_t* list = p.lists[0].indices + sp.token * p.lists[0].index_stride;
  sp.end = sp.begin + up_to_last(list + sp.begin, sp.end - sp.begin, thread_here() & 31);
  sp.blocks = (sp.end - sp.begin + K::kBlock - 1) / K::kBlock;
}

// The blocks of a CTA's first token, for those that do not copy it.
template <Way W, class R, int N>
__device__ __forceinline__ void count_blocks(Smem<R, N>& sm, const Args& p, Span& sp) {
  if constexpr (W == Way::kMany) {
    cut_list<Config<R, N>>(p, sp);
  } else {
    mb_wait(&sm.counted, 0);
    sp.blocks = __reduce_max_sync(~0u, sm.blocks);  // the same, in a uniform register
  }
}

// The CTA's next token, false after its last, where it has several. Every role goes on by itself:
// rows, blocks and the phases of barriers are counted over all tokens.
template <class K>
__device__ __forceinline__ bool next_token(const Args& p, Span& sp) {
  if (p.tokens - sp.token <= static_cast<int>(gridDim.y)) return false;
  sp.token += static_cast<int>(gridDim.y);
  cut_list<K>(p, sp);
  return true;
}
// Whether this is the score warpgroup that does what is done once.
__device__ __forceinline__ bool first_scorer() { return thread_here() / 128 == 2; }
// How far the score or a weigh warpgroup is: the next block's first stage, its number.
struct Progress {
  int slot, block;
};

}  // namespace winnow::internal::attend::decode_sm90
