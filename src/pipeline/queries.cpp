// Queries over ranks: new records are quantised where they are made and gathered as bytes, so that
// every rank has the same ones. Over sharded caches gather_prefix() brings those before them.
#include "pipeline/queries.h"

#include <algorithm>

#include "core/arithmetic.h"
#include "core/check.h"
#include "parallel/agree.h"
#include "parallel/on_device.h"
#include "parallel/records.h"
#include "plan/share.h"

namespace winnow {

namespace {

namespace parallel = internal::parallel;
using internal::core::Pages;

// Bytes of `rows` records and index keys; of any index keys if their format is not known.
size_t block_bytes(CacheFormat latent, CacheFormat keys, int64_t rows) {
  if (rows == 0) return 0;
  return static_cast<size_t>(page_bytes(latent, rows) + page_bytes(keys, rows));
}
size_t most_block_bytes(const PlanOptions& o, int64_t rows) {
  return block_bytes(o.format, CacheFormat::kIndexKeysBf16, rows);
}

// The records of a block of `rows`, and of the `blocks` that were gathered, one after the other.
Pages latent_of(std::byte* data, const PlanOptions& o, int64_t rows) {
  return {data, 0, 1, static_cast<int32_t>(rows), o.format};
}
Pages keys_of(std::byte* data, CacheFormat format, const PlanOptions& o, int64_t rows) {
  return {data + page_bytes(o.format, rows), 0, 1, static_cast<int32_t>(rows), format};
}
Pages of_all(Pages one, int32_t blocks, size_t bytes) {
  one.pages = blocks;
  one.stride = static_cast<int64_t>(bytes);
  return one;
}
Pages rows_of(std::byte* data, CacheFormat format, const PlanOptions& o) {
  return {data, 0, 1, static_cast<int32_t>(o.workspace_rows), format};
}
// The pages of a cache that was checked.
Pages pages_in(const Cache& c) {
  const int64_t stride = c.page_stride ? c.page_stride : page_bytes(c.format, c.page);
  return {static_cast<std::byte*>(c.data), stride, c.pages, c.page, c.format};
}

// Rows of a block of prefixes, at most.
int64_t most_prefix_rows(const PlanOptions& o) {
  const auto rows = static_cast<int32_t>(o.workspace_rows);
  return internal::plan::most_tokens(rows, o.max_requests, o.parallel.shard());
}

Tensor places(const QueryMemory& m, int64_t count) { return tensor(m.places, {count}); }

}  // namespace

PrefixMemory::PrefixMemory(Arena& arena, const Plan& plan) {
  const PlanOptions& o = plan.options();
  if (!by_sharded_queries(o)) return;
  const size_t block = most_block_bytes(o, most_prefix_rows(o));
  latent = arena.take<std::byte>(static_cast<size_t>(page_bytes(o.format, o.workspace_rows)));
  keys = arena.take<std::byte>(
      static_cast<size_t>(page_bytes(CacheFormat::kIndexKeysBf16, o.workspace_rows)));
  send = arena.take<std::byte>(block);
  received = arena.take<std::byte>(static_cast<size_t>(o.parallel.comm->size()) * block);
}

QueryMemory::QueryMemory(Arena& arena, const Plan& plan) {
  const PlanOptions& o = plan.options();
  if (!by_queries(o)) return;
  const size_t block = most_block_bytes(o, o.max_tokens);
  send = arena.take<std::byte>(block);
  received = arena.take<std::byte>(static_cast<size_t>(o.parallel.comm->size()) * block);
  places = arena.take<int64_t>(static_cast<size_t>(o.max_tokens));
  const size_t bytes = gather_prefix_bytes(plan);
  prefix = {arena.take<std::byte>(bytes), bytes};
}

Cache gathered_records(const Plan& plan, const PrefixMemory& rows) {
  const PlanOptions& o = plan.options();
  return {rows.latent, o.format, 1, static_cast<int32_t>(o.workspace_rows)};
}

void set_gathered_keys(const Plan& plan, const PrefixMemory& rows, ScoreArgs& score) {
  const PlanOptions& o = plan.options();
  const int64_t count = plan.gathered_rows();
  score.keys = {};
  score.block_table = {};
  score.requests = {};
  if (score.q.dtype == DType::kBf16) {
    score.key_rows = tensor(reinterpret_cast<const bf16*>(rows.keys), {count, kIndexDim});
    return;
  }
  score.key_rows = tensor(reinterpret_cast<const e4m3*>(rows.keys), {count, kIndexDim});
  const std::byte* const scales = rows.keys + o.workspace_rows * kIndexDim;
  score.key_scales = tensor(reinterpret_cast<const float*>(scales), {count});
}

void write_over_ranks(const PipelineArgs& a, const QueryMemory& m, const PrefixMemory& rows,
                      const TokenOrder& order) {
  const Plan& plan = *a.plan;
  const PlanOptions& o = plan.options();
  Communicator& comm = *o.parallel.comm;
  const auto count = static_cast<int64_t>(plan.token_order().size());
  if (count == 0) return;  // no rank has a token
  const int64_t most = count / comm.size();
  const CacheFormat format = a.indexer.keys.format;
  const Device device = plan.device(a.target);
  const Pages own = latent_of(m.send, o, most), own_keys = keys_of(m.send, format, o, most);
  parallel::number_places(m.places, plan.tokens(), device);
  write({.plan = &plan,
         .kv = a.kv,
         .slots = places(m, plan.tokens()),
         .cache = parallel::block_of(o.format, most, own.data),
         .scale = a.steps.scale,
         .target = a.target});
  write({.plan = &plan,
         .kv = a.indexer.k,
         .slots = places(m, plan.tokens()),
         .cache = parallel::block_of(format, most, own_keys.data),
         .target = a.target});

  const size_t bytes = block_bytes(o.format, format, most);
  const parallel::Step step{"pipeline", comm, device};
  step.all_gather(m.send, m.received, bytes);
  const Pages latent = of_all(latent_of(m.received, o, most), comm.size(), bytes);
  const Pages keys = of_all(keys_of(m.received, format, o, most), comm.size(), bytes);
  const auto place = [&](const Pages& from, const Pages& to, const Tensor& slots) {
    parallel::place_records({from, to, order.order, count, static_cast<const int64_t*>(slots.data)},
                            device);
  };
  place(latent, pages_in(a.cache), a.slots);
  place(keys, pages_in(a.indexer.keys), a.indexer.slots);
  if (!by_sharded_queries(o)) return;
  const auto in_rows = [&](const Pages& from, const Pages& to) {
    parallel::place_records({from, to, order.rows, count}, device);
  };
  in_rows(latent, rows_of(rows.latent, o.format, o));
  in_rows(keys, rows_of(rows.keys, format, o));
}

void gather_prefix(const GatherPrefixArgs& a) try {
  const Check check("gather_prefix");
  check.that(a.plan != nullptr, "plan", "a plan", "none");
  const Plan& plan = *a.plan;
  const PlanOptions& o = plan.options();
  check.that(o.parallel.spread == Spread::kQueries && o.parallel.sharded, "plan",
             "one of kQueries with sharded caches", "another");
  const Device device = plan.device(a.target);
  const Cache cache = check.cache(a.cache, "cache", {device.kind, false});
  const Cache keys = check.cache(a.keys, "keys", {device.kind, false});
  check.that(cache.format == o.format, "cache", cat("format ", name_of(o.format)),
             cat(name_of(cache.format)));
  check.that(keys.format == CacheFormat::kIndexKeys || keys.format == CacheFormat::kIndexKeysBf16,
             "keys", "index keys", cat(name_of(keys.format)));
  const auto table = [&](const Tensor& t, const char* name) {
    check.tensor(t, name, DType::kI32, {Check::kAny, Check::kAny});
    check.that(t.shape[0] >= plan.request_count(), name,
               cat("at least ", plan.request_count(), " rows"), cat(t.shape[0]));
    return parallel::Sequences{o.parallel.shard(), plan.prefix_lens(),
                               static_cast<const int32_t*>(t.data), t.stride[0], t.shape[1]};
  };
  const parallel::Sequences records = table(a.block_table, "block_table");
  const parallel::Sequences key_records = table(a.key_table, "key_table");
  if (!by_sharded_queries(o)) return;  // one rank reads its own caches
  Communicator& comm = a.comm ? *a.comm : *o.parallel.comm;
  parallel::check_communicator("gather_prefix", comm, device);
  parallel::check_lengths_not_captured("gather_prefix", device);
  check.that(
      comm.size() == o.parallel.comm->size() && comm.rank() == o.parallel.comm->rank(), "comm",
      cat("rank ", o.parallel.comm->rank(), " of ", o.parallel.comm->size(), ", as the plan has"),
      cat("rank ", comm.rank(), " of ", comm.size()));
  check.workspace(a.rows, gather_prefix_bytes(plan));

  Arena arena(a.rows);
  const PrefixMemory m(arena, plan);
  const int64_t rows = parallel::block_rows(records.shard, records.lengths);
  if (rows == 0) return;
  const size_t bytes = block_bytes(o.format, keys.format, rows);
  parallel::take_records(pages_in(cache), records, latent_of(m.send, o, rows), device);
  parallel::take_records(pages_in(keys), key_records, keys_of(m.send, keys.format, o, rows),
                         device);
  const parallel::Step step{"gather_prefix", comm, device};
  step.all_gather(m.send, m.received, bytes);
  const Pages latent = of_all(latent_of(m.received, o, rows), comm.size(), bytes);
  const Pages found = of_all(keys_of(m.received, keys.format, o, rows), comm.size(), bytes);
  parallel::order_records(latent, records, plan.row_starts(), rows_of(m.latent, o.format, o),
                          device);
  parallel::order_records(found, key_records, plan.row_starts(), rows_of(m.keys, keys.format, o),
                          device);
} catch (const std::bad_alloc&) {
  out_of_memory("gather_prefix");
}

size_t gather_prefix_bytes(const Plan& plan) try {
  if (!by_sharded_queries(plan.options())) return 0;
  Arena arena;
  PrefixMemory(arena, plan);
  return arena.bytes();
} catch (const std::bad_alloc&) {
  out_of_memory("gather_prefix");
}

}  // namespace winnow
