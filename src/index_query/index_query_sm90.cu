// index_query on the device: the launch.
#include "index_query/index_query_sm90.cuh"

#include "cuda/launch.h"
#include "index_query/few_sm90.cuh"

namespace winnow::internal::index_query {

namespace {

constexpr int kThreads = 256;

template <Form kForm, int kEach>
__global__ void __launch_bounds__(kThreads, kForm == Form::kAny ? 1 : 5)
    prepare_tokens(const __grid_constant__ Call call) {
  prepare<kForm, kEach>(call, blockIdx.x);
}

// A token in the grid's second dimension.
template <bool kHalf, bool kPowerOfTwo>
__global__ void __launch_bounds__(cuda::kFewThreads)
    prepare_few_heads(const __grid_constant__ FewIndexed call) {
  prepare_few<kHalf, kPowerOfTwo>(call, blockIdx.y, blockIdx.x);
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens * p.heads == 0) return;
  // Whole warps, as few as the heads of a thread allow.
  const int each = each_of(p);
  const int most = each == 1 ? cuda::kFewThreads : kThreads;
  const int64_t warps = core::ceil_div(p.heads, int64_t{32 / kLanes * each});
  const int threads = static_cast<int>(warps < most / 32 ? warps * 32 : most);
  const Call call = call_of(p, threads);
  if (is_few(call)) {
    const dim3 grid(cuda::few_blocks(p.heads), static_cast<unsigned>(p.tokens));
    with_few(p, [&](auto half, auto power_of_two) {
      prepare_few_heads<decltype(half)::value, decltype(power_of_two)::value>
          <<<grid, cuda::kFewThreads, 0, cuda::stream_of(p.device)>>>(few_of(p));
    });
    return cuda::keep_error(cudaGetLastError());
  }
  with_form(form_of(call), call, [&](auto form, auto each) {
    prepare_tokens<decltype(form)::value, decltype(each)::value>
        <<<blocks_of(call), threads, 0, cuda::stream_of(p.device)>>>(call);
    cuda::keep_error(cudaGetLastError());
  });
}

}  // namespace winnow::internal::index_query
