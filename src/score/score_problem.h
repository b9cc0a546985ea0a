// Inputs of one score case, with the exact logits and their error bounds. For tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/arithmetic.h"
#include "core/formats.h"
#include "score/score_cases.h"
#include "testing.h"
#include "winnow/score.h"

namespace winnow::internal::score {

struct Expected {
  double value = 0, bound = 0;
  double coarse = 0;  // bound of tensor cores that add fp8 products with 14 bits
};

struct Problem {
  static constexpr int64_t kDim = 128;
  Case c;
  int64_t value;                                    // bytes of a query's or key's value
  int64_t requests, width, pages, page_bytes, row;  // row: elements from one key row to the next
  testing::Guarded<uint8_t> q, key_rows, cache;
  testing::Guarded<float> weights, scales;
  testing::Guarded<int32_t> table, request_ids, starts, ends;

  explicit Problem(const Case& c_)
      : c(c_),
        value(c.bf16 ? 2 : 1),
        requests(ceil_div(c.tokens, c.next_n)),
        width(c.page ? c.keys / c.page + 2 : 0),
        pages(c.page ? width * requests + 3 : 0),
        page_bytes(c.page * (c.bf16 ? 256 : 132) + c.padding * (c.bf16 ? 16 : 4)),
        row(kDim + c.padding),
        q(c.tokens * (c.heads + c.padding) * kDim * value),
        key_rows(c.page ? 0 : c.keys * row * value),
        cache(pages * page_bytes),
        weights(c.tokens * (c.heads + c.padding)),
        scales(c.page || c.bf16 ? 0 : c.keys),
        table(requests * width),
        request_ids(c.tokens),
        starts(c.tokens),
        ends(c.tokens) {
    testing::Rng rng(c.keys * 131 + c.heads * 7 + c.tokens);
    // Unused memory (between pages, pages of nobody) keeps NaN codes and NaN scales.
    std::fill(key_rows.begin(), key_rows.end(), 0xff);
    std::fill(cache.begin(), cache.end(), 0xff);
    fill(rng, q.data(), c.tokens * (c.heads + c.padding) * kDim, false);
    for (float& w : weights) w = c.fill == Fill::kCodes ? odd(rng) : testing::normal(rng);
    const auto bad = testing::hostile(c.keys), bad_requests = testing::hostile(requests);
    for (int64_t t = 0; t < c.tokens; ++t) {
      request_ids[t] = static_cast<int32_t>(t / c.next_n);
      starts[t] = static_cast<int32_t>(t % 5 == 4 ? bad[testing::draw(rng, 0, 6)]
                                                  : testing::draw(rng, 0, c.keys / 3));
      ends[t] = static_cast<int32_t>(t % 7 == 6 ? bad[testing::draw(rng, 0, 6)]
                                                : testing::draw(rng, c.keys / 2, c.keys));
      if (t % 6 == 5) request_ids[t] = bad_requests[testing::draw(rng, 0, 6)];
    }
    if (c.tokens == 1) ends[0] = static_cast<int32_t>(c.keys);
    const auto bad_pages = testing::hostile(pages);
    for (int64_t i = 0; i < requests * width; ++i)
      table[i] = static_cast<int32_t>(testing::draw(rng, 0, 8) == 0 ? bad_pages[i % 7]
                                                                    : requests * width - i);
    for (int64_t j = 0; j < c.keys && !c.page; ++j) {
      fill(rng, key_rows.data() + j * row * value, kDim, true);
      if (!c.bf16) scales[j] = scale(rng);
    }
    for (int64_t i = 0; i < requests * width; ++i) {
      if (table[i] < 0 || table[i] >= pages) continue;
      uint8_t* base = cache.data() + table[i] * page_bytes;
      fill(rng, base, c.page * kDim, true);
      for (int64_t j = 0; j < c.page && !c.bf16; ++j) {
        const float s = scale(rng);
        std::memcpy(base + c.page * kDim + j * 4, &s, 4);
      }
    }
  }

  ScoreArgs args() {
    const int64_t h = c.heads + c.padding;
    ScoreArgs a{.q = values_at(q.data(), {c.tokens, c.heads, kDim}, {h * kDim, kDim, 1}),
                .weights = tensor(weights.data(), {c.tokens, c.heads}, {h, 1}),
                .ends = tensor(ends.data(), {c.tokens})};
    if (c.starts) a.starts = tensor(starts.data(), {c.tokens});
    if (c.page) {
      a.keys = {cache.data(), c.bf16 ? CacheFormat::kIndexKeysBf16 : CacheFormat::kIndexKeys, pages,
                c.page, page_bytes};
      a.block_table = tensor(table.data(), {requests, width});
      a.requests = tensor(request_ids.data(), {c.tokens});
    } else {
      a.key_rows = values_at(key_rows.data(), {c.keys, kDim}, {row, 1});
      if (!c.bf16) a.key_scales = tensor(scales.data(), {c.keys});
    }
    a.clean = c.clean;
    return a;
  }

  bool valid(int64_t t, int64_t j) const { return (!c.starts || j >= starts[t]) && j < ends[t]; }

