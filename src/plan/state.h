// What a plan holds.
#pragma once

#include <string>
#include <vector>

#include "plan/choice.h"
#include "plan/ranks.h"
#include "plan/staging.h"
#include "winnow/plan.h"

namespace winnow {

namespace internal::plan {
// A batch that fits a plan.
struct CheckedBatch {
  int32_t requests = 0;
  int64_t tokens = 0;
  BatchSplit split;
};
}  // namespace internal::plan

// Everything is allocated here, for the capacity; refill() only writes into it.
struct Plan::State {
  PlanOptions options;
  std::string kernel_asked;  // what options.target.kernel points to
  internal::plan::Choice choice;
  internal::plan::Ranks ranks;
  Shard held;     // kContext: of the keys that this rank holds
  Shard queried;  // kQueries over several ranks: of the tokens that it computes; else a world of 1
  int32_t batch_capacity = 0;  // tokens of a whole batch
  size_t gather_bytes = 0;

  // The current batch. Vectors keep their capacity's size; the counts say how much of them counts.
  int32_t requests = 0, tokens = 0, batch_tokens = 0;
  int64_t gathered_rows = 0;
  BatchSplit split;
  internal::plan::Staging staging;                      // what the spans point into
  std::span<int32_t> query_lens, seq_lens;              // by request
  std::span<int32_t> request_ids, positions, key_ends;  // by token
  std::span<int32_t> state_starts;                      // by token, V4 with compressed states
  std::span<int32_t> prefill_requests;                  // by token, kSeparate alone
  std::span<int32_t> token_order;                       // kQueries
  std::span<int32_t> token_rows, key_starts;            // sharded
  std::span<int32_t> prefix_lens, row_starts;           // by request: kQueries; sharded
  std::vector<int32_t> own_starts, own_lens;            // kQueries: this rank's share of a batch
  int32_t most = 0;                                     // kQueries: tokens of a rank
  int32_t leading = 0;  // prefills that read the pages before the first that does not
  // By prefill request, kSeparate alone:
  std::span<int32_t> starts, compressed_lens, gather_starts, gather_lens, gather_rows;
  std::vector<int32_t> ends;  // by token, for the schedule alone
  std::vector<Part> parts;
  std::vector<Chunk> chunks;
  size_t part_count = 0, chunk_count = 0;
  std::vector<Tile> tiles;
  std::vector<int32_t> worker_starts, split_starts;
  std::vector<Schedule> schedules;  // by part

  void allocate();
  internal::plan::CheckedBatch checked(const Batch& batch) const;
  void share(const Batch& batch);
  void fill(const Batch& batch) noexcept;
  bool by_queries() const { return queried.world > 1; }
  bool sharded() const { return by_queries() && options.parallel.sharded; }
  void fill_parts(std::span<const int32_t> query_starts) noexcept;
  int32_t fill_chunk(int32_t first, int32_t last, std::span<const int32_t> query_starts,
                     bool mha) noexcept;
  void fill_gather(const Part& part) noexcept;
  bool separate() const { return options.mode == Mode::kSeparate; }
  bool routed = false;  // prefills of kSeparate have a route each
  Route route(int32_t query_len, int32_t seq_len) const noexcept;
  Route route_of(int32_t prefill) const noexcept;
  bool v4() const { return options.model.lists == 2; }
  bool compressed() const { return v4() && options.extra_topk > 0; }
};

}  // namespace winnow
