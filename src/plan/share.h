// Which tokens of a batch a rank computes (Spread::kQueries), without allocating.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/plan.h"

namespace winnow::internal::plan {

// The tokens of a request that a rank computes: positions [first, first + query), of which it owns
// `count`, the first of them as local position `local`.
struct RequestShare {
  int64_t local = 0;
  int32_t count = 0;
  // Number within the request of the i-th.
  int32_t token(const Shard& shard, int32_t first, int32_t i) const {
    return static_cast<int32_t>(shard.global(local + i)) - first;
  }
};
inline RequestShare share_of(const Shard& shard, int32_t query, int32_t seq) {
  if (seq == 0) return {};  // padding
  const int64_t before = shard.local_length(seq - query);
  return {before, static_cast<int32_t>(shard.local_length(seq) - before)};
}

// The most tokens of a rank in any batch of this capacity: its share of a request's q consecutive
// positions is at most q / world + interleave.
int32_t most_tokens(int32_t tokens, int32_t requests, const Shard& shard) noexcept;

struct Shares {
  std::span<int32_t> query_starts, seq_lens;  // [R + 1], [R]: of this rank
  std::span<int32_t> order;                   // [world * most]: Plan::token_order()
  std::span<int32_t> rows;                    // the same: Plan::token_rows(); may be empty
  std::span<const int32_t> row_starts;        // [R], with rows
  int32_t most = 0;                           // tokens of a rank
};

// Fills the spans, which are large enough, for a checked batch; `most` first.
int32_t tokens_of_a_rank(const Batch& batch, const Shard& shard) noexcept;
void share_out(const Batch& batch, const Shard& shard, const Shares& to) noexcept;

}  // namespace winnow::internal::plan
