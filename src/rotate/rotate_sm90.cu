// rotate and rope_table on the device. rotate is a pass over heads (cuda/heads.h). rope_table: a
// thread per angle, cosine and sine in double, rounded once; made at load, so nobody waits for it.
#include <cuda_runtime.h>

#include "core/arithmetic.h"
#include "cuda/heads.h"
#include "cuda/launch.h"
#include "rotate/kernel.h"

namespace winnow::internal::rotate::sm90 {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) fill_table(const __grid_constant__ TableParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t position = i / core::kPairs;
  const int64_t pair = i % core::kPairs;
  if (position >= p.positions) return;
  const float angle = __fmul_rn(static_cast<float>(position), p.frequencies[pair]);
  float* at = p.table + position * p.position_stride + pair * p.pair_stride;
  at[0] = static_cast<float>(cos(double{angle}));
  at[p.sine_stride] = static_cast<float>(sin(double{angle}));
}

}  // namespace

void rotate(const Params& p) noexcept {
  cuda::HeadParams heads;
  heads.x = p.x;
  heads.x_token = p.x_token;
  heads.x_head = p.x_head;
  heads.out = p.out;
  heads.out_token = p.out_token;
  heads.out_head = p.out_head;
  heads.tokens = p.tokens;
  heads.heads = p.heads;
  heads.width = p.width;
  heads.positions = p.positions;
  heads.position_stride = p.position_stride;
  heads.rope = p.rope;
  heads.device = p.device;
  cuda::prepare_heads(heads);
}

void rope_table(const TableParams& p) noexcept {
  const int64_t angles = p.positions * core::kPairs;
  if (angles == 0) return;
  const auto blocks = static_cast<unsigned>(core::ceil_div(angles, int64_t{kThreads}));
  fill_table<<<blocks, kThreads, 0, cuda::stream_of(p.device)>>>(p);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::rotate::sm90
