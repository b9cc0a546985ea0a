// What compress()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/kernel_table.h"
#include "core/prologue.h"
#include "core/quantizer.h"
#include "winnow/compress.h"

namespace winnow::internal::compress {

inline constexpr int kMaxWidth = 512;  // d
inline constexpr int kMaxRows = 256;   // rows of an entry

struct Params {
  const void* rows = nullptr;  // float, or bf16
  bool rows_are_bf16 = false;
  int64_t row_stride = 0, tokens = 0;
  const int32_t* positions = nullptr;
  int64_t position_stride = 0;
  const int32_t* requests = nullptr;  // null without a state
  int64_t request_stride = 0;
  int32_t ratio = 1;
  bool overlap = false, gate = false;
  int64_t width = 0;            // d
  const float* bias = nullptr;  // null: none
  int64_t bias_stride = 0;

  float* state = nullptr;  // null: none
  int64_t block_stride = 0, state_stride = 0, blocks = 0, block = 1;
  bool ring = false;
  const int32_t* table = nullptr;  // null: a ring per request
  int64_t table_stride = 0, table_rows = 0, table_width = 0;

  core::NormParams norm;
  core::RopeParams rope;  // no table: none
  bool hadamard = false;
  const int64_t* slots = nullptr;  // null without a cache
  int64_t slot_stride = 0;
  core::Pages cache;  // no data: none
  core::Quantizer quantizer;
  bf16* latent = nullptr;  // null: not requested
  int64_t latent_stride = 0;
  Device device;
};

// Values of a row (and of its scores): e * d.
WINNOW_HD inline int64_t values_of(const Params& p) { return p.overlap ? 2 * p.width : p.width; }

// Rows that an entry takes.
WINNOW_HD inline int64_t rows_of_entry(const Params& p) {
  return p.overlap ? 2 * int64_t{p.ratio} : p.ratio;
}

// Of a position >= 0: it and the divisor fit in 32 bits, in which a device divides faster.
WINNOW_HD inline int64_t quotient(int64_t position, int64_t by) {
  return static_cast<uint32_t>(position) / static_cast<uint32_t>(by);
}
WINNOW_HD inline int64_t remainder(int64_t position, int64_t by) {
  const auto divisor = static_cast<uint32_t>(by);
  if ((divisor & (divisor - 1)) == 0) return static_cast<uint32_t>(position) & (divisor - 1);
  return static_cast<uint32_t>(position) % divisor;
}

// The state's row of a position, or null: the block table says where, and has hostile entries.
WINNOW_HD inline float* state_row(const Params& p, int64_t request, int64_t position) {
  if (p.state == nullptr || position < 0 || request < 0) return nullptr;
  int64_t at = request;
  if (p.table != nullptr) {
    const int64_t column = p.ring ? 0 : quotient(position, p.block);
    if (request >= p.table_rows || column >= p.table_width) return nullptr;
    at = p.table[request * p.table_stride + column];
  }
  if (at < 0 || at >= p.blocks) return nullptr;
  return p.state + at * p.block_stride + remainder(position, p.block) * p.state_stride;
}

WINNOW_HD inline int64_t position_of(const Params& p, int64_t token) {
  return p.positions[token * p.position_stride];
}
WINNOW_HD inline int64_t request_of(const Params& p, int64_t token) {
  return p.requests == nullptr ? 0 : p.requests[token * p.request_stride];
}

// Whether token `other` of the call is position `position` of the same request as token `token`.
WINNOW_HD inline bool is_neighbour(const Params& p, int64_t token, int64_t other,
                                   int64_t position) {
  if (other < 0 || other >= p.tokens) return false;
  // Both loads are issued before either result is used: a device waits once.
  const bool same_request = request_of(p, other) == request_of(p, token);
  return (position_of(p, other) == position) & same_request;
}

// Whether the token closes an entry.
WINNOW_HD inline bool closes(const Params& p, int64_t token) {
  const int64_t position = position_of(p, token);
  return position >= 0 && remainder(position + 1, p.ratio) == 0;
}

// One row of an entry: d values and d scores, from the call or from the state.
struct Row {
  const void* values = nullptr;  // null: neither has it
  const void* scores = nullptr;
  const float* bias = nullptr;  // to be added to the scores; the state's have it already
  bool are_bf16 = false;
};

// The row of `position`, which token `token` at position `last` closes an entry over.
WINNOW_HD inline Row row_of(const Params& p, int64_t token, int64_t last, int64_t position) {
  const int64_t values = values_of(p);
  // With overlap the window before gives its first half, the entry's own window the second.
  const int64_t part = p.overlap && position > last - p.ratio ? p.width : 0;
  const int64_t other = token - (last - position);
  Row row;
  if (is_neighbour(p, token, other, position)) {
    const int64_t at = other * p.row_stride + part;
    row.are_bf16 = p.rows_are_bf16;
    if (p.rows_are_bf16) {
      row.values = static_cast<const bf16*>(p.rows) + at;
      row.scores = static_cast<const bf16*>(p.rows) + at + values;
    } else {
      row.values = static_cast<const float*>(p.rows) + at;
      row.scores = static_cast<const float*>(p.rows) + at + values;
    }
    if (p.bias != nullptr) row.bias = p.bias + remainder(position, p.ratio) * p.bias_stride + part;
  } else if (const float* stored = state_row(p, request_of(p, token), position)) {
    row.values = stored + part;
    row.scores = stored + values + part;
  }
  return row;
}

// Where the token's own row goes, or null. In a ring the last of the call's rows that share a place
// stays.
WINNOW_HD inline float* own_state_row(const Params& p, int64_t token) {
  const int64_t position = position_of(p, token);
  float* row = state_row(p, request_of(p, token), position);
  if (p.ring && is_neighbour(p, token, token + p.block, position + p.block)) return nullptr;
  return row;
}

struct Shape {};  // every kernel takes every call
using CompressKernel = Kernel<Shape, Params>;
std::span<const CompressKernel> kernels();

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;
void sm90(const Params& p) noexcept;  // CUDA builds

}  // namespace winnow::internal::compress
