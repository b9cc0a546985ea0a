// prepare_queries on the device: one launch, the blocks of prepare_query(), then those of
// index_query() (heads.cuh, index_query_sm90.cuh).
#include <cuda_runtime.h>

#include "cuda/heads.cuh"
#include "cuda/launch.h"
#include "index_query/index_query_sm90.cuh"
#include "prepare_queries/kernel.h"
#include "prepare_query/heads_sm90.h"

namespace winnow::internal::prepare_queries {

namespace {

template <cuda::HeadsWay kWay, index_query::Form kForm, int kEach>
__global__ void __launch_bounds__(cuda::kHeadThreads, kForm == index_query::Form::kAny ? 1 : 4)
    prepare_both(const __grid_constant__ cuda::HeadsPlan query,
                 const __grid_constant__ index_query::Call index) {
  if (blockIdx.x < query.blocks) cuda::prepare_heads<kWay>(query, blockIdx.x);
  else index_query::prepare<kForm, kEach>(index, blockIdx.x - query.blocks);
}

// Few heads: a token in the grid's second dimension, the blocks of its heads in the first.
template <bool kHalf, bool kPowerOfTwo>
__global__ void __launch_bounds__(cuda::kFewThreads)
    prepare_few_heads(const __grid_constant__ index_query::FewIndexed index,
                      const __grid_constant__ cuda::FewTurned query) {
  const uint32_t of_index = cuda::few_blocks(index.heads);
  if (blockIdx.x < of_index)
    index_query::prepare_few<kHalf, kPowerOfTwo>(index, blockIdx.y, blockIdx.x);
  else cuda::turn_few(query, blockIdx.y, blockIdx.x - of_index);
}

// Ways of the models: V3.2's and V4's heads.
constexpr bool is_common(cuda::HeadsWay way) {
  return way == cuda::HeadsWay::kTurn || way == cuda::HeadsWay::kNormLatent;
}

}  // namespace

void sm90(const Params& p) noexcept {
  const cuda::HeadsPlan query = cuda::plan_heads(prepare_query::heads_of(p.query));
  const index_query::Call index = index_query::call_of(p.index, query.threads);
  const unsigned blocks = query.blocks + index_query::blocks_of(index);
  if (blocks == 0) return;
  if (query.way == cuda::HeadsWay::kTurn && cuda::fits_few(query.p) && cuda::is_in_place(query.p) &&
      index_query::is_few(index) && p.query.tokens == p.index.tokens) {
    const dim3 grid(cuda::few_blocks(p.index.heads) + cuda::few_blocks(p.query.heads),
                    static_cast<unsigned>(p.index.tokens));
    index_query::with_few(p.index, [&](auto half, auto power_of_two) {
      prepare_few_heads<decltype(half)::value, decltype(power_of_two)::value>
          <<<grid, cuda::kFewThreads, 0, cuda::stream_of(p.device)>>>(index_query::few_of(p.index),
                                                                      cuda::few_turned(query.p));
    });
    return cuda::keep_error(cudaGetLastError());
  }
  const index_query::Form wanted =
      is_common(query.way) ? index_query::form_of(index) : index_query::Form::kAny;
  cuda::with_way(query.way, [&](auto way) {
    index_query::with_form(wanted, index, [&](auto form, auto each) {
      constexpr cuda::HeadsWay kWay = decltype(way)::value;
      constexpr index_query::Form kForm =
          is_common(kWay) ? decltype(form)::value : index_query::Form::kAny;
      prepare_both<kWay, kForm, decltype(each)::value>
          <<<blocks, query.threads, 0, cuda::stream_of(p.device)>>>(query, index);
      cuda::keep_error(cudaGetLastError());
    });
  });
}

}  // namespace winnow::internal::prepare_queries
