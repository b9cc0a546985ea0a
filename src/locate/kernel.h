// What locate()'s kernels see: checked, plain, strides in elements.
#pragma once

#include <cstdint>
#include <span>

#include "core/hd.h"
#include "core/kernel_table.h"
#include "winnow/locate.h"

namespace winnow::internal::locate {

struct Params {
  const int32_t* ids = nullptr;
  int64_t id_stride = 0;
  int64_t tokens = 0, width = 0;
  const int32_t* requests = nullptr;
  int64_t request_stride = 0;
  const int32_t* table = nullptr;
  int64_t table_stride = 0, table_rows = 0, table_width = 0;
  int32_t page = 1, rows_per_page = 1;
  int64_t pages = 0;
  const int32_t* prefill_requests = nullptr;  // null: no workspace
  int64_t prefill_stride = 0;
  const int32_t* workspace_starts = nullptr;
  int64_t starts_stride = 0, prefills = 0, workspace_rows = 0;
  ContextParallel parallel;
  int32_t* slots = nullptr;
  int64_t slot_stride = 0;
  int32_t* counts = nullptr;  // may be null
  int64_t count_stride = 0;
  Device device;
};

// How the ids of one token are turned into slots.
struct Row {
  bool workspace = false;  // slot = start + id, for ids below `limit`
  int32_t start = 0;
  int64_t limit = 0;  // ids >= limit are invalid
  const int32_t* table = nullptr;
};

// The row of token t; limit 0 (nothing valid) when its request is not in the table.
WINNOW_HD inline Row row_of(const Params& p, int64_t t) {
  Row r;
  const int32_t prefill = p.prefill_requests ? p.prefill_requests[t * p.prefill_stride] : -1;
  if (prefill >= 0) {
    if (prefill >= p.prefills) return r;
    r.workspace = true;
    r.start = p.workspace_starts[prefill * p.starts_stride];
    if (r.start >= 0 && r.start < p.workspace_rows) r.limit = p.workspace_rows - r.start;
    return r;
  }
  const int32_t request = p.requests[t * p.request_stride];
  if (request < 0 || request >= p.table_rows) return r;
  r.table = p.table + request * p.table_stride;
  r.limit = p.table_width * p.page;
  return r;
}

// Where an id stands in what this rank holds of its row, or -1. In 32 bits, which hold any id: a
// device divides 64 bits by a hundred instructions.
WINNOW_HD inline int32_t position_of(const Params& p, const Row& r, int32_t id) {
  if (id < 0) return -1;
  auto at = static_cast<uint32_t>(id);
  if (p.parallel.world > 1) {
    const auto world = static_cast<uint32_t>(p.parallel.world);
    const auto interleave = static_cast<uint32_t>(p.parallel.interleave);
    const uint32_t turn = at / interleave;
    if (turn % world != static_cast<uint32_t>(p.parallel.rank)) return -1;
    at = turn / world * interleave + at % interleave;
  }
  return at < r.limit ? static_cast<int32_t>(at) : -1;
}

// The entry of the block table that a position needs; 0 where it needs none.
WINNOW_HD inline int32_t page_of(const Params& p, const Row& r, int32_t position) {
  if (position < 0 || r.workspace) return 0;
  return r.table[static_cast<uint32_t>(position) / static_cast<uint32_t>(p.page)];
}

// The slot of a position whose page is this, or -1.
WINNOW_HD inline int32_t slot_in(const Params& p, const Row& r, int32_t position, int32_t page) {
  if (position < 0) return -1;
  if (r.workspace) return r.start + position;
  if (page < 0 || page >= p.pages) return -1;
  const uint32_t offset = static_cast<uint32_t>(position) % static_cast<uint32_t>(p.page);
  return page * p.rows_per_page + static_cast<int32_t>(offset);  // pages * rows_per_page fit
}

// One id of a row: its slot, or -1.
WINNOW_HD inline int32_t slot_of(const Params& p, const Row& r, int32_t id) {
  const int32_t position = position_of(p, r, id);
  return slot_in(p, r, position, page_of(p, r, position));
}

struct Shape {};
using LocateKernel = Kernel<Shape, Params>;
std::span<const LocateKernel> kernels();

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;
void sm90(const Params& p) noexcept;  // CUDA builds

}  // namespace winnow::internal::locate
