// What Hopper's attend kernels take of a call: Params without what concerns the CPU alone.
#pragma once

#include "attend/kernel.h"

namespace winnow::internal::attend {

// The order is that of use: a launch finds its arguments in no cache, and waits for each 64 bytes.
struct Call {
  int list_count, tokens;
  ListView lists[2];
  const bf16 *q, *q_rope;
  int64_t q_token, q_head, qr_token, qr_head;
  const int32_t* requests;
  int64_t request_stride;
  float scale;
  const float* sink;
  bf16* out;
  int64_t out_token, out_head;
  float* lse;
  int64_t lse_token, lse_head;
  float* max_logit;
  int64_t max_token, max_head;
  float empty_lse;
  int heads;
  int groups;  // that the heads are cut in
};

inline Call call_of(const Params& p, int groups) {
  Call a{};
  a.q = p.q, a.q_rope = p.q_rope;
  a.q_token = p.q_token_stride, a.q_head = p.q_head_stride;
  a.qr_token = p.rope_token_stride, a.qr_head = p.rope_head_stride;
  a.lists[0] = p.lists[0], a.lists[1] = p.lists[1], a.list_count = p.list_count;
  a.requests = p.requests, a.request_stride = p.request_stride;
  a.scale = p.scale, a.sink = p.sink;
  a.out = p.out, a.out_token = p.out_token_stride, a.out_head = p.out_head_stride;
  a.lse = p.lse, a.lse_token = p.lse_token_stride, a.lse_head = p.lse_head_stride;
  a.max_logit = p.max_logit, a.max_token = p.max_token_stride, a.max_head = p.max_head_stride;
  a.empty_lse = p.empty_lse;
  a.tokens = p.tokens, a.heads = p.heads, a.groups = groups;
  return a;
}

// How many of a list's `count` entries there are up to the last that is an index: without lengths,
// the lists of a short context end in -1. By a whole warp, 256 at once from the end on. Rare, so it
// is called: then it lies behind the code of every launch, of which the first 64 KB cost nothing.
inline __device__ __noinline__ int up_to_last(const int32_t* list, int count, int lane) {
  constexpr int kEach = 8, kAtOnce = 32 * kEach;
  const int32_t* at = list + (count - 1 - lane);
#pragma unroll 1
  for (; count > 0; count -= kAtOnce, at -= kAtOnce) {
    int entry[kEach], nearest = kAtOnce;  // how far before the end of those at hand
#pragma unroll
    for (int k = 0; k < kEach; k++) entry[k] = count - lane > 32 * k ? __ldg(at - 32 * k) : -1;
#pragma unroll
    for (int k = kEach - 1; k >= 0; k--)
      if (entry[k] >= 0) nearest = 32 * k + lane;
    nearest = __reduce_min_sync(~0u, nearest);
    if (nearest < kAtOnce) return count - nearest;
  }
  return 0;
}

}  // namespace winnow::internal::attend
