// Wide attention on Hopper: when it serves a call, and the choice of the instantiation.
#include "attend/wide_sm90/launch.h"

#include "core/arithmetic.h"
#include "core/tuning_h200.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace winnow::internal::attend::wide_sm90 {
namespace {

namespace tuned = tuning_h200::wide;

int head_groups(int heads) { return ceil_div(heads, kHeads); }

Args args_of(const Params& params) {
  const int groups = head_groups(params.heads);
  return {device_params_of(params, groups), params.tokens * groups};
}

// Positions that a list's entries may mean.
int64_t positions(const ListView& list) {
  return int64_t{list.page} * (list.block_table ? list.table_width : list.pages);
}

// Whether rows are taken in sweeps: within their limits, where the L2 does not hold the rows
// anyway, and CTAs have items enough. A sweep's direction depends on the token's place in the
// batch, so a fixed split has none.
bool swept(const Params& params, int ctas) {
  const ListView& list = params.lists[0];
  return params.list_count == 1 && !params.fixed_split && list.width <= kSweepBlocks * kBlock &&
         positions(list) > tuned::kSweepPositions && positions(list) <= kSweepRows &&
         params.tokens * head_groups(params.heads) > tuned::kSweepItems * ctas;
}

}  // namespace

void run(const Params& params) noexcept {
  if (params.tokens == 0) return;
  const int ctas = cuda::multiprocessors(params.device.index);
  const cudaStream_t stream = cuda::stream_of(params.device);
  if (params.lists[0].format != CacheFormat::kV32Bf16)
    launch_v4_bf16(args_of(params), ctas, stream);
  else if (swept(params, ctas)) launch_v32_bf16_swept(args_of(params), ctas, stream);
  else launch_v32_bf16(args_of(params), ctas, stream);
}

// The kernel has no splits, so it needs items for a part of the multiprocessors, about where the
// decode kernel's splits end.
const char* slower(const attend::Shape& shape) {
  if (shape.fixed_split) return "a fixed split may not change with the batch";
  const int64_t items = shape.tokens * head_groups(shape.heads);
  const int quarters = shape.heads > 32 ? tuned::kQuarters : tuned::kQuartersFewHeads;
  return 4 * items >= quarters * cuda::multiprocessors(shape.device)
             ? nullptr
             : "too few tokens to fill the multiprocessors without splits";
}

const char* fits(const attend::Shape& shape) {
  if (shape.heads > 128) return "more than 128 heads";
  if (shape.f32_out) return "an output in fp32";
  for (int i = 0; i < shape.list_count; ++i) {
    if (shape.formats[i] != CacheFormat::kV32Bf16 && shape.formats[i] != CacheFormat::kV4Bf16)
      return "a cache that is not bf16";
    if (shape.formats[i] != shape.formats[0]) return "two lists of different cache formats";
  }
  return nullptr;
}

}  // namespace winnow::internal::attend::wide_sm90
