// The arithmetic of planning: every case of the specification by its numbers, and each refusal.
#include <numeric>

#include "core/arithmetic.h"
#include "testing.h"
#include "winnow/plan.h"

namespace winnow {
namespace {

using testing::expect_invalid;
using testing::Guarded;
using Ints = std::vector<int32_t>;

Ints starts_of(const Ints& lens) {
  Ints starts(lens.size() + 1, 0);
  std::partial_sum(lens.begin(), lens.end(), starts.begin() + 1);
  return starts;
}

BatchSplit split_of(const Ints& lens, int32_t threshold, bool uniform, int64_t tokens = -1) {
  const Ints starts = starts_of(lens);
  return split_batch(starts, tokens < 0 ? starts.back() : tokens, threshold, uniform);
}

BatchSplit split(int32_t decodes, int32_t prefills, int32_t decode_tokens, int32_t prefill_tokens,
                 int32_t active) {
  return {decodes, prefills, decode_tokens, prefill_tokens, active};
}

TEST(RequestIds, PaddingMapsToRequestZero) {
  Guarded<int32_t> out(9);
  request_ids(Ints{0, 2, 2, 5, 6}, {out.data(), out.size()});
  EXPECT_EQ(out.values(), (Ints{0, 0, 2, 2, 2, 3, 0, 0, 0}));
  request_ids(Ints{0}, {out.data(), out.size()});  // nothing of the last batch stays
  EXPECT_EQ(out.values(), Ints(9, 0));
  expect_invalid(
      [&] {
        request_ids(Ints{0, 10}, {out.data(), out.size()});
      },
      {"plan", "out", "at least 10", "found 9"});
  expect_invalid(
      [&] {
        request_ids({}, {out.data(), out.size()});
      },
      {"query_starts", "at least one"});
  expect_invalid(
      [&] {
        request_ids(Ints{1, 2}, {out.data(), out.size()});
      },
      {"query_starts", "0 first", "1"});
  expect_invalid(
      [&] {
        request_ids(Ints{0, 4, 3}, {out.data(), out.size()});
      },
      {"query_starts", "descend", "3 after 4", "entry 2"});
}

TEST(SplitBatch, CasesOfTheSpecification) {
  EXPECT_EQ(split_of({2, 2, 1, 3, 2, 1, 2}, 3, true), split(2, 5, 4, 9, 2));
  EXPECT_EQ(split_of({2, 2, 2, 4, 5, 6, 7, 8}, 4, true), split(3, 5, 6, 30, 3));
  EXPECT_EQ(split_of({2, 2, 2, 0}, 4, true, 8), split(4, 0, 8, 0, 3));
  EXPECT_EQ(split_of({1, 2, 3}, 128, true), split(1, 2, 1, 5, 1));
  const BatchSplit seven = split_of({110, 110, 110, 110, 110, 110, 0}, 128, true, 660);
  EXPECT_EQ(seven, split(7, 0, 660, 0, 6));
  EXPECT_EQ(seven.decode_tokens / seven.active_decodes, 110);
}

TEST(SplitBatch, NonUniform) {
  EXPECT_EQ(split_of({1, 1, 5, 1, 9}, 1, false), split(2, 3, 2, 15, 2));  // a late 1 is a prefill
  EXPECT_EQ(split_of({2, 1, 0, 2}, 2, false), split(4, 0, 5, 0, 3));
  EXPECT_EQ(split_of({3, 1, 1}, 2, false), split(0, 3, 0, 5, 0));  // q[0] > t: all prefill
  EXPECT_EQ(split_of({3, 3}, 2, true), split(0, 2, 0, 6, 0));
  EXPECT_EQ(split_of({}, 1, false), split(0, 0, 0, 0, 0));
  EXPECT_EQ(split_of({}, 1, true, 4), split(0, 0, 4, 0, 0));
}

TEST(SplitBatch, PaddingGoesWithTheLastKind) {
  EXPECT_EQ(split_of({1, 1}, 1, false, 8), split(2, 0, 8, 0, 2));
  EXPECT_EQ(split_of({1, 7}, 1, false, 16), split(1, 1, 1, 15, 1));
  EXPECT_EQ(split_of({2, 0, 2, 3}, 4, true), split(1, 3, 2, 5, 1));  // the 0 is not the first's 2
}

TEST(SplitBatch, Errors) {
  expect_invalid([] { split_of({2, 2}, 1, false, 3); }, {"plan", "tokens", "4 to", "found 3"});
  expect_invalid([] { split_of({2, 2}, -1, false); }, {"threshold", "-1"});
  expect_invalid([] { split_of({1}, 1, false, int64_t{1} << 31); }, {"tokens", "2147483648"});
}

TEST(PrefillChunks, CasesOfTheSpecification) {
  using Chunks = std::vector<Chunk>;
  EXPECT_EQ(prefill_chunks(Ints{2, 3, 4, 2}, 5), (Chunks{{0, 2}, {2, 3}, {3, 4}}));
  EXPECT_EQ(prefill_chunks(Ints{5, 5, 5}, 5), (Chunks{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(prefill_chunks(Ints{4, 4, 4}, 100), (Chunks{{0, 3}}));
  EXPECT_EQ(prefill_chunks(Ints{}, 5), Chunks{});
  EXPECT_EQ(prefill_chunks(Ints{0, 0, 5, 0}, 5), (Chunks{{0, 4}}));
  EXPECT_EQ(prefill_chunks(Ints{INT32_MAX, INT32_MAX, 1}, int64_t{INT32_MAX} * 2),
            (Chunks{{0, 2}, {2, 3}}));  // the sum does not fit 32 bits
  expect_invalid(
      [] {
        prefill_chunks(Ints{2, 6}, 5);
      },
      {"plan", "seq_lens", "0 to 5", "6 at entry 1"});
  expect_invalid([] { prefill_chunks(Ints{-1}, 5); }, {"seq_lens", "-1 at entry 0"});
}

TEST(WorkspaceStarts, CaseOfTheSpecification) {
  Guarded<int32_t> out(4);
  workspace_starts(Ints{10, 15, 20, 5}, std::vector<Chunk>{{0, 2}, {2, 4}},
                   {out.data(), out.size()});
  EXPECT_EQ(out.values(), (Ints{0, 10, 0, 20}));
  const auto call = [&](const Ints& lens, const std::vector<Chunk>& chunks) {
    workspace_starts(lens, chunks, {out.data(), out.size()});
  };
  expect_invalid([&] { call({1, 2}, {{0, 3}}); }, {"plan", "chunks", "2 requests", "[0, 3)"});
  expect_invalid([&] { call({1, -2}, {{0, 2}}); }, {"seq_lens", "-2 at entry 1"});
  expect_invalid([&] { call({INT32_MAX, 1}, {{0, 2}}); }, {"chunks", "2147483648"});
  expect_invalid([&] { call({1, 1, 1, 1, 1}, {}); }, {"out", "at least 5", "found 4"});
  EXPECT_EQ(out.values(), (Ints{0, 10, 0, 20}));
}

TEST(PrefillRequestIds, DecodesAndPaddingAreMinusOne) {
  Guarded<int32_t> out(8);
  prefill_request_ids(Ints{0, 1, 2, 5, 5, 6}, 2, {out.data(), out.size()});
  EXPECT_EQ(out.values(), (Ints{-1, -1, 0, 0, 0, 2, -1, -1}));
  expect_invalid(
      [&] {
        prefill_request_ids(Ints{0, 1}, 2, {out.data(), out.size()});
      },
      {"plan", "decodes", "0 to 1", "2"});
}

TEST(V4PrefillChunks, RunsUnderTheBound) {
  // ratio 4, window 8: gather = q + min(prefix, 7). Bound: 4 * (64 / 4 + 8 + 16) = 160 rows.
  const Ints query = {16, 16, 4, 16}, seq = {64, 40, 4, 64};
  const V4ChunkArgs args{query, seq, 4, 8, 64, 16};
  // Rows per request: 16 + 23 = 39; four of them need 156.
  EXPECT_EQ(v4_prefill_chunks(args), (std::vector<V4Chunk>{{0, 4, 16, 39}}));
  // Bound 4 * (16 + 8 + 4) = 112: with q = 4, 16 + 11 = 27 rows, four of them fit and a fifth not.
  const Ints short_query(5, 4), long_seq(5, 64);
  EXPECT_EQ(v4_prefill_chunks({short_query, long_seq, 4, 8, 64, 4}),
            (std::vector<V4Chunk>{{0, 4, 16, 27}, {4, 5, 16, 27}}));
  // No compression: the window rows alone. Bound 4 * (8 + 16) = 96; 23 each.
  EXPECT_EQ(v4_prefill_chunks({query, seq, 0, 8, 64, 16}), (std::vector<V4Chunk>{{0, 4, 0, 23}}));
  // A state for every token: as many as the longest sequence has. Bound: 4 * (64 + 8 + 16) = 352.
  EXPECT_EQ(v4_prefill_chunks({query, seq, 1, 8, 64, 16}), (std::vector<V4Chunk>{{0, 4, 64, 87}}));
}

TEST(V4PrefillChunks, CoverAndFit) {
  testing::Rng rng(3);
  for (int round = 0; round < 200; ++round) {
    constexpr int32_t kRatios[] = {1, 2, 4, 128};
    const int32_t ratio = kRatios[testing::draw(rng, 0, 3)], window = 128;
    const int64_t context = 1 + testing::draw(rng, 0, 3000), batched = 256;
    Ints query(testing::draw(rng, 0, 30)), seq(query.size());
    for (size_t i = 0; i < seq.size(); ++i) {
      seq[i] = static_cast<int32_t>(testing::draw(rng, 0, context));
      query[i] = static_cast<int32_t>(testing::draw(rng, 0, std::min<int64_t>(seq[i], batched)));
    }
    const int64_t bound = 4 * (ceil_div(context, ratio) + window + batched);
    int32_t next = 0;
    for (const V4Chunk& c : v4_prefill_chunks({query, seq, ratio, window, context, batched})) {
      EXPECT_EQ(c.first, next);
      EXPECT_GT(c.last, c.first);
      EXPECT_LE(int64_t{c.last - c.first} * c.rows, bound);
      int32_t compressed = 0, gather = 0;
      for (int32_t r = c.first; r < c.last; ++r) {
        compressed = std::max(compressed, seq[r] / ratio);
        gather = std::max(gather, query[r] + std::min(seq[r] - query[r], window - 1));
      }
      EXPECT_EQ(c.compressed, compressed);
      EXPECT_EQ(c.rows, compressed + gather);
      next = c.last;
    }
    EXPECT_EQ(next, static_cast<int32_t>(seq.size()));
  }
}

TEST(V4PrefillChunks, Errors) {
  const Ints query = {4}, seq = {8};
  const V4ChunkArgs good{query, seq, 4, 8, 64, 16};
  const auto expect = [&](auto change, std::initializer_list<const char*> words) {
    V4ChunkArgs a = good;
    change(a);
    expect_invalid([&] { v4_prefill_chunks(a); }, words);
  };
  const Ints two = {4, 4}, nine = {9}, negative = {-1};
  expect([&](auto& a) { a.query_lens = two; }, {"plan", "query_lens", "1 entries", "2"});
  expect([&](auto& a) { a.query_lens = nine; }, {"seq_lens", "query length, 9", "8 at entry 0"});
  expect([&](auto& a) { a.query_lens = negative; }, {"query_lens", "-1 at entry 0"});
  expect([&](auto& a) { a.seq_lens = negative; }, {"seq_lens", "-1 at entry 0"});
  expect([&](auto& a) { a.max_model_len = 7; }, {"seq_lens", "0 to 7", "8 at entry 0"});
  expect([&](auto& a) { a.max_batched_tokens = 3; }, {"query_lens", "0 to 3", "4"});
  expect([&](auto& a) { a.window = -1; }, {"window", "-1"});
}

}  // namespace
}  // namespace winnow
