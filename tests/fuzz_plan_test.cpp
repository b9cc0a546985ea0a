// Random batches from fixed seeds against the invariants of planning, and V4's lists against their
// reference.
#include <algorithm>

#include "fuzz.h"
#include "winnow/error.h"
#include "winnow/lists.h"
#include "winnow/plan.h"

namespace winnow {
namespace {

using testing::chance;
using testing::draw;
using testing::fuzz;
using testing::Guarded;
using testing::indices;
using testing::page_size;
using testing::Rng;
using testing::runnable;

// A batch of decodes first, then anything, with empty requests among them.
struct FuzzBatch {
  std::vector<int32_t> starts = {0}, lens;

  FuzzBatch(Rng& rng, int64_t requests, int32_t threshold) {
    const int64_t decodes = draw(rng, 0, requests);
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t n = draw(rng, 0, r < decodes ? threshold : 20);
      starts.push_back(starts.back() + static_cast<int32_t>(n));
      lens.push_back(static_cast<int32_t>(n + draw(rng, n == 0 ? 1 : 0, 60)));
    }
  }
  int32_t query_len(int64_t r) const { return starts[r + 1] - starts[r]; }
  int64_t requests() const { return static_cast<int64_t>(lens.size()); }
};

TEST(Fuzz, PlanningArithmetic) {
  fuzz(20, [](Rng& rng) {
    const int32_t threshold = static_cast<int32_t>(draw(rng, 1, 4));
    const FuzzBatch b(rng, draw(rng, 1, 12), threshold);
    const int64_t tokens = b.starts.back() + draw(rng, 0, 5);

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

    std::vector<int32_t> ids(tokens, 99), prefill_ids(tokens, 99);
    request_ids(b.starts, ids);
    prefill_request_ids(b.starts, s.decodes, prefill_ids);
    for (int64_t r = 0; r < b.requests(); ++r)
      for (int32_t t = b.starts[r]; t < b.starts[r + 1]; ++t) {
        EXPECT_EQ(ids[t], r);
        EXPECT_EQ(prefill_ids[t], r < s.decodes ? -1 : r - s.decodes);
      }
    for (int64_t t = b.starts.back(); t < tokens; ++t) {
      EXPECT_EQ(ids[t], 0);
      EXPECT_EQ(prefill_ids[t], -1);
    }

    const int64_t rows = *std::max_element(b.lens.begin(), b.lens.end()) + draw(rng, 0, 100);
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
      if (c.last < b.requests()) {
        EXPECT_GT(sum + b.lens[c.last], rows);  // greedy
      }
      next = c.last;
    }
    EXPECT_EQ(next, b.requests());
    EXPECT_THROW(prefill_chunks(b.lens, *std::max_element(b.lens.begin(), b.lens.end()) - 1),
                 Error);
  });
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
      EXPECT_EQ(covered, combined && part.gathered ? (width + 127) / 128 * 128 : width);
    }
  }
  EXPECT_EQ(next, tokens);
}

Route by_lengths(const RouteArgs& a) noexcept { return static_cast<Route>(a.context % 3); }

TEST(Fuzz, Plans) {
  fuzz(20, [](Rng& rng) {
    const bool v4 = chance(rng, 50);
    const Model& model = v4 ? kV4 : kV32;
    const Mode modes[] = {Mode::kAuto, Mode::kMixed, Mode::kSeparate, Mode::kDirect};
    const bool fp8 = chance(rng, 80);
    Plan plan({.model = model,
               .format = fp8 ? model.fp8 : model.bf16,
               .heads = static_cast<int32_t>(draw(rng, 1, 128)),
               .topk = static_cast<int32_t>(draw(rng, 1, 300)),
               .extra_topk = v4 ? static_cast<int32_t>(draw(rng, 0, 300)) : 0,
               .ratio = v4 ? static_cast<int32_t>(draw(rng, 2, 8)) : 1,
               .page = page_size(rng),
               .pages = draw(rng, 80, 200),
               .max_requests = 12,
               .max_tokens = 400,
               .max_context = 80,
               .decode_threshold = static_cast<int32_t>(draw(rng, 1, 4)),
               .mode = fp8 ? modes[draw(rng, 0, 3)] : Mode::kAuto,
               .route = chance(rng, 50) ? by_lengths : prefill_route,
               .mha = !v4 && chance(rng, 50),
               .split = chance(rng, 50) ? SplitPolicy::kBalanced : SplitPolicy::kFixed,
               .split_size = static_cast<int32_t>(draw(rng, 1, 200))});
    const int32_t* address = plan.request_ids().data();
    for (int refill = 0; refill < 3; ++refill) {
      const FuzzBatch b(rng, draw(rng, 1, 12), plan.options().decode_threshold);
      const int64_t tokens = b.starts.back() + draw(rng, 0, 3);
      if (tokens == 0) continue;
      plan.refill({.query_starts = b.starts, .seq_lens = b.lens, .tokens = tokens});
      if (address == nullptr) address = plan.request_ids().data();
      EXPECT_EQ(plan.request_ids().data(), address);
      check_plan(plan, b, tokens);
      // A refill that throws leaves everything as it was.
      std::vector<int32_t> bad = b.starts;
      bad[draw(rng, 0, static_cast<int64_t>(bad.size()) - 1)] -= 1000;
      EXPECT_THROW(plan.refill({.query_starts = bad, .seq_lens = b.lens}), Error);
      check_plan(plan, b, tokens);
    }
  });
}

