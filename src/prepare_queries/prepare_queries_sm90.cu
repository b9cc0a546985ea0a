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

template <cuda::HeadsWay kWay>
__global__ void __launch_bounds__(cuda::kHeadThreads)
    prepare_both(const __grid_constant__ cuda::HeadsPlan query,
                 const __grid_constant__ index_query::Call index) {
  if (blockIdx.x < query.blocks) cuda::prepare_heads<kWay>(query, blockIdx.x);
  else index_query::prepare(index, blockIdx.x - query.blocks);
}

}  // namespace

void sm90(const Params& p) noexcept {
  const cuda::HeadsPlan query = cuda::plan_heads(prepare_query::heads_of(p.query));
  const index_query::Call index = index_query::call_of(p.index, cuda::kHeadThreads);
  const unsigned blocks = query.blocks + index_query::blocks_of(index);
  if (blocks == 0) return;
  cuda::with_way(query.way, [&](auto way) {
    prepare_both<decltype(way)::value>
        <<<blocks, cuda::kHeadThreads, 0, cuda::stream_of(p.device)>>>(query, index);
    cuda::keep_error(cudaGetLastError());
  });
}

}  // namespace winnow::internal::prepare_queries
