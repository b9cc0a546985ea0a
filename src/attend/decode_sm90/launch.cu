// Decode on Hopper: the launches of a call.
#include "attend/decode_sm90/launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <memory>
#include <utility>

#include "attend/decode_sm90/cut.h"
#include "core/arithmetic.h"
#include "core/tuning_h200.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace winnow::internal::attend::decode_sm90 {
namespace {

namespace tuned = tuning_h200::decode;

// Products of e4m3 are added with some 13 bits below the largest term: the more of them a list has,
// the more is lost.
constexpr int32_t kMostCodeColumns = 4096;

// Clusters of `size` CTAs that device `index` runs at once, asked once. A GPC has 14 to 18
// multiprocessors, so on an H200 {132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7}.
int clusters(int index, int size) {
  static std::array<std::array<std::atomic<int>, 17>, 64> known{};
  std::atomic<int>& count = known[static_cast<unsigned>(index) % known.size()][size];
  int found = count.load(std::memory_order_relaxed);
  if (found > 0) return found;
  found = size == 1 ? cuda::multiprocessors(index) : clusters_at_once(size);
  // Where the device could not say, it is asked again: one cluster would cut all later calls badly.
  if (found > 0) count.store(found, std::memory_order_relaxed);
  return std::max(found, 1);
}

Gpu gpu_of(const Shape& shape) {
  return {shape.device, cuda::multiprocessors(shape.device), clusters};
}

// Where splits may meet in the workspace, and how many bytes there are.
std::pair<std::byte*, size_t> exchange_memory(const Params& params) {
  void* begin = params.workspace.data();
  size_t bytes = params.workspace.size();
  if (!std::align(kExchangeAlign, 1, begin, bytes)) return {nullptr, 0};
  return {static_cast<std::byte*>(begin), bytes};
}

F32Output f32_output_of(const Params& p) {
  if (p.block_heads == 0) return {p.out_f32, 0, 0, 0};
  return {p.out_f32, p.out_block_stride - p.block_heads * p.out_head_stride,
          p.lse_block_stride - p.block_heads * p.lse_head_stride,
          ceil_div(0x10000u, static_cast<uint32_t>(p.block_heads))};
}

// Launches the decode kernel for a call that is cut so.
void launch_cut(const Params& params, const Cut& cut) {
  const Shape shape = shape_of(params);
  const CacheFormat format = format_of(shape);
  const auto splits = static_cast<unsigned>(cut.splits);
  std::byte* const exchange = cut.exchange ? exchange_memory(params).first : nullptr;
  const Args args{{cut.splits, ceil_div(0x80000000u, splits), exchange},
                  device_params_of(params, cut.groups),
                  f32_output_of(params),
                  {}};
  // Without splits, each multiprocessor has a CTA that goes from token to token. Rows are counted
  // in stages of 16 over all tokens, in an int. Where a token's heads are in groups, these drift
  // apart over many rows, until one no longer finds the other's rows in the L2.
  Share share{cut.heads, params.tokens};
  if (cut.splits == 1 && takes_many_tokens(format, cut.heads, shape.tables) && !params.out_f32) {
    const int at_once = std::max(1, clusters(params.device.index, 1) / cut.groups);
    const int64_t rows = (int64_t{shape.width} + 64) * (params.tokens / at_once + 1);
    const int64_t most_rows = cut.groups == 1 ? int64_t{INT_MAX} : tuned::kMostRowsOfGroups;
    if (rows <= most_rows) share.tokens = at_once;
  }
  const cudaStream_t stream = cuda::stream_of(params.device);
  if (of_codes(shape)) return launch_v32_codes(args, share, stream);
  switch (format) {
    case CacheFormat::kV32Fp8: launch_v32_fp8(args, share, stream); break;
    case CacheFormat::kV32Bf16: launch_v32_bf16(args, share, stream); break;
    case CacheFormat::kV4Fp8: launch_v4_fp8(args, share, stream); break;
    default: launch_v4_bf16(args, share, stream); break;
  }
}

// Sets the flags of all parts to 0, while the kernel that uses them already begins (helped.cuh).
__global__ void __launch_bounds__(kMostParts) clear_flags(uint32_t* flags) {
  let_next_start();
  flags[threadIdx.x] = 0;
}

void clear_flags_of(const Params& params) {
  clear_flags<<<1, kMostParts, 0, cuda::stream_of(params.device)>>>(
      reinterpret_cast<uint32_t*>(exchange_memory(params).first));
  keep_error(cudaGetLastError());
}

// The launch that clear_flags_of() must precede. It begins beside the kernel before it on the
// stream.
void launch_helped(const Params& params, const HelpedCut& cut) {
  const HelpedTokens helped = helped_tokens(cut, params.tokens);
  const Args args{{1, 0x80000000u, exchange_memory(params).first},
                  device_params_of(params, cut.groups),
                  f32_output_of(params),
                  helped};
  launch_v32_fp8(args, {64, helped.main_ctas + helped.helpers}, cuda::stream_of(params.device));
}

Choice choose(const Params& params) {
  const Shape shape = shape_of(params);
  return choose(shape, exchange_memory(params).second, gpu_of(shape));
}

}  // namespace

int32_t first_launch(const Shape& shape, bool wide) {
  return first_launch(shape, wide, gpu_of(shape));
}

void run(const Params& params) noexcept {
  if (params.tokens == 0) return;
  const int32_t first = first_launch(shape_of(params), false);
  const Params begin = tokens_of(params, 0, first);
  const Params rest = tokens_of(params, first, params.tokens - first);
  const Choice of_begin = choose(begin);
  const Choice of_rest = rest.tokens > 0 ? choose(rest) : Choice{};
  // Flags are cleared before both launches, since the second one begins beside the first.
  if (of_begin.is_helped || of_rest.is_helped) clear_flags_of(params);
  if (of_begin.is_helped) launch_helped(begin, of_begin.helped);
  else launch_cut(begin, of_begin.cut);
  if (of_rest.is_helped) launch_helped(rest, of_rest.helped);
  else if (rest.tokens > 0) launch_cut(rest, of_rest.cut);
}

const char* fits(const Shape& shape) { return shape.heads > 128 ? "more than 128 heads" : nullptr; }

const char* fits_fp8(const Shape& shape) {
  if (!of_codes(shape)) return "Precision::kFp8 alone";
  for (const CacheFormat format : shape.formats)
    if (format != CacheFormat::kV32Fp8) return "V3.2's fp8 records alone";
  if (shape.width > kMostCodeColumns) return "more than 4,096 columns";
  return fits(shape);
}

size_t workspace(const Shape& shape, int64_t) { return workspace_bytes(shape); }

}  // namespace winnow::internal::attend::decode_sm90

namespace winnow::internal::attend::wide_then_decode_sm90 {

void run(const Params& params) noexcept {
  if (params.tokens == 0) return;
  const int32_t first = decode_sm90::first_launch(shape_of(params), true);
  wide_sm90::run(tokens_of(params, 0, first));
  if (first < params.tokens) decode_sm90::run(tokens_of(params, first, params.tokens - first));
}

const char* fits(const Shape& shape) {
  if (const char* why = wide_sm90::fits(shape)) return why;
  if (decode_sm90::first_launch(shape, true) == shape.tokens)
    return "no tokens behind the last full wave that gain by a launch of their own";
  return nullptr;
}

}  // namespace winnow::internal::attend::wide_then_decode_sm90
