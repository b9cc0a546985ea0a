// merge with portable vectors: a (token, head) row at a time, rows shared out to the workers. Bound
// by memory: every partial row is read once.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "merge/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "merge/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::merge::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace vectors = winnow::internal::cpu::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const bf16* p) {
  return vectors::load_bf16(d, p);
}
template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, bf16* p) {
  vectors::store_bf16(d, v, p);
}

// One row of a call, and what its parts weigh.
struct Row {
  const float* lse;  // of part 0
  const void* in;
  void* out;
  float max, whole;  // largest lse; sum of e^{lse - max}, the sink's included
};

// Columns [from, d_v), in steps of a vector; returns how far it came.
template <class In, class Out, class D>
HWY_INLINE int64_t columns(D d, const Params& p, const Row& row, int64_t from) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; from + 4 * lanes <= p.d_v || (lanes == 1 && from < p.d_v);) {
    // Four vectors share the weight of a part.
    const int64_t vectors = lanes == 1 ? 1 : 4;
    hn::Vec<D> sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
    for (int64_t i = 0; i < p.parts; ++i) {
      const float lse = row.lse[i * p.lse_part_stride];
      if (std::isinf(lse)) continue;  // empty: its row is not read
      const auto weight = hn::Set(d, std::exp(lse - row.max) / row.whole);
      const In* in = static_cast<const In*>(row.in) + i * p.part_stride + from;
      for (int64_t v = 0; v < vectors; ++v)
        sum[v] = hn::MulAdd(weight, load(d, in + v * lanes), sum[v]);
    }
    for (int64_t v = 0; v < vectors; ++v)
      store(d, sum[v], static_cast<Out*>(row.out) + from + v * lanes);
    from += vectors * lanes;
  }
  return from;
}

template <class In, class Out>
void write_row(const Params& p, const Row& row) {
  const int64_t at = columns<In, Out>(hn::ScalableTag<float>(), p, row, 0);
  columns<In, Out>(hn::CappedTag<float, 1>(), p, row, at);
}

void merge_row(const Params& p, int64_t t, int64_t h) {
  Row row;
  row.lse = p.partial_lse + t * p.lse_token_stride + h * p.lse_head_stride;
  float max = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int64_t i = 0; i < p.parts; ++i) {
    const float lse = row.lse[i * p.lse_part_stride];
    if (!std::isinf(lse) && !(lse <= max)) max = lse;
  }
  for (int64_t i = 0; i < p.parts; ++i) {
    const float lse = row.lse[i * p.lse_part_stride];
    if (!std::isinf(lse)) sum += std::exp(lse - max);
  }
  row.max = max;
  row.whole = sum + (p.sink ? std::exp(p.sink[h] - max) : 0.0f);
  const int64_t in = t * p.token_stride + h * p.head_stride;
  const int64_t out = t * p.out_token_stride + h * p.out_head_stride;
  row.in = static_cast<const std::byte*>(p.partial_out) + in * (p.partial_bf16 ? 2 : 4);
  row.out = static_cast<std::byte*>(p.out) + out * (p.out_bf16 ? 2 : 4);
  if (p.partial_bf16) p.out_bf16 ? write_row<bf16, bf16>(p, row) : write_row<bf16, float>(p, row);
  else p.out_bf16 ? write_row<float, bf16>(p, row) : write_row<float, float>(p, row);
  if (p.lse)
    p.lse[t * p.out_lse_token_stride + h * p.out_lse_head_stride] =
        sum == 0 ? -std::numeric_limits<float>::infinity() : max + std::log(sum);
}

}  // namespace winnow::internal::merge::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::merge {

HWY_EXPORT(merge_row);

void simd(const Params& p) noexcept {
  // Some 64 KB of partial rows a task.
  const int64_t rows = p.tokens * p.heads;
  const int64_t per_task = 1 + 16384 / (p.parts * p.d_v + 1);
  cpu::parallel_for(ceil_div(rows, per_task), [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * per_task);
    for (int64_t r = task * per_task; r < end; ++r)
      HWY_DYNAMIC_DISPATCH(merge_row)(p, r / p.heads, r % p.heads);
  });
}

}  // namespace winnow::internal::merge
#endif  // HWY_ONCE
