// V4's index lists: slots of compressed states, all states of a sequence (C128A: layers with a
// state for 128 tokens), sliding windows, and compressed and window rows combined for prefill. On
// CUDA these run on the stream.
#pragma once

#include "winnow/parallel.h"
#include "winnow/tensor.h"

namespace winnow {

class Plan;

// Every struct's `plan` is optional. It gives kernel and device; `target` then gives only the
// stream. Where a struct has a `shard`, a list holds what this rank attends to or stores: the
// compressed states that it owns, by their number, or the window positions that it owns.

struct CompressedSlotsArgs {
  const Plan* plan = nullptr;
  Tensor positions;    // [T] int32; negative: padding
  Tensor requests;     // [T] int32
  Tensor block_table;  // [R, W] int32
  int32_t ratio = 4;   // a token writes a state iff (position + 1) % ratio == 0
  int32_t page = 64;   // states per page
  int64_t pages = 0;   // in the compressed cache, 1 or more
  Tensor slots;        // [N >= T] int64, out
  Target target = {};
  Shard shard = {};  // of states: block_table holds local ones; those of other ranks get -1
};

// slot = block_table[request][(pos / ratio) / page] * page + (pos / ratio) % page for tokens that
// write a state. All other entries are -1: those of other tokens, of padding, from T on, and where
// the page is missing or outside the cache. All N entries are written.
void compressed_slots(const CompressedSlotsArgs& args);

struct C128aListsArgs {
  const Plan* plan = nullptr;
  Tensor positions;    // [T] int32; negative: padding
  Tensor requests;     // [T] int32
  Tensor block_table;  // [R, W] int32
  int32_t ratio = 128;
  int32_t page = 64;
  int64_t pages = 0;          // in the compressed cache, 1 or more
  int64_t decode_tokens = 0;  // the first rows hold slots, the others workspace rows
  Tensor lists;               // [T, capacity] int32, out: the whole row is written
  Tensor lengths;             // [T] int32, out
  Target target = {};
  Shard shard = {};  // of states: this rank's own, as local ones
};

// All compressed states so far, n = (pos + 1) / ratio of them (at most the capacity): decode rows
// hold the slots of states 0..n-1, prefill rows 0..n-1, then -1. lengths = n, 0 for padding. With a
// shard n = shard.local_length((pos + 1) / ratio).
void c128a_lists(const C128aListsArgs& args);

// Columns that a batch with this largest position (>= -1) uses: (max_position + 1) / ratio, rounded
// up to a multiple of 128.
int32_t c128a_width(int32_t max_position, int32_t ratio = 128);

struct WindowListsArgs {
  const Plan* plan = nullptr;
  Tensor positions;         // [T] int32; negative: padding
  Tensor requests = {};     // [T] int32; with block_table
  Tensor block_table = {};  // [R, W] int32, optional: gives physical slots instead of positions
  int32_t window = 128;
  int32_t page = 64;
  int64_t pages = 0;  // in the cache; with block_table: 1 or more
  Tensor lists;       // [T, capacity >= window] int32, out: the whole row is written
  Tensor lengths;     // [T] int32, out
  Target target = {};
  Shard shard = {};  // of positions; cache and block_table hold the whole window on every rank
};

// Positions [max(pos - window + 1, 0), pos], left-aligned, then -1. lengths = min(pos + 1, window).
// Padding: length 0, a row of -1. With a shard those of the positions that it owns, so that the
// lists of all ranks hold each position once.
void window_lists(const WindowListsArgs& args);

struct CombinedListsArgs {
  const Plan* plan = nullptr;
  Tensor topk;       // [T, K] int32: compressed rows of each token, ascending, -1 at the end
  Tensor positions;  // [T] int32; negative: padding
  Tensor requests;   // [T] int32: first_request + request within the chunk
  int32_t first_request = 0;
  Tensor seq_lens;     // [R] int32, of the chunk's requests
  Tensor gather_lens;  // [R] int32: window rows gathered for each request (its last tokens)
  int32_t ratio = 4;
  int32_t window = 128;
  int32_t compressed = 0;  // N of the chunk
  int32_t rows = 0;        // M of the chunk
  Tensor lists;            // [T, >= ceil128(K + window)] int32, out: the whole row is written
  Tensor lengths;          // [T] int32, out
  Target target = {};
};

// The row of a token, with `request` counted within the chunk: the first min((pos + 1) / ratio, K)
// entries of topk + rows * request, then the window rows
//   rows * request + compressed + p - (seq_len - gather_len)   for p in (pos - window, pos],
// then -1. An entry that names no row of the request becomes -1: its compressed rows are those
// below `compressed`, its window rows the gather_len behind them, within `rows`. lengths = how many
// entries there are, these included. Padding and requests outside the chunk give an empty row.
void combined_lists(const CombinedListsArgs& args);

}  // namespace winnow
