// Decode on Hopper: how a call is cut into CTAs, and the choice of the instantiation.
#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <memory>
#include <utility>

#include "attend/decode_sm90/launch.h"
#include "cuda/device.h"

namespace winnow::internal::attend {
namespace {

using decode_sm90::Args;
using decode_sm90::Share;

// Heads of a CTA: the instantiated sizes, each a multiple of 8.
constexpr int kSizes[] = {8, 16, 24, 32, 48, 64};

int size_for(int heads) {
  for (int n : kSizes)
    if (n >= heads) return n;
  return 0;
}

// Clusters of `size` CTAs that device `index` runs at once, asked once: a GPC has 14 to 18
// multiprocessors, so on an H200 {132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7}.
int clusters(int index, int size) {
  static std::array<std::array<std::atomic<int>, 17>, 64> known{};
  std::atomic<int>& n = known[static_cast<unsigned>(index) % known.size()][size];
  if (n.load(std::memory_order_relaxed) == 0)
    n.store(
        size == 1 ? cuda::multiprocessors(index) : std::max(1, decode_sm90::clusters_at_once(size)),
        std::memory_order_relaxed);
  return n.load(std::memory_order_relaxed);
}

struct Cut {
  int groups = 1, splits = 1, size = 8;
  bool exchange = false;  // splits are no clusters
  double cost = 1e30;     // in microseconds, by cut()'s model
};

// A call whose splits are no clusters has a CTA a multiprocessor at most: 144 on the largest
// Hopper.
constexpr int kMostCtas = 144;
constexpr size_t kExchangeAlign = 128;

// Blocks of 64 rows of a token, and what one takes a CTA of `size` heads, in microseconds.
int blocks_of(const Params& p) {
  return (p.lists[0].width + (p.list_count > 1 ? p.lists[1].width : 0) + 63) / 64;
}
double block_time(int size) { return size <= 32 ? 1.85 : 2.4; }

// The cheapest cut by a model in microseconds: fixed cost, blocks of 64 rows, merge. `fixed` keeps
// to what depends on the token alone, so that a token's bits are the same in any batch. Clusters
// of many CTAs leave multiprocessors idle; splits that meet in `memory` bytes do not.
Cut cut(const Params& p, int max_size, bool fixed, size_t memory) {
  const int blocks = blocks_of(p);
  Cut best;
  for (int groups = (p.heads + max_size - 1) / max_size; groups <= 16; ++groups) {
    const int size = size_for((p.heads + groups - 1) / groups);
    if (size > max_size || size * (groups - 1) >= p.heads) continue;
    for (int splits = 1; splits <= std::clamp(blocks, 1, 16); ++splits) {
      const int64_t jobs = fixed ? 1 : static_cast<int64_t>(p.tokens) * groups;
      const int room = clusters(p.device.index, splits);
      const int64_t waves = (jobs + room - 1) / room;
      const double block = block_time(size), merge = splits > 1 ? 1.5 + size / 32.0 : 0;
      const int share = (blocks + splits - 1) / splits;
      const double cost = waves * (5 + size / 8.0 + share * block + merge) + 0.002 * jobs * splits;
      if (cost < best.cost) best = {groups, splits, size, false, cost};
      const int most = std::min(cuda::multiprocessors(p.device.index), kMostCtas);
      if (fixed || splits == 1 || jobs * splits > most ||
          jobs * decode_sm90::exchange_bytes(size, splits) > memory)
        continue;
      const double last = size == 64 ? 0.5 : 1.7;  // `block` is of many blocks
      const double other = 5 + std::max(size, 16) / 8.0 + share * block + last;
      if (other < best.cost) best = {groups, splits, size, true, other};
    }
    if (fixed) break;
  }
  return best;
}

// The kernel's rows. Two lists of different formats are the bf16 kernel's, which makes its rows of
// fp8 records.
bool mixed(const Params& p) { return p.list_count > 1 && p.lists[0].format != p.lists[1].format; }
CacheFormat format_of(const Params& p) {
  const CacheFormat first = p.lists[0].format;
  if (!mixed(p)) return first;
  const bool v32 = first == CacheFormat::kV32Fp8 || first == CacheFormat::kV32Bf16;
  return v32 ? CacheFormat::kV32Bf16 : CacheFormat::kV4Bf16;
}

// Where splits may meet in the workspace, and how many bytes there are.
std::pair<std::byte*, size_t> exchange_of(const Params& p) {
  void* at = p.workspace.data();
  size_t memory = p.workspace.size();
  if (!std::align(kExchangeAlign, 1, at, memory)) return {nullptr, 0};
  return {static_cast<std::byte*>(at), memory};
}

// 48: the bf16 rows of V3.2 leave no room for Q of 64 heads beside a ring of eight stages.
int most_heads(const Params& p) { return format_of(p) == CacheFormat::kV32Bf16 ? 48 : 64; }
Cut cut(const Params& p) { return cut(p, most_heads(p), p.fixed_split, exchange_of(p).second); }

// `count` tokens of a call, from `first` on.
Params part(Params p, int32_t first, int32_t count) {
  const auto skip = [first](auto*& at, int64_t stride) {
    if (at) at += first * stride;
  };
  skip(p.q, p.q_token_stride), skip(p.q_rope, p.rope_token_stride);
  for (ListView& l : p.lists) skip(l.indices, l.index_stride), skip(l.lengths, l.length_stride);
  skip(p.requests, p.request_stride);
  skip(p.out, p.out_token_stride), skip(p.lse, p.lse_token_stride);
  skip(p.max_logit, p.max_token_stride);
  p.tokens = count;
  return p;
}

// How many tokens of a call go first: those that fill the multiprocessors one or more times, where
// the few that are left are faster in splits, behind them, than as one wave more; else all. 68
// tokens of 128 heads take 90 us instead of 134.
int32_t first_part(const Params& p, bool wide) {
  if (p.fixed_split) return p.tokens;
  const int most = wide ? 64 : most_heads(p), groups = (p.heads + most - 1) / most,
            size = size_for((p.heads + groups - 1) / groups),
            at_once = cuda::multiprocessors(p.device.index) / groups;
  const int32_t waves = p.tokens / at_once, full = waves * at_once;
  if (full == 0 || full == p.tokens) return p.tokens;
  // As cut() has it; the wide kernel takes 3 us a token and 1.6 a block, and where CTAs go from
  // token to token, a later one begins 10 earlier.
  const double wave =
      wide ? 3 + blocks_of(p) * 1.6 : 5 + size / 8.0 + blocks_of(p) * block_time(size);
  const Cut all = wide ? Cut{.cost = (waves + 1) * wave} : cut(p);
  const bool many =
      !wide && all.splits == 1 && decode_sm90::goes_on(format_of(p), size, by_table(p.lists));
  const double launch = wide ? 15 : 3;  // another kernel, whose code is in no cache
  constexpr double kGoesOn = 10;
  const double more = all.cost - waves * wave - (many ? kGoesOn : 0);  // for the rest
  // A gain below a tenth is none where lists are not full: 1,024 new tokens of 2k would lose 4 %.
  constexpr double kWorth = 0.9;
  return launch + cut(part(p, full, p.tokens - full)).cost < kWorth * more ? full : p.tokens;
}

void decode(const Params& p) {
  const CacheFormat format = format_of(p);
  const Cut c = cut(p);
  const auto splits = static_cast<unsigned>(c.splits);
  std::byte* const exchange = c.exchange ? exchange_of(p).first : nullptr;
  const Args a{{c.splits, (0x80000000u + splits - 1) / splits, exchange}, call_of(p, c.groups)};
  // Without splits a CTA a multiprocessor, which goes from token to token. Groups of a token's
  // heads drift apart over many rows, until one no longer finds the other's in the L2: 3 % slower
  // with 62 tokens of 2,048 rows, 3 % faster with 4. Stages of 16 rows are counted over all tokens.
  Share share{c.size, p.tokens};
  if (c.splits == 1 && decode_sm90::goes_on(format, c.size, by_table(p.lists))) {
    const int at_once = std::max(1, clusters(p.device.index, 1) / c.groups);
    const int64_t width = int64_t{p.lists[0].width} + (p.list_count > 1 ? p.lists[1].width : 0),
                  rows = (width + 64) * (p.tokens / at_once + 1);
    if (rows <= (c.groups == 1 ? int64_t{INT_MAX} : 16384)) share.tokens = at_once;
  }
  switch (format) {
    case CacheFormat::kV32Fp8: decode_sm90::decode_v32_fp8(a, share, p.device.stream); break;
    case CacheFormat::kV32Bf16: decode_sm90::decode_v32_bf16(a, share, p.device.stream); break;
    case CacheFormat::kV4Fp8: decode_sm90::decode_v4_fp8(a, share, p.device.stream); break;
    default: decode_sm90::decode_v4_bf16(a, share, p.device.stream); break;
  }
}

}  // namespace

void sm90_decode(const Params& p) noexcept {
  if (p.tokens == 0) return;
  const bool wide = !mixed(p) && sm90_wide_is_better(p);
  const int32_t first = first_part(p, wide);
  if (wide) sm90_wide(part(p, 0, first));
  else decode(part(p, 0, first));
  if (first < p.tokens) decode(part(p, first, p.tokens - first));
}

std::string sm90_decode_fits(const Shape& shape) {
  if (shape.heads > 128) return "more than 128 heads";
  return {};
}

// For any number of tokens up to the shape's: sums of all CTAs, and what is there once for two or
// more of them.
size_t sm90_decode_workspace(const Shape& shape, int64_t) {
  const int size = std::max(8, size_for(std::min(shape.heads, 64)));
  return kMostCtas / 2 * decode_sm90::exchange_bytes(size, 2) + kExchangeAlign;
}

}  // namespace winnow::internal::attend
