// The stages of pipeline() that ranks share out: the score by rows or by keys (kHeads), and the
// attention over parts of the context (kContext).
#include "pipeline/ranks.h"

#include <algorithm>

#include "combine/kernel.h"
#include "core/arithmetic.h"
#include "cut/kernel.h"
#include "parallel/agree.h"
#include "winnow/combine.h"
#include "winnow/cut.h"

namespace winnow {

namespace {

// Rows [first, first + count) of a tensor.
Tensor rows(Tensor t, int64_t first, int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + first * t.stride[0] * size_of(t.dtype);
  t.shape[0] = count;
  return t;
}

// kHeads with as many tokens as ranks: each rank scores its rows whole.
void select_rows(const Plan& plan, const ScoreSelectArgs& all, const RankMemory& m) {
  Communicator& comm = *plan.options().parallel.comm;
  const int64_t tokens = plan.tokens(), width = all.ids.shape[1];
  const int64_t each = ceil_div<int64_t>(tokens, comm.size());
  const int64_t first = std::min(tokens, comm.rank() * each);
  const int64_t count = std::min(each, tokens - first);
  std::fill_n(m.own_ids + count * width, (each - count) * width, -1);
  ScoreSelectArgs own = all;
  own.score.some_tokens = true;
  for (Tensor* t : {&own.score.q, &own.score.weights, &own.score.requests, &own.score.ends})
    *t = rows(*t, first, count);
  own.ids = tensor(m.own_ids, {count, width});
  if (count > 0) score_select(own);
  const internal::parallel::Step step{"pipeline", comm, plan.device(all.score.target)};
  step.all_gather(m.own_ids, all.ids.data, static_cast<size_t>(each * width) * sizeof(int32_t));
}

// kHeads with fewer tokens than ranks: each rank scores a part of every row.
void select_keys(const Plan& plan, const ScoreSelectArgs& all, const RankMemory& m) {
  const Communicator& comm = *plan.options().parallel.comm;
  const int64_t tokens = plan.tokens(), width = all.ids.shape[1];
  const int64_t rank = comm.rank(), ranks = comm.size();
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t end = plan.key_ends()[t];
    m.starts[t] = static_cast<int32_t>(end * rank / ranks);
    m.ends[t] = static_cast<int32_t>(end * (rank + 1) / ranks);
  }
  ScoreSelectArgs own = all;
  own.score.starts = tensor(m.starts, {tokens});
  own.score.ends = tensor(m.ends, {tokens});
  own.ids = tensor(m.own_ids, {tokens, width});
  own.values = tensor(m.values, {tokens, width});
  score_select(own);
  cut({.plan = &plan,
       .ids = own.ids,
       .values = own.values,
       .positions = all.ids,
       .workspace = m.exchange,
       .target = all.score.target});
}

// kContext: each rank scores the keys that it holds, and keeps its members of the top-k.
void select_shard(const Plan& plan, const ScoreSelectArgs& all, const RankMemory& m) {
  const int64_t tokens = plan.tokens(), width = all.ids.shape[1];
  ScoreSelectArgs own = all;
  own.values = tensor(m.values, {tokens, width});
  score_select(own);
  cut({.plan = &plan,
       .ids = own.ids,
       .values = own.values,
       .kept = own.ids,
       .counts = tensor(m.counts, {tokens}),
       .workspace = m.exchange,
       .target = all.score.target});
}

}  // namespace

RankMemory::RankMemory(Arena& arena, const PlanOptions& o, int64_t picked) {
  if (!several_ranks(o) || o.parallel.spread == Spread::kQueries) return;
  const int32_t ranks = o.parallel.comm->size();
  const bool context = by_context(o);
  const int64_t tokens = o.max_tokens, d_v = o.model.d_v;
  const int64_t each = ceil_div<int64_t>(tokens, ranks);
  values = arena.take<float>(tokens * picked);
  size_t bytes = internal::cut::most_workspace(tokens, picked, ranks, !context);
  if (context) {
    counts = arena.take<int32_t>(tokens);
    partial_out = arena.take<float>(tokens * o.heads * d_v);
    partial_lse = arena.take<float>(tokens * o.heads);
    bytes = std::max(bytes, internal::combine::most_workspace(tokens, o.heads, d_v, ranks));
  } else {
    // Its rows, or with fewer tokens than ranks its part of every row.
    own_ids = arena.take<int32_t>(std::max<int64_t>(each, ranks) * picked);
    starts = arena.take<int32_t>(tokens);
    ends = arena.take<int32_t>(tokens);
  }
  exchange = {arena.take<std::byte>(bytes), bytes};
}

void select_over_ranks(const Plan& plan, const ScoreSelectArgs& all, const RankMemory& memory) {
  if (plan.tokens() == 0) return;
  if (by_context(plan.options())) select_shard(plan, all, memory);
  else if (plan.tokens() >= plan.options().parallel.comm->size()) select_rows(plan, all, memory);
  else select_keys(plan, all, memory);
}

void attend_over_ranks(AttendArgs args, const RankMemory& m) {
  const Tensor out = args.out, lse = args.lse, sink = args.sink;
  const int64_t tokens = args.q.shape[0], heads = args.q.shape[1], d_v = out.shape[2];
  args.out = tensor(m.partial_out, {tokens, heads, d_v});
  args.lse = tensor(m.partial_lse, {tokens, heads});
  args.sink = {};
  args.empty_lse_negative = true;
  attend(args);
  combine({.plan = args.plan,
           .partial_out = args.out,
           .partial_lse = args.lse,
           .sink = sink,
           .out = out,
           .lse = lse,
           .workspace = m.exchange,
           .target = args.target});
}

}  // namespace winnow
