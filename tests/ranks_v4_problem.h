// A layer of V4 whose batch runs on one rank, or with its heads or its context over several: the
// window cache is whole on every rank; over the context, compressed states and their index keys are
// shared out by their number.
#pragma once

#include <cstdint>
#include <vector>

#include "core/formats.h"
#include "memory.h"
#include "ranks_problem.h"
#include "winnow/pipeline.h"

namespace winnow::testing {

class RankProblemV4 {
 public:
  static constexpr int32_t kHeads = 24, kIndexHeads = 2, kPage = 8, kWindow = 40;
  static constexpr int64_t kDim = 512;

  // With an indexer: C4A with a top-k of `picked`. Without: every state of `ratio` tokens (C128A).
  // picked = 0: the window alone.
  struct Kind {
    int32_t ratio, picked;
    bool indexed;
  };

  RankProblemV4(std::vector<RankRequest> batch, const Kind& layer)
      : requests(std::move(batch)), kind(layer) {
    for (const RankRequest& r : requests) {
      starts.push_back(starts.back() + r.query);
      seq_lens.push_back(r.seq);
      longest = std::max(longest, r.seq);
    }
    tokens = starts.back();
  }

  struct Result {
    std::vector<bf16> out;
    std::vector<float> lse;
  };

  PlanOptions options(const Parallel& parallel) const {
    const int32_t ranks = parallel.comm ? parallel.comm->size() : 1;
    return {.model = kV4,
            .format = CacheFormat::kV4Fp8,
            .heads = parallel.spread == Spread::kHeads ? kHeads / ranks : kHeads,
            .topk = kWindow,
            .extra_topk = kind.picked,
            .ratio = kind.ratio,
            .index_heads = kIndexHeads,
            .page = kPage,
            .pages = pages(longest),
            .max_requests = 8,
            .max_tokens = 64,
            .max_context = longest,
            .split = SplitPolicy::kFixed,
            .target = {.device = device, .kernel = kernel},
            .parallel = parallel};
  }
  Batch batch() const { return {starts, seq_lens}; }

