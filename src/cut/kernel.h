// What cut()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/arithmetic.h"
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

// This rank's rows as the call brought them, and as they travel: `width` values, then as many
// positions, a row behind the other. On CUDA keys of the values travel instead (cuda/topk_parts.cuh
// has them), 0 where there is no candidate.
struct OwnRows {
  const int32_t* ids = nullptr;
  const float* values = nullptr;
  int64_t id_stride = 0, value_stride = 0;
  int64_t tokens = 0, width = 0;
  int64_t all_rows = 0;  // those after the last token are empty
  Shard shard;
  float* packed = nullptr;  // [all_rows, 2 width]
  Device device;
};

// Of this rank's entries those that are not behind their row's cut.
struct Keeping {
  OwnRows own;                    // packed
  const int64_t* cuts = nullptr;  // [tokens]
  int32_t* kept = nullptr;        // [tokens, width], out; may be null, and may be own.ids
  int64_t kept_stride = 0;
  int32_t* counts = nullptr;  // [tokens], out; may be null
  int64_t count_stride = 0;
};

// Candidates of `rows` rows from `blocks` ranks, as they travel, block after block. A
// position below 0 is no candidate.
struct Params {
  const float* candidates = nullptr;
  int64_t rows = 0, width = 0;
  int32_t blocks = 1;
  int64_t* cuts = nullptr;       // [rows], out: the width-th order; below all where all fit
  int32_t* positions = nullptr;  // [rows, width], out; may be null
  int64_t position_stride = 0;
  std::byte* scratch = nullptr;  // CPU: scratch_bytes() for each worker
  const Keeping* keeping =
      nullptr;  // what follows with these cuts, where they are all; may be null
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
  return round_up(static_cast<size_t>(width) * blocks * 12, 64);
}

struct Shape {
  int64_t width = 0;
  bool positions = false;
};
struct CutKernel : Kernel<Shape, Params> {
  void (*pack)(const OwnRows&) noexcept;
  void (*keep)(const Keeping&) noexcept;
};
std::span<const CutKernel> kernels();

// Workspace of any call of up to `tokens` rows over `ranks` ranks, in the form that the library
// chooses.
size_t most_workspace(int64_t tokens, int64_t width, int32_t ranks, bool positions,
                      DeviceKind device);

void pack(const OwnRows& own) noexcept;
void keep(const Keeping& k) noexcept;
void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;

#ifdef WINNOW_WITH_CUDA
const char* fits_sm90(const Shape& shape);
void sm90(const Params& p) noexcept;
void pack_sm90(const OwnRows& own) noexcept;
void keep_sm90(const Keeping& k) noexcept;
#endif

}  // namespace winnow::internal::cut
