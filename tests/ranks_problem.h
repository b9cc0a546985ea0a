// A layer of V3.2 whose batch runs on one rank or on several: every number depends on the request
// and the position alone, so all ranks make the same inputs and each holds its part of the caches.
#pragma once

#include <cstdint>
#include <vector>

#include "core/formats.h"
#include "winnow/pipeline.h"

namespace winnow::testing {

// In [-1, 1), from a hash.
inline float rank_number(uint64_t request, uint64_t position, uint64_t j) {
  uint64_t x = request * 0x9e3779b97f4a7c15u + position * 0xbf58476d1ce4e5b9u + j + 1;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return static_cast<float>((x ^ x >> 31) >> 40) / (1 << 23) - 1;
}

struct RankRequest {
  int32_t query, seq;
};

class RankProblem {
 public:
  static constexpr int32_t kHeads = 24, kIndexHeads = 2, kPage = 8, kTopk = 32;
  static constexpr int64_t kDim = 576, kValue = 512;

  explicit RankProblem(std::vector<RankRequest> batch) : requests(std::move(batch)) {
    for (const RankRequest& r : requests) {
      starts.push_back(starts.back() + r.query);
      seq_lens.push_back(r.seq);
      longest = std::max(longest, r.seq);
    }
    tokens = starts.back();
  }

  // What a rank gives: [its tokens, its heads, 512], [its tokens, its heads].
  struct Result {
    std::vector<bf16> out;
    std::vector<float> lse;
    std::vector<std::byte> records;  // what the caches hold afterwards, by request and position
  };

  PlanOptions options(const Parallel& parallel, SplitPolicy split = SplitPolicy::kFixed) const {
    const int32_t ranks = parallel.comm ? parallel.comm->size() : 1;
    return {.heads = parallel.spread == Spread::kHeads ? kHeads / ranks : kHeads,
            .topk = kTopk,
            .index_heads = kIndexHeads,
            .page = kPage,
            .pages = pages(held(parallel)),
            .max_requests = 8,
            .max_tokens = 64,
            .max_context = longest,
            .workspace_rows = parallel.sharded ? 8 * longest : 0,
            .split = split,
            .target = {.kernel = kernel},
            .parallel = parallel};
  }
  Batch batch() const { return {starts, seq_lens}; }

  // Where a rank's caches hold a part of every sequence: which.
  static Shard held(const Parallel& parallel) {
    const bool whole = parallel.spread == Spread::kQueries && !parallel.sharded;
    return whole ? Shard{} : parallel.shard();
  }

  // One pipeline() call on caches that hold what came before.
  Result run(const Parallel& parallel, SplitPolicy split = SplitPolicy::kFixed) const {
    Plan plan(options(parallel, split));
    plan.refill(batch());
    return run(plan);
  }
  Result run(const Plan& plan) const {
    const Parallel& parallel = plan.options().parallel;
    const Shard shard = held(parallel);
    const int32_t ranks = parallel.comm ? parallel.comm->size() : 1;
    const int32_t rank = parallel.comm ? parallel.comm->rank() : 0;
    const bool by_heads = parallel.spread == Spread::kHeads;
    const bool by_queries = parallel.spread == Spread::kQueries;
    const int64_t q_heads = by_heads ? kHeads / ranks : kHeads;
    const bool all_heads = parallel.spread == Spread::kNone || by_queries;
    const int64_t own = all_heads ? kHeads : kHeads / ranks;
    // Where each token of the batch stands in this rank's tensors; -1: another rank has it.
    const BatchShare share = shard_batch(batch(), by_queries ? parallel.shard() : Shard{});
    const auto count_of_own = static_cast<int64_t>(share.tokens.size());
    std::vector<int64_t> place(tokens, -1);
    for (int64_t i = 0; i < count_of_own; ++i) place[share.tokens[i]] = i;
    const int64_t width = pages(shard) / static_cast<int64_t>(requests.size());

    std::vector<int32_t> table(requests.size() * static_cast<size_t>(width));
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - 1 - i);
    const int64_t count = pages(shard);
    std::vector<std::byte> cache(count * page_bytes(CacheFormat::kV32Fp8, kPage));
    std::vector<std::byte> keys(count * page_bytes(CacheFormat::kIndexKeys, kPage));
    const Cache latent{cache.data(), CacheFormat::kV32Fp8, count, kPage};
    const Cache index{keys.data(), CacheFormat::kIndexKeys, count, kPage};

