// Wide attention on Hopper: arguments, the choice of the instantiation, and when it is the better
// one.
#include "attend/wide_sm90/launch.h"
#include "cuda/device.h"

namespace winnow::internal::attend {
namespace {

wide_sm90::Args args_of(const Params& p) {
  const int groups = (p.heads + wide_sm90::kHeads - 1) / wide_sm90::kHeads;
  return {call_of(p, groups), p.tokens * groups};
}

// Positions that a list's entries may mean.
int64_t positions(const ListView& l) {
  return int64_t{l.page} * (l.block_table ? l.table_width : l.pages);
}

// Whether rows are taken in sweeps: within their limits, and where the L2 does not hold the rows
// anyway (32k of them, 38 MB, take as long either way). A sweep's direction depends on the token's
// place in the batch.
bool swept(const Params& p) {
  const ListView& l = p.lists[0];
  return p.list_count == 1 && !p.fixed_split &&
         l.width <= wide_sm90::kSweepBlocks * wide_sm90::kBlock && positions(l) > 40960 &&
         positions(l) <= wide_sm90::kSweepRows;
}

}  // namespace

void sm90_wide(const Params& p) noexcept {
  if (p.tokens == 0) return;
  const int ctas = cuda::multiprocessors(p.device.index);
  if (p.lists[0].format != CacheFormat::kV32Bf16)
    wide_sm90::attend_v4_bf16(args_of(p), ctas, p.device.stream);
  else if (swept(p)) wide_sm90::attend_v32_bf16_swept(args_of(p), ctas, p.device.stream);
  else wide_sm90::attend_v32_bf16(args_of(p), ctas, p.device.stream);
}

bool sm90_wide_is_better(const Params& p) {
  // It has no splits, so it wants items for half of the multiprocessors, where the decode kernel's
  // splits end: bf16 rows, topk 2048, 64 tokens of 128 heads 71 us against 124, 128 of 64 heads 92
  // against 131. It pads heads to 64, and is faster all the same from three quarters on: 112 tokens
  // of 32 heads 83 us against 86, 4,096 tokens of 16 heads 1,895 against 2,653. A fixed split may
  // not change with the batch.
  const bool bf16_rows =
      p.lists[0].format == CacheFormat::kV32Bf16 || p.lists[0].format == CacheFormat::kV4Bf16;
  const int64_t items = int64_t{p.tokens} * ((p.heads + wide_sm90::kHeads - 1) / wide_sm90::kHeads);
  const int quarters = p.heads > 32 ? 2 : 3;
  return bf16_rows && !p.fixed_split &&
         4 * items >= quarters * cuda::multiprocessors(p.device.index);
}

size_t sm90_wide_workspace(const Shape&, int64_t) { return 0; }

std::string sm90_wide_fits(const Shape& shape) {
  if (shape.heads > 128) return "more than 128 heads";
  for (int i = 0; i < shape.list_count; ++i) {
    if (shape.formats[i] != CacheFormat::kV32Bf16 && shape.formats[i] != CacheFormat::kV4Bf16)
      return "a cache that is not bf16";
    if (shape.formats[i] != shape.formats[0]) return "two lists of different cache formats";
  }
  return {};
}

}  // namespace winnow::internal::attend
