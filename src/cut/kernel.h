// What cut()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/kernel_table.h"
#include "cpu/topk.h"
#include "winnow/cut.h"

namespace winnow::internal::cut {

// A candidate as one number: larger is better. Unequal for unequal positions.
inline int64_t order_of_key(int32_t key, int32_t position) {
  const auto high = static_cast<uint64_t>(static_cast<uint32_t>(key)) << 32;
  return static_cast<int64_t>(high | static_cast<uint32_t>(INT32_MAX - position));
}
inline int64_t order_of(float value, int32_t position) {
  return order_of_key(cpu::order_key(value), position);
}
// Below every candidate.
inline constexpr int64_t kTakeAll = INT64_MIN;

// A candidate's position in its row, or -1: ids are data and may be anything.
inline int32_t position_of(const Shard& shard, int32_t id) {
  if (id < 0) return -1;
  const int64_t position = shard.world == 1 ? id : shard.global(id);
  return position <= INT32_MAX ? static_cast<int32_t>(position) : -1;
}

// Candidates of `rows` rows from `blocks` ranks: `width` values, then as many positions, a row
// behind the other, the blocks behind each other. A position below 0 is no candidate.
struct Params {
  const float* candidates = nullptr;
  int64_t rows = 0, width = 0;
  int32_t blocks = 1;
  int64_t* cuts = nullptr;       // [rows], out: the width-th order; kTakeAll where all fit
  int32_t* positions = nullptr;  // [rows, width], out; may be null
  int64_t position_stride = 0;
  std::byte* scratch = nullptr;  // scratch_bytes() for each worker
  Device device;

  int64_t block_stride() const { return rows * 2 * width; }
  const float* values(int64_t row, int32_t block) const {
    return candidates + block * block_stride() + row * 2 * width;
  }
  const int32_t* positions_in(int64_t row, int32_t block) const {
    return reinterpret_cast<const int32_t*>(values(row, block) + width);
  }
};

// Of one worker: an order, or a value, a position and an index, for every candidate of a row.
inline size_t scratch_bytes(int64_t width, int32_t blocks) {
  return (static_cast<size_t>(width) * blocks * 12 + 63) / 64 * 64;
}

struct Shape {};
using CutKernel = Kernel<Shape, Params>;
std::span<const CutKernel> kernels();

// Workspace of any call of up to `tokens` rows over `ranks` ranks, in the form that the library
// chooses.
size_t most_workspace(int64_t tokens, int64_t width, int32_t ranks, bool positions);

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;

}  // namespace winnow::internal::cut
