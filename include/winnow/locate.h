// locate: logical ids, block table -> physical slots, or rows of the prefill workspace.
#pragma once

#include "winnow/tensor.h"

namespace winnow {

class Plan;

// Decode context parallelism: position p lives on rank (p / interleave) % world, as local position
// (p / (world * interleave)) * interleave + p % interleave.
struct ContextParallel {
  int32_t world = 1;
  int32_t rank = 0;
  int32_t interleave = 1;
  bool compact = false;  // move this rank's entries to the front of the row, in order
};

struct LocateArgs {
  const Plan* plan = nullptr;
  int32_t part = -1;          // of the plan: the tokens of plan->parts()[part]; -1: all tokens
  Tensor ids;                 // [T, K] int32
  Tensor requests;            // [T] int32: row of the block table
  Tensor block_table;         // [R, W] int32
  int32_t page = 64;          // tokens per page
  int64_t pages = 0;          // in the cache, 1 or more: pages outside [0, pages) are rejected
  int32_t rows_per_page = 0;  // slots a page takes in the result; 0 means page
  // For prefill tokens that read a contiguous workspace: row = workspace_starts[p] + id, with
  // p = prefill_requests[t].
  Tensor prefill_requests = {};  // [T] int32, -1 for decode tokens; optional
  Tensor workspace_starts = {};  // [P] int32
  // Rows in the workspace: rows outside [0, workspace_rows) are rejected.
  int64_t workspace_rows = 0;
  ContextParallel parallel = {};
  Tensor slots;        // [T, K] int32, out
  Tensor counts = {};  // [T] int32, out, optional: valid entries per row
  Target target = {};
};

// slots = block_table[request][id / page] * rows_per_page + id % page, and -1 where the id is
// negative, where it points past the table, where the page found is outside the cache, or where the
// request is outside the table. In the workspace also where p is outside workspace_starts, and for
// every id of a start below 0. `slots` may be `ids` itself.
void locate(const LocateArgs& args);

}  // namespace winnow
