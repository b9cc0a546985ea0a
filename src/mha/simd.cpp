// attend_mha with portable vectors, fp32. Neighbouring tokens mostly choose the same keys, so up to
// 16 of them share a pass: over the union of their keys, S has a lane per token, and a key outside
// a token's own set gets -inf there. Where the sets differ so much that this costs more, fewer
// tokens share; one alone takes only its own keys. Keys and values are converted once per pass, in
// blocks of 64.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/arena.h"
#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "mha/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "mha/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/products-inl.h"

#ifndef WINNOW_ATTEND_MHA_SIMD_ONCE
#define WINNOW_ATTEND_MHA_SIMD_ONCE
namespace winnow::internal::mha {
namespace {

constexpr int32_t kBlock = 64;  // keys
constexpr int32_t kGroup = 16;  // tokens

// Rows of 32 floats and a cache line: an odd number of lines, so that rows spread over the L1 sets.
constexpr int64_t padded(int64_t d) { return round_up(d, 32); }
constexpr int64_t row_stride(int64_t d) { return padded(d) + 16; }

struct Scratch {
  uint64_t* sets;        // [kGroup][words]
  float *keys, *values;  // [kBlock][row_stride]
  float* queries;        // panels of tokens, each [d_qk][panel width]
  float* o;              // [kGroup][row_stride]
  cpu::Columns tokens;
  size_t bytes;

  Scratch(Arena arena, const Shape& s) : tokens(arena, kBlock, kGroup) {
    sets = arena.take<uint64_t>(kGroup * words(s.rows));
    keys = arena.take<float>(kBlock * row_stride(s.d_qk));
    values = arena.take<float>(kBlock * row_stride(s.d_v));
    queries = arena.take<float>(tokens.width * s.d_qk);
    o = arena.take<float>(kGroup * row_stride(s.d_v));
    bytes = round_up(arena.bytes(), Arena::kAlign);
  }
};

// Tokens [first, first + count) of a call, the first of them number `at` of the scratch's sets.
struct Tokens {
  int64_t first;
  int32_t at, count;
};

// The rows that any token of a group reads, ascending, block by block; and whether all read it.
class Union {
 public:
  Union(const uint64_t* sets, int64_t words, int32_t count)
      : sets_(sets), words_(words), count_(count) {
    if (words_ > 0) word_ = joined(0);
  }
  int32_t fill(int32_t* rows, bool* shared) {
    int32_t n = 0;
    for (; at_ < words_; word_ = ++at_ < words_ ? joined(at_) : 0)
      for (; word_; word_ &= word_ - 1) {
        if (n == kBlock) return n;
        const int bit = std::countr_zero(word_);
        shared[n] = all_ >> bit & 1;
        rows[n++] = static_cast<int32_t>(at_ * 64 + bit);
      }
    return n;
  }

 private:
  uint64_t joined(int64_t w) {
    uint64_t any = 0;
    all_ = ~uint64_t{0};
    for (int32_t i = 0; i < count_; ++i) {
      any |= sets_[i * words_ + w];
      all_ &= sets_[i * words_ + w];
    }
    return any;
  }
  const uint64_t* sets_;
  const int64_t words_;
  const int32_t count_;
  int64_t at_ = 0;
  uint64_t word_ = 0, all_ = 0;
};

// A key costs its conversion, about as much as the products of kConversion tokens with it (21 on
// Zen 4, fewer with shorter vectors): in a pass of `count` tokens once for each key of their union,
// alone for each key of each of them.
constexpr int64_t kConversion = 16;
bool worth_sharing(const uint64_t* sets, int64_t words, int32_t count) {
  int64_t joined = 0, sum = 0;
  for (int64_t w = 0; w < words; ++w) {
    uint64_t any = 0;
    for (int32_t i = 0; i < count; ++i) {
      any |= sets[i * words + w];
      sum += std::popcount(sets[i * words + w]);
    }
    joined += std::popcount(any);
  }
  return joined * (kConversion + count) <= sum * (kConversion + 1);
}

}  // namespace
}  // namespace winnow::internal::mha
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::mha::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace products = winnow::internal::cpu::HWY_NAMESPACE;

