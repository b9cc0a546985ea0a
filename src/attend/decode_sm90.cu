// Decode on Hopper: how a call is cut into CTAs, and the choice of the instantiation.
#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <memory>

#include "attend/decode_sm90.h"
#include "cuda/device.h"

namespace winnow::attention {
namespace {

using sm90::Args;
using sm90::Share;

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
    n.store(size == 1 ? gpu::multiprocessors(index) : std::max(1, sm90::clusters_at_once(size)),
            std::memory_order_relaxed);
  return n.load(std::memory_order_relaxed);
}

struct Cut {
  int groups = 1, splits = 1, size = 8;
  bool exchange = false;  // splits are no clusters
};

// A call whose splits are no clusters has a CTA a multiprocessor at most: 144 on the largest
// Hopper.
constexpr int kMostCtas = 144;
constexpr size_t kExchangeAlign = 128;

// The cheapest cut by a model in microseconds: fixed cost, blocks of 64 rows, merge. `fixed` keeps
// to what depends on the token alone, so that a token's bits are the same in any batch. Clusters
// of many CTAs leave multiprocessors idle; splits that meet in `memory` bytes do not.
Cut cut(const Params& p, int max_size, bool fixed, size_t memory) {
  const int rows = p.lists[0].width + (p.list_count > 1 ? p.lists[1].width : 0);
  const int blocks = (rows + 63) / 64;
  Cut best;
  double least = 1e30;
  for (int groups = (p.heads + max_size - 1) / max_size; groups <= 16; ++groups) {
    const int size = size_for((p.heads + groups - 1) / groups);
    if (size > max_size || size * (groups - 1) >= p.heads) continue;
    for (int splits = 1; splits <= std::clamp(blocks, 1, 16); ++splits) {
      const int64_t jobs = fixed ? 1 : static_cast<int64_t>(p.tokens) * groups;
      const int room = clusters(p.device.index, splits);
      const int64_t waves = (jobs + room - 1) / room;
      const double block = size <= 32 ? 1.85 : 2.4, merge = splits > 1 ? 1.5 + size / 32.0 : 0;
      const int share = (blocks + splits - 1) / splits;
      const double cost = waves * (5 + size / 8.0 + share * block + merge) + 0.002 * jobs * splits;
      if (cost < least) least = cost, best = {groups, splits, size, false};
      const int most = std::min(gpu::multiprocessors(p.device.index), kMostCtas);
      if (fixed || splits == 1 || jobs * splits > most ||
          jobs * sm90::exchange_bytes(size, splits) > memory)
        continue;
      const double last = size == 64 ? 0.5 : 1.7;  // `block` is of many blocks
      const double other = 5 + std::max(size, 16) / 8.0 + share * block + last;
      if (other < least) least = other, best = {groups, splits, size, true};
    }
    if (fixed) break;
  }
  return best;
}

}  // namespace

void sm90_decode(const Params& p) noexcept {
  if (p.tokens == 0) return;
  // Two lists of different formats: the bf16 kernel, which makes its rows of fp8 records.
  const bool mixed = p.list_count > 1 && p.lists[0].format != p.lists[1].format;
  if (!mixed && sm90_wide_is_better(p)) return sm90_wide(p);
  const bool v32 =
      p.lists[0].format == CacheFormat::kV32Fp8 || p.lists[0].format == CacheFormat::kV32Bf16;
  const CacheFormat format = !mixed ? p.lists[0].format
                             : v32  ? CacheFormat::kV32Bf16
                                    : CacheFormat::kV4Bf16;
  void* at = p.workspace.data();
  size_t memory = p.workspace.size();
  if (!std::align(kExchangeAlign, 1, at, memory)) memory = 0;
  // 48: the bf16 rows of V3.2 leave no room for Q of 64 heads beside a ring of eight stages.
  const Cut c = cut(p, format == CacheFormat::kV32Bf16 ? 48 : 64, p.fixed_split, memory);
  const auto splits = static_cast<unsigned>(c.splits);
  std::byte* const exchange = c.exchange ? static_cast<std::byte*>(at) : nullptr;
  const Args a{{c.splits, (0x80000000u + splits - 1) / splits, exchange}, call_of(p, c.groups)};
  // Without splits a CTA a multiprocessor, which goes from token to token. Groups of a token's
  // heads drift apart over many rows, until one no longer finds the other's in the L2: 3 % slower
  // with 62 tokens of 2,048 rows, 3 % faster with 4. Stages of 16 rows are counted over all tokens.
  Share share{c.size, p.tokens};
  if (c.splits == 1 && sm90::goes_on(format, c.size)) {
    const int at_once = std::max(1, clusters(p.device.index, 1) / c.groups);
    const int64_t width = int64_t{p.lists[0].width} + (p.list_count > 1 ? p.lists[1].width : 0),
                  rows = (width + 64) * (p.tokens / at_once + 1);
    if (rows <= (c.groups == 1 ? int64_t{INT_MAX} : 16384)) share.tokens = at_once;
  }
  switch (format) {
    case CacheFormat::kV32Fp8: sm90::decode_v32_fp8(a, share, p.device.stream); break;
    case CacheFormat::kV32Bf16: sm90::decode_v32_bf16(a, share, p.device.stream); break;
    case CacheFormat::kV4Fp8: sm90::decode_v4_fp8(a, share, p.device.stream); break;
    default: sm90::decode_v4_bf16(a, share, p.device.stream); break;
  }
}

std::string sm90_decode_fits(const Shape& shape) {
  if (shape.heads > 128) return "more than 128 heads";
  return {};
}

// For any number of tokens up to the shape's: sums of all CTAs, and what is there once for two or
// more of them.
size_t sm90_decode_workspace(const Shape& shape, int64_t) {
  const int size = std::max(8, size_for(std::min(shape.heads, 64)));
  return kMostCtas / 2 * sm90::exchange_bytes(size, 2) + kExchangeAlign;
}

}  // namespace winnow::attention
