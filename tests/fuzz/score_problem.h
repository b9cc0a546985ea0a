// Index keys in e4m3 or bf16. Queries and keys are multiples of 1/2 up to 1, weights multiples of
// 1/8 up to 2, scales powers of two: a logit of up to 64 heads is a multiple of 2^-5 below 2^14,
// times the scale, so fp32 sums are exact in any order and all kernels must agree bit for bit.
#pragma once

#include "target.h"
#include "winnow/model.h"
#include "winnow/score.h"

namespace winnow::testing {

inline bool serves(const Candidate& kernel, const ScoreArgs& a) {
  return a.q.dtype != DType::kBf16 || reads_bf16_keys(kernel.name);
}

struct ScoreProblem {
  int64_t T, heads, N, R, W, pages;
  int32_t page;
  bool is_bf16;
  CacheFormat format;
  Guarded<e4m3> q, rows;
  Guarded<bf16> wide_q, wide_rows;
  Guarded<float> weights, scales;
  Guarded<uint8_t> cache;
  Guarded<int32_t> table, requests, starts, ends;
  ScoreArgs args;

  explicit ScoreProblem(Source& s)
      : T(draw(s, 0, 4)),
        heads(chance(s, 90) ? draw(s, 1, 4) : draw(s, 1, 64)),
        N(chance(s, 90) ? draw(s, 0, 20) : draw(s, 0, 300)),
        R(draw(s, 0, 3)),
        W(draw(s, 0, 8)),
        pages(draw(s, 1, 6)),
        page(chance(s, 90) ? draw32(s, 1, 4) : page_size(s)),
        is_bf16(chance(s, 25)),
        format(is_bf16 ? CacheFormat::kIndexKeysBf16 : CacheFormat::kIndexKeys),
        q(T * heads * kIndexDim),
        rows(N * kIndexDim),
        wide_q(T * heads * kIndexDim),
        wide_rows(N * kIndexDim),
        weights(T * heads),
        scales(N),
        cache(pages * page_bytes(format, page)),
        table(indices(s, R * W, pages)),
        requests(indices(s, T, R)),
        starts(indices(s, T, N / 2 + 1, 20)),
        ends(indices(s, T, N + 1, 20)) {
    args.q = is_bf16 ? tensor(wide_q.data(), {T, heads, kIndexDim})
                     : tensor(q.data(), {T, heads, kIndexDim});
    args.weights = tensor(weights.data(), {T, heads});
    if (chance(s, 60)) {
      args.keys = {.data = cache.data(), .format = format, .pages = pages, .page = page};
      args.block_table = tensor(table.data(), {R, W});
      args.requests = tensor(requests.data(), {T});
    } else {
      args.key_rows =
          is_bf16 ? tensor(wide_rows.data(), {N, kIndexDim}) : tensor(rows.data(), {N, kIndexDim});
      if (!is_bf16) args.key_scales = tensor(scales.data(), {N});
    }
    if (chance(s, 50)) args.starts = tensor(starts.data(), {T});
    args.ends = tensor(ends.data(), {T});
    args.clean = chance(s, 50);

    // Contents come from the generator alone.
    static constexpr uint8_t kCodes[] = {0x00, 0x30, 0x38, 0xb0, 0xb8};  // 0, 1/2, 1, -1/2, -1
    const auto value = [&] { return e4m3{kCodes[s() % 5]}; };
    const auto scale = [&] { return std::ldexp(1.0f, static_cast<int>(s() % 13) - 9); };
    for (e4m3& x : q) x = value();
    for (e4m3& x : rows) x = value();
    const auto widened = [&] { return to_bf16(to_float(value())); };
    for (bf16& x : wide_q) x = widened();
    for (bf16& x : wide_rows) x = widened();
    for (float& x : weights) x = 0.125f * static_cast<float>(static_cast<int>(s() % 33) - 16);
    for (float& x : scales) x = scale();
    const int64_t stride = page_bytes(format, page);
    for (int64_t p = 0; p < pages; ++p)
      for (int64_t off = 0; off < page; ++off) {
        uint8_t* base = cache.data() + p * stride;
        if (is_bf16) {
          auto* row = reinterpret_cast<bf16*>(base) + off * kIndexDim;
          for (int d = 0; d < kIndexDim; ++d) row[d] = widened();
          continue;
        }
        for (int d = 0; d < kIndexDim; ++d) base[off * kIndexDim + d] = value().bits;
        const float key_scale = scale();
        std::memcpy(base + page * kIndexDim + off * 4, &key_scale, 4);
      }
  }
  // Keys that a row may have: the rows, or what the block table can name.
  int64_t keys() const { return args.key_rows ? N : W * page; }
};

}  // namespace winnow::testing
