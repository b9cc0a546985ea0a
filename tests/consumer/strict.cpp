// What a caller writes, for compilers with many warnings: each template, each inline function and
// each verb with members left out. Compiled, never run.
#include <winnow/winnow.h>

#include <cstddef>
#include <vector>

namespace strict {

using namespace winnow;

Tensor views(std::vector<bf16>& rows, const std::vector<int32_t>& ids, std::byte* bytes);
bool numbers(Communicator& ranks);
void calls(Tensor t, const Cache& cache, const std::vector<int32_t>& lens);

Tensor views(std::vector<bf16>& rows, const std::vector<int32_t>& ids, std::byte* bytes) {
  const int64_t n = static_cast<int64_t>(ids.size());
  const e4m3* codes = nullptr;
  float* floats = nullptr;
  int64_t* slots = nullptr;
  uint8_t* mask = nullptr;
  const Tensor all[] = {tensor(rows.data(), {3, 576}),
                        tensor(ids.data(), {n, 3}),
                        tensor(bytes, {n}, {2}),
                        tensor(codes, {n, n, 128}),
                        tensor(floats, {n, 2, 32}, {64, 1, 2}),
                        tensor(slots, {n}),
                        tensor(mask, {2, 2})};
  int64_t sizes = 0;
  for (const Tensor& t : all) sizes += t ? t.size() * size_of(t.dtype) : 0;
  return sizes > 0 ? all[0] : Tensor{};
}

bool numbers(Communicator& ranks) {
  const Parallel parallel{.comm = &ranks, .spread = Spread::kContext};
  const Shard shard = parallel.shard();
  const int64_t there = shard.global(shard.local(7)) + shard.local_length(9);
  return shard.owns(there) && shard == Shard{} && context_is_cheaper(1, there) &&
         BatchSplit{} == BatchSplit{} && Tile{} == Tile{} && Part{} == Part{};
}

void calls(Tensor t, const Cache& cache, const std::vector<int32_t>& lens) {
  Plan plan({.pages = 4, .target = {cpu()}});
  plan.refill({.query_starts = lens, .seq_lens = lens});
  norm({});
  norm({.rows = {{.x = t, .out = t}}, .target = {cuda()}});
  rotate({.x = t, .positions = t, .rope = {.table = t}, .out = t});
  rope_table({.table = t});
  prepare_query({.q = t, .positions = t, .rope = {}, .out = t});
  index_query({.q = t, .weights = t, .positions = t, .rope = {}, .out = t, .out_weights = t});
  prepare_queries({});
  compress({.rows = t, .positions = t, .requests = t});
  write({.kv = t, .slots = t, .cache = cache});
  gather({.cache = cache, .block_table = t, .lengths = t, .out = t});
  norm_write({});
  norm_write({.norm = {}, .write = {{.kv = t, .slots = t, .cache = cache}}});
  score({.q = t, .weights = t, .ends = t});
  score_select({.score = {.q = t, .weights = t, .ends = t}, .ids = t});
  select({.logits = t, .ids = t});
  locate({.ids = t, .requests = t, .block_table = t, .slots = t});
  attend({.q = t, .lists = {{{cache, t}}}, .scale = 0.1f, .out = t});
  attend_mha({.q = t, .k = t, .v = t, .scale = 0.1f, .out = t});
  merge({.partial_out = t, .partial_lse = t, .out = t});
  topk_mask({.ids = t, .mask = t});
  window_lists({.positions = t, .lists = t, .lengths = t});
  cut({.ids = t, .values = t});
  combine({.partial_out = t, .partial_lse = t, .out = t});
  pipeline({.plan = &plan,
            .kv = t,
            .slots = t,
            .cache = cache,
            .block_table = t,
            .q = t,
            .out = t,
            .workspace = {}});
  (void)prefill_route({.tokens = 1});
}

}  // namespace strict
