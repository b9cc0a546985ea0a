// Decode on Hopper: how a call is cut into CTAs, and the choice of the instantiation.
#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <memory>
#include <utility>

#include "attend/decode_sm90/launch.h"
#include "cuda/device.h"

namespace winnow::internal::attend::decode_sm90 {
namespace {

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
    n.store(size == 1 ? cuda::multiprocessors(index) : std::max(1, clusters_at_once(size)),
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
int blocks_of(const Shape& s) { return (s.width + 63) / 64; }
double block_time(int size) { return size <= 32 ? 1.85 : 2.4; }

// The cheapest cut by a model in microseconds: fixed cost, blocks of 64 rows, merge. A fixed split
// keeps to what depends on the token alone, so that a token's bits are the same in any batch.
// Clusters of many CTAs leave multiprocessors idle; splits that meet in `memory` bytes do not.
Cut cut(const Shape& s, int max_size, size_t memory) {
  const bool fixed = s.fixed_split;
  const int blocks = blocks_of(s);
  Cut best;
  for (int groups = (s.heads + max_size - 1) / max_size; groups <= 16; ++groups) {
    const int size = size_for((s.heads + groups - 1) / groups);
    if (size > max_size || size * (groups - 1) >= s.heads) continue;
    for (int splits = 1; splits <= std::clamp(blocks, 1, 16); ++splits) {
      const int64_t jobs = fixed ? 1 : static_cast<int64_t>(s.tokens) * groups;
      const int room = clusters(s.device, splits);
      const int64_t waves = (jobs + room - 1) / room;
      const double block = block_time(size), merge = splits > 1 ? 1.5 + size / 32.0 : 0;
      const int share = (blocks + splits - 1) / splits;
      const double cost = waves * (5 + size / 8.0 + share * block + merge) + 0.002 * jobs * splits;
      if (cost < best.cost) best = {groups, splits, size, false, cost};
      const int most = std::min(cuda::multiprocessors(s.device), kMostCtas);
      if (fixed || splits == 1 || jobs * splits > most ||
          jobs * exchange_bytes(size, splits) > memory)
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
CacheFormat format_of(const Shape& s) {
  const CacheFormat first = s.formats[0];
  if (s.formats[1] == first) return first;
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
int most_heads(const Shape& s) { return format_of(s) == CacheFormat::kV32Bf16 ? 48 : 64; }

void launch(const Params& p) {
  const Shape shape = shape_of(p);
  const CacheFormat format = format_of(shape);
  const Cut c = cut(shape, most_heads(shape), exchange_of(p).second);
  const auto splits = static_cast<unsigned>(c.splits);
  std::byte* const exchange = c.exchange ? exchange_of(p).first : nullptr;
  const Args a{{c.splits, (0x80000000u + splits - 1) / splits, exchange}, call_of(p, c.groups)};
  // Without splits a CTA a multiprocessor, which goes from token to token. Groups of a token's
  // heads drift apart over many rows, until one no longer finds the other's in the L2: 3 % slower
  // with 62 tokens of 2,048 rows, 3 % faster with 4. Stages of 16 rows are counted over all tokens.
  Share share{c.size, p.tokens};
  if (c.splits == 1 && goes_on(format, c.size, shape.tables)) {
    const int at_once = std::max(1, clusters(p.device.index, 1) / c.groups);
    const int64_t rows = (int64_t{shape.width} + 64) * (p.tokens / at_once + 1);
    if (rows <= (c.groups == 1 ? int64_t{INT_MAX} : 16384)) share.tokens = at_once;
  }
  switch (format) {
    case CacheFormat::kV32Fp8: decode_v32_fp8(a, share, p.device.stream); break;
    case CacheFormat::kV32Bf16: decode_v32_bf16(a, share, p.device.stream); break;
    case CacheFormat::kV4Fp8: decode_v4_fp8(a, share, p.device.stream); break;
    default: decode_v4_bf16(a, share, p.device.stream); break;
  }
}

}  // namespace

// 68 tokens of 128 heads take 90 us with a second launch instead of 134.
int32_t first_launch(const Shape& s, bool wide) {
  const auto all = static_cast<int32_t>(s.tokens);
  if (s.fixed_split) return all;
  const int most = wide ? 64 : most_heads(s), groups = (s.heads + most - 1) / most,
            size = size_for((s.heads + groups - 1) / groups),
            at_once = cuda::multiprocessors(s.device) / groups;
  const int32_t waves = all / at_once, full = waves * at_once;
  if (full == 0 || full == all) return all;
  const size_t memory = s.workspace < kExchangeAlign ? 0 : s.workspace - kExchangeAlign;
  const auto cheapest = [&](const Shape& shape) { return cut(shape, most_heads(shape), memory); };
  // As cut() has it; the wide kernel takes 3 us a token and 1.6 a block, and where CTAs go from
  // token to token, a later one begins 10 earlier.
  const double wave =
      wide ? 3 + blocks_of(s) * 1.6 : 5 + size / 8.0 + blocks_of(s) * block_time(size);
  const Cut whole = wide ? Cut{.cost = (waves + 1) * wave} : cheapest(s);
  const bool many = !wide && whole.splits == 1 && goes_on(format_of(s), size, s.tables);
  const double launch = wide ? 15 : 3;  // another kernel, whose code is in no cache
  constexpr double kGoesOn = 10;
  const double more = whole.cost - waves * wave - (many ? kGoesOn : 0);  // for the rest
  // A gain below a tenth is none where lists are not full: 1,024 new tokens of 2k would lose 4 %.
  constexpr double kWorth = 0.9;
  Shape rest = s;
  rest.tokens = all - full;
  return launch + cheapest(rest).cost < kWorth * more ? full : all;
}

void run(const Params& p) noexcept {
  if (p.tokens == 0) return;
  const int32_t first = first_launch(shape_of(p), false);
  launch(tokens_of(p, 0, first));
  if (first < p.tokens) launch(tokens_of(p, first, p.tokens - first));
}

const char* fits(const Shape& shape) { return shape.heads > 128 ? "more than 128 heads" : nullptr; }

// For any number of tokens up to the shape's: sums of all CTAs, and what is there once for two or
// more of them.
size_t workspace(const Shape& shape, int64_t) {
  const int size = std::max(8, size_for(std::min(shape.heads, 64)));
  return kMostCtas / 2 * exchange_bytes(size, 2) + kExchangeAlign;
}

}  // namespace winnow::internal::attend::decode_sm90

namespace winnow::internal::attend::wide_then_decode_sm90 {

void run(const Params& p) noexcept {
  if (p.tokens == 0) return;
  const int32_t first = decode_sm90::first_launch(shape_of(p), true);
  wide_sm90::run(tokens_of(p, 0, first));
  if (first < p.tokens) decode_sm90::run(tokens_of(p, first, p.tokens - first));
}

const char* fits(const Shape& shape) {
  if (const char* why = wide_sm90::fits(shape)) return why;
  if (decode_sm90::first_launch(shape, true) == shape.tokens)
    return "no tokens behind the last full wave that gain by a launch of their own";
  return nullptr;
}

}  // namespace winnow::internal::attend::wide_then_decode_sm90
