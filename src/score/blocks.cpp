// Tasks are (token block, piece of the keys). A worker packs the queries of a token block once for
// all pieces of it that it gets, and dequantises each block of 64 keys once for all tokens of the
// block that belong to the same request. Scratch: about 170 KB on the worker's stack, nothing else.
#include "score/blocks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include "core/arithmetic.h"
#include "cpu/threads.h"

namespace winnow::internal::score {

namespace {

constexpr int64_t kQueryBytes = 2 * (kMaxHeads * kDim * 4 + kMaxHeads * 4);  // fp32, two tokens
constexpr int64_t kMaxTokens = 16;  // of a block; more do not lower the cost of decoding visibly
constexpr int64_t kMinPiece = 4 * kBlockKeys;
constexpr int64_t kTasksPerThread = 16;  // even ends cost a sixteenth of a share at most

struct Scratch {
  alignas(64) std::byte queries[kQueryBytes];
  alignas(64) std::byte keys[kBlockKeys * kDim * 4];
  alignas(64) float scales[kBlockKeys];
  alignas(64) float out[kBlockKeys];
  uint64_t missing = 0;            // bit per key of the block
  int64_t packed = -1;             // token block that `queries` holds
  std::span<const uint8_t> ahead;  // of the next block's keys, not asked for yet
};

// The tasks of a call, which threads take in turn: a block of tokens and a piece of the keys each.
class Tasks {
 public:
  Tasks(const Params& p, const Engine& e) : p_(p), e_(e), query_bytes_(e.query_bytes(p.heads)) {
    per_block_ = std::clamp<int64_t>(kQueryBytes / query_bytes_, 1, kMaxTokens);
    const int64_t blocks = ceil_div(p.tokens, per_block_);
    first_ = p.ranges.limit;
    for (int64_t t = 0; t < p.tokens; ++t)
      if (const Range r = p.ranges.of(t); r.first < r.last) {
        first_ = std::min(first_, r.first);
        last_ = std::max(last_, r.last);
      }
    if (first_ >= last_) return;
    const int64_t wanted = ceil_div(kTasksPerThread * cpu::threads(), blocks);
    piece_ = std::max(kMinPiece, ceil_div(last_ - first_, wanted));
    piece_ = round_up(piece_, kBlockKeys);
    pieces_ = ceil_div(last_ - first_, piece_);
    tasks_ = blocks * pieces_;
  }

  void run() {
    cpu::parallel_for(std::min<int64_t>(cpu::threads(), tasks_), [&](int64_t, int) {
      const auto share = [](void* tasks) { static_cast<Tasks*>(tasks)->drain(); };
      if (e_.around) e_.around(share, this);
      else drain();
    });
  }

 private:
  void drain() {
    Scratch s;
    for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;)
      run_task(task, s);
  }

  // One piece of the keys for every run of tokens of the block that shares a request.
  void run_task(int64_t task, Scratch& s) const {
    const int64_t block = task / pieces_, first_token = block * per_block_;
    const int64_t last_token = std::min(first_token + per_block_, p_.tokens);
    const int64_t from = first_ + task % pieces_ * piece_, to = std::min(from + piece_, last_);
    for (int64_t t = first_token, end = t; t < last_token; t = end) {
      const int32_t request = request_of(p_, t);
      Range keys{to, from};  // those that some token of the run wants
      for (end = t; end < last_token && request_of(p_, end) == request; ++end) {
        const Range r = p_.ranges.of(end);
        if (std::max(r.first, from) >= std::min(r.last, to)) continue;
        keys = {std::min(keys.first, std::max(r.first, from)),
                std::max(keys.last, std::min(r.last, to))};
      }
      if (keys.first >= keys.last) continue;
      pack(block, first_token, last_token, s);
      for (int64_t k = keys.first; k < keys.last; k += kBlockKeys) {
        const int64_t n = std::min<int64_t>(kBlockKeys, keys.last - k);
        dequantize(request, k, n, s);
        const int64_t after = k + n < keys.last ? k + n : likely_next(block);
        s.ahead = bytes_of(request, after, std::min<int64_t>(kBlockKeys, last_ - after));
        for (int64_t token = t; token < end; ++token)
          score_block(token, s.queries + (token - first_token) * query_bytes_, {k, k + n}, s);
      }
    }
  }

