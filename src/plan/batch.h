// What batch.cpp and plan.cpp share: chunks one at a time, so that refilling a plan allocates
// nothing.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/plan.h"

namespace winnow::internal::plan {

// query_starts begins at 0 and does not descend; returns the number of requests.
int32_t checked_requests(std::span<const int32_t> query_starts);

// The longest run from request `first` on whose sequences fit `rows`; at least one request.
Chunk next_chunk(std::span<const int32_t> seq_lens, int32_t first, int64_t rows) noexcept;

// Rows of a V4 prefill request: its compressed states, and the tokens that its windows reach.
int32_t compressed_len(int32_t seq_len, int32_t ratio) noexcept;
int32_t gather_len(int32_t query_len, int32_t seq_len, int32_t window) noexcept;

// Sequences up to here give chunk rows (context / 2 compressed + context gathered) that fit int32.
inline constexpr int64_t kMaxV4Context = INT32_MAX / 3 * 2;

// The bound of v4_prefill_chunks(), and its chunk from request `first` on under any bound.
int64_t v4_chunk_rows(const V4ChunkArgs& args) noexcept;
V4Chunk next_v4_chunk(const V4ChunkArgs& args, int32_t first, int64_t rows) noexcept;

}  // namespace winnow::internal::plan
