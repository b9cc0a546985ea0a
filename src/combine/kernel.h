// combine beside the call: what pipeline() asks, and packing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.h"
#include "core/namespaces.h"
#include "winnow/tensor.h"

namespace winnow::internal::combine {

// Partial results of all heads as they travel, a block for every rank.
struct Blocks {
  int64_t tokens, heads, d_v;
  int32_t ranks;
  bool bf16_wire;
};
size_t bytes_of(const Blocks& blocks);
// [W, T, H / W, d_v] and [W, T, H / W] of blocks at `memory`: where combine() sends from.
Tensor out_of(const Blocks& blocks, std::byte* memory);
Tensor lse_of(const Blocks& blocks, std::byte* memory);
// Workspace of any call of up to these tokens: in f32 the parts lie as they travel, in bf16 they
// are packed.
size_t most_workspace(const Blocks& most, DeviceKind device);

// From rows of heads, in blocks of `block_heads`, to blocks of `own_heads`.
struct Packing {
  const float* out;
  int64_t out_stride[3];  // of a block, a token and a head
  const float* lse;
  int64_t lse_stride[3];
  int64_t tokens, heads, block_heads, own_heads, d_v;
  bool bf16_wire;
  std::byte* send;
  size_t block_bytes, lse_offset;
  Device device;

  WINNOW_HD int64_t from(const int64_t (&stride)[3], int64_t token, int64_t head) const {
    const int64_t block = head / block_heads;
    return block * stride[0] + token * stride[1] + (head - block * block_heads) * stride[2];
  }
};
#ifdef WINNOW_WITH_CUDA
void pack_sm90(const Packing& p) noexcept;
#endif

}  // namespace winnow::internal::combine
