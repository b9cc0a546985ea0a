// What attend()'s kernels see: checked, plain, in bytes and elements.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/hd.h"
#include "core/kernel_table.h"
#include "winnow/plan.h"
#include "winnow/tensor.h"

namespace winnow::internal::attend {

// The records of a page, and what divides by them.
struct PageRows {
  int32_t rows = 1, shift = 31;
  uint32_t factor = uint32_t{1} << 31;

  constexpr PageRows() = default;
  // With 2^s >= n the factor, 2^(31+s) / n rounded up, is below 2^32; times n it exceeds 2^(31+s)
  // by less than 2^s, which an index below 2^31 does not make a whole page.
  constexpr PageRows(int32_t n)
      : rows(n),
        shift(31 + static_cast<int32_t>(std::bit_width(static_cast<uint32_t>(n) - 1))),
        factor(static_cast<uint32_t>(((uint64_t{1} << shift) + static_cast<uint32_t>(n) - 1) /
                                     static_cast<uint32_t>(n))) {}
  WINNOW_HD constexpr operator int32_t() const { return rows; }
  WINNOW_HD constexpr int32_t of(int32_t index) const {  // index / rows, for index >= 0
    return static_cast<int32_t>(uint64_t{static_cast<uint32_t>(index)} * factor >> shift);
  }
};

// One list of a call. Column c of token t holds a slot, or a logical id when block_table is there.
struct ListView {
  const int32_t* indices = nullptr;
  int64_t index_stride = 0;
  const int32_t* lengths = nullptr;  // null: width
  int64_t length_stride = 0;
  int32_t width = 0;  // columns
  PageRows page;
  const std::byte* data = nullptr;
  int64_t page_stride = 0;  // bytes
  int64_t pages = 0;
  const int32_t* block_table = nullptr;  // null: indices are slots
  int64_t table_stride = 0;
  int32_t table_rows = 0, table_width = 0;
  CacheFormat format = CacheFormat::kV32Fp8;
};

// A record to read, as a page and an offset inside it; page -1 when the entry is invalid.
struct Entry {
  int64_t page = -1;
  int32_t offset = 0;
};

// Whether a list entry is valid. `request`: logical ids. The same is said by sm90's
// place_of_slot() and places_by_table(), and of eight entries at once by x86's take_keys().
WINNOW_HD inline Entry resolve(const ListView& list, int32_t index, int32_t request) {
  Entry e;
  if (index < 0) return e;
  const int32_t page = list.page.of(index);
  if (list.block_table) {
    if (page >= list.table_width || request < 0 || request >= list.table_rows) return e;
    const int64_t found = list.block_table[request * list.table_stride + page];
    if (found < 0 || found >= list.pages) return e;
    e.page = found;
  } else {
    if (page >= list.pages) return e;
    e.page = page;
  }
  e.offset = static_cast<int32_t>(index - page * list.page);
  return e;
}

// Whether one of a call's lists has logical ids.
WINNOW_HD inline bool by_table(const ListView (&lists)[2]) {
  return lists[0].block_table || lists[1].block_table;
}

WINNOW_HD inline int32_t columns(const ListView& list, int64_t token) {
  if (!list.lengths) return list.width;
  const int32_t n = list.lengths[token * list.length_stride];
  return n < 0 ? 0 : n < list.width ? n : list.width;
}

struct Params {
  // Queries: d_nope values at q, d_rope at q_rope, of the token and head strides given.
  const bf16* q = nullptr;
  const bf16* q_rope = nullptr;
  int64_t q_token_stride = 0, q_head_stride = 0, rope_token_stride = 0, rope_head_stride = 0;
  ListView lists[2];
  int32_t list_count = 1;
  const int32_t* requests = nullptr;  // [T], with logical ids
  int64_t request_stride = 0;
  int32_t tokens = 0, heads = 0;
  float scale = 1.0f;
  const float* sink = nullptr;  // [H]
  bf16* out = nullptr;
  float* out_f32 = nullptr;  // instead of `out`, with the same strides
  int64_t out_token_stride = 0, out_head_stride = 0;
  float* lse = nullptr;  // may be null
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  // Heads of a block where out_f32 and lse are in blocks, [W, T, H / W, ...]; 0: they are not.
  int32_t block_heads = 0;
  int64_t out_block_stride = 0, lse_block_stride = 0;
  float* max_logit = nullptr;  // may be null
  int64_t max_token_stride = 0, max_head_stride = 0;
  float empty_lse = 0;  // +inf or -inf
  bool fixed_split =
      false;  // CUDA: cuts depend on the token alone (bits do not depend on the batch)
  // CPU: the tiles, and the workspace that scratch_bytes() and partials ask for.
  Schedule schedule;
  std::span<std::byte> workspace;
  Device device;
  // CUDA: about how many entries most tokens have, where `lengths` say; 0: all columns.
  int32_t likely_width = 0;
  Precision precision = Precision::kFull;

