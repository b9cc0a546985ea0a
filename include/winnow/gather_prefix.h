// gather_prefix: what every rank's caches hold of a batch's sequences -> contiguous rows of all of
// them, for one layer of a prefill over ranks (Spread::kQueries with sharded caches).
#pragma once

#include <cstddef>
#include <span>

#include "winnow/parallel.h"
#include "winnow/tensor.h"

namespace winnow {

class Plan;

struct GatherPrefixArgs {
  const Plan* plan = nullptr;  // refilled for the batch
  Cache cache;                 // this rank's records ...
  Tensor block_table;          // [>= R, W] int32: pages of local positions
  Cache keys;                  // ... and index keys
  Tensor key_table;            // [>= R, W] int32
  // gather_prefix_bytes(), out: pipeline() takes it as `prefix`.
  std::span<std::byte> rows;
  // Instead of the plan's, for a call beside a pipeline() that uses that one. Of the same ranks.
  Communicator* comm = nullptr;
  Target target = {};
};

// One all_gather of (656 + 132) bytes for every token before the batch's own (bf16 cache: 1152 +
// 132), rounded up to the same number on each rank; then records stand by position. A layer's
// prefix does not depend on the layer before, so an engine calls this for the next layer, with
// other rows, before it runs this one: on CUDA on a second stream, on a CPU from a second thread;
// either with a communicator of its own. The same call on every rank; nothing is sent where no
// sequence has a prefix.
void gather_prefix(const GatherPrefixArgs& args);

// For the plan's capacity; 0 for plans whose caches are not sharded by queries.
size_t gather_prefix_bytes(const Plan& plan);

}  // namespace winnow
