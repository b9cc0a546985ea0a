#include "problems.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "core/arithmetic.h"
#include "random.h"

namespace winnow::bench {

namespace {

int64_t pages_for(int64_t tokens, int32_t page) { return ceil_div(tokens, page); }

}  // namespace

Paging::Paging(Placement& memory, const Sizes& s, int64_t context)
    : pages(pages_for(context, s.page) * (s.shared ? 1 : s.batch)),
      width(pages_for(context, s.page)),
      table(s.batch * width),
      requests(s.tokens()) {
  tools::Random random(s.seed + 3);
  std::vector<int32_t> order(static_cast<size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = pages - 1; i > 0; --i) std::swap(order[i], order[random.draw(0, i)]);
  for (int64_t i = 0; i < s.batch * width; ++i) table[i] = order[s.shared ? i % width : i];
  for (int64_t t = 0; t < s.tokens(); ++t) requests[t] = static_cast<int32_t>(t / s.s_q);
  table_view = memory.copied(table, {s.batch, width});
  request_view = memory.copied(requests, {s.tokens()});
}

FilledCache::FilledCache(Placement& placement, Cache shape, uint64_t seed, ScaleMode scale)
    : cache(shape) {
  using Key = std::tuple<CacheFormat, int64_t, int32_t, uint64_t, ScaleMode>;
  static std::deque<std::pair<Key, decltype(memory)>> kept;
  const Key key(cache.format, cache.pages, cache.page, seed, scale);
  for (const auto& [of, filled] : kept)
    if (placement.on_host() && of == key) memory = filled;
  if (memory) {
    cache.data = memory->data();
    return;
  }
  fill(placement, seed, scale);
  if (!placement.on_host()) return;
  kept.emplace_back(key, memory);
  if (kept.size() > 2) kept.pop_front();
}

void FilledCache::fill(Placement& placement, uint64_t seed, ScaleMode scale) {
  const int64_t bytes = cache.pages * page_bytes(cache.format, cache.page);
  memory = std::make_shared<tools::Buffer<std::byte>>();
  cache.data = placement.room(*memory, {bytes}).data;
  // On a device a block of numbers is written over and over, since making them takes the longest,
  // but as other rows each time: 256 ways to begin a row and to go on to the next. Equal rows would
  // give equal logits, which select is slower with.
  const int64_t d = record_dim(cache.format), all = cache.pages * cache.page;
  const int64_t block = std::min<int64_t>(all, placement.on_host() ? 1024 : 16384);
  const int64_t made = placement.on_host() ? block : 2 * block;  // rows of d numbers
  tools::Random random(seed);
  tools::Buffer<bf16> kv;
  tools::Buffer<int64_t> slots(block);
  Placement own(placement.device());
  Tensor rows;
  std::byte* device_slots = placement.on_host() ? nullptr : own.bytes(block * sizeof(int64_t));
  for (int64_t first = 0; first < all; first += block) {
    const int64_t count = std::min(block, all - first);
    if (first == 0) rows = own.normals(kv, {made, d}, random, tools::kLatentSigma);
    else if (placement.on_host()) random.normals(kv.span(), tools::kLatentSigma);
    rows.shape[0] = count;
    Tensor these = rows;
    if (!placement.on_host()) {
      const int64_t turn = first / block;
      these.data = static_cast<bf16*>(rows.data) + turn % 16 * 8;
      these.stride[0] = d + turn / 16 % 16 * 8;
    }
    std::iota(slots.begin(), slots.end(), first);
    auto* where = slots.data();
    if (device_slots) {
      wait_for(placement.device());  // the write before has read its slots
      own.upload(device_slots, slots.data(), static_cast<size_t>(count) * sizeof(int64_t));
      where = reinterpret_cast<int64_t*>(device_slots);
    }
    write({.kv = these,
           .slots = tensor(where, {count}),
           .cache = cache,
           .scale = scale,
           .target = {.device = placement.device()}});
  }
  wait_for(placement.device());
}

WriteProblem::WriteProblem(const Sizes& s, CacheFormat format)
    : placement(s.device), slots(s.tokens()) {
  const int64_t pages = pages_for(std::max(s.context, s.tokens()), s.page);
  tools::Random random(s.seed);
  args.kv = placement.normals(kv, {s.tokens(), record_dim(format)}, random, tools::kLatentSigma);
  tools::Buffer<int32_t> chosen(s.tokens());
  random.choose(chosen.span(), pages * s.page);
  std::copy(chosen.begin(), chosen.end(), slots.begin());
  for (int64_t i = s.tokens() - 1; i > 0; --i) std::swap(slots[i], slots[random.draw(0, i)]);
  if (s.in_order) std::iota(slots.begin(), slots.end(), 0);
  args.slots = placement.copied(slots, {s.tokens()});
  const Tensor room = placement.room(memory, {pages * page_bytes(format, s.page)});
  args.cache = {.data = room.data, .format = format, .pages = pages, .page = s.page};
  args.target.device = s.device;
}

double WriteProblem::bytes() const {
  const double record = static_cast<double>(page_bytes_used(args.cache.format, 64)) / 64;
  return static_cast<double>(slots.size()) *
         (record + 8 + 2.0 * static_cast<double>(args.kv.shape[1]));
}

static CacheFormat key_format(const Sizes& s) {
  return s.bf16_keys ? CacheFormat::kIndexKeysBf16 : CacheFormat::kIndexKeys;
}

ScoreProblem::ScoreProblem(const Sizes& s)
    : placement(s.device),
      paging(placement, s, s.contiguous ? 0 : s.context),
      keys(placement, {nullptr, key_format(s), paging.pages, s.page}, s.seed),
      ends(s.tokens()),
      sizes_(s) {
  tools::Random random(s.seed + 1);
  for (int64_t t = 0; t < s.tokens(); ++t)  // each token of a request sees one key more
    ends[t] = static_cast<int32_t>(std::max<int64_t>(0, s.context - s.s_q + 1 + t % s.s_q));
  const std::initializer_list<int64_t> queries = {s.tokens(), s.index_heads, kIndexDim};
  args.q = s.bf16_keys ? placement.normals(wide_q, queries, random)
                       : placement.normals(q, queries, random);
  args.weights = placement.normals(weights, {s.tokens(), s.index_heads}, random, 0.1f);
  if (s.contiguous) {
    args.key_rows = s.bf16_keys ? placement.normals(wide_rows, {s.context, kIndexDim}, random)
                                : placement.normals(rows, {s.context, kIndexDim}, random);
    if (!s.bf16_keys) args.key_scales = placement.normals(scales, {s.context}, random, 0.1f);
  } else {
    args.keys = keys.cache;
    args.block_table = paging.table_view;
    args.requests = paging.request_view;
  }
  args.ends = placement.copied(ends, {s.tokens()});
  args.logits = placement.room(logits, {s.tokens(), s.context});
  args.target.device = s.device;
  select_args.score = args;
  select_args.score.logits = {};
  select_args.ids = placement.room(ids, {s.tokens(), s.topk});
}

void ScoreProblem::use(const char* kernel) {
  args.target.kernel = select_args.score.target.kernel = kernel;
  select_args.workspace = placement.workspace(workspace, score_select_workspace_bytes(select_args));
}

double ScoreProblem::flops() const {
  const double keys_seen = std::accumulate(ends.begin(), ends.end(), 0.0);
  return keys_seen * static_cast<double>(sizes_.index_heads) * 2 * kIndexDim;
}

double ScoreProblem::bytes() const {  // keys once a request, logits once
  const double requests = sizes_.shared ? 1.0 : static_cast<double>(sizes_.batch);
  const auto key = static_cast<double>(page_bytes_used(key_format(sizes_), 1));
  return requests * static_cast<double>(sizes_.context) * key +
         4.0 * std::accumulate(ends.begin(), ends.end(), 0.0);
}

SelectProblem::SelectProblem(const Sizes& s) : placement(s.device) {
  tools::Random random(s.seed);
  args.logits = placement.normals(logits, {s.tokens(), s.context}, random);
  args.ids = placement.room(ids, {s.tokens(), s.topk});
  args.target.device = s.device;
}

double SelectProblem::bytes() const {
  return 4.0 * static_cast<double>(args.logits.size() + args.ids.size());
}

LocateProblem::LocateProblem(const Sizes& s)
    : placement(s.device), paging(placement, s, s.context), ids(s.tokens() * s.topk) {
  tools::Random random(s.seed);
  for (int64_t t = 0; t < s.tokens(); ++t) random.choose(ids.span(t * s.topk, s.topk), s.context);
  args.ids = placement.copied(ids, {s.tokens(), s.topk});
  args.requests = paging.request_view;
  args.block_table = paging.table_view;
  args.page = s.page;
  args.pages = paging.pages;
  args.slots = placement.room(slots, {s.tokens(), s.topk});
  args.counts = placement.room(counts, {s.tokens()});
  args.target.device = s.device;
}

double LocateProblem::bytes() const {
  return 4.0 * static_cast<double>(2 * ids.size() + paging.table.size());
}

}  // namespace winnow::bench
