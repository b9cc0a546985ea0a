// Wide attention on Hopper: arguments, the choice of the instantiation, and when it is the better
// one.
#include "attend/wide_sm90/launch.h"
#include "cuda/device.h"

namespace winnow::internal::attend::wide_sm90 {
namespace {

Args args_of(const Params& p) {
  const int groups = (p.heads + kHeads - 1) / kHeads;
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
  return p.list_count == 1 && !p.fixed_split && l.width <= kSweepBlocks * kBlock &&
         positions(l) > 40960 && positions(l) <= kSweepRows;
}

}  // namespace

void run(const Params& p) noexcept {
  if (p.tokens == 0) return;
  const int ctas = cuda::multiprocessors(p.device.index);
  if (p.lists[0].format != CacheFormat::kV32Bf16) attend_v4_bf16(args_of(p), ctas, p.device.stream);
  else if (swept(p)) attend_v32_bf16_swept(args_of(p), ctas, p.device.stream);
  else attend_v32_bf16(args_of(p), ctas, p.device.stream);
}

const char* slower(const attend::Shape& s) {
  // It has no splits, so it wants items for half of the multiprocessors, where the decode kernel's
  // splits end: bf16 rows, topk 2048, 64 tokens of 128 heads 71 us against 124, 128 of 64 heads 92
  // against 131. It pads heads to 64, and is faster all the same from three quarters on: 112 tokens
  // of 32 heads 83 us against 86, 4,096 tokens of 16 heads 1,895 against 2,653.
  if (s.fixed_split) return "a fixed split may not change with the batch";
  const int64_t items = s.tokens * ((s.heads + kHeads - 1) / kHeads);
  const int quarters = s.heads > 32 ? 2 : 3;
  return 4 * items >= quarters * cuda::multiprocessors(s.device)
             ? nullptr
             : "too few tokens to fill the multiprocessors without splits";
}

const char* fits(const attend::Shape& shape) {
  if (shape.heads > 128) return "more than 128 heads";
  for (int i = 0; i < shape.list_count; ++i) {
    if (shape.formats[i] != CacheFormat::kV32Bf16 && shape.formats[i] != CacheFormat::kV4Bf16)
      return "a cache that is not bf16";
    if (shape.formats[i] != shape.formats[0]) return "two lists of different cache formats";
  }
  return nullptr;
}

}  // namespace winnow::internal::attend::wide_sm90