  // The formula, and score.h's bound with room for results in the subnormal range.
  Expected expected(int64_t t, int64_t j) const {
    const auto [key, key_scale] = key_of(t, j);
    if (!key) return {-std::numeric_limits<double>::infinity(), 0};
    // Plain pointers: under sanitizers the loop is most of the test.
    const float* const of_code = values();
    const auto dequantized = [&](const uint8_t* from, double* to) {
      const auto* wide = reinterpret_cast<const bf16*>(from);
      for (int64_t i = 0; i < kDim; ++i) to[i] = c.bf16 ? to_float(wide[i]) : of_code[from[i]];
    };
    double key_row[kDim], row_q[kDim];
    dequantized(key, key_row);
    double sum = 0, loss = 0, coarse = 0;
    for (int64_t h = 0; h < c.heads; ++h) {
      dequantized(q.data() + (t * (c.heads + c.padding) + h) * kDim * value, row_q);
      double dot = 0, size = 0, largest = 0;
      for (int64_t i = 0; i < kDim; ++i) {
        const double product = row_q[i] * key_row[i], magnitude = std::fabs(product);
        dot += product;
        size += magnitude;
        largest = std::max(largest, std::max(magnitude, std::fabs(dot)));
      }
      const double w = weights[t * (c.heads + c.padding) + h], relu = dot > 0 ? dot : 0;
      sum += w * relu;
      // Four steps align 32 products and the sum so far to the largest of them and cut at 2^-13 of
      // it.
      coarse += std::fabs(w) * 4 * 33 * 0x1p-13 * largest;
      loss += std::fabs(w) * (relu > 0 || size > 0 ? 128 * size + (c.heads + 2) * relu : 0);
      // Sums of bf16's products may be subnormal: 2^-149 for each of 128 additions.
      if (c.bf16) loss += std::fabs(w) * 128 * 0x1p-125;
    }
    return {key_scale * sum,
            std::fabs(key_scale) * (loss * 0x1p-24 + c.heads * 0x1p-149) + 0x1p-149,
            std::fabs(key_scale) * coarse};
  }

 private:
  Tensor values_at(uint8_t* data, std::initializer_list<int64_t> shape,
                   std::initializer_list<int64_t> stride) const {
    return c.bf16 ? tensor(reinterpret_cast<bf16*>(data), shape, stride)
                  : tensor(reinterpret_cast<e4m3*>(data), shape, stride);
  }
  void fill(testing::Rng& rng, uint8_t* to, int64_t count, bool key) const {
    for (int64_t i = 0; i < count; ++i)
      if (c.bf16) reinterpret_cast<bf16*>(to)[i] = wide_code(rng, key);
      else to[i] = code(rng, key);
  }
  // A bf16 of the case's fill: e4m3's kinds, with more bits; a few NaN and infinities in kCodes.
  bf16 wide_code(testing::Rng& rng, bool key) const {
    switch (c.fill) {
      case Fill::kNormal: return to_bf16(testing::normal(rng) * (key ? 150.0f : 1.0f));
      case Fill::kTiny:
        return {static_cast<uint16_t>(testing::draw(rng, 0, 0xff) | (rng() & 0x8000))};
      case Fill::kWide:
        return to_bf16(testing::normal(rng) *
                       std::exp2(static_cast<float>(testing::draw(rng, -20, 20))));
      case Fill::kCodes:
        return {rng() % 64 ? to_bf16(testing::normal(rng)).bits : uint16_t{0x7fc0}};
      case Fill::kZero:
        return {static_cast<uint16_t>(testing::draw(rng, 1, 0x4000) | (key ? 0x8000 : 0))};
    }
    return {};
  }
  uint8_t code(testing::Rng& rng, bool key) const {
    switch (c.fill) {
      case Fill::kNormal: return to_e4m3(testing::normal(rng) * (key ? 150.0f : 1.0f)).bits;
      case Fill::kTiny: return static_cast<uint8_t>(testing::draw(rng, 0, 7) | (rng() & 0x80));
      case Fill::kWide: return static_cast<uint8_t>(testing::draw(rng, 0, 126) | (rng() & 0x80));
      case Fill::kCodes: {
        const auto x = static_cast<uint8_t>(rng());
        return (x & 0x7f) == 0x7f && rng() % 64 ? uint8_t{0x38} : x;  // a few NaN per case
      }
      case Fill::kZero: return static_cast<uint8_t>(testing::draw(rng, 1, 60) | (key ? 0x80 : 0));
    }
    return 0;
  }
  float odd(testing::Rng& rng) const {
    const float pick[] = {0.0f, -0.0f, 1e-30f, -1e10f, 3.0f, -0.5f, 1e-3f};
    return pick[rng() % std::size(pick)];
  }
  float scale(testing::Rng& rng) const {
    return c.fill == Fill::kCodes ? odd(rng) : std::exp2(testing::normal(rng) - 6);
  }
  // Of every code.
  static const float* values() {
    static const std::vector<float> all = [] {
      std::vector<float> v(256);
      for (int i = 0; i < 256; ++i) v[i] = to_float(e4m3{static_cast<uint8_t>(i)});
      return v;
    }();
    return all.data();
  }
  std::pair<const uint8_t*, double> key_of(int64_t t, int64_t j) const {
    if (!c.page) return {key_rows.data() + j * row * value, c.bf16 ? 1 : scales[j]};
    const int64_t r = request_ids[t];
    if (r < 0 || r >= requests || j / c.page >= width) return {nullptr, 0};
    const int64_t page = table[r * width + j / c.page];
    if (page < 0 || page >= pages) return {nullptr, 0};
    const uint8_t* base = cache.data() + page * page_bytes;
    if (c.bf16) return {base + j % c.page * kDim * 2, 1};
    float s = 0;
    std::memcpy(&s, base + c.page * kDim + j % c.page * 4, 4);
    return {base + j % c.page * kDim, s};
  }
};

}  // namespace winnow::internal::score
