// What Hopper's attend kernels take of a call: Params without what concerns the CPU alone.
#pragma once

#include "attend/kernel.h"

namespace winnow::internal::attend {

// A kernel's arguments. Fields are in the order in which they are used: a launch finds its
// arguments in no cache and waits for each 64 bytes of them. Strides are in elements.
struct DeviceParams {
  int list_count;
  int tokens;
  ListView lists[2];
  const bf16* q;
  const bf16* q_rope;
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t rope_token_stride;
  int64_t rope_head_stride;
  const int32_t* requests;
  int64_t request_stride;
  float scale;
  const float* sink;
  bf16* out;
  int64_t out_token_stride;
  int64_t out_head_stride;
  float* lse;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  float* max_logit;
  int64_t max_token_stride;
  int64_t max_head_stride;
  float empty_lse;
  int heads;
  // The heads are cut into this many groups, one CTA (or cluster) each.
  int groups;
};

inline DeviceParams device_params_of(const Params& params, int groups) {
  return {
      .list_count = params.list_count,
      .tokens = params.tokens,
      .lists = {params.lists[0], params.lists[1]},
      .q = params.q,
      .q_rope = params.q_rope,
      .q_token_stride = params.q_token_stride,
      .q_head_stride = params.q_head_stride,
      .rope_token_stride = params.rope_token_stride,
      .rope_head_stride = params.rope_head_stride,
      .requests = params.requests,
      .request_stride = params.request_stride,
      .scale = params.scale,
      .sink = params.sink,
      .out = params.out,
      .out_token_stride = params.out_token_stride,
      .out_head_stride = params.out_head_stride,
      .lse = params.lse,
      .lse_token_stride = params.lse_token_stride,
      .lse_head_stride = params.lse_head_stride,
      .max_logit = params.max_logit,
      .max_token_stride = params.max_token_stride,
      .max_head_stride = params.max_head_stride,
      .empty_lse = params.empty_lse,
      .heads = params.heads,
      .groups = groups,
  };
}

// How many of a list's `count` entries remain when the invalid ones (-1) at its end are left out:
// without lengths, the lists of a short context are padded with -1. A whole warp searches from the
// end, with kEntriesPerLane loads under way.
template <int kEntriesPerLane>
__device__ __forceinline__ int search_end(const int32_t* list, int count, int lane) {
  constexpr int kAtOnce = 32 * kEntriesPerLane;
  const int32_t* last = list + (count - 1 - lane);
#pragma unroll 1
  for (; count > 0; count -= kAtOnce, last -= kAtOnce) {
    int entry[kEntriesPerLane];
    // The distance of the nearest valid entry from the end of this window.
    int nearest = kAtOnce;
#pragma unroll
    for (int k = 0; k < kEntriesPerLane; k++)
      entry[k] = count - lane > 32 * k ? __ldg(last - 32 * k) : -1;
#pragma unroll
    for (int k = kEntriesPerLane - 1; k >= 0; k--)
      if (entry[k] >= 0) nearest = 32 * k + lane;
    nearest = __reduce_min_sync(~0u, nearest);
    if (nearest < kAtOnce) return count - nearest;
  }
  return 0;
}
// The same where it is rare and therefore a function that is called: its code then lies after the
// kernel's, of which only the first 64 KB come with a launch.
inline __device__ __noinline__ int length_without_padding(const int32_t* list, int count,
                                                          int lane) {
  return search_end<8>(list, count, lane);
}

}  // namespace winnow::internal::attend
