// Blocks of columns that a selection is restricted to, or that it finds: checked, plain.
#pragma once

#include <cstdint>
#include <span>

#include "core/check.h"
#include "core/range.h"
#include "winnow/select.h"

namespace winnow::internal::core {

struct Blocks {
  int32_t size = 8;                 // columns of a block
  const int32_t* within = nullptr;  // null: no restriction
  int64_t within_stride = 0, within_count = 0;
  int32_t* best = nullptr;  // null: not requested
  int64_t best_stride = 0, best_count = 0;
  bool restricts = false, finds = false;

  bool given() const { return restricts || finds; }
  std::span<const int32_t> within_of(int64_t token) const {
    return {within + token * within_stride, static_cast<size_t>(within_count)};
  }
  std::span<int32_t> best_of(int64_t token) const {
    return {best + token * best_stride, static_cast<size_t>(best_count)};
  }
};

// The columns of `range` that lie in block `block`.
inline Range columns_of(const Blocks& blocks, int64_t block, const Range& range) {
  const int64_t first = block * blocks.size, last = first + blocks.size;
  return {first > range.first ? first : range.first, last < range.last ? last : range.last};
}

Blocks checked_blocks(const Check& check, const SelectBlocks& blocks, int64_t tokens);

}  // namespace winnow::internal::core
