// Top-k inside blocks of columns, and the best blocks of a row. A thread block serves a token: it
// finds the K-th largest key by its four bytes, from the highest on, then writes what lies above it
// and as many equal ones as are left, in ascending order.
//
// Who does what: an item is an entry of the token's list, with all columns of its block (within),
// or a block of the row with its largest column (best). A thread takes every 512th item. Keys are
// read again in each of the five passes; 16,384 columns are 64 KB, which the L1 cache and L2 hold.
// Budget: no bar, since its rows are few; a pass over 2,048 blocks of 8 is about 3 us.
#include "cuda/launch.h"
#include "cuda/topk_blocks.h"

namespace winnow::internal::cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

// Digits in the order of the floats: -0 equals +0, NaN is below everything (cpu::order_key()).
__device__ __forceinline__ uint32_t digits_of(float x) {
  const int32_t bits = __float_as_int(x), magnitude = bits & 0x7fffffff;
  const int32_t key = magnitude > 0x7f800000 ? INT32_MIN : (bits < 0 ? -magnitude : magnitude);
  return static_cast<uint32_t>(key) ^ 0x80000000u;
}
constexpr uint32_t kAlways = 0xffffffffu;  // above +inf: the newest block

struct Memory {
  uint32_t counts[256];
  int64_t warps[2][kWarps];
  int64_t left;
  uint32_t found;
};

// Sums of all threads before this one; `total` is that of the block.
__device__ int64_t sums_before(int64_t x, int64_t* warps, int64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = x;
  for (int d = 1; d < 32; d *= 2) {
    const int64_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  int64_t before = 0;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  return before + sum - x;
}

// The largest of all threads before this one, and of `carry`, which then covers the block.
__device__ int64_t largest_before(int64_t x, int64_t* warps, int64_t& carry) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t most = x;
  for (int d = 1; d < 32; d *= 2) {
    const int64_t other = __shfl_up_sync(~0u, most, d);
    if (lane >= d) most = max(most, other);
  }
  __syncthreads();
  if (lane == 31) warps[warp] = most;
  const int64_t above = __shfl_up_sync(~0u, most, 1);
  __syncthreads();
  int64_t before = lane > 0 ? max(carry, above) : carry;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before = max(before, warps[w]);
    carry = max(carry, warps[w]);
  }
  return before;
}

struct Job {
  const float* row;  // column c stands at row[c]
  core::Range range;
  int64_t size, items;
  int64_t base;           // taken from ids
  const int32_t* within;  // null: items are blocks of the row
};

__device__ core::Range columns_of(const Job& job, int64_t block) {
  const int64_t first = block * job.size, last = first + job.size;
  return {max(first, job.range.first), min(last, job.range.last)};
}

// f(id, digits) for what this thread has of one item.
template <bool kWithin, class F>
__device__ void visit(const Job& job, int64_t item, int64_t block, bool valid, F&& f) {
  if (!valid) return;
  const core::Range columns = columns_of(job, block);
  if constexpr (kWithin) {
    for (int64_t c = columns.first; c < columns.last; ++c)
      f(static_cast<int32_t>(c - job.base), digits_of(job.row[c]));
    return;
  }
  uint32_t most = item == job.items - 1 ? kAlways : 0;
  for (int64_t c = columns.first; c < columns.last; ++c) most = max(most, digits_of(job.row[c]));
  f(static_cast<int32_t>(block), most);
}

// body(item, block, valid) for every item of the token, all threads together: a list's entry counts
// if it is larger than all before it.
template <bool kWithin, class F>
__device__ void for_items(const Job& job, Memory& sm, F&& body) {
  int64_t carry = -1;
  for (int64_t from = 0; from < job.items; from += kThreads) {
    const int64_t item = from + threadIdx.x;
    const bool there = item < job.items;
    int64_t block = -1;
    bool valid = there;
    if constexpr (kWithin) {
      block = there ? job.within[item] : -1;
      const int64_t before = largest_before(block, sm.warps[0], carry);
      valid = there && block > before;
    } else {
      block = job.range.first / job.size + item;
    }
    body(item, block, valid);
  }
}

