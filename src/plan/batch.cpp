// The arithmetic of planning: who decodes, who prefills, in which chunks. Lengths are int32 as the
// engine gives them; sums of them are int64 throughout.
#include "plan/batch.h"

#include <algorithm>

#include "core/arithmetic.h"
#include "core/check.h"

namespace winnow {

namespace internal::plan {

int32_t checked_requests(std::span<const int32_t> query_starts) {
  const Check check("plan");
  check.that(!query_starts.empty(), "query_starts", "at least one entry", "none");
  check.that(query_starts.size() <= INT32_MAX, "query_starts", "at most 2147483647 entries",
             "more");
  check.that(query_starts[0] == 0, "query_starts", "0 first", std::to_string(query_starts[0]));
  for (size_t i = 1; i < query_starts.size(); ++i)
    if (query_starts[i] < query_starts[i - 1])
      check.fail("query_starts", "entries that do not descend",
                 cat(query_starts[i], " after ", query_starts[i - 1], " at entry ", i));
  return static_cast<int32_t>(query_starts.size()) - 1;
}

Chunk next_chunk(std::span<const int32_t> seq_lens, int32_t first, int64_t rows) noexcept {
  const int32_t count = static_cast<int32_t>(seq_lens.size());
  int32_t last = first + 1;
  // A first sequence that is too long stands alone; callers have refused it already.
  for (int64_t sum = seq_lens[first]; last < count && (sum += seq_lens[last]) <= rows;) ++last;
  return {first, last};
}

int32_t compressed_len(int32_t seq_len, int32_t ratio) noexcept {
  return ratio == 0 ? 0 : seq_len / ratio;
}

int32_t gather_len(int32_t query_len, int32_t seq_len, int32_t window) noexcept {
  // A padded request has no sequence: seq_len 0 whatever its query length.
  if (seq_len < query_len) return 0;
  return query_len + std::min(seq_len - query_len, std::max(window - 1, 0));
}

int64_t v4_chunk_rows(const V4ChunkArgs& a) noexcept {
  const int64_t compressed = a.ratio == 0 ? 0 : ceil_div(a.max_model_len, a.ratio);
  return 4 * (compressed + a.window + a.max_batched_tokens);
}

V4Chunk next_v4_chunk(const V4ChunkArgs& a, int32_t first, int64_t rows) noexcept {
  V4Chunk chunk{first, first, 0, 0};
  int32_t compressed = 0, gathered = 0;  // the largest so far
  for (int32_t i = first; i < static_cast<int32_t>(a.seq_lens.size()); ++i) {
    compressed = std::max(compressed, compressed_len(a.seq_lens[i], a.ratio));
    gathered = std::max(gathered, gather_len(a.query_lens[i], a.seq_lens[i], a.window));
    const int64_t each = int64_t{compressed} + gathered;
    // Every request of a chunk takes as many rows as the largest: one more may cost all of them.
    if (i > first && (i - first + 1) * each > rows) break;
    chunk = {first, i + 1, compressed, static_cast<int32_t>(each)};
  }
  return chunk;
}

}  // namespace internal::plan

namespace {

// A span's elements in [lo, hi], named with the index of the first one outside.
void check_lens(std::span<const int32_t> lens, const char* argument, int64_t lo, int64_t hi) {
  for (size_t i = 0; i < lens.size(); ++i)
    if (lens[i] < lo || lens[i] > hi)
      Check("plan").fail(argument, cat(lo, " to ", hi), cat(lens[i], " at entry ", i));
}

}  // namespace

void request_ids(std::span<const int32_t> query_starts, std::span<int32_t> out) try {
  const int32_t requests = internal::plan::checked_requests(query_starts);
  Check("plan").that(out.size() >= static_cast<size_t>(query_starts.back()), "out",
                     cat("at least ", query_starts.back(), " entries"), std::to_string(out.size()));
  // Whatever the buffer held before, every entry is written.
  for (int32_t r = 0; r < requests; ++r)
    std::fill(out.begin() + query_starts[r], out.begin() + query_starts[r + 1], r);
  std::fill(out.begin() + query_starts.back(), out.end(), 0);
} catch (const std::bad_alloc&) {
  out_of_memory("plan");
}

BatchSplit split_batch(std::span<const int32_t> query_starts, int64_t tokens, int32_t threshold,
                       bool uniform) try {
  const int32_t requests = internal::plan::checked_requests(query_starts);
  const Check check("plan");
  check.range(tokens, "tokens", query_starts.back(), INT32_MAX);
  check.range(threshold, "threshold", 0, INT32_MAX);
  const auto length = [&](int32_t r) { return query_starts[r + 1] - query_starts[r]; };
  int32_t decodes = 0;  // requests before the first prefill
  if (requests > 0 && length(0) <= threshold) {
    const auto joins = [&](int32_t r) {
      return uniform ? length(r) == length(0) : length(r) <= threshold;
    };
    while (decodes < requests && joins(decodes)) ++decodes;
    // Uniform decodes may be followed by empty requests, as long as nothing else comes.
    if (uniform) {
      int32_t last = decodes;
      while (last < requests && (length(last) == length(0) || length(last) == 0)) ++last;
      if (last == requests) decodes = requests;
    }
  }
  BatchSplit s;
  s.decodes = decodes;
  s.prefills = requests - decodes;
  // Padding stands at the end: it counts with the decodes when there is nothing else.
  s.decode_tokens = s.prefills == 0 ? static_cast<int32_t>(tokens) : query_starts[decodes];
  s.prefill_tokens = static_cast<int32_t>(tokens) - s.decode_tokens;
  for (int32_t r = 0; r < decodes; ++r) s.active_decodes += length(r) > 0;
  return s;
} catch (const std::bad_alloc&) {
  out_of_memory("plan");
}

std::vector<Chunk> prefill_chunks(std::span<const int32_t> seq_lens, int64_t rows) try {
  check_lens(seq_lens, "seq_lens", 0, rows);
  std::vector<Chunk> chunks;
  for (int32_t first = 0; first < static_cast<int32_t>(seq_lens.size()); first = chunks.back().last)
    chunks.push_back(internal::plan::next_chunk(seq_lens, first, rows));
  return chunks;
} catch (const std::bad_alloc&) {
  out_of_memory("plan");
}

void workspace_starts(std::span<const int32_t> seq_lens, std::span<const Chunk> chunks,
                      std::span<int32_t> out) try {
  const Check check("plan");
  check_lens(seq_lens, "seq_lens", 0, INT32_MAX);
  check.that(out.size() >= seq_lens.size(), "out", cat("at least ", seq_lens.size(), " entries"),
             std::to_string(out.size()));
  const auto count = static_cast<int32_t>(seq_lens.size());
  for (const Chunk& c : chunks) {
    check.that(0 <= c.first && c.first <= c.last && c.last <= count, "chunks",
               cat("runs of ", count, " requests"), cat("[", c.first, ", ", c.last, ")"));
    int64_t rows = 0;  // of the chunk, before anything of it is written
    for (int32_t r = c.first; r < c.last; ++r) rows += seq_lens[r];
    check.that(rows <= INT32_MAX, "chunks", "at most 2147483647 rows each", std::to_string(rows));
  }
  for (const Chunk& c : chunks)
    for (int32_t r = c.first, row = 0; r < c.last; row += seq_lens[r++]) out[r] = row;
} catch (const std::bad_alloc&) {
  out_of_memory("plan");
}

void prefill_request_ids(std::span<const int32_t> query_starts, int32_t decodes,
                         std::span<int32_t> out) try {
  const int32_t requests = internal::plan::checked_requests(query_starts);
  const Check check("plan");
  check.range(decodes, "decodes", 0, requests);
  check.that(out.size() >= static_cast<size_t>(query_starts.back()), "out",
             cat("at least ", query_starts.back(), " entries"), std::to_string(out.size()));
  std::fill(out.begin(), out.end(), -1);
  for (int32_t r = decodes; r < requests; ++r)
    std::fill(out.begin() + query_starts[r], out.begin() + query_starts[r + 1], r - decodes);
} catch (const std::bad_alloc&) {
  out_of_memory("plan");
}

std::vector<V4Chunk> v4_prefill_chunks(const V4ChunkArgs& a) try {
  const Check check("plan");
  const size_t count = a.seq_lens.size();
  check.that(a.query_lens.size() == count, "query_lens", cat(count, " entries (as seq_lens)"),
             std::to_string(a.query_lens.size()));
  check.range(a.ratio, "ratio", 0, INT32_MAX);
  check.range(a.window, "window", 0, INT32_MAX);
  check.range(a.max_model_len, "max_model_len", 0, internal::plan::kMaxV4Context);
  check.range(a.max_batched_tokens, "max_batched_tokens", 0, INT32_MAX);
  // Within these a chunk of one request always fits the bound.
  check_lens(a.query_lens, "query_lens", 0, a.max_batched_tokens);
  check_lens(a.seq_lens, "seq_lens", 0, a.max_model_len);
  for (size_t i = 0; i < count; ++i)
    if (a.seq_lens[i] < a.query_lens[i])
      check.fail("seq_lens", cat("at least the query length, ", a.query_lens[i]),
                 cat(a.seq_lens[i], " at entry ", i));
  std::vector<V4Chunk> chunks;
  for (int32_t first = 0; first < static_cast<int32_t>(count); first = chunks.back().last)
    chunks.push_back(internal::plan::next_v4_chunk(a, first, internal::plan::v4_chunk_rows(a)));
  return chunks;
} catch (const std::bad_alloc&) {
  out_of_memory("plan");
}

}  // namespace winnow