  // Where a row of `out` and its lse stand.
  int64_t out_at(int64_t token, int64_t head) const {
    const int64_t block = block_heads > 0 ? head / block_heads : 0;
    return block * out_block_stride + token * out_token_stride +
           (head - block * block_heads) * out_head_stride;
  }
  int64_t lse_at(int64_t token, int64_t head) const {
    const int64_t block = block_heads > 0 ? head / block_heads : 0;
    return block * lse_block_stride + token * lse_token_stride +
           (head - block * block_heads) * lse_head_stride;
  }
};

// What the choice of a kernel and the size of its workspace depend on.
struct Shape {
  CacheFormat formats[2] = {CacheFormat::kV32Fp8, CacheFormat::kV32Fp8};
  int32_t list_count = 1;
  int32_t heads = 128;
  int64_t tokens = 1;    // capacity
  int32_t width = 2048;  // columns of both lists
  // CUDA: what the choice among Hopper's kernels depends on besides.
  bool tables = false;       // a list has logical ids
  bool fixed_split = false;  // cuts depend on the token alone
  int32_t device = 0;        // its index
  size_t workspace = 0;      // bytes of the call's workspace
  bool f32_out = false;      // the output stays in fp32
  int32_t likely_width = 0;  // entries of most tokens; 0: `width`
  Precision precision = Precision::kFull;
};

struct AttendKernel : Kernel<Shape, Params> {
  // Bytes of workspace for a call of this shape whose schedule has at most `tiles` tiles.
  size_t (*workspace)(const Shape&, int64_t tiles);
};

std::span<const AttendKernel> kernels();

inline constexpr int kValueDim = 512;  // d_v of both families
inline constexpr int kMaxKeyDim = 576;

// The specification: fp64, one token after the other, without the schedule.
void reference(const Params& p) noexcept;
size_t reference_workspace(const Shape& shape, int64_t tiles);

#ifdef WINNOW_WITH_CUDA
// Rows of q and out, and pages, begin on 16-byte boundaries in all of Hopper's kernels.
namespace decode_sm90 {
// Records as they are stored, dequantised into matrix fragments. Few tokens are faster with a
// workspace; none is needed. Tokens after the last full wave may go in a second launch.
void run(const Params& p) noexcept;
const char* fits(const Shape& shape);
size_t workspace(const Shape& shape, int64_t tiles);
// The same function serves Precision::kFp8: V3.2's fp8 records, whose codes are multiplied as they
// are stored.
const char* fits_fp8(const Shape& shape);
// How many tokens fill the multiprocessors one or more times, where those after them are faster
// in splits, in a launch of their own, than as one wave more; else all. `wide`: the first ones are
// the wide kernel's.
int32_t first_launch(const Shape& shape, bool wide);
}  // namespace decode_sm90
namespace wide_sm90 {
// Heads on M, rows as bf16 in shared memory once, for both products; no workspace.
void run(const Params& p) noexcept;
const char* fits(const Shape& shape);
const char* slower(const Shape& shape);
}  // namespace wide_sm90
// The wide kernel for full waves, the decode kernel for the tokens after them.
namespace wide_then_decode_sm90 {
void run(const Params& p) noexcept;
const char* fits(const Shape& shape);
}  // namespace wide_then_decode_sm90
#endif

// `count` tokens of a call, from `first` on.
Params tokens_of(Params p, int32_t first, int32_t count);
Shape shape_of(const Params& p);

// Record `e` of a list as the fp32 values that every kernel starts from: d_qk of them.
void dequantize(const ListView& list, const Entry& e, float* out) noexcept;

}  // namespace winnow::internal::attend
