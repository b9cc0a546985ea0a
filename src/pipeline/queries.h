// The stages of pipeline() where ranks share out the queries (Spread::kQueries): new records
// travel, and over sharded caches those before them.
#pragma once

#include "core/arena.h"
#include "pipeline/pipeline_checks.h"
#include "winnow/gather_prefix.h"

// Beside the public verbs, in their namespace: a shared library hides it.
#pragma GCC visibility push(hidden)
namespace winnow {

// Whether the plan's ranks share out the queries, and whether their caches are sharded.
inline bool by_queries(const PlanOptions& o) {
  return several_ranks(o) && o.parallel.spread == Spread::kQueries;
}
inline bool by_sharded_queries(const PlanOptions& o) { return by_queries(o) && o.parallel.sharded; }

// Contiguous rows of a batch's sequences, and the blocks that they are gathered by: the layout of
// GatherPrefixArgs::rows, for the plan's capacity.
struct PrefixMemory {
  std::byte *latent = nullptr, *keys = nullptr;    // rows by position, a page of all of them each
  std::byte *send = nullptr, *received = nullptr;  // blocks
  PrefixMemory() = default;
  PrefixMemory(internal::core::Arena& arena, const Plan& plan);
};

// What the new records of a batch travel by; empty unless queries are shared out.
struct QueryMemory {
  std::byte *send = nullptr, *received = nullptr;
  int64_t* places = nullptr;    // 0, 1, ...: where write() puts them in a block
  std::span<std::byte> prefix;  // sharded: as GatherPrefixArgs::rows
  QueryMemory() = default;
  QueryMemory(internal::core::Arena& arena, const Plan& plan);
};

// Sharded: the rows of all sequences, as attend() and score() read them.
Cache gathered_records(const Plan& plan, const PrefixMemory& rows);
void set_gathered_keys(const Plan& plan, const PrefixMemory& rows, ScoreArgs& score);

// The plan's token_order() and token_rows(), where the device reads them.
struct TokenOrder {
  const int32_t* order = nullptr;
  const int32_t* rows = nullptr;
};

// Writes this rank's new tokens and index keys into a block, gathers the blocks of all ranks, and
// places their records where they belong: in the caches, and over sharded caches in `rows` as well.
void write_over_ranks(const PipelineArgs& args, const QueryMemory& memory, const PrefixMemory& rows,
                      const TokenOrder& order);

}  // namespace winnow
#pragma GCC visibility pop
