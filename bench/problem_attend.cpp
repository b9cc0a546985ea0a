#include <algorithm>

#include "problems.h"
#include "random.h"

namespace winnow::bench {

namespace {

constexpr int64_t kCompression = 4;  // V4: tokens per compressed state

// Slots of `width` distinct positions of each token's request.
void fill_slots(const Paging& paging, const Sizes& s, int64_t context,
                const tools::Buffer<int32_t>& slots) {
  tools::Random random(s.seed + 17);
  const int64_t width = static_cast<int64_t>(slots.size()) / std::max<int64_t>(s.tokens(), 1);
  for (int64_t t = 0; t < s.tokens(); ++t) {
    const std::span<int32_t> row = slots.span(t * width, width);
    random.choose(row, context);
    const int32_t* table = paging.table.data() + paging.requests[t] * paging.width;
    for (int32_t& id : row)
      if (id >= 0) id = table[id / s.page] * s.page + id % s.page;
  }
}

}  // namespace

AttendProblem::AttendProblem(const Sizes& s)
    : paging(s, s.context),
      extra_paging(s, s.extra > 0 ? std::max<int64_t>(s.context / kCompression, 1) : 0),
      cache(s.bf16_cache ? s.model.bf16 : s.model.fp8, paging.pages, s.page, s.seed),
      extra_cache(cache.cache.format, extra_paging.pages, s.page, s.seed + 1),
      q(s.tokens() * s.heads * s.model.d_qk),
      out(s.tokens() * s.heads * s.model.d_v),
      lse(s.tokens() * s.heads),
      max_logit(s.tokens() * s.heads),
      sink(s.heads),
      slots(s.tokens() * s.topk),
      extra_slots(s.tokens() * s.extra),
      sizes_(s) {
  tools::Random random(s.seed + 2);
  random.normals(q.span(), 1.0f);
  random.normals(sink.span(), 1.0f);
  fill_slots(paging, s, s.context, slots);
  args.q = tensor(q.data(), {s.tokens(), s.heads, s.model.d_qk});
  args.lists[0] = {.cache = cache.cache, .indices = tensor(slots.data(), {s.tokens(), s.topk})};
  if (s.extra > 0) {
    fill_slots(extra_paging, s, std::max<int64_t>(s.context / kCompression, 1), extra_slots);
    args.lists[1] = {.cache = extra_cache.cache,
                     .indices = tensor(extra_slots.data(), {s.tokens(), s.extra})};
  }
  args.scale = s.model.d_qk == 576 ? 0.0416666679f : 0.0441941738f;  // 576^-1/2, 512^-1/2
  if (s.model.lists == 2) args.sink = tensor(sink.data(), {s.heads});
  args.out = tensor(out.data(), {s.tokens(), s.heads, s.model.d_v});
  args.lse = tensor(lse.data(), {s.tokens(), s.heads});
  args.max_logit = tensor(max_logit.data(), {s.tokens(), s.heads});
}

void AttendProblem::use(const char* kernel) {
  args.target.kernel = kernel;
  workspace = tools::Buffer<std::byte>(static_cast<int64_t>(attend_workspace_bytes(args)));
  args.workspace = workspace.span();
}

double AttendProblem::flops() const {
  return 2.0 * static_cast<double>(sizes_.tokens() * sizes_.heads * (sizes_.topk + sizes_.extra)) *
         (sizes_.model.d_qk + sizes_.model.d_v);
}

double AttendProblem::bytes() const {  // every selected record, queries and output once
  const double record = static_cast<double>(page_bytes_used(cache.cache.format, 64)) / 64;
  return static_cast<double>(sizes_.tokens() * (sizes_.topk + sizes_.extra)) * (record + 4) +
         2.0 * static_cast<double>(q.size() + out.size());
}

}  // namespace winnow::bench
