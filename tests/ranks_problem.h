// A layer of V3.2 whose batch runs on one rank or on several: every number depends on the request
// and the position alone, so all ranks make the same inputs and each holds its part of the caches.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/formats.h"
#include "memory.h"
#include "winnow/error.h"
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
            .target = {.device = device, .kernel = kernel},
            .parallel = parallel};
  }
  Batch batch() const { return {starts, seq_lens}; }

  // Where a rank's caches hold a part of every sequence: which.
  static Shard held(const Parallel& parallel) {
    const bool whole = parallel.spread == Spread::kQueries && !parallel.sharded;
    return whole ? Shard{} : parallel.shard();
  }

  // A call with its memory, where its device reaches it.
  struct Call {
    MappedVector<int32_t> table;
    MappedVector<std::byte> cache, keys;
    MappedVector<bf16> kv, k, q;
    MappedVector<int64_t> slots;
    MappedVector<e4m3> index_q;
    MappedVector<float> weights, sink;
    MappedVector<bf16> out;
    MappedVector<float> lse;
    std::unique_ptr<DeviceWorkspace> workspace;
    PipelineArgs args;
  };

  // One pipeline() call on caches that hold what came before.
  Result run(const Parallel& parallel, SplitPolicy split = SplitPolicy::kFixed) const {
    Plan plan(options(parallel, split));
    plan.refill(batch());
    return run(plan);
  }
  Result run(const Plan& plan) const {
    const std::unique_ptr<Call> call = prepare(plan);
    pipeline(call->args);
    if (!stream_finished(plan.device({}))) throw Error(ErrorCode::kRuntime, "the device failed");
    return result(*call, held(plan.options().parallel));
  }
  Result result(const Call& c, const Shard& shard) const {
    return {{c.out.begin(), c.out.end()}, {c.lse.begin(), c.lse.end()}, records_of(c, shard)};
  }

  std::unique_ptr<Call> prepare(const Plan& plan) const {
    const Parallel& parallel = plan.options().parallel;
    const Ways w(*this, parallel);
    auto call = std::make_unique<Call>();
    Call& c = *call;
    c.table.resize(requests.size() * static_cast<size_t>(w.width));
    for (size_t i = 0; i < c.table.size(); ++i)
      c.table[i] = static_cast<int32_t>(c.table.size() - 1 - i);
    const int64_t count = pages(w.shard);
    c.cache.resize(count * page_bytes(CacheFormat::kV32Fp8, kPage));
    c.keys.resize(count * page_bytes(CacheFormat::kIndexKeys, kPage));
    const Cache latent{c.cache.data(), CacheFormat::kV32Fp8, count, kPage};
    const Cache index{c.keys.data(), CacheFormat::kIndexKeys, count, kPage};
    // One call for all records: a call costs more than a record under a sanitizer.
    std::vector<bf16> old_kv, old_k;
    std::vector<int64_t> old_slots;
    for (size_t r = 0; r < requests.size(); ++r) {
      const int64_t before = fill_all ? longest : requests[r].seq - requests[r].query;
      for (int64_t p = 0; p < before; ++p) {
        const int64_t where = slot(c, w, r, p);
        if (where < 0) continue;
        old_slots.push_back(where);
        old_kv.resize(old_kv.size() + kDim);
        old_k.resize(old_k.size() + kIndexDim);
        fill(std::span(old_kv).last(kDim), r, p, 1, 0.2f);
        fill(std::span(old_k).last(kIndexDim), r, p / 2, 2, 1.0f);  // neighbours are equal: ties
      }
    }
    const auto held_before = static_cast<int64_t>(old_slots.size());
    const Tensor slots = tensor(old_slots.data(), {held_before});
    write({.kv = tensor(old_kv.data(), {held_before, kDim}), .slots = slots, .cache = latent});
    write({.kv = tensor(old_k.data(), {held_before, kIndexDim}), .slots = slots, .cache = index});

    const auto n = static_cast<int64_t>(w.share.tokens.size());
    c.kv.resize(n * kDim);
    c.k.resize(n * kIndexDim);
    c.q.resize(n * w.q_heads * kDim);
    c.slots.resize(tokens);
    c.index_q.resize(n * kIndexHeads * kIndexDim);
    c.weights.resize(n * kIndexHeads);
    c.sink.resize(w.own);
    c.out.resize(n * w.own * kValue);
    c.lse.resize(n * w.own);
    fill_inputs(c, parallel);
    c.workspace =
        std::make_unique<DeviceWorkspace>(plan.device({}), pipeline_workspace_bytes(plan));
    const auto rows = static_cast<int64_t>(requests.size());
    c.args = {.plan = &plan,
              .kv = tensor(c.kv.data(), {n, kDim}),
              .slots = tensor(c.slots.data(), {tokens}),
              .cache = latent,
              .block_table = tensor(c.table.data(), {rows, w.width}),
              .indexer = {.k = tensor(c.k.data(), {n, kIndexDim}),
                          .slots = tensor(c.slots.data(), {tokens}),
                          .keys = index,
                          .block_table = tensor(c.table.data(), {rows, w.width}),
                          .q = tensor(c.index_q.data(), {n, kIndexHeads, kIndexDim}),
                          .weights = tensor(c.weights.data(), {n, kIndexHeads})},
              .q = tensor(c.q.data(), {n, w.q_heads, kDim}),
              .scale = 1.0f / 24,
              .sink = tensor(c.sink.data(), {w.own}),
              .out = tensor(c.out.data(), {n, w.own, kValue}),
              .lse = tensor(c.lse.data(), {n, w.own}),
              .workspace = {static_cast<std::byte*>(c.workspace->data()), c.workspace->size()}};
    return call;
  }

  // What this batch's tokens bring, into a call of as many tokens.
  void fill_inputs(Call& c, const Parallel& parallel) const {
    const Ways w(*this, parallel);
    // Where each token of the batch stands in this rank's tensors; -1: another rank has it.
    std::vector<int64_t> place(tokens, -1);
    for (size_t i = 0; i < w.share.tokens.size(); ++i)
      place[w.share.tokens[i]] = static_cast<int64_t>(i);
    for (int64_t h = 0; h < w.own; ++h) c.sink[h] = number(99, 0, w.first_own + h);
    for (size_t r = 0; r < requests.size(); ++r) {
      const auto [query, seq] = requests[r];
      for (int64_t i = 0; i < query; ++i) {
        const int64_t p = seq - query + i, t = place[starts[r] + i];
        c.slots[starts[r] + i] = slot(c, w, r, p);
        if (t < 0) continue;
        fill(std::span(c.kv).subspan(t * kDim, kDim), r, p, 1, 0.2f);
        fill(std::span(c.k).subspan(t * kIndexDim, kIndexDim), r, p / 2, 2, 1.0f);
        for (int64_t h = 0; h < w.q_heads; ++h)
          fill(std::span(c.q).subspan((t * w.q_heads + h) * kDim, kDim), r, p,
               10 + w.first_head + h, 1.7f);
        for (int64_t j = 0; j < kIndexHeads * kIndexDim; ++j)
          c.index_q[t * kIndexHeads * kIndexDim + j] = to_e4m3(number(r, p, 100000 + j));
        for (int64_t h = 0; h < kIndexHeads; ++h)
          c.weights[t * kIndexHeads + h] = number(r, p, 200000 + h);
      }
    }
  }

  const char* kernel = nullptr;  // of all stages that have it
  Device device = {};
  bool fill_all = false;  // caches hold every position up to `longest` before the call
  std::vector<RankRequest> requests;
  std::vector<int32_t> starts{0}, seq_lens;
  int32_t longest = 1;
  int64_t tokens = 0;

 private:
  // What a rank has, by the way that work is shared out.
  struct Ways {
    Shard shard;  // of the caches
    BatchShare share;
    int64_t q_heads, own;           // heads of q and of the results
    int64_t first_head, first_own;  // of all
    int64_t width;                  // pages of a request

    Ways(const RankProblem& problem, const Parallel& parallel) : shard(held(parallel)) {
      const int32_t ranks = parallel.comm ? parallel.comm->size() : 1;
      const int32_t rank = parallel.comm ? parallel.comm->rank() : 0;
      const bool by_heads = parallel.spread == Spread::kHeads;
      const bool by_queries = parallel.spread == Spread::kQueries;
      const bool all_heads = parallel.spread == Spread::kNone || by_queries;
      share = shard_batch(problem.batch(), by_queries ? parallel.shard() : Shard{});
      q_heads = by_heads ? kHeads / ranks : kHeads;
      own = all_heads ? kHeads : kHeads / ranks;
      first_head = by_heads ? rank * q_heads : 0;
      first_own = all_heads ? 0 : rank * own;
      width = problem.pages(shard) / static_cast<int64_t>(problem.requests.size());
    }
  };
  static int64_t slot(const Call& c, const Ways& w, size_t request, int64_t position) {
    if (!w.shard.owns(position)) return -1;
    const int64_t at = w.shard.local(position);
    const int64_t page = c.table[static_cast<int64_t>(request) * w.width + at / kPage];
    return page * kPage + at % kPage;
  }
  // The bytes of every record that this rank holds: 656 and 132 a position.
  std::vector<std::byte> records_of(const Call& c, const Shard& shard) const {
    const Cache &latent = c.args.cache, &index = c.args.indexer.keys;
    const int64_t width = c.args.block_table.shape[1];
    const MappedVector<int32_t>& table = c.table;
    std::vector<std::byte> found;
    const auto add = [&](const Cache& cache, int64_t page, int64_t at, int64_t bytes) {
      const std::byte* const from =
          static_cast<const std::byte*>(cache.data) + page * page_bytes(cache.format, kPage) + at;
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
