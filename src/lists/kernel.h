// What the kernels of V4's index lists see: checked, plain, strides in elements. The functions here
// are the specification of a row's length and of one entry; kernels loop over them or beat them.
#pragma once

#include <cstdint>
#include <span>

#include "core/hd.h"
#include "core/kernel_table.h"
#include "winnow/lists.h"

namespace winnow::internal::lists {

struct Table {
  const int32_t* data = nullptr;  // null: indices stay as they are
  int64_t stride = 0, rows = 0, width = 0;
  int32_t page = 1;
  int64_t pages = 0;
};

// Slot of a request's index-th token or state; -1 if its page is missing or outside the cache.
WINNOW_HD inline int64_t slot_of(const Table& t, int32_t request, int64_t index) {
  const int64_t page = index / t.page;
  if (request < 0 || request >= t.rows || page >= t.width) return -1;
  const int64_t found = t.data[request * t.stride + page];
  return found < 0 || found >= t.pages ? -1 : found * t.page + index % t.page;
}

struct Tokens {
  int64_t count = 0;
  const int32_t* positions = nullptr;  // negative: padding
  const int32_t* requests = nullptr;   // null without a table
};

// Lists and their lengths, one row per token.
struct Rows {
  int32_t* data = nullptr;
  int64_t stride = 0, width = 0;
  int32_t* lengths = nullptr;
};

struct SlotsParams {
  Tokens tokens;
  Table table;
  int32_t ratio = 4;
  int64_t* slots = nullptr;
  int64_t slot_count = 0;  // >= tokens
  Shard shard;             // of states
  Device device;
};

WINNOW_HD inline int64_t compressed_slot(const SlotsParams& p, int64_t t) {
  if (t >= p.tokens.count || p.tokens.positions[t] < 0) return -1;
  const int64_t position = p.tokens.positions[t];
  if ((position + 1) % p.ratio != 0) return -1;
  const int64_t state = position / p.ratio;
  if (p.shard.world == 1) return slot_of(p.table, p.tokens.requests[t], state);
  return p.shard.owns(state) ? slot_of(p.table, p.tokens.requests[t], p.shard.local(state)) : -1;
}

// Consecutive indices [first, first + length) of each token, as they are or through the table:
// what window and C128A rows have in common. Over several ranks they count what this one owns; a
// window's then turn back into positions, since all ranks hold the whole window.
struct RunParams {
  Tokens tokens;
  Table table;
  int64_t slot_rows = 0;  // the first rows go through the table
  int32_t ratio = 1;      // C128A: tokens per state
  int32_t window = 0;     // 0: all from the first on
  Shard shard;
  Rows out;
  Device device;
};

struct Run {
  int64_t first = 0, length = 0;
};

WINNOW_HD inline Run run_of(const RunParams& p, int64_t t) {
  const int64_t position = p.tokens.positions[t];
  Run r;
  if (position < 0) return r;
  r.length = (position + 1) / p.ratio;
  if (p.window > 0 && r.length > p.window) {
    r.first = r.length - p.window;
    r.length = p.window;
  }
  if (p.shard.world > 1) {
    const int64_t end = p.shard.local_length(r.first + r.length);
    r.first = p.shard.local_length(r.first);
    r.length = end - r.first;
  }
  if (r.length > p.out.width) r.length = p.out.width;
  return r;
}

// shard.global(), of a position that 31 bits hold: dividing 64 bits takes a kernel's registers.
WINNOW_HD inline int64_t global_of(const Shard& shard, int64_t local) {
  const auto each = static_cast<uint32_t>(shard.interleave);
  const uint32_t round = static_cast<uint32_t>(local) / each;
  return (int64_t{round} * shard.world + shard.rank) * each + static_cast<uint32_t>(local) % each;
}

WINNOW_HD inline int32_t run_entry(const RunParams& p, int64_t t, const Run& r, int64_t k) {
  if (k >= r.length) return -1;
  int64_t index = r.first + k;
  if (p.window > 0 && p.shard.world > 1) index = global_of(p.shard, index);
  return static_cast<int32_t>(t < p.slot_rows ? slot_of(p.table, p.tokens.requests[t], index)
                                              : index);
}

struct CombinedParams {
  const int32_t* topk = nullptr;
  int64_t topk_stride = 0, topk_width = 0;
  Tokens tokens;
  int32_t first_request = 0;
  int64_t requests = 0;  // of the chunk
  const int32_t* seq_lens = nullptr;
  const int32_t* gather_lens = nullptr;
  int32_t ratio = 4, window = 128, compressed = 0, rows = 0;
  Rows out;
  Device device;
};

// A combined row: `states` entries of topk moved by `base`, then `tokens` workspace rows from
// `window_row` on, of which those in [window_first, window_last) belong to the request.
struct Combined {
  int64_t states = 0, tokens = 0, base = 0;
  int64_t window_row = 0, window_first = 0, window_last = 0;
};

WINNOW_HD inline Combined combined_of(const CombinedParams& p, int64_t t) {
  Combined c;
  const int64_t position = p.tokens.positions[t];
  const int64_t request = int64_t{p.tokens.requests[t]} - p.first_request;
  if (position < 0 || request < 0 || request >= p.requests) return c;
  c.states = (position + 1) / p.ratio;
  if (c.states > p.topk_width) c.states = p.topk_width;
  c.tokens = position + 1 < p.window ? position + 1 : p.window;
  c.base = request * p.rows;
  const int64_t gathered = p.gather_lens[request];
  const int64_t skipped = p.seq_lens[request] - gathered;  // tokens in front of the gathered ones
  c.window_first = c.base + p.compressed;
  c.window_row = c.window_first + position + 1 - c.tokens - skipped;
  c.window_last = c.window_first + gathered;
  if (c.window_last > c.base + p.rows) c.window_last = c.base + p.rows;
  if (c.window_last > INT32_MAX) c.window_last = INT32_MAX;  // rows are int32
  return c;
}

WINNOW_HD inline int32_t combined_entry(const CombinedParams& p, int64_t t, const Combined& c,
                                        int64_t k) {
  if (k < c.states) {
    const int32_t id = p.topk[t * p.topk_stride + k];
    const int64_t row = c.base + id;
    return id < 0 || id >= p.compressed || row > INT32_MAX ? -1 : static_cast<int32_t>(row);
  }
  const int64_t row = c.window_row + (k - c.states);
  if (k >= c.states + c.tokens || row < c.window_first || row >= c.window_last) return -1;
  return static_cast<int32_t>(row);
}

// One table for the four functions.
struct Shape {};
struct ListsKernel : detail::KernelEntry {
  using Shape = lists::Shape;
  const char* (*fits)(const Shape&);
  void (*slots)(const SlotsParams&) noexcept;
  void (*runs)(const RunParams&) noexcept;
  void (*combined)(const CombinedParams&) noexcept;
  const char* (*slower)(const Shape&) = nullptr;
};
std::span<const ListsKernel> kernels();

namespace reference {
void slots(const SlotsParams& p) noexcept;
void runs(const RunParams& p) noexcept;
void combined(const CombinedParams& p) noexcept;
}  // namespace reference
namespace simd {
void slots(const SlotsParams& p) noexcept;
void runs(const RunParams& p) noexcept;
void combined(const CombinedParams& p) noexcept;
}  // namespace simd
namespace sm90 {  // CUDA builds
void slots(const SlotsParams& p) noexcept;
void runs(const RunParams& p) noexcept;
void combined(const CombinedParams& p) noexcept;
}  // namespace sm90

}  // namespace winnow::internal::lists