    const int64_t n = count_of_own;
    std::vector<bf16> kv(n * kDim), k(n * kIndexDim), q(n * q_heads * kDim);
    std::vector<int64_t> slots(tokens);
    std::vector<e4m3> index_q(n * kIndexHeads * kIndexDim);
    std::vector<float> weights(n * kIndexHeads), sink(own);
    for (int64_t h = 0; h < own; ++h) sink[h] = number(99, 0, (all_heads ? 0 : rank * own) + h);
    for (size_t r = 0; r < requests.size(); ++r) {
      const auto [query, seq] = requests[r];
      const auto slot = [&](int64_t p) {
        if (!shard.owns(p)) return int64_t{-1};
        const int64_t at = shard.local(p);
        return table[static_cast<int64_t>(r) * width + at / kPage] * int64_t{kPage} + at % kPage;
      };
      std::vector<bf16> old_kv(kDim), old_k(kIndexDim);
      for (int64_t p = 0; p < seq - query; ++p) {
        int64_t where = slot(p);
        fill(old_kv, r, p, 1, 0.2f);
        fill(old_k, r, p / 2, 2, 1.0f);  // neighbours are equal: ties
        write({.kv = tensor(old_kv.data(), {1, kDim}),
               .slots = tensor(&where, {1}),
               .cache = latent});
        write({.kv = tensor(old_k.data(), {1, kIndexDim}),
               .slots = tensor(&where, {1}),
               .cache = index});
      }
      for (int64_t i = 0; i < query; ++i) {
        const int64_t p = seq - query + i, t = place[starts[r] + i];
        slots[starts[r] + i] = slot(p);
        if (t < 0) continue;
        fill(std::span(kv).subspan(t * kDim, kDim), r, p, 1, 0.2f);
        fill(std::span(k).subspan(t * kIndexDim, kIndexDim), r, p / 2, 2, 1.0f);
        for (int64_t h = 0; h < q_heads; ++h)
          fill(std::span(q).subspan((t * q_heads + h) * kDim, kDim), r, p,
               10 + (by_heads ? rank * q_heads : 0) + h, 1.7f);
        for (int64_t j = 0; j < kIndexHeads * kIndexDim; ++j)
          index_q[t * kIndexHeads * kIndexDim + j] = to_e4m3(number(r, p, 100000 + j));
        for (int64_t h = 0; h < kIndexHeads; ++h)
          weights[t * kIndexHeads + h] = number(r, p, 200000 + h);
      }
    }

    Result result{std::vector<bf16>(n * own * kValue), std::vector<float>(n * own)};
    std::vector<std::byte> workspace(pipeline_workspace_bytes(plan));
    const auto rows = static_cast<int64_t>(requests.size());
    pipeline({.plan = &plan,
              .kv = tensor(kv.data(), {n, kDim}),
              .slots = tensor(slots.data(), {tokens}),
              .cache = latent,
              .block_table = tensor(table.data(), {rows, width}),
              .indexer = {.k = tensor(k.data(), {n, kIndexDim}),
                          .slots = tensor(slots.data(), {tokens}),
                          .keys = index,
                          .block_table = tensor(table.data(), {rows, width}),
                          .q = tensor(index_q.data(), {n, kIndexHeads, kIndexDim}),
                          .weights = tensor(weights.data(), {n, kIndexHeads})},
              .q = tensor(q.data(), {n, q_heads, kDim}),
              .scale = 1.0f / 24,
              .sink = tensor(sink.data(), {own}),
              .out = tensor(result.out.data(), {n, own, kValue}),
              .lse = tensor(result.lse.data(), {n, own}),
              .workspace = workspace});
    result.records = records_of(latent, index, table, width, shard);
    return result;
  }

  const char* kernel = nullptr;  // of all stages that have it
  std::vector<RankRequest> requests;
  std::vector<int32_t> starts{0}, seq_lens;
  int32_t longest = 1;
  int64_t tokens = 0;

 private:
  // The bytes of every record that this rank holds: 656 and 132 a position.
  std::vector<std::byte> records_of(const Cache& latent, const Cache& index,
                                    const std::vector<int32_t>& table, int64_t width,
                                    const Shard& shard) const {
    std::vector<std::byte> found;
    const auto add = [&](const Cache& cache, int64_t page, int64_t at, int64_t bytes) {
      const std::byte* const from = static_cast<const std::byte*>(cache.data) +
                                    page * page_bytes(cache.format, kPage) + at;
      found.insert(found.end(), from, from + bytes);
    };
    for (size_t r = 0; r < requests.size(); ++r)
      for (int64_t i = 0; i < shard.local_length(requests[r].seq); ++i) {
        const int64_t page = table[static_cast<int64_t>(r) * width + i / kPage], off = i % kPage;
        add(latent, page, off * 656, 656);
        add(index, page, off * 128, 128);
        add(index, page, kPage * 128 + off * 4, 4);
      }
    return found;
  }
  int64_t pages(const Shard& shard) const {
    const int64_t most = shard.local_length(longest) + 1;
    return static_cast<int64_t>(requests.size()) * ((most + kPage - 1) / kPage);
  }
  static float number(uint64_t request, uint64_t position, uint64_t j) {
    return rank_number(request, position, j);
  }
  static void fill(std::span<bf16> row, uint64_t request, uint64_t position, uint64_t what,
                   float size) {
    for (size_t j = 0; j < row.size(); ++j)
      row[j] = to_bf16(size * number(request, position, what * 1000 + j));
  }
};

// Decodes with a speculative token, a sequence that begins, one that is shorter than most groups of
// ranks, a prefill.
inline std::vector<RankRequest> rank_batch() {
  return {{1, 200}, {2, 90}, {1, 1}, {1, 3}, {1, 64}, {1, 65}, {6, 40}};
}

}  // namespace winnow::testing
