#include "ranks/layer.h"

#include <algorithm>
#include <cstring>

namespace winnow::cli {

namespace {

constexpr int64_t kDim = 576, kValue = 512;

int32_t ranks_of(const Parallel& p) { return p.comm ? p.comm->size() : 1; }

// Where a rank's caches hold a part of every sequence: which.
Shard held_by(const Parallel& p) {
  return p.spread == Spread::kQueries && !p.sharded ? Shard{} : p.shard();
}

PlanOptions plan_options(const RankLayerOptions& o, int32_t q_heads) {
  return {.heads = q_heads,
          .topk = o.topk,
          .index_heads = o.index_heads,
          .page = o.page,
          .pages = o.pages,
          .max_requests = o.max_requests,
          .max_tokens = o.max_tokens,
          .max_context = o.max_context,
          .workspace_rows = o.parallel.sharded ? int64_t{o.max_requests} * o.max_context : 0,
          .split = SplitPolicy::kFixed,
          .target = {.kernel = o.kernel.empty() ? nullptr : o.kernel.c_str()},
          .parallel = o.parallel};
}

}  // namespace

RankLayer::RankLayer(const RankLayerOptions& o)
    : o_(o),
      held_(held_by(o.parallel)),
      q_heads_(o.parallel.spread == Spread::kHeads ? o.heads / ranks_of(o.parallel) : o.heads),
      out_heads_(o.parallel.spread == Spread::kContext ? o.heads / ranks_of(o.parallel) : q_heads_),
      first_head_(out_heads_ < o.heads && o.parallel.comm ? o.parallel.comm->rank() * out_heads_
                                                          : 0),
      plan_(plan_options(o_, q_heads_)),
      records_(o.pages * page_bytes(CacheFormat::kV32Fp8, o.page)),
      index_(o.pages * page_bytes(CacheFormat::kIndexKeys, o.page)),
      workspace_(static_cast<int64_t>(pipeline_workspace_bytes(plan_))) {}

int64_t RankLayer::slot(std::span<const int32_t> pages, int64_t position) const {
  if (!held_.owns(position)) return -1;
  const int64_t at = held_.local(position);
  return pages[static_cast<size_t>(at / o_.page)] * int64_t{o_.page} + at % o_.page;
}

void RankLayer::write_prefix(std::span<const int32_t> pages, int32_t count, uint64_t seed) {
  tools::Random random(seed);
  std::vector<bf16> kv(count * kDim), k(count * kIndexDim);
  std::vector<int64_t> slots(static_cast<size_t>(count));
  random.normals(kv, tools::kLatentSigma);
  random.normals(k, 1.0f);
  for (int32_t p = 0; p < count; ++p) slots[static_cast<size_t>(p)] = slot(pages, p);
  const Tensor where = tensor(slots.data(), {count});
  winnow::write({.kv = tensor(kv.data(), {count, kDim}), .slots = where, .cache = latent()});
  winnow::write({.kv = tensor(k.data(), {count, kIndexDim}), .slots = where, .cache = keys()});
}

void RankLayer::fill_caches(uint64_t seed) {
  const int64_t drawn = std::min<int64_t>(o_.pages, 32);
  const Cache some{records_.data(), CacheFormat::kV32Fp8, drawn, o_.page};
  const Cache some_keys{index_.data(), CacheFormat::kIndexKeys, drawn, o_.page};
  const int64_t count = drawn * o_.page;
  tools::Random random(seed);
  std::vector<bf16> kv(count * kDim), k(count * kIndexDim);
  std::vector<int64_t> slots(static_cast<size_t>(count));
  random.normals(kv, tools::kLatentSigma);
  random.normals(k, 1.0f);
  for (int64_t i = 0; i < count; ++i) slots[static_cast<size_t>(i)] = i;
  const Tensor where = tensor(slots.data(), {count});
  winnow::write({.kv = tensor(kv.data(), {count, kDim}), .slots = where, .cache = some});
  winnow::write({.kv = tensor(k.data(), {count, kIndexDim}), .slots = where, .cache = some_keys});
  const int64_t page = page_bytes(CacheFormat::kV32Fp8, o_.page);
  const int64_t key_page = page_bytes(CacheFormat::kIndexKeys, o_.page);
  for (int64_t i = drawn; i < o_.pages; ++i) {
    std::memcpy(records_.data() + i * page, records_.data() + i % drawn * page,
                static_cast<size_t>(page));
    std::memcpy(index_.data() + i * key_page, index_.data() + i % drawn * key_page,
                static_cast<size_t>(key_page));
    // Other scales, so that logits differ.
    auto* const scales =
        reinterpret_cast<float*>(index_.data() + i * key_page + o_.page * int64_t{kIndexDim});
    for (int32_t j = 0; j < o_.page; ++j) scales[j] *= 1.0f + 0.1f * random.normal();
  }
}

void RankLayer::prepare(std::span<const Sequence> batch, uint64_t seed) {
  starts_.assign(1, 0);
  lens_.clear();
  rows_ = static_cast<int64_t>(batch.size());
  width_ = 1;
  for (const Sequence& s : batch) {
    starts_.push_back(starts_.back() + s.query);
    lens_.push_back(s.seq);
    width_ = std::max(width_, static_cast<int64_t>(s.pages.size()));
  }
  table_.assign(static_cast<size_t>(rows_ * width_), -1);
  for (size_t r = 0; r < batch.size(); ++r)
    std::copy(batch[r].pages.begin(), batch[r].pages.end(),
              table_.begin() + static_cast<int64_t>(r) * width_);
  const Batch whole{.query_starts = starts_, .seq_lens = lens_};
  const bool by_queries = o_.parallel.spread == Spread::kQueries;
  share_ = shard_batch(whole, by_queries ? o_.parallel.shard() : Shard{});
  plan_.refill(whole);

  // All tokens and heads are drawn on every rank, in one order.
  const int64_t tokens = starts_.back(), heads = o_.heads, index_heads = o_.index_heads;
  const auto own = static_cast<int64_t>(share_.tokens.size());
  tools::Random random(seed);
  std::vector<bf16> kv(kDim), k(kIndexDim), q(heads * kDim);
  std::vector<e4m3> index_q(index_heads * kIndexDim);
  std::vector<float> weights(index_heads);
  kv_.resize(own * kDim);
  k_.resize(own * kIndexDim);
  q_.resize(own * q_heads_ * kDim);
  index_q_.resize(own * index_heads * kIndexDim);
  weights_.resize(own * index_heads);
  slots_.resize(tokens);
  out_.resize(own * out_heads_ * kValue);
  const int64_t head = o_.parallel.spread == Spread::kHeads ? first_head_ : 0;
  int64_t at = 0;
  for (size_t r = 0; r < batch.size(); ++r)
    for (int32_t i = 0; i < batch[r].query; ++i) {
      const int64_t t = starts_[r] + i;
      random.normals(kv, tools::kLatentSigma);
      random.normals(k, 1.0f);
      random.normals(q, 1.0f);
      random.normals(index_q, 1.0f);
      random.normals(weights, 1.0f);
      slots_[t] = slot(batch[r].pages, batch[r].seq - batch[r].query + i);
      if (at == own || share_.tokens[at] != t) continue;
      std::copy(kv.begin(), kv.end(), kv_.begin() + at * kDim);
      std::copy(k.begin(), k.end(), k_.begin() + at * kIndexDim);
      std::copy_n(q.begin() + head * kDim, q_heads_ * kDim, q_.begin() + at * q_heads_ * kDim);
      std::copy(index_q.begin(), index_q.end(), index_q_.begin() + at * index_heads * kIndexDim);
      std::copy(weights.begin(), weights.end(), weights_.begin() + at * index_heads);
      ++at;
    }
}

void RankLayer::run() {
  const auto own = static_cast<int64_t>(share_.tokens.size());
  const auto tokens = static_cast<int64_t>(slots_.size());
  const Tensor slots = tensor(slots_.data(), {tokens});
  const Tensor table = tensor(table_.data(), {rows_, width_});
  pipeline({.plan = &plan_,
            .kv = tensor(kv_.data(), {own, kDim}),
            .slots = slots,
            .cache = latent(),
            .block_table = table,
            .indexer = {.k = tensor(k_.data(), {own, kIndexDim}),
                        .slots = slots,
                        .keys = keys(),
                        .block_table = table,
                        .q = tensor(index_q_.data(), {own, o_.index_heads, kIndexDim}),
                        .weights = tensor(weights_.data(), {own, o_.index_heads})},
            .q = tensor(q_.data(), {own, q_heads_, kDim}),
            .scale = 0.1352f,
            .out = tensor(out_.data(), {own, out_heads_, kValue}),
            .workspace = workspace_.span()});
}

}  // namespace winnow::cli