// `values`, if there are any: the logits at the ids, -inf after them.
template <bool kWithin>
__device__ void select_items(const Job& job, int32_t* ids, float* values, int64_t width,
                             Memory& sm) {
  if (threadIdx.x == 0) {
    sm.left = width;
    sm.found = 0;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += kThreads) sm.counts[i] = 0;
    __syncthreads();
    const uint32_t found = sm.found;
    for_items<kWithin>(job, sm, [&](int64_t item, int64_t block, bool valid) {
      visit<kWithin>(job, item, block, valid, [&](int32_t, uint32_t digits) {
        if (shift == 24 || (digits ^ found) >> (shift + 8) == 0)
          atomicAdd(&sm.counts[digits >> shift & 255], 1u);
      });
    });
    __syncthreads();
    if (threadIdx.x == 0 && sm.left > 0) {
      int byte = 255;
      while (byte > 0 && sm.counts[byte] < sm.left) sm.left -= sm.counts[byte--];
      sm.found = found | static_cast<uint32_t>(byte) << shift;
    }
    __syncthreads();
  }
  const uint32_t found = sm.found;
  const int64_t left = sm.left;
  int64_t given = 0, ties = 0;  // of the items before
  for_items<kWithin>(job, sm, [&](int64_t item, int64_t block, bool valid) {
    int64_t above = 0, equal = 0, all_above = 0, all_equal = 0;
    visit<kWithin>(job, item, block, valid, [&](int32_t, uint32_t digits) {
      above += digits > found;
      equal += digits == found;
    });
    const int64_t above_before = sums_before(above, sm.warps[0], all_above);
    int64_t tie = ties + sums_before(equal, sm.warps[1], all_equal);
    int64_t at = given + above_before + min(tie, left) - min(ties, left);
    visit<kWithin>(job, item, block, valid, [&](int32_t id, uint32_t digits) {
      const bool keeps = digits > found || (digits == found && tie < left);
      tie += digits == found;
      if (!keeps) return;
      if (at < width) {
        ids[at] = id;
        if (kWithin && values) values[at] = job.row[id + job.base];
      }
      ++at;
    });
    given += all_above + min(ties + all_equal, left) - min(ties, left);
    ties += all_equal;
  });
  for (int64_t i = min(given, width) + threadIdx.x; i < width; i += kThreads) {
    ids[i] = -1;
    if (kWithin && values) values[i] = -INFINITY;
  }
}

template <bool kWithin>
__global__ void __launch_bounds__(kThreads)
    select_blocks(const __grid_constant__ TopkParams p, const __grid_constant__ BlockParams b) {
  __shared__ Memory sm;
  const int64_t token = blockIdx.x;
  const core::Range range = p.ranges.of(token);
  Job job{.row = p.logits + token * p.logit_stride - (p.from_start ? range.first : 0),
          .range = range,
          .size = b.size,
          .items = b.within_count,
          .base = p.relative ? range.first : 0,
          .within = b.within + token * b.within_stride};
  if constexpr (kWithin) {
    float* values = p.values ? p.values + token * p.value_stride : nullptr;
    select_items<true>(job, p.ids + token * p.id_stride, values, p.width, sm);
  } else {
    job.items =
        range.first < range.last ? (range.last - 1) / job.size - range.first / job.size + 1 : 0;
    select_items<false>(job, b.best + token * b.best_stride, nullptr, b.best_count, sm);
  }
}

template <bool kWithin>
void launch(const TopkParams& p, const BlockParams& b) {
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(p.tokens)), kThreads, 0, stream_of(p.device));
  keep_error(cudaLaunchKernelEx(&config, select_blocks<kWithin>, p, b));
}

}  // namespace

void topk_in_blocks(const TopkParams& rows, const BlockParams& blocks) noexcept {
  if (rows.tokens == 0) return;
  if (blocks.restricts) launch<true>(rows, blocks);
  else topk(rows, fastest_topk(shape_of(rows)));
  if (blocks.finds) launch<false>(rows, blocks);
}

}  // namespace winnow::internal::cuda