// A bf16 row as floats.
void load_row(const bf16* in, int64_t size, float* out) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) hn::StoreU(products::load_bf16(d, in + i), d, out + i);
  for (; i < size; ++i) out[i] = to_float(in[i]);
}

// The tokens' queries of a head, scaled and transposed into panels; lanes past the last are zero.
void pack_queries(const Params& p, const Tokens& t, int64_t h, float* out) {
  products::for_panels(t.count, [&](auto tag, auto vectors, int64_t first) {
    const int64_t wide = hn::MaxLanes(decltype(tag)()) * vectors;
    for (int64_t i = 0; i < wide; ++i) {
      const bool there = first + i < t.count;
      const bf16* q = p.q + h * p.q_head_stride;
      if (there) q += (t.first + first + i) * p.q_token_stride;
      for (int64_t d = 0; d < p.d_qk; ++d)
        out[d * wide + i] = there ? to_float(q[d]) * p.scale : 0.0f;
    }
    out += p.d_qk * wide;
  });
}

// A block of keys: their rows, and whether every token of the group has them.
struct Block {
  int32_t rows[kBlock];
  bool shared[kBlock];
  int32_t count;
};

// The next block, requested while the one before it is worked on: rows lie heads apart, where no
// hardware prefetcher follows.
void take(const Params& p, int64_t h, Union& keys, Block& block) {
  block.count = keys.fill(block.rows, block.shared);
  const auto ask = [](const bf16* row, int64_t size) {
    for (int64_t i = 0; i < size; i += 32) __builtin_prefetch(row + i, 0, 2);
  };
  for (int32_t i = 0; i < block.count; ++i) {
    ask(p.k + block.rows[i] * p.k_row_stride + h * p.k_head_stride, p.d_qk);
    ask(p.v + block.rows[i] * p.v_row_stride + h * p.v_head_stride, p.d_v);
  }
}

// Takes keys that a token does not have out of its column, and adds the bias.
void restrict_keys(const Params& p, const Scratch& s, const Tokens& t, const int32_t* rows,
                   int32_t key) {
  const int32_t row = rows[key];
  float* logits = s.tokens.logits + key * s.tokens.width;
  for (int32_t i = 0; i < t.count; ++i) {
    const uint64_t* set = s.sets + (t.at + i) * words(p.rows);
    if (!(set[row / 64] >> row % 64 & 1)) logits[i] = -std::numeric_limits<float>::infinity();
    else logits[i] += bias_of(p, t.first + i, row - start_of(p, t.first + i));
  }
}

void write_token(const Params& p, const Scratch& s, int64_t token, int64_t h, int32_t column) {
  const float m = s.tokens.m[column], l = s.tokens.l[column], max = s.tokens.max[column];
  // Divided by l + e^{sink - m}; a sum of 0 means that nothing was read.
  const float sink = p.sink ? std::exp(p.sink[h] - m) : 0.0f;
  const float factor = 1.0f / (l + sink);
  const float* o = s.o + column * row_stride(p.d_v);
  bf16* out = p.out + token * p.out_token_stride + h * p.out_head_stride;
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  if (l != 0)
    for (const auto f = hn::Set(d, factor); i + lanes <= p.d_v; i += lanes)
      products::store_bf16(d, hn::Mul(hn::LoadU(d, o + i), f), out + i);
  for (; i < p.d_v; ++i) out[i] = l == 0 ? bf16{0} : to_bf16(o[i] * factor);
  if (p.lse)
    p.lse[token * p.lse_token_stride + h * p.lse_head_stride] = l == 0 ? p.empty_lse
                                                                : std::isinf(max) && !std::isnan(l)
                                                                    ? max
                                                                    : m + std::log(l);
}

bool finite(const float* x, int64_t size) {  // in whole rows
  const hn::ScalableTag<float> d;
  auto sum = hn::Zero(d);  // x - x is 0, or NaN
  for (int64_t i = 0; i < size; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, x + i);
    sum = hn::Add(sum, hn::Sub(v, v));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum)) == 0;
}

