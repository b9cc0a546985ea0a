// V4's index lists on the device: a thread per entry, a block per stretch of one row. Lengths,
// positions and tables are read here, so a captured graph follows them. Memory-bound: 4 B written
// per entry.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/arithmetic.h"
#include "cuda/launch.h"
#include "lists/kernel.h"

namespace winnow::internal::lists::sm90 {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostSplits = 64;  // blocks that share a row

// One block row of the grid per token; wide rows are shared by several blocks.
dim3 grid_of(int64_t tokens, int64_t width) {
  const int64_t splits = std::clamp<int64_t>(ceil_div(width, 4 * kThreads), 1, kMostSplits);
  return {static_cast<unsigned>(tokens), static_cast<unsigned>(splits)};
}

__global__ void __launch_bounds__(kThreads) slot_entries(const __grid_constant__ SlotsParams p) {
  const int64_t t = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (t < p.slot_count) p.slots[t] = compressed_slot(p, t);
}

// Writes entry(k) to every column of a token's row and `length` beside it.
template <class Entry>
__device__ void write_row(const Rows& out, int64_t t, int64_t length, const Entry& entry) {
  const int64_t step = int64_t{kThreads} * gridDim.y;
  for (int64_t k = blockIdx.y * int64_t{kThreads} + threadIdx.x; k < out.width; k += step)
    out.data[t * out.stride + k] = entry(k);
  if (blockIdx.y == 0 && threadIdx.x == 0) out.lengths[t] = static_cast<int32_t>(length);
}

__global__ void __launch_bounds__(kThreads) run_rows(const __grid_constant__ RunParams p) {
  const int64_t t = blockIdx.x;
  const Run r = run_of(p, t);
  write_row(p.out, t, r.length, [&](int64_t k) { return run_entry(p, t, r, k); });
}

__global__ void __launch_bounds__(kThreads)
    combined_rows(const __grid_constant__ CombinedParams p) {
  const int64_t t = blockIdx.x;
  const Combined c = combined_of(p, t);
  write_row(p.out, t, c.states + c.tokens, [&](int64_t k) { return combined_entry(p, t, c, k); });
}

}  // namespace

void slots(const SlotsParams& p) noexcept {
  if (p.slot_count == 0) return;
  const int64_t blocks = ceil_div(p.slot_count, kThreads);
  slot_entries<<<static_cast<unsigned>(blocks), kThreads, 0, cuda::stream_of(p.device)>>>(p);
  cuda::keep_error(cudaGetLastError());
}

void runs(const RunParams& p) noexcept {
  if (p.tokens.count == 0) return;
  run_rows<<<grid_of(p.tokens.count, p.out.width), kThreads, 0, cuda::stream_of(p.device)>>>(p);
  cuda::keep_error(cudaGetLastError());
}

void combined(const CombinedParams& p) noexcept {
  if (p.tokens.count == 0) return;
  combined_rows<<<grid_of(p.tokens.count, p.out.width), kThreads, 0, cuda::stream_of(p.device)>>>(
      p);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::lists::sm90
