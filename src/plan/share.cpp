// The tokens of a batch, shared out over ranks by their positions.
#include "plan/share.h"

#include <algorithm>

#include "core/check.h"
#include "plan/batch.h"

namespace winnow {

namespace internal::plan {

namespace {

int32_t query_of(const Batch& batch, size_t r) {
  return batch.query_starts[r + 1] - batch.query_starts[r];
}

Shard of_rank(Shard shard, int32_t rank) {
  shard.rank = rank;
  return shard;
}

}  // namespace

int32_t most_tokens(int32_t tokens, int32_t requests, const Shard& shard) noexcept {
  const int64_t shared = tokens / shard.world + int64_t{requests} * shard.interleave;
  return static_cast<int32_t>(std::min<int64_t>(tokens, shared));
}

int32_t tokens_of_a_rank(const Batch& batch, const Shard& shard) noexcept {
  int32_t most = 0;
  for (int32_t w = 0; w < shard.world; ++w) {
    int32_t count = 0;
    for (size_t r = 0; r < batch.seq_lens.size(); ++r)
      count += share_of(of_rank(shard, w), query_of(batch, r), batch.seq_lens[r]).count;
    most = std::max(most, count);
  }
  return most;
}

void share_out(const Batch& batch, const Shard& shard, const Shares& to) noexcept {
  std::fill(to.order.begin(), to.order.end(), -1);
  std::fill(to.rows.begin(), to.rows.end(), -1);
  to.query_starts[0] = 0;
  for (int32_t w = 0; w < shard.world; ++w) {
    const Shard theirs = of_rank(shard, w);
    int32_t place = 0;
    for (size_t r = 0; r < batch.seq_lens.size(); ++r) {
      const int32_t query = query_of(batch, r), seq = batch.seq_lens[r], first = seq - query;
      const RequestShare share = share_of(theirs, query, seq);
      int32_t last = -1;
      for (int32_t i = 0; i < share.count; ++i) {
        last = share.token(theirs, first, i);
        const size_t at = static_cast<size_t>(w) * to.most + place++;
        to.order[at] = batch.query_starts[r] + last;
        if (!to.rows.empty()) to.rows[at] = to.row_starts[r] + first + last;
      }
      if (w != shard.rank) continue;
      to.query_starts[r + 1] = place;
      to.seq_lens[r] = last < 0 ? 0 : first + last + 1;
    }
  }
}

}  // namespace internal::plan

BatchShare shard_batch(const Batch& batch, const Shard& shard) try {
  const Check check("shard_batch");
  check.range(shard.interleave, "shard.interleave", 1, INT32_MAX);
  check.range(shard.world, "shard.world", 1, INT32_MAX);
  check.range(shard.rank, "shard.rank", 0, shard.world - 1);
  const int32_t requests = internal::plan::checked_requests(batch.query_starts);
  check.that(batch.seq_lens.size() == static_cast<size_t>(requests), "seq_lens",
             cat(requests, " entries (requests of query_starts)"), cat(batch.seq_lens.size()));
  BatchShare share;
  share.query_starts.push_back(0);
  for (int32_t r = 0; r < requests; ++r) {
    const int32_t query = batch.query_starts[r + 1] - batch.query_starts[r];
    const int32_t seq = batch.seq_lens[r], first = seq - query;
    check.that(seq == 0 || seq >= query, "seq_lens",
               cat("at least the query length, ", query, ", or 0 (padding)"),
               cat(seq, " at entry ", r));
    const internal::plan::RequestShare own = internal::plan::share_of(shard, query, seq);
    for (int32_t i = 0; i < own.count; ++i) {
      const int32_t token = own.token(shard, first, i);
      share.tokens.push_back(batch.query_starts[r] + token);
      share.positions.push_back(first + token);
    }
    share.query_starts.push_back(static_cast<int32_t>(share.tokens.size()));
    share.seq_lens.push_back(own.count == 0 ? 0 : share.positions.back() + 1);
  }
  return share;
} catch (const std::bad_alloc&) {
  out_of_memory("shard_batch");
}

}  // namespace winnow