// One head of a group of tokens that share a pass.
void attend_group(const Params& p, const Scratch& s, const Tokens& t, int64_t h) {
  const int64_t k_row = row_stride(p.d_qk), v_row = row_stride(p.d_v);
  pack_queries(p, t, h, s.queries);
  s.tokens.reset(kBlock);
  std::fill_n(s.o, t.count * v_row, 0.0f);
  Union keys(s.sets + t.at * words(p.rows), words(p.rows), t.count);
  Block blocks[2];
  take(p, h, keys, blocks[0]);
  for (int turn = 0; blocks[turn].count > 0; turn ^= 1) {
    const auto& [rows, shared, count] = blocks[turn];
    for (int32_t i = 0; i < count; ++i) {
      load_row(p.k + rows[i] * p.k_row_stride + h * p.k_head_stride, p.d_qk, s.keys + i * k_row);
      load_row(p.v + rows[i] * p.v_row_stride + h * p.v_head_stride, p.d_v, s.values + i * v_row);
    }
    for (int32_t i = count; i % products::kRows; ++i) std::fill_n(s.keys + i * k_row, p.d_qk, 0.0f);
    take(p, h, keys, blocks[turn ^ 1]);
    products::logits(s.tokens, {.k = s.keys,
                                .queries = s.queries,
                                .row = k_row,
                                .size = p.d_qk,
                                .columns = t.count,
                                .count = count});
    for (int32_t i = 0; i < count; ++i)
      if (!shared[i] || p.bias) restrict_keys(p, s, t, rows, i);
    products::softmax(s.tokens, count, 1.0f);
    products::add_values(s.tokens, {.v = s.values,
                                    .o = s.o,
                                    .v_row = v_row,
                                    .o_row = v_row,
                                    .size = padded(p.d_v),
                                    .columns = t.count,
                                    .keys = count});
  }
  // A weight of 0 does not keep out a NaN or infinity that only other tokens of the group have:
  // each alone reads no keys but its own.
  if (t.count > 1 && !finite(s.o, t.count * v_row)) {
    for (int32_t i = 0; i < t.count; ++i) attend_group(p, s, {t.first + i, t.at + i, 1}, h);
    return;
  }
  for (int32_t i = 0; i < t.count; ++i) write_token(p, s, t.first + i, h, i);
}

// Heads [h0, h1) of up to kGroup tokens.
void mha_task(const Params& p, const Scratch& s, const Tokens& all, int64_t h0, int64_t h1) {
  const int64_t n = words(p.rows);
  for (int32_t i = 0; i < all.count; ++i) build_set(p, all.first + i, s.sets + i * n);
  std::fill_n(s.values, kBlock * row_stride(p.d_v), 0.0f);  // columns past d_v stay 0
  for (int32_t at = 0; at < all.count;) {
    int32_t count = static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(all.count - at)));
    while (count > 1 && !worth_sharing(s.sets + at * n, n, count)) count /= 2;
    for (int64_t h = h0; h < h1; ++h) attend_group(p, s, {all.first + at, at, count}, h);
    at += count;
  }
}

}  // namespace winnow::internal::mha::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::mha {

HWY_EXPORT(mha_task);

size_t simd_workspace(const Shape& shape) {
  return Scratch(Arena(), shape).bytes * cpu::threads() + Arena::kAlign;
}

void simd(const Params& p) noexcept {
  const Shape shape{p.tokens, p.heads, p.rows, p.d_qk, p.d_v};
  const size_t bytes = Scratch(Arena(), shape).bytes;
  // Heads are shared out too while there are few tokens; every task finds the sets anew.
  const int64_t groups = ceil_div(p.tokens, kGroup);
  const int64_t chunks = std::clamp<int64_t>(4 * cpu::threads() / groups, 1, p.heads);
  cpu::parallel_for(groups * chunks, [&](int64_t task, int worker) {
    const int64_t g = task / chunks, c = task % chunks;
    const Scratch s(Arena(p.workspace.subspan(worker * bytes, bytes)), shape);
    const auto count = static_cast<int32_t>(std::min<int64_t>(kGroup, p.tokens - g * kGroup));
    HWY_DYNAMIC_DISPATCH(mha_task)
    (p, s, {g * kGroup, 0, count}, c * p.heads / chunks, (c + 1) * p.heads / chunks);
  });
}

}  // namespace winnow::internal::mha
#endif  // HWY_ONCE
