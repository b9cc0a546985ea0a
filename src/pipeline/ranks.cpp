// The stages of pipeline() that ranks share out: the score by rows or by keys (kHeads), and the
// attention over parts of the context (kContext).
#include "pipeline/ranks.h"

#include <algorithm>

#include "combine/kernel.h"
#include "core/arithmetic.h"
#include "cut/kernel.h"
#include "parallel/on_device.h"
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
  const Device device = plan.device(all.score.target);
  internal::parallel::clear_ids(device, m.own_ids + count * width, (each - count) * width);
  ScoreSelectArgs own = all;
  own.score.some_tokens = true;
  for (Tensor* t : {&own.score.q, &own.score.weights, &own.score.requests, &own.score.ends})
    *t = rows(*t, first, count);
  own.ids = tensor(m.own_ids, {count, width});
  if (count > 0) score_select(own);
  const internal::parallel::Step step{"pipeline", comm, device};
  step.all_gather(m.own_ids, all.ids.data, static_cast<size_t>(each * width) * sizeof(int32_t));
}

// kHeads with fewer tokens than ranks: each rank scores a part of every row.
void select_keys(const Plan& plan, const ScoreSelectArgs& all, const RankMemory& m) {
  const Communicator& comm = *plan.options().parallel.comm;
  const int64_t tokens = plan.tokens(), width = all.ids.shape[1];
  internal::parallel::share_keys({.all_ends = static_cast<const int32_t*>(all.score.ends.data),
                                  .tokens = tokens,
                                  .rank = comm.rank(),
                                  .ranks = comm.size(),
                                  .starts = m.starts,
                                  .ends = m.ends,
                                  .device = plan.device(all.score.target)});
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
  const int64_t tokens = o.max_tokens;
  const int64_t each = ceil_div<int64_t>(tokens, ranks);
  values = arena.take<float>(tokens * picked);
  const DeviceKind device = o.target.device.kind;
  size_t bytes = internal::cut::most_workspace(tokens, picked, ranks, !context, device);
  if (context) {
    counts = arena.take<int32_t>(tokens);
    internal::combine::Blocks blocks{tokens, o.heads, o.model.d_v, ranks, false};
    parts = arena.take<std::byte>(internal::combine::bytes_of(blocks));
    blocks.bf16_wire = o.parallel.wire == Wire::kBf16;
    bytes = std::max(bytes, internal::combine::most_workspace(blocks, device));
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
  const int64_t tokens = args.q.shape[0], heads = args.q.shape[1];
  const int32_t ranks = args.plan->options().parallel.comm->size();
  const internal::combine::Blocks blocks{tokens, heads, out.shape[2], ranks, false};
  args.out = internal::combine::out_of(blocks, m.parts);
  args.lse = internal::combine::lse_of(blocks, m.parts);
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
