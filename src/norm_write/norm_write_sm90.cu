// norm_write on the device: one launch, the blocks of norm() and those of each write(), a warp per
// token (norm_sm90.cuh, write_sm90.cuh), mixed evenly: a multiprocessor has all kinds at a time,
// and one's waits are filled by the others.
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "norm/norm_sm90.cuh"
#include "norm_write/kernel.h"
#include "write/write_sm90.cuh"

namespace winnow::internal::norm_write {

namespace {

constexpr int kWarps = norm::kWarps;

// Which of the first n blocks belong to one kind, evenly among all: floor(n * share / 2^32).
struct Share {
  uint64_t share = 0;
  __host__ __device__ uint32_t of(uint32_t n) const {
    return static_cast<uint32_t>(n * share >> 32);
  }
  static Share make(int64_t blocks, int64_t all) {  // rounded up, so that of(all) = blocks
    if (blocks == 0) return {};
    return {((static_cast<uint64_t>(blocks) << 32) + static_cast<uint64_t>(all) - 1) /
            static_cast<uint64_t>(all)};
  }
};

struct Call {
  norm::Call norm;
  write::sm90::WriteCall write[2];
  Share shares[2];  // of the first write among all blocks, of the second among what is left
};

// Whose block this is: of write[part] or, if that is negative, of norm.
struct Part {
  int part;
  uint32_t block;
};
__device__ __forceinline__ Part part_of(const Call& call, uint32_t block) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t before = call.shares[i].of(block);
    if (call.shares[i].of(block + 1) > before) return {i, before};
    block -= before;
  }
  return {-1, block};
}

__global__ void __launch_bounds__(kWarps * 32) rows(const __grid_constant__ Call call) {
  __shared__ norm::Sums sums;
  const auto [part, block] = part_of(call, blockIdx.x);
  if (part < 0) return norm::norm_block<false>(call.norm, block, sums);
  const write::sm90::WriteCall& write = call.write[part];
  const int64_t token = int64_t{block} * kWarps + threadIdx.x / 32;
  with_record(write.p.cache.format, [&](auto record) {
    write::sm90::write_token<decltype(record)>(write, token, threadIdx.x % 32);
  });
}

// What engines ask for: norms that are plain, one latent record R, and index keys or none. kLong:
// pieces of a lane, of many rows; 0: of few.
template <class R, int kLong>
__global__ void __launch_bounds__(kWarps * 32, kLong > 0 ? 8 : 1)
    plain_rows(const __grid_constant__ Call call) {
  const auto [part, block] = part_of(call, blockIdx.x);
  const uint32_t warp = block * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (part == 0) {
    constexpr bool kMany = kLong > 0;
    write::sm90::write_plain<R, kMany ? 16 : 32, !kMany>(call.write[0], warp, lane);
  } else if (part == 1) {
    write::sm90::write_plain_keys<(kLong == 0)>(call.write[1], warp, lane);
  } else if constexpr (kLong > 0) {
    norm::norm_many<kLong>(call.norm, block);
  } else {
    __shared__ norm::Sums sums;
    norm::norm_block<true>(call.norm, block, sums);
  }
}

using Kernel = void (*)(Call);

template <class R>
Kernel plain_kernel(bool many) {
  return many ? plain_rows<R, norm::kManyPieces> : plain_rows<R, 0>;
}

bool is_plain(const Call& call, int pieces) {
  const write::Params& keys = call.write[1].p;
  if (pieces == 0 || call.write[0].p.tokens == 0 || !is_plain(call.write[0])) return false;
  return keys.tokens == 0 ||
         (keys.cache.format == CacheFormat::kIndexKeys && is_plain(call.write[1]));
}

}  // namespace

void sm90(const Params& p) noexcept {
  const int pieces = norm::plain_pieces(p.norm);
  const bool many = pieces > 0 && norm::is_many(p.norm, pieces);
  Call call{norm::call_of(p.norm, false),
            {write::sm90::call_of(p.write[0]), write::sm90::call_of(p.write[1])}};
  Kernel kernel = rows;
  const CacheFormat format = p.write[0].cache.format;
  if (is_plain(call, pieces) && format == CacheFormat::kV32Fp8) kernel = plain_kernel<V32Fp8>(many);
  if (is_plain(call, pieces) && format == CacheFormat::kV4Fp8) kernel = plain_kernel<V4Fp8>(many);
  const bool plain = kernel != rows;
  if (plain && many) call.norm = norm::call_of(p.norm, true);
  int64_t all = call.norm.blocks[0] + call.norm.blocks[1];
  for (int i = 1; i >= 0; --i) {
    int64_t each = 1;  // tokens of a warp
    if (plain) each = i == 1 ? write::sm90::kKeysOfWarp : many ? 2 : 1;
    const int64_t blocks = ceil_div(p.write[i].tokens, each * kWarps);
    all += blocks;
    call.shares[i] = Share::make(blocks, all);
  }
  const auto blocks = static_cast<unsigned>(all);
  if (blocks == 0) return;
  kernel<<<blocks, kWarps * 32, 0, cuda::stream_of(p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::norm_write
