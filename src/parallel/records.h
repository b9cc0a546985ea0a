// Cached records as bytes: from pages to blocks that travel, and from blocks to where they belong.
#pragma once

#include <cstdint>
#include <span>

#include "core/quantizer.h"
#include "winnow/parallel.h"

namespace winnow::internal::parallel {

// Records of `count` tokens as one page; what a rank sends. Blocks of several ranks behind each
// other are a cache with a page for each.
Cache block_of(CacheFormat format, int64_t count, std::byte* data);

// Record i of `from`, counted through its pages, becomes slots[order[i]] of `to`, for i below
// `count`. Those below 0 or outside `to` are left out; no `slots`: order[i] itself.
struct Placed {
  Pages from, to;
  const int32_t* order = nullptr;
  int64_t count = 0;
  const int64_t* slots = nullptr;
};
void place_records(const Placed& placed, const Device& device);

// 0, 1, ...: where write() puts records in a block.
void number_places(int64_t* places, int64_t count, const Device& device);

// Sequences whose positions are shared out, as rows of a table of pages.
struct Sequences {
  Shard shard;                       // of this rank
  std::span<const int32_t> lengths;  // [R], of whole sequences; on the host
  const int32_t* table = nullptr;    // [R, table_width], pages of local positions
  int64_t table_stride = 0, table_width = 0;
};

// Rows of a rank's block for all sequences: as many on every rank.
int64_t block_rows(const Shard& shard, std::span<const int32_t> lengths);

// This rank's records of the sequences -> its block, a sequence behind the other. Records whose
// page is missing become zeros.
void take_records(const Pages& cache, const Sequences& sequences, const Pages& block,
                  const Device& device);

// The blocks of all ranks -> sequence r at rows [starts[r], starts[r] + lengths[r]) of `to`.
void order_records(const Pages& blocks, const Sequences& sequences, std::span<const int32_t> starts,
                   const Pages& to, const Device& device);

}  // namespace winnow::internal::parallel
