// One layer of V3.2 over ranks: caches that hold what a spread wants, a batch's inputs, and the
// pipeline() call. Every rank draws the same numbers and keeps its part of them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "buffer.h"
#include "random.h"
#include "winnow/winnow.h"

namespace winnow::cli {

struct RankLayerOptions {
  Parallel parallel = {};
  int32_t heads = 16, index_heads = 32, topk = 2048;  // heads of all ranks together
  int32_t page = 64, max_requests = 8, max_tokens = 64, max_context = 8192;
  int64_t pages = 0;  // of a rank's caches
  std::string kernel;
};

// A request of a batch: its pages, its new tokens, and its length with them.
struct Sequence {
  std::span<const int32_t> pages;
  int32_t query = 0, seq = 0;
};

class RankLayer {
 public:
  explicit RankLayer(const RankLayerOptions& options);

  // Tokens [0, count) of a sequence, before its first batch.
  void write_prefix(std::span<const int32_t> pages, int32_t count, uint64_t seed);
  // Every record of the caches, drawn cheaply; for contexts of any length.
  void fill_caches(uint64_t seed);
  // A batch and its inputs: refill() and everything that a model's projections would give.
  void prepare(std::span<const Sequence> batch, uint64_t seed);
  void run();

  const Plan& plan() const { return plan_; }
  // [tokens of this rank, heads of this rank, 512], and what it has of a batch.
  std::span<const bf16> out() const { return out_; }
  const std::vector<int32_t>& own_tokens() const { return share_.tokens; }
  int32_t first_head() const { return first_head_; }
  int32_t out_heads() const { return out_heads_; }

 private:
  Cache latent() const { return {records_.data(), CacheFormat::kV32Fp8, o_.pages, o_.page}; }
  Cache keys() const { return {index_.data(), CacheFormat::kIndexKeys, o_.pages, o_.page}; }
  int64_t slot(std::span<const int32_t> pages, int64_t position) const;

  RankLayerOptions o_;
  Shard held_;  // of positions in the caches
  int32_t q_heads_, out_heads_, first_head_;
  Plan plan_;
  tools::Buffer<std::byte> records_, index_, workspace_;
  // The batch.
  BatchShare share_;
  int64_t rows_ = 0, width_ = 0;
  std::vector<int32_t> starts_, lens_, table_;
  std::vector<int64_t> slots_;
  std::vector<bf16> kv_, k_, q_, out_;
  std::vector<e4m3> index_q_;
  std::vector<float> weights_;
};

}  // namespace winnow::cli
