// Norm and RoPE of heads: which way, and the launch.
#include "cuda/heads.cuh"

#include <bit>

#include "cuda/device.h"
#include "cuda/few.cuh"
#include "cuda/launch.h"

namespace winnow::internal::cuda {

namespace {

template <HeadsWay kWay>
__global__ void __launch_bounds__(kHeadThreads, kWay == HeadsWay::kTurn ? 4 : 1)
    heads(const __grid_constant__ HeadsPlan plan) {
  prepare_heads<kWay>(plan, blockIdx.x);
}

// A token in the grid's second dimension.
__global__ void __launch_bounds__(kFewThreads)
    turn_few_heads(const __grid_constant__ FewTurned call) {
  turn_few(call, blockIdx.y, blockIdx.x);
}
__global__ void __launch_bounds__(kFewThreads)
    copy_few_heads(const __grid_constant__ FewCopied call) {
  copy_few(call, blockIdx.y, blockIdx.x);
}

void prepare_few(const HeadParams& p) {
  const auto tokens = static_cast<unsigned>(p.tokens);
  const cudaStream_t stream = stream_of(p.device);
  if (is_in_place(p)) {
    turn_few_heads<<<dim3(few_blocks(p.heads), tokens), kFewThreads, 0, stream>>>(few_turned(p));
  } else {
    const FewCopied call = few_copied(p);
    const auto blocks = static_cast<unsigned>(core::ceil_div(call.pieces, uint32_t{kFewThreads}));
    copy_few_heads<<<dim3(blocks, tokens), kFewThreads, 0, stream>>>(call);
  }
  keep_error(cudaGetLastError());
}

// A head is whole groups of 64 aligned values.
bool is_even(const HeadParams& p) {
  return p.width % kRopeDim == 0 && is_wide(p.x, p.x_token * 2) &&
         is_wide(p.out, p.out_token * 2) && p.x_head % kPiece == 0 && p.out_head % kPiece == 0 &&
         is_wide(p.norm);
}

bool is_latent(const HeadParams& p) {
  return p.width == kLatentWidth && p.norm.kind == NormKind::kRms && p.norm.weight == nullptr &&
         p.norm.bias == nullptr && !p.rope.half && !p.rope.first;
}

Cut cut_of(const HeadParams& p, int most) {
  const bool in_place = p.x == p.out && p.x_token == p.out_token && p.x_head == p.out_head;
  Cut cut;
  cut.first = in_place ? core::rope_begin(p.rope, p.width) : 0;
  cut.groups = in_place ? 1 : static_cast<uint32_t>(p.width / kRopeDim);
  if (cut.groups > 1)
    cut.inverse = static_cast<uint32_t>(((uint64_t{1} << 32) + cut.groups - 1) / cut.groups);
  const int64_t groups = p.heads * cut.groups;  // of a token
  int threads = kRopeLanes;
  while (threads < most && threads / kRopeLanes * kHeadEach < groups) threads *= 2;
  cut.log_threads = std::countr_zero(static_cast<unsigned>(threads));
  cut.blocks = static_cast<uint32_t>(core::ceil_div(groups, threads / kRopeLanes * kHeadEach));
  return cut;
}

}  // namespace

// The plan by blocks of `threads`.
static HeadsPlan plan_by(const HeadParams& p, int threads) {
  HeadsPlan plan;
  plan.p = p;
  plan.threads = threads;
  const int64_t heads = p.tokens * p.heads;
  if (heads == 0 || p.rope.positions == 0) return plan;
  const int64_t warps = threads / 32;
  plan.blocks = static_cast<unsigned>(core::ceil_div(heads, warps));
  if (!is_even(p)) return plan;
  if (p.norm.kind == NormKind::kNone) {
    plan.way = HeadsWay::kTurn;
    plan.cut = cut_of(p, threads);
    const int64_t groups = core::ceil_div(p.tokens, int64_t{threads >> plan.cut.log_threads});
    plan.blocks = static_cast<unsigned>(groups * plan.cut.blocks);
  } else if (p.width <= 2 * kWarpValues) {
    plan.way = is_latent(p)             ? HeadsWay::kNormLatent
               : p.width <= kWarpValues ? HeadsWay::kNormShort
                                        : HeadsWay::kNorm;
    const int64_t groups = p.tokens * core::ceil_div(p.heads, int64_t{kNormHeads});
    plan.blocks = static_cast<unsigned>(core::ceil_div(groups, warps));
  }
  return plan;
}

HeadsPlan plan_heads(const HeadParams& p) noexcept {
  const HeadsPlan plan = plan_by(p, kHeadThreads);
  const bool few = plan.blocks < static_cast<unsigned>(multiprocessors(p.device.index));
  return few ? plan_by(p, kFewHeadThreads) : plan;
}

void prepare_heads(const HeadParams& p) noexcept {
  const HeadsPlan plan = plan_heads(p);
  if (plan.blocks == 0) return;
  if (plan.way == HeadsWay::kTurn && fits_few(p)) return prepare_few(p);
  with_way(plan.way, [&](auto way) {
    heads<decltype(way)::value><<<plan.blocks, plan.threads, 0, stream_of(p.device)>>>(plan);
    keep_error(cudaGetLastError());
  });
}

}  // namespace winnow::internal::cuda