// Runs call(kernel, lists, lengths) with every kernel; lists and lengths must be the reference's.
template <class F>
void expect_lists(int64_t tokens, int64_t width, F&& call) {
  std::vector<int32_t> want, want_lengths;
  for (const std::string& kernel : runnable("lists")) {
    Guarded<int32_t> lists(tokens * width), lengths(tokens);
    call(Target{.kernel = kernel.c_str()}, tensor(lists.data(), {tokens, width}),
         tensor(lengths.data(), {tokens}));
    if (kernel == "reference") want = lists.values(), want_lengths = lengths.values();
    EXPECT_EQ(lists.values(), want) << kernel;
    EXPECT_EQ(lengths.values(), want_lengths) << kernel;
  }
}

TEST(Fuzz, Lists) {
  fuzz(10, [](Rng& rng) {
    const int64_t T = draw(rng, 0, 8), R = draw(rng, 0, 4), W = draw(rng, 0, 6);
    const int64_t pages = draw(rng, 1, 20), K = draw(rng, 0, 40);
    const int32_t page = page_size(rng), ratio = static_cast<int32_t>(draw(rng, 1, 9));
    const int32_t window = static_cast<int32_t>(draw(rng, 1, 70));
    auto positions = indices(rng, T, 600), requests = indices(rng, T, R);
    auto table = indices(rng, R * W, pages), topk = indices(rng, T * K, 60);
    auto seq_lens = indices(rng, R, 600), gather_lens = indices(rng, R, 200);
    const Tensor at = tensor(positions.data(), {T}), of = tensor(requests.data(), {T});
    const Tensor tables = tensor(table.data(), {R, W});

    std::vector<int64_t> want;
    for (const std::string& kernel : runnable("lists")) {
      Guarded<int64_t> slots(T + 3);
      compressed_slots({.positions = at,
                        .requests = of,
                        .block_table = tables,
                        .ratio = ratio,
                        .page = page,
                        .pages = pages,
                        .slots = tensor(slots.data(), {T + 3}),
                        .target = {.kernel = kernel.c_str()}});
      if (kernel == "reference") want = slots.values();
      EXPECT_EQ(slots.values(), want) << kernel;
    }
    const int64_t decode_tokens = draw(rng, 0, T);
    expect_lists(T, draw(rng, 0, 300), [&](Target target, Tensor lists, Tensor lengths) {
      c128a_lists({.positions = at,
                   .requests = of,
                   .block_table = tables,
                   .ratio = ratio,
                   .page = page,
                   .pages = pages,
                   .decode_tokens = decode_tokens,
                   .lists = lists,
                   .lengths = lengths,
                   .target = target});
    });
    const bool logical = chance(rng, 50);
    expect_lists(T, window + draw(rng, 0, 9), [&](Target target, Tensor lists, Tensor lengths) {
      window_lists({.positions = at,
                    .requests = of,
                    .block_table = logical ? Tensor{} : tables,
                    .window = window,
                    .page = page,
                    .pages = pages,
                    .lists = lists,
                    .lengths = lengths,
                    .target = target});
    });
    const int32_t compressed = static_cast<int32_t>(draw(rng, 0, 60));
    const int32_t rows = compressed + static_cast<int32_t>(draw(rng, 0, 200));
    const int64_t width = (K + window + 127) / 128 * 128 + draw(rng, 0, 5);
    expect_lists(T, width, [&](Target target, Tensor lists, Tensor lengths) {
      combined_lists({.topk = tensor(topk.data(), {T, K}),
                      .positions = at,
                      .requests = of,
                      .seq_lens = tensor(seq_lens.data(), {R}),
                      .gather_lens = tensor(gather_lens.data(), {R}),
                      .ratio = ratio,
                      .window = window,
                      .compressed = compressed,
                      .rows = rows,
                      .lists = lists,
                      .lengths = lengths,
                      .target = target});
    });
  });
}

}  // namespace
}  // namespace winnow
