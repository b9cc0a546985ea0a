#include "problems.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "random.h"

namespace winnow::bench {

namespace {

int64_t pages_for(int64_t tokens, int32_t page) { return (tokens + page - 1) / page; }

}  // namespace

Paging::Paging(const Sizes& s, int64_t context)
    : pages(pages_for(context, s.page) * (s.shared ? 1 : s.batch)),
      width(pages_for(context, s.page)),
      table(s.batch * width),
      requests(s.tokens()),
      batch_(s.batch) {
  tools::Random random(s.seed + 3);
  std::vector<int32_t> order(static_cast<size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = pages - 1; i > 0; --i) std::swap(order[i], order[random.draw(0, i)]);
  for (int64_t i = 0; i < s.batch * width; ++i) table[i] = order[s.shared ? i % width : i];
  for (int64_t t = 0; t < s.tokens(); ++t) requests[t] = static_cast<int32_t>(t / s.s_q);
}

FilledCache::FilledCache(CacheFormat format, int64_t pages, int32_t page, uint64_t seed)
    : memory(pages * page_bytes(format, page)),
      cache{.data = memory.data(), .format = format, .pages = pages, .page = page} {
  const int64_t d = record_dim(format), block = std::min<int64_t>(pages * page, 1024);
  tools::Random random(seed);
  tools::Buffer<bf16> kv(block * d);
  tools::Buffer<int64_t> slots(block);
  for (int64_t first = 0; first < pages * page; first += block) {
    const int64_t rows = std::min(block, pages * page - first);
    random.normals(kv.span(), tools::kLatentSigma);
    std::iota(slots.begin(), slots.end(), first);
    write({.kv = tensor(kv.data(), {rows, d}),
           .slots = tensor(slots.data(), {rows}),
           .cache = cache});
  }
}

WriteProblem::WriteProblem(const Sizes& s, CacheFormat format)
    : kv(s.tokens() * record_dim(format)), slots(s.tokens()) {
  const int64_t pages = pages_for(std::max(s.context, s.tokens()), s.page);
  memory = tools::Buffer<std::byte>(pages * page_bytes(format, s.page));
  tools::Random random(s.seed);
  random.normals(kv.span(), tools::kLatentSigma);
  tools::Buffer<int32_t> chosen(s.tokens());
  random.choose(chosen.span(), pages * s.page);
  std::copy(chosen.begin(), chosen.end(), slots.begin());
  for (int64_t i = s.tokens() - 1; i > 0; --i) std::swap(slots[i], slots[random.draw(0, i)]);
  args.kv = tensor(kv.data(), {s.tokens(), record_dim(format)});
  args.slots = tensor(slots.data(), {s.tokens()});
  args.cache = {.data = memory.data(), .format = format, .pages = pages, .page = s.page};
}

double WriteProblem::bytes() const {
  const double record = static_cast<double>(page_bytes_used(args.cache.format, 64)) / 64;
  return static_cast<double>(slots.size()) *
         (record + 8 + 2.0 * static_cast<double>(args.kv.shape[1]));
}

ScoreProblem::ScoreProblem(const Sizes& s)
    : paging(s, s.context),
      keys(CacheFormat::kIndexKeys, paging.pages, s.page, s.seed),
      q(s.tokens() * s.index_heads * kIndexDim),
      weights(s.tokens() * s.index_heads),
      logits(s.tokens() * s.context),
      ends(s.tokens()),
      ids(s.tokens() * s.topk),
      sizes_(s) {
  tools::Random random(s.seed + 1);
  random.normals(q.span(), 1.0f);
  random.normals(weights.span(), 0.1f);
  for (int64_t t = 0; t < s.tokens(); ++t)  // each token of a request sees one key more
    ends[t] = static_cast<int32_t>(std::max<int64_t>(0, s.context - s.s_q + 1 + t % s.s_q));
  args.q = tensor(q.data(), {s.tokens(), s.index_heads, kIndexDim});
  args.weights = tensor(weights.data(), {s.tokens(), s.index_heads});
  args.keys = keys.cache;
  args.block_table = paging.table_view(), args.requests = paging.request_view();
  args.ends = tensor(ends.data(), {s.tokens()});
  args.logits = tensor(logits.data(), {s.tokens(), s.context});
  select_args.score = args;
  select_args.score.logits = {};
  select_args.ids = tensor(ids.data(), {s.tokens(), s.topk});
}

double ScoreProblem::flops() const {
  const double keys_seen = std::accumulate(ends.begin(), ends.end(), 0.0);
  return keys_seen * static_cast<double>(sizes_.index_heads) * 2 * kIndexDim;
}

double ScoreProblem::bytes() const {  // keys once a request, logits once
  const double requests = sizes_.shared ? 1.0 : static_cast<double>(sizes_.batch);
  return requests * static_cast<double>(sizes_.context) * 132 +
         4.0 * std::accumulate(ends.begin(), ends.end(), 0.0);
}

SelectProblem::SelectProblem(const Sizes& s)
    : logits(s.tokens() * s.context), ids(s.tokens() * s.topk) {
  tools::Random(s.seed).normals(logits.span(), 1.0f);
  args.logits = tensor(logits.data(), {s.tokens(), s.context});
  args.ids = tensor(ids.data(), {s.tokens(), s.topk});
}

double SelectProblem::bytes() const {
  return 4.0 * static_cast<double>(logits.size() + ids.size());
}

LocateProblem::LocateProblem(const Sizes& s)
    : paging(s, s.context),
      ids(s.tokens() * s.topk),
      slots(s.tokens() * s.topk),
      counts(s.tokens()) {
  tools::Random random(s.seed);
  for (int64_t t = 0; t < s.tokens(); ++t) random.choose(ids.span(t * s.topk, s.topk), s.context);
  args.ids = tensor(ids.data(), {s.tokens(), s.topk});
  args.requests = paging.request_view(), args.block_table = paging.table_view();
  args.page = s.page, args.pages = paging.pages;
  args.slots = tensor(slots.data(), {s.tokens(), s.topk});
  args.counts = tensor(counts.data(), {s.tokens()});
}

double LocateProblem::bytes() const {
  return 4.0 * static_cast<double>(2 * ids.size() + paging.table.size());
}

}  // namespace winnow::bench