  Result run(const Parallel& parallel) const {
    Plan plan(options(parallel));
    plan.refill(batch());
    const bool by_heads = parallel.spread == Spread::kHeads;
    const Shard shard = parallel.shard();
    const int32_t ranks = parallel.comm ? parallel.comm->size() : 1;
    const int32_t rank = parallel.comm ? parallel.comm->rank() : 0;
    const int64_t own = kHeads / ranks, rows = static_cast<int64_t>(requests.size());
    const int64_t q_heads = by_heads ? own : kHeads, first_head = by_heads ? rank * own : 0;
    Paged window(pages(longest), CacheFormat::kV4Fp8, rows);
    const int64_t states = shard.local_length(longest / kind.ratio) + 1;
    Paged compressed(pages(states), CacheFormat::kV4Fp8, rows);
    Paged keys(pages(states), CacheFormat::kIndexKeys, rows);

    MappedVector<bf16> kv(tokens * kDim), q(tokens * q_heads * kDim), new_states, new_keys;
    MappedVector<int64_t> slots(tokens), state_slots;
    MappedVector<e4m3> index_q(tokens * kIndexHeads * kIndexDim);
    MappedVector<float> weights(tokens * kIndexHeads), sink(own);
    for (int64_t h = 0; h < own; ++h) sink[h] = number(99, 0, rank * own + h);
    const auto state_slot = [&](size_t r, int64_t s) {
      return shard.owns(s) ? compressed.slot(r, shard.local(s)) : int64_t{-1};
    };
    const auto append = [&](MappedVector<bf16>& to, int64_t width, size_t r, int64_t s, int what) {
      to.resize(to.size() + static_cast<size_t>(width));
      fill(std::span(to).last(static_cast<size_t>(width)), r, s, what, what == 2 ? 0.2f : 1.0f);
    };
    for (size_t r = 0; r < requests.size(); ++r) {
      const auto [query, seq] = requests[r];
      MappedVector<bf16> old_kv, old_states, old_keys;
      MappedVector<int64_t> old_slots, old_state_slots;
      for (int64_t p = 0; p < seq; ++p) {
        const bool is_new = p >= seq - query, closes = (p + 1) % kind.ratio == 0;
        const int64_t s = p / kind.ratio;
        if (!is_new) {
          append(old_kv, kDim, r, p, 2);
          old_slots.push_back(window.slot(r, p));
        }
        if (closes) {
          append(is_new ? new_states : old_states, kDim, r, s + 100000, 2);
          append(is_new ? new_keys : old_keys, kIndexDim, r, s / 2, 3);  // neighbours tie
          (is_new ? state_slots : old_state_slots).push_back(state_slot(r, s));
        }
        if (!is_new) continue;
        const int64_t t = starts[r] + p - (seq - query);
        slots[t] = window.slot(r, p);
        fill(std::span(kv).subspan(t * kDim, kDim), r, p, 2, 0.2f);
        for (int64_t h = 0; h < q_heads; ++h)
          fill(std::span(q).subspan((t * q_heads + h) * kDim, kDim), r, p, 10 + first_head + h,
               1.7f);
        for (int64_t j = 0; j < kIndexHeads * kIndexDim; ++j)
          index_q[t * kIndexHeads * kIndexDim + j] = to_e4m3(number(r, p, 100000 + j));
        for (int64_t h = 0; h < kIndexHeads; ++h)
          weights[t * kIndexHeads + h] = number(r, p, 200000 + h);
      }
      put(window, old_kv, old_slots, kDim);
      put(compressed, old_states, old_state_slots, kDim);
      put(keys, old_keys, old_state_slots, kIndexDim);
    }

    MappedVector<bf16> out(tokens * own * kDim);
    MappedVector<float> lse(tokens * own);
    const DeviceWorkspace workspace(plan.device({}), pipeline_workspace_bytes(plan));
    const auto count = static_cast<int64_t>(state_slots.size());
    PipelineArgs args{.plan = &plan,
                      .kv = tensor(kv.data(), {tokens, kDim}),
                      .slots = tensor(slots.data(), {tokens}),
                      .cache = window.cache(),
                      .block_table = window.view(),
                      .q = tensor(q.data(), {tokens, q_heads, kDim}),
                      .scale = 1.0f / 24,
                      .sink = tensor(sink.data(), {own}),
                      .out = tensor(out.data(), {tokens, own, kDim}),
                      .lse = tensor(lse.data(), {tokens, own}),
                      .workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()}};
    if (kind.picked > 0) {
      args.compressed_kv = tensor(new_states.data(), {count, kDim});
      args.compressed_slots = tensor(state_slots.data(), {count});
      args.compressed = compressed.cache();
      args.compressed_table = compressed.view();
    }
    if (kind.indexed)
      args.indexer = {.k = tensor(new_keys.data(), {count, kIndexDim}),
                      .slots = tensor(state_slots.data(), {count}),
                      .keys = keys.cache(),
                      .block_table = keys.view(),
                      .q = tensor(index_q.data(), {tokens, kIndexHeads, kIndexDim}),
                      .weights = tensor(weights.data(), {tokens, kIndexHeads})};
    pipeline(args);
    if (!stream_finished(plan.device({}))) throw Error(ErrorCode::kRuntime, "the device failed");
    return {{out.begin(), out.end()}, {lse.begin(), lse.end()}};
  }

  const char* kernel = "simd";
  Device device = {};
  std::vector<RankRequest> requests;
  Kind kind;
  std::vector<int32_t> starts{0}, seq_lens;
  int32_t longest = 1;
  int64_t tokens = 0;

 private:
  // A cache whose pages go to the requests in turn, backwards.
  struct Paged {
    MappedVector<std::byte> memory;
    MappedVector<int32_t> table;
    CacheFormat format;
    int64_t pages, rows;
    Paged(int64_t count, CacheFormat of, int64_t requests)
        : memory(count * page_bytes(of, kPage)),
          table(count),
          format(of),
          pages(count),
          rows(requests) {
      for (size_t i = 0; i < table.size(); ++i)
        table[i] = static_cast<int32_t>(table.size() - 1 - i);
    }
    int64_t slot(size_t request, int64_t at) const {
      const int64_t width = pages / rows;
      return table[static_cast<int64_t>(request) * width + at / kPage] * int64_t{kPage} +
             at % kPage;
    }
    Cache cache() { return {memory.data(), format, pages, kPage}; }
    Tensor view() const { return tensor(table.data(), {rows, pages / rows}); }
  };

  static void put(Paged& to, const MappedVector<bf16>& rows, const MappedVector<int64_t>& slots,
                  int64_t width) {
    const auto count = static_cast<int64_t>(slots.size());
    write({.kv = tensor(rows.data(), {count, width}),
           .slots = tensor(slots.data(), {count}),
           .cache = to.cache()});
  }
  int64_t pages(int64_t length) const {
    return static_cast<int64_t>(requests.size()) * (length / kPage + 1);
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

}  // namespace winnow::testing