  // Where the piece of the keys begins that this thread takes next unless another one does; last_
  // if there is none for the same tokens.
  int64_t likely_next(int64_t block) const {
    const int64_t task = next_.load(std::memory_order_relaxed);
    return task < tasks_ && task / pieces_ == block ? first_ + task % pieces_ * piece_ : last_;
  }

  void pack(int64_t block, int64_t first, int64_t last, Scratch& s) const {
    if (s.packed == block) return;
    for (int64_t t = first; t < last; ++t) e_.pack(p_, t, s.queries + (t - first) * query_bytes_);
    s.packed = block;
  }

  // The bytes of the next n keys, as far as they lie side by side, for an engine that fetches them.
  std::span<const uint8_t> bytes_of(int32_t request, int64_t first, int64_t n) const {
    if (!e_.fetches || n <= 0) return {};
    const Run run = keys_of(p_, request, first, n);
    if (!run.rows || run.row_stride != kDim) return {};
    if (run.scales && run.scale_stride == 1)
      for (int64_t j = 0; j < run.count; j += 16) __builtin_prefetch(run.scales + j);
    return {run.rows, static_cast<size_t>(run.count * kDim)};
  }

  // n keys of a request from `first` on. Missing ones, and those that fill up the last group, are
  // zero.
  void dequantize(int32_t request, int64_t first, int64_t n, Scratch& s) const {
    const int64_t row_bytes = static_cast<int64_t>(kDim) * e_.value_bytes;
    const int64_t whole = round_up(n, kGroupKeys);
    s.missing = 0;
    for (int64_t i = 0; i < n;) {
      const Run run = keys_of(p_, request, first + i, n - i);
      if (run.rows) {
        e_.dequantize(run, s.keys + i * row_bytes);
        for (int64_t j = 0; j < run.count; ++j)
          s.scales[i + j] = run.scales ? run.scales[j * run.scale_stride] : 1.0f;
      } else {
        std::memset(s.keys + i * row_bytes, 0, static_cast<size_t>(run.count * row_bytes));
        std::fill_n(s.scales + i, run.count, 0.0f);
        for (int64_t j = i; j < i + run.count; ++j) s.missing |= uint64_t{1} << j;
      }
      i += run.count;
    }
    std::memset(s.keys + n * row_bytes, 0, static_cast<size_t>((whole - n) * row_bytes));
    std::fill_n(s.scales + n, whole - n, 0.0f);
  }

  // The logits of one token for the dequantised keys [keys.first, keys.last), where its range has
  // them.
  void score_block(int64_t token, const std::byte* query, Range keys, Scratch& s) const {
    const Range r = p_.ranges.of(token);
    const int64_t a = std::max(r.first, keys.first), z = std::min(r.last, keys.last);
    if (a >= z) return;
    const int64_t skip = (a - keys.first) / kGroupKeys * kGroupKeys;
    e_.block({query, s.keys + skip * kDim * e_.value_bytes, s.scales + skip, s.out + skip, p_.heads,
              static_cast<int32_t>(z - keys.first - skip), std::exchange(s.ahead, {})});
    for (uint64_t m = s.missing; m != 0; m &= m - 1)
      s.out[__builtin_ctzll(m)] = -std::numeric_limits<float>::infinity();
    float* row = p_.logits + token * p_.logit_stride - (p_.from_start ? r.first : 0);
    std::memcpy(row + a, s.out + (a - keys.first), static_cast<size_t>(z - a) * sizeof(float));
  }

  const Params& p_;
  const Engine& e_;
  int64_t query_bytes_, per_block_ = 1;
  int64_t first_ = 0, last_ = 0;  // keys that any token wants
  int64_t piece_ = 0, pieces_ = 0, tasks_ = 0;
  std::atomic<int64_t> next_{0};
};

}  // namespace

void run_blocks(const Params& p, const Engine& engine) noexcept {
  if (p.clean)
    cpu::parallel_for(p.tokens, [&](int64_t t, int) {
      const auto [first, last] = p.ranges.of(t);
      float* row = p.logits + t * p.logit_stride;
      std::fill(row, row + first, -std::numeric_limits<float>::infinity());
      std::fill(row + last, row + p.ranges.limit, -std::numeric_limits<float>::infinity());
    });
  Tasks(p, engine).run();
}

}  // namespace winnow::internal::score
