// Planning: its arithmetic, plans of random options, refills with random and with damaged batches,
// against the invariants that docs/design.md states.
#include "winnow/plan.h"

#include "core/arithmetic.h"
#include "target.h"
#include "winnow/error.h"

namespace winnow::testing {
namespace {

// Capacity of the plans. Small, so that many fit into a second: a plan's memory and a check's time
// grow with tokens times list positions.
constexpr int32_t kRequests = 6, kTokens = 64, kContext = 40;

// A batch of decodes first, then anything, with empty requests among them.
struct FuzzBatch {
  std::vector<int32_t> starts = {0}, lens;

  FuzzBatch(Source& s, int64_t requests, int32_t threshold) {
    const int64_t decodes = draw(s, 0, requests);
    for (int64_t r = 0; r < requests; ++r) {
      const int32_t n = draw32(s, 0, r < decodes ? threshold : kTokens / kRequests);
      starts.push_back(starts.back() + n);
      lens.push_back(n + draw32(s, n == 0 ? 1 : 0, kContext - kTokens / kRequests));
    }
  }
  int32_t query_len(int64_t r) const { return starts[r + 1] - starts[r]; }
  int64_t requests() const { return std::ssize(lens); }
};

void check_split(const FuzzBatch& b, int32_t threshold) {
  const BatchSplit s = split_batch(b.starts, b.starts.back(), threshold, false);
  EXPECT_EQ(s.decodes + s.prefills, b.requests());
  EXPECT_EQ(s.decode_tokens, b.starts[s.decodes]);
  EXPECT_EQ(s.decode_tokens + s.prefill_tokens, b.starts.back());
  for (int64_t r = 0; r < s.decodes; ++r) EXPECT_LE(b.query_len(r), threshold);
  if (s.prefills > 0) {
    EXPECT_GT(b.query_len(s.decodes), threshold);
  }
  const BatchSplit u = split_batch(b.starts, b.starts.back(), threshold, true);
  EXPECT_EQ(u.decodes + u.prefills, b.requests());
  for (int64_t r = 0; r < u.decodes; ++r)
    EXPECT_TRUE(b.query_len(r) == b.query_len(0) || b.query_len(r) == 0);
}

void check_ids(const FuzzBatch& b, int32_t decodes, int64_t tokens) {
  std::vector<int32_t> ids(tokens, 99), prefill_ids(tokens, 99);
  request_ids(b.starts, ids);
  prefill_request_ids(b.starts, decodes, prefill_ids);
  for (int64_t r = 0; r < b.requests(); ++r)
    for (int32_t t = b.starts[r]; t < b.starts[r + 1]; ++t) {
      EXPECT_EQ(ids[t], r);
      EXPECT_EQ(prefill_ids[t], r < decodes ? -1 : r - decodes);
    }
  for (int64_t t = b.starts.back(); t < tokens; ++t) {
    EXPECT_EQ(ids[t], 0);
    EXPECT_EQ(prefill_ids[t], -1);
  }
}

void check_chunks(const FuzzBatch& b, int64_t spare_rows) {
  const int32_t longest = *std::max_element(b.lens.begin(), b.lens.end());
  const int64_t rows = longest + spare_rows;
  const std::vector<Chunk> chunks = prefill_chunks(b.lens, rows);
  std::vector<int32_t> first(b.lens.size());
  workspace_starts(b.lens, chunks, first);
  int32_t next = 0;
  for (const Chunk& c : chunks) {
    EXPECT_EQ(c.first, next);
    ASSERT_LT(c.first, c.last);
    ASSERT_LE(c.last, b.requests());
    int64_t sum = 0;
    for (int32_t r = c.first; r < c.last; sum += b.lens[r++]) EXPECT_EQ(first[r], sum);
    EXPECT_LE(sum, rows);
    // Greedy: the next one would not have fitted.
    if (c.last < b.requests()) {
      EXPECT_GT(sum + b.lens[c.last], rows);
    }
    next = c.last;
  }
  EXPECT_EQ(next, b.requests());
  EXPECT_THROW(prefill_chunks(b.lens, longest - 1), Error);
}

void check_plan(const Plan& plan, const FuzzBatch& b, int64_t tokens) {
  EXPECT_EQ(plan.request_count(), b.requests());
  ASSERT_EQ(plan.tokens(), tokens);
  for (int64_t r = 0; r < b.requests(); ++r)
    for (int32_t t = b.starts[r]; t < b.starts[r + 1]; ++t) {
      EXPECT_EQ(plan.positions()[t], b.lens[r] - b.starts[r + 1] + t);
      EXPECT_EQ(plan.key_ends()[t], (plan.positions()[t] + 1) / plan.options().ratio);
    }
  for (int64_t t = b.starts.back(); t < tokens; ++t) {
    EXPECT_EQ(plan.positions()[t], -1);
    EXPECT_EQ(plan.key_ends()[t], 0);
  }
  // Parts follow each other over all tokens; each one's tiles cover every token's lists once, and
  // its workers take every tile.
  const int32_t width = plan.options().topk + plan.options().extra_topk;
  const bool combined = plan.options().model.lists == 2;  // V4's gathered lists are padded to 128
  int32_t next = 0;
  for (size_t i = 0; i < plan.parts().size(); ++i) {
    const Part& part = plan.parts()[i];
    EXPECT_EQ(part.first_token, next);
    next = part.last_token;
    EXPECT_LE(part.mha, part.gathered && plan.options().mha);
    for (int32_t t = part.first_token; t < part.last_token && plan.mode() == Mode::kSeparate; ++t)
      EXPECT_EQ(plan.prefill_requests()[t] >= 0, part.gathered && plan.positions()[t] >= 0);
    const Schedule s = plan.schedule(static_cast<int32_t>(i));
    EXPECT_EQ(s.worker_starts.front(), 0);
    EXPECT_EQ(s.worker_starts.back(), static_cast<int64_t>(s.tiles.size()));
    EXPECT_TRUE(std::is_sorted(s.worker_starts.begin(), s.worker_starts.end()));
    for (int32_t t = 0; t < part.last_token - part.first_token; ++t) {
      int32_t covered = 0, split = 0;
      for (int32_t k = s.split_starts[t]; k < s.split_starts[t + 1]; ++k) {
        const Tile& tile = s.tiles[k];
        EXPECT_EQ(tile, (Tile{t, covered, tile.end, split++}));
        covered = tile.end;
      }
      EXPECT_EQ(covered, combined && part.gathered ? round_up(width, 128) : width);
    }
  }
  EXPECT_EQ(next, tokens);
}

Route by_lengths(const RouteArgs& a) noexcept { return static_cast<Route>(a.context % 3); }

// Of a list; few are longer than two tiles of 128.
int32_t width(Source& s) { return chance(s, 90) ? draw32(s, 1, 16) : draw32(s, 1, 300); }

PlanOptions any_options(Source& s) {
  const bool v4 = chance(s, 50), fp8 = chance(s, 80);
  const Model& model = v4 ? kV4 : kV32;
  const Mode modes[] = {Mode::kAuto, Mode::kMixed, Mode::kSeparate, Mode::kDirect};
  return {.model = model,
          .format = fp8 ? model.fp8 : model.bf16,
          .heads = draw32(s, 1, 128),
          .topk = width(s),
          .extra_topk = v4 ? width(s) - 1 : 0,
          .ratio = v4 ? draw32(s, 1, 8) : 1,
          .page = page_size(s),
          .pages = draw(s, kContext, 200),
          .max_requests = kRequests,
          .max_tokens = kTokens,
          .max_context = kContext,
          .decode_threshold = draw32(s, 1, 4),
          .mode = fp8 ? modes[draw(s, 0, 3)] : Mode::kAuto,
          .route = chance(s, 50) ? by_lengths : prefill_route,
          .mha = !v4 && chance(s, 50),
          .split = chance(s, 50) ? SplitPolicy::kBalanced : SplitPolicy::kFixed,
          .split_size = chance(s, 80) ? draw32(s, 1, 16) : draw32(s, 1, 200)};
}

// One option that no plan can have, or one that few have.
void damage(Source& s, PlanOptions& o) {
  const int32_t odd[] = {INT32_MIN, -1, 0, 1, 129, 513, INT32_MAX};
  const int32_t value = odd[draw(s, 0, 6)];
  switch (draw(s, 0, 12)) {
    case 0: o.heads = value; break;
    case 1: o.topk = std::min(value, 513); break;
    case 2: o.extra_topk = std::min(value, 513); break;
    case 3: o.ratio = value; break;
    case 4: o.page = value; break;
    case 5: o.pages = chance(s, 50) ? INT64_MAX : value; break;
    case 6: o.max_requests = std::min(value, 513); break;
    case 7: o.max_tokens = std::min(value, 513); break;
    case 8: o.max_context = value; break;
    case 9: o.decode_threshold = value; break;
    case 10: o.workspace_rows = chance(s, 50) ? INT64_MIN : std::min(value, 513); break;
    case 11: o.split_size = value; break;
    default: o.index_heads = value;
  }
}

// A batch that refill() must refuse, or at least not fall for.
void damage(Source& s, FuzzBatch& b) {
  const int32_t odd[] = {INT32_MIN, -1000, -1, kTokens + 1, INT32_MAX};
  std::vector<int32_t>& some = chance(s, 50) ? b.starts : b.lens;
  if (chance(s, 20)) some.pop_back();
  else some[draw(s, 0, std::ssize(some) - 1)] = odd[draw(s, 0, 4)];
}

void check_refills(Source& s, Plan& plan) {
  const int32_t* address = plan.request_ids().data();
  for (int refill = 0; refill < 3; ++refill) {
    const FuzzBatch b(s, draw(s, 1, kRequests), plan.options().decode_threshold);
    const int64_t tokens = b.starts.back() + draw(s, 0, 3);
    if (tokens == 0) continue;
    plan.refill({.query_starts = b.starts, .seq_lens = b.lens, .tokens = tokens});
    if (address == nullptr) address = plan.request_ids().data();
    EXPECT_EQ(plan.request_ids().data(), address);
    check_plan(plan, b, tokens);
    // A refill that throws leaves everything as it was.
    FuzzBatch bad = b;
    damage(s, bad);
    try {
      plan.refill({.query_starts = bad.starts, .seq_lens = bad.lens});
    } catch (const Error&) {
      check_plan(plan, b, tokens);
    }
  }
}

void run(Source& s) {
  const int32_t threshold = draw32(s, 1, 4);
  const FuzzBatch b(s, draw(s, 1, kRequests), threshold);
  check_split(b, threshold);
  check_ids(b, split_batch(b.starts, b.starts.back(), threshold, false).decodes,
            b.starts.back() + draw(s, 0, 5));
  check_chunks(b, draw(s, 0, 100));
  PlanOptions o = any_options(s);
  const bool damaged = chance(s, 30);
  if (damaged) damage(s, o);
  try {
    Plan plan(o);
    if (!damaged) check_refills(s, plan);
  } catch (const Error& e) {
    EXPECT_TRUE(damaged) << e.what();
  }
}

const FuzzTarget plan_target{"plan", 20, run};

}  // namespace
}  // namespace winnow::testing
