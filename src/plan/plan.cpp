// plan: a capacity's kernels and workspace, and a batch's split, ids and schedule.
#include "winnow/plan.h"

#include <algorithm>

#include "core/check.h"
#include "core/schedule.h"
#include "plan/batch.h"
#include "plan/share.h"
#include "plan/state.h"

namespace winnow {

void Plan::State::allocate() {
  const PlanOptions& o = options;
  const size_t most_parts = separate() ? 1 + o.max_requests : 1;
  // Each part cuts at most one token more per boundary between workers.
  const ScheduleShape shape = internal::plan::schedule_shape(o, separate(), o.max_tokens);
  const int64_t most_tiles =
      max_tiles(shape) + static_cast<int64_t>(most_parts - 1) * (shape.workers - 1);
  Check("plan").that(
      most_tiles <= INT32_MAX, "max_tokens", "at most 2147483647 tiles",
      cat(most_tiles, " (max_tokens ", o.max_tokens, ", split_size ", o.split_size, ")"));
  const size_t by_request = o.max_requests, by_token = o.max_tokens;
  const size_t shared = by_queries() ? queried.world * by_token : 0;
  const size_t gathering = sharded()      ? shared + by_token + 2 * by_request
                           : by_queries() ? by_request
                                          : 0;
  staging = internal::plan::Staging(
      o.target.device,
      (separate() ? 7 * by_request + 4 * by_token : 2 * by_request + 3 * by_token) + shared +
          gathering + (compressed() ? by_token : 0));
  for (auto* v : {&query_lens, &seq_lens}) *v = staging.take(by_request);
  for (auto* v : {&request_ids, &positions, &key_ends}) *v = staging.take(by_token);
  if (compressed()) state_starts = staging.take(by_token);
  if (by_queries()) {
    token_order = staging.take(shared);
    prefix_lens = staging.take(by_request);
    own_starts.resize(by_request + 1);
    own_lens.resize(by_request);
  }
  if (sharded()) {
    row_starts = staging.take(by_request);
    token_rows = staging.take(shared);
    key_starts = staging.take(by_token);
  }
  ends.resize(by_token);
  if (separate()) {
    prefill_requests = staging.take(by_token);
    chunks.resize(o.max_requests);
    for (auto* v : {&starts, &compressed_lens, &gather_starts, &gather_lens, &gather_rows})
      *v = staging.take(by_request);
    gather_bytes = static_cast<size_t>(o.workspace_rows) * o.model.d_qk * sizeof(bf16);
  }
  tiles.resize(most_tiles);
  worker_starts.resize(most_parts * (shape.workers + 1));
  split_starts.resize(o.max_tokens + most_parts);
  parts.resize(most_parts);
  schedules.resize(most_parts);
}

Plan::Plan(const PlanOptions& asked) try : state_(std::make_unique<State>()) {
  State& s = *state_;
  internal::parallel::telling(internal::plan::control_of(asked.parallel), "plan", [&] {
    s.routed = internal::plan::chooses_routes(asked);
    s.options = internal::plan::resolve(asked);
    s.batch_capacity = asked.max_tokens;
    const Parallel& p = s.options.parallel;
    if (p.spread == Spread::kContext) s.held = p.shard();
    if (p.spread == Spread::kQueries) s.queried = p.shard();
    if (asked.target.kernel) {
      s.kernel_asked = asked.target.kernel;
      s.options.target.kernel = s.kernel_asked.c_str();
    }
    s.choice = internal::plan::choose_kernels(s.options);
    s.allocate();
  });
  s.ranks = internal::plan::Ranks(s.options, s.choice);
  const int32_t no_requests[1] = {0};
  s.fill({no_requests, {}, 0});
} catch (const std::bad_alloc&) {
  out_of_memory("plan");
}

Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;

// The route of a prefill of kSeparate.
Route Plan::State::route(int32_t query_len, int32_t seq_len) const noexcept {
  const PlanOptions& o = options;
  if (!routed) return Route::kGathered;
  if (seq_len > o.workspace_rows && !v4()) return Route::kDirect;
  const Route route = o.route({.model = o.model,
                               .heads = o.heads,
                               .tokens = query_len,
                               .context = seq_len,
                               .mha = o.mha,
                               .device = o.target.device.kind});
  return route == Route::kMha && !o.mha ? Route::kGathered : route;
}

// The same by number, once lengths and `leading` are filled. V4's index lists have those of pages
// before all others.
Route Plan::State::route_of(int32_t prefill) const noexcept {
  if (prefill < leading) return Route::kDirect;
  const int32_t r = split.decodes + prefill;
  const Route one = route(query_lens[r], seq_lens[r]);
  return v4() && one == Route::kDirect ? Route::kGathered : one;
}

// All checks come first, so that a batch that is refused changes nothing.
void Plan::refill(const Batch& batch) try {
  State& s = state();
  const internal::plan::CheckedBatch checked = internal::parallel::telling(
      internal::plan::control_of(s.options.parallel), "refill", [&] { return s.checked(batch); });
  s.ranks.agree_on(batch, checked.tokens);
  // Nothing below can fail.
  s.staging.settle();
  s.requests = checked.requests;
  s.batch_tokens = static_cast<int32_t>(checked.tokens);
  if (s.by_queries()) {
    s.share(batch);
    return;
  }
  s.tokens = s.batch_tokens;
  s.split = checked.split;
  s.fill(batch);
} catch (const std::bad_alloc&) {
  out_of_memory("plan");
}

internal::plan::CheckedBatch Plan::State::checked(const Batch& batch) const {
  const PlanOptions& o = options;
  const Check check("plan");
  const int32_t requests = internal::plan::checked_requests(batch.query_starts);
  check.range(requests, "query_starts (requests)", 0, o.max_requests);
  check.that(batch.seq_lens.size() == static_cast<size_t>(requests), "seq_lens",
             cat(requests, " entries (requests of query_starts)"),
             std::to_string(batch.seq_lens.size()));
  check.range(batch.query_starts.back(), "query_starts (tokens)", 0, batch_capacity);
  const int64_t tokens = batch.tokens == 0 ? batch.query_starts.back() : batch.tokens;
  check.range(tokens, "tokens", batch.query_starts.back(), batch_capacity);
  const BatchSplit split =
      split_batch(batch.query_starts, tokens, o.decode_threshold, o.uniform_decode);
  int64_t rows_of_all = 0;
  for (int32_t r = 0; r < requests; ++r) {
    const int32_t length = batch.seq_lens[r];
    const int32_t query = batch.query_starts[r + 1] - batch.query_starts[r];
    if (query > 0) rows_of_all += std::max(length, 0);
    if (length < 0 || length > o.max_context)
      check.fail("seq_lens", cat("0 to ", o.max_context, " (max_context)"),
                 cat(length, " at entry ", r));
    if (length != 0 && length < query)
      check.fail("seq_lens", cat("at least the query length, ", query, ", or 0 (padding)"),
                 cat(length, " at entry ", r));
    // Only prefills of kSeparate are gathered. Where each has its route, what is too long is not,
    // except for V4, where that would depend on the requests before.
    if (!separate() || (routed && !v4())) continue;
    if (r < split.decodes && !by_queries()) continue;
    const int64_t rows =
        v4() ? int64_t{o.extra_topk > 0 ? internal::plan::compressed_len(length, o.ratio) : 0} +
                   internal::plan::gather_len(query, length, o.topk)
             : length;
    if (rows > o.workspace_rows)
      check.fail("seq_lens", cat("at most ", o.workspace_rows, " workspace rows a prefill"),
                 cat(rows, " at entry ", r));
  }
  if (sharded())
    check.that(rows_of_all <= o.workspace_rows, "seq_lens",
               cat("at most ", o.workspace_rows, " tokens together (workspace_rows)"),
               cat(rows_of_all));
  return {requests, tokens, split};
}

// kQueries: the share of this rank is its batch.
void Plan::State::share(const Batch& batch) {
  int32_t row = 0;
  for (int32_t r = 0; r < requests; ++r) {
    const int32_t query = batch.query_starts[r + 1] - batch.query_starts[r];
    const int32_t seq = batch.seq_lens[r];
    prefix_lens[r] = seq == 0 || query == 0 ? 0 : seq - query;
    if (!sharded()) continue;
    row_starts[r] = row;
    row += query > 0 ? seq : 0;
  }
  gathered_rows = row;
  most = internal::plan::tokens_of_a_rank(batch, queried);
  const auto places = static_cast<size_t>(queried.world) * static_cast<size_t>(most);
  internal::plan::share_out(batch, queried,
                            {.query_starts = own_starts,
                             .seq_lens = own_lens,
                             .order = token_order.first(places),
                             .rows = token_rows.first(sharded() ? places : 0),
                             .row_starts = row_starts,
                             .most = most});
  const std::span starts = std::span(own_starts).first(static_cast<size_t>(requests) + 1);
  tokens = starts.back();
  split = split_batch(starts, tokens, options.decode_threshold, options.uniform_decode);
  fill({starts, std::span(own_lens).first(static_cast<size_t>(requests)), tokens});
}

void Plan::State::fill(const Batch& batch) noexcept {
  const std::span<const int32_t> query_starts = batch.query_starts;
  // Padding first, so that nothing of the last batch stays.
  std::fill_n(positions.begin(), tokens, -1);
  std::fill_n(request_ids.begin(), tokens, 0);
  std::fill_n(ends.begin(), tokens, 0);
  std::fill_n(key_ends.begin(), tokens, 0);
  if (compressed()) std::fill_n(state_starts.begin(), tokens, -1);
  if (separate()) {
    std::fill_n(prefill_requests.begin(), tokens, -1);
    for (auto* v : {&starts, &compressed_lens, &gather_starts, &gather_lens, &gather_rows})
      std::fill_n(v->begin(), split.prefills, 0);  // of prefills that read the pages
  }
  for (int32_t r = 0; r < requests; ++r) {
    query_lens[r] = query_starts[r + 1] - query_starts[r];
    seq_lens[r] = batch.seq_lens[r];
  }
  leading = 0;
  while (separate() && leading < split.prefills) {
    const int32_t r = split.decodes + leading;
    if (seq_lens[r] > 0 && route(query_lens[r], seq_lens[r]) != Route::kDirect) break;
    if (seq_lens[r] == 0 && leading == 0) break;  // padding goes with those before it
    ++leading;
  }
  for (int32_t r = 0; r < requests; ++r) {
    const bool gathered =
        separate() && r >= split.decodes && route_of(r - split.decodes) != Route::kDirect;
    const int64_t before = by_queries() ? queried.local_length(prefix_lens[r]) : 0;
    for (int32_t i = 0; i < query_lens[r]; ++i) {
      const int32_t t = query_starts[r] + i;
      request_ids[t] = r;
      if (seq_lens[r] == 0) continue;  // a padded request: computed positions would be negative
      positions[t] = by_queries() ? static_cast<int32_t>(queried.global(before + i))
                                  : seq_lens[r] - query_lens[r] + i;
      ends[t] = positions[t] + 1;
      if (compressed()) state_starts[t] = ends[t] - options.ratio;
      key_ends[t] = static_cast<int32_t>(held.local_length(ends[t] / options.ratio));
      if (sharded()) {
        key_starts[t] = row_starts[r];
        key_ends[t] += row_starts[r];
      }
      if (gathered) prefill_requests[t] = r - split.decodes;
    }
  }
  fill_parts(query_starts);

  // Lay the parts' schedules end to end.
  ScheduleMemory memory{tiles, worker_starts, split_starts};
  for (size_t p = 0; p < part_count; ++p) {
    const Part& part = parts[p];
    const ScheduleShape shape =
        internal::plan::schedule_shape(options, part.gathered, part.last_token - part.first_token);
    schedules[p] =
        make_schedule(shape, std::span(ends).subspan(part.first_token, shape.tokens), memory);
    memory.tiles = memory.tiles.subspan(schedules[p].tiles.size());
    memory.worker_starts = memory.worker_starts.subspan(schedules[p].worker_starts.size());
    memory.split_starts = memory.split_starts.subspan(schedules[p].split_starts.size());
  }
}

// Splits the batch into attend() calls.
void Plan::State::fill_parts(std::span<const int32_t> query_starts) noexcept {
  part_count = chunk_count = 0;
  if (!separate()) {
    parts[part_count++] = {0, tokens, 0, requests};
    return;
  }
  const int32_t base = split.decodes;
  // The prefills from `first` on that take one route; padding goes with those before it.
  const auto run_from = [&](int32_t first) {
    const Route one = route_of(first);
    int32_t last = first + 1;
    while (last < split.prefills && (seq_lens[base + last] == 0 || route_of(last) == one)) ++last;
    return last;
  };
  // Padding after the last request belongs to the last part.
  const auto token_at = [&](int32_t i) {
    return i == split.prefills ? tokens : query_starts[base + i];
  };
  int32_t first = leading;
  if (first > 0) parts[part_count++] = {0, token_at(first), 0, base + first};
  else if (split.decode_tokens > 0 || split.prefills == 0)
    parts[part_count++] = {0, split.decode_tokens, 0, base};
  while (first < split.prefills) {
    const Route one = route_of(first);
    const int32_t last = run_from(first);
    if (one == Route::kDirect) {
      parts[part_count++] = {token_at(first), token_at(last), base + first, base + last};
      first = last;
    } else {
      first = fill_chunk(first, last, query_starts, one == Route::kMha);
    }
  }
}

// One chunk of the prefills [first, last), which take one route; returns where the next begins.
int32_t Plan::State::fill_chunk(int32_t first, int32_t last, std::span<const int32_t> query_starts,
                                bool mha) noexcept {
  const int32_t base = split.decodes;
  const std::span prefill_lens = seq_lens.subspan(base, last);
  V4Chunk c;
  if (v4()) {
    const V4ChunkArgs args{.query_lens = query_lens.subspan(base, last),
                           .seq_lens = prefill_lens,
                           .ratio = options.extra_topk > 0 ? options.ratio : 0,
                           .window = options.topk};
    c = internal::plan::next_v4_chunk(args, first, options.workspace_rows);
  } else {
    const Chunk plain = internal::plan::next_chunk(prefill_lens, first, options.workspace_rows);
    c = {plain.first, plain.last, 0, 0};
  }
  chunks[chunk_count++] = {c.first, c.last};
  const int32_t end = c.last == split.prefills ? tokens : query_starts[base + c.last];
  parts[part_count] = {query_starts[base + c.first],
                       end,
                       base + c.first,
                       base + c.last,
                       true,
                       c.compressed,
                       c.rows,
                       mha};
  fill_gather(parts[part_count++]);
  return c.last;
}

// What a chunk gathers, and to which of its rows. The chunk fits the workspace, so rows fit int32.
void Plan::State::fill_gather(const Part& part) noexcept {
  int32_t row = 0;
  for (int32_t r = part.first_request; r < part.last_request; ++r) {
    const int32_t p = r - split.decodes;
    starts[p] = row;
    if (v4()) {
      compressed_lens[p] =
          options.extra_topk > 0 ? internal::plan::compressed_len(seq_lens[r], options.ratio) : 0;
      gather_lens[p] = internal::plan::gather_len(query_lens[r], seq_lens[r], options.topk);
      gather_rows[p] = row + part.compressed;
      row += part.rows;
    } else {
      compressed_lens[p] = 0;
      gather_lens[p] = seq_lens[r];
      gather_rows[p] = row;
      row += seq_lens[r];
    }
    gather_starts[p] = seq_lens[r] - gather_lens[p];
  }
}

Plan::State& Plan::state() const {
  Check("plan").that(state_ != nullptr, "plan", "a plan", "one that was moved from");
  return *state_;
}

}  // namespace winnow
