#include <algorithm>
#include <vector>

#include "problems.h"
#include "random.h"

namespace winnow::bench {

namespace {

constexpr int64_t kCompression = 4;  // V4: tokens per compressed state

constexpr int64_t kDrawn = 512;  // tokens whose slots are drawn; later ones take theirs in turn

// Replaces all but `overlap` percent of the positions in `row` by others.
void renew(std::span<int32_t> row, int64_t context, int32_t overlap, tools::Random& random) {
  std::vector<bool> taken(context);
  for (const int32_t id : row) taken[id] = true;
  for (int32_t& id : row) {
    if (static_cast<int32_t>(random.draw(0, 99)) < overlap) continue;
    int64_t next = random.draw(0, context - 1);
    while (taken[next]) next = (next + 1) % context;
    taken[next] = true;
    id = static_cast<int32_t>(next);
  }
}

// Slots of `width` distinct positions of each token's request.
void fill_slots(const Paging& paging, const Sizes& s, int64_t context,
                const tools::Buffer<int32_t>& slots) {
  tools::Random random(s.seed + 17);
  const int64_t width = static_cast<int64_t>(slots.size()) / std::max<int64_t>(s.tokens(), 1);
  std::vector<int32_t> ids(width);  // of the token before
  for (int64_t t = 0; t < s.tokens(); ++t) {
    const std::span<int32_t> row = slots.span(t * width, width);
    if (s.batch == 1 && t >= kDrawn) {
      std::ranges::copy(slots.span((t - kDrawn) * width, width), row.begin());
      continue;
    }
    if (s.overlap > 0 && t > 0) renew(ids, context, s.overlap, random);
    else random.choose(ids, context);
    std::ranges::copy(ids, row.begin());
    const int32_t* table = paging.table.data() + paging.requests[t] * paging.width;
    for (int32_t& id : row)
      if (id >= 0 && !s.logical) id = table[id / s.page] * s.page + id % s.page;
    for (int64_t i = 1; s.holes && i < width; i += 2) row[i] = -1;
    for (int64_t i = width - 1; s.shuffled && i > 0; --i) std::swap(row[i], row[random.draw(0, i)]);
  }
}

Cache shape_of(const Sizes& s, int64_t pages) {
  return {nullptr, s.bf16_cache ? s.model.bf16 : s.model.fp8, pages, s.page};
}

}  // namespace

AttendProblem::AttendProblem(const Sizes& s)
    : placement(s.device),
      paging(placement, s, s.context),
      extra_paging(placement, s, s.extra > 0 ? std::max<int64_t>(s.context / kCompression, 1) : 0),
      cache(placement, shape_of(s, paging.pages), s.seed, s.scale),
      extra_cache(placement, shape_of(s, extra_paging.pages), s.seed + 1, s.scale),
      sink(s.heads),
      slots(s.tokens() * s.topk),
      extra_slots(s.tokens() * s.extra),
      sizes_(s) {
  tools::Random random(s.seed + 2);
  args.q = placement.normals(q, {s.tokens(), s.heads, s.model.d_qk}, random);
  const Tensor sinks = placement.normals(sink, {s.heads}, random);
  fill_slots(paging, s, s.context, slots);
  args.lists[0] = {.cache = cache.cache, .indices = placement.copied(slots, {s.tokens(), s.topk})};
  if (s.extra > 0) {
    fill_slots(extra_paging, s, std::max<int64_t>(s.context / kCompression, 1), extra_slots);
    args.lists[1] = {.cache = extra_cache.cache,
                     .indices = placement.copied(extra_slots, {s.tokens(), s.extra})};
  }
  if (s.logical) {
    args.requests = paging.request_view;
    args.lists[0].block_table = paging.table_view;
    if (s.extra > 0) args.lists[1].block_table = extra_paging.table_view;
  }
  args.scale = s.model.d_qk == 576 ? 0.0416666679f : 0.0441941738f;  // 576^-1/2, 512^-1/2
  if (s.model.lists == 2) args.sink = sinks;
  args.out = placement.room(out, {s.tokens(), s.heads, s.model.d_v});
  args.lse = placement.room(lse, {s.tokens(), s.heads});
  args.max_logit = placement.room(max_logit, {s.tokens(), s.heads});
  args.target.device = s.device;
}

void AttendProblem::use(const char* kernel) {
  args.target.kernel = kernel;
  args.workspace = placement.workspace(workspace, attend_workspace_bytes(args));
}

double AttendProblem::attended() const {
  const int64_t states = std::max<int64_t>(sizes_.context / kCompression, 1);
  const int64_t rows = std::min(sizes_.topk, sizes_.context) + std::min(sizes_.extra, states);
  return static_cast<double>(sizes_.tokens() * rows) / (sizes_.holes ? 2 : 1);
}

double AttendProblem::flops() const {
  return 2.0 * attended() * static_cast<double>(sizes_.heads) *
         (sizes_.model.d_qk + sizes_.model.d_v);
}

double AttendProblem::bytes() const {  // every selected record, queries and output once
  const double record = static_cast<double>(page_bytes_used(cache.cache.format, 64)) / 64;
  return attended() * (record + 4) + 2.0 * static_cast<double>(args.q.size() + args.out.size());
}

GatherProblem::GatherProblem(const Sizes& s, void* rows)
    : placement(s.device),
      paging(placement, s, s.context),
      cache(placement, shape_of(s, paging.pages), s.seed),
      lengths(s.batch) {
  std::ranges::fill(lengths, static_cast<int32_t>(s.context));
  args.cache = cache.cache;
  args.block_table = paging.table_view;
  args.lengths = placement.copied(lengths, {s.batch});
  args.out = tensor(static_cast<bf16*>(rows), {s.batch * s.context, s.model.d_qk});
  args.target.device = s.device;
}

}  // namespace winnow::bench
