// A case of attend_cases.h with contents, and its answer by the book: fp64, two passes, one entry
// after the other. Slots that no list may read hold NaN.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include "accuracy.h"
#include "attend/attend_cases.h"
#include "attend/kernel.h"
#include "core/arithmetic.h"
#include "core/formats.h"
#include "testing.h"
#include "winnow/attend.h"
#include "winnow/model.h"
#include "winnow/write.h"

namespace winnow::internal::attend {

using winnow::testing::draw;
using winnow::testing::Guarded;
using winnow::testing::normal;
using winnow::testing::Rng;

inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline const Model& model_of_format(CacheFormat f) {
  return f == kV32.fp8 || f == kV32.bf16 ? kV32 : kV4;
}

// One list's cache and indices.
struct ProblemList {
  CaseList c;
  Cache cache;
  std::unique_ptr<Guarded<uint8_t>> bytes;
  std::unique_ptr<Guarded<int32_t>> indices, lengths, table;
  int64_t table_rows = 2, table_width = 0;

  ProblemList(const Case& all, const CaseList& list, Rng& rng) : c(list) {
    const int64_t stride = page_bytes(c.format, c.page) + (all.strided ? 4608 : 0);
    const int64_t slots = c.pages * c.page;
    // All ones: NaN as e4m3, as bf16, as fp32 and as ue8m0.
    bytes = std::make_unique<Guarded<uint8_t>>(c.pages * stride, 0xff);
    cache = {bytes->data(), c.format, c.pages, c.page, stride};
    write_records(all, rng);
    // Every other slot holds a record.
    const auto live = [&] { return 2 * draw(rng, 0, ceil_div(slots, 2) - 1); };

    table_width = ceil_div(slots, c.page) + 1;
    table = std::make_unique<Guarded<int32_t>>(table_rows * table_width);
    const auto bad_pages = testing::hostile(c.pages);
    for (int64_t r = 0; r < table_rows; ++r)
      for (int64_t i = 0; i < table_width; ++i)
        (*table)[r * table_width + i] =
            i < c.pages ? static_cast<int32_t>((i + r) % c.pages) : bad_pages[i % bad_pages.size()];

    indices = std::make_unique<Guarded<int32_t>>(all.tokens * c.width);
    lengths = std::make_unique<Guarded<int32_t>>(all.tokens);
    const int64_t limit = c.logical ? table_width * c.page : slots;
    const auto bad = testing::hostile(limit);
    for (int64_t t = 0; t < all.tokens; ++t) {
      const int64_t length[] = {c.width - c.width / 3, 0, c.width + 7, -3, 1};
      (*lengths)[t] = static_cast<int32_t>(length[t % 5]);
      for (int64_t k = 0; k < c.width; ++k) {
        // Behind the length: slots that hold NaN. Before it: one entry in ten is hostile.
        const bool behind = (c.lengths || c.padded) && k >= (*lengths)[t];
        int64_t index = c.padded && behind                  ? -1
                        : slots < 2 || draw(rng, 0, 9) == 0 ? bad[draw(rng, 0, bad.size() - 1)]
                        : behind                            ? live() ^ 1
                                                            : live();
        if (behind && index == slots) index = INT32_MAX;
        // A shifted page of an odd size moves a live slot to a dead one: move it back.
        if (c.logical && index >= 0 && index < slots && !behind) index = logical(index, t % 2);
        (*indices)[t * c.width + k] = static_cast<int32_t>(index);
      }
    }
  }

  // The id that request r's table row maps to this slot.
  int64_t logical(int64_t slot, int64_t r) const {
    return ((slot / c.page - r + c.pages) % c.pages) * c.page + slot % c.page;
  }

  void write_records(const Case& all, Rng& rng) {
    const int64_t slots = c.pages * c.page, n = ceil_div(slots, 2);
    const int64_t d = model_of_format(c.format).d_qk;
    std::vector<bf16> kv(n * d);
    std::vector<int64_t> where(n);
    for (int64_t i = 0; i < n; ++i) {
      where[i] = 2 * i;
      for (int64_t j = 0; j < d; ++j) {
        // Magnitudes vary from tile to tile.
        float x = normal(rng) * std::ldexp(1.0f, static_cast<int>((i + j / 64) % 5) - 2);
        if (all.logits == Logits::kEqual && i > 0) x = to_float(kv[j]);
        if (all.logits == Logits::kDominant && i != n / 2) x *= 0.1f;
        if (all.logits == Logits::kDominant && i == n / 2) x = 3.0f + x;
        if (all.logits == Logits::kWide) x *= 20;
        kv[i * d + j] = to_bf16(x);
      }
    }
    const auto write = [&](int64_t begin, int64_t end, ScaleMode scale) {
      if (begin < end)
        winnow::write({.kv = tensor(kv.data() + begin * d, {end - begin, d}),
                       .slots = tensor(where.data() + begin, {end - begin}),
                       .cache = cache,
                       .scale = scale,
                       .target = {.kernel = "reference"}});
    };
    write(0, n, c.scales == Scales::kAny ? ScaleMode::kDefault : ScaleMode::kPow2);
    if (c.scales == Scales::kMostPowers)
      for (int64_t i = 0; i < n; i += 200) write(i, i + 1, ScaleMode::kAmax);
  }

  KvList view(int64_t tokens) {
    KvList l{.cache = cache, .indices = tensor(indices->data(), {tokens, c.width})};
    if (c.lengths) l.lengths = tensor(lengths->data(), {tokens});
    if (c.logical) l.block_table = tensor(table->data(), {table_rows, table_width});
    return l;
  }

  // The record that column k of token t means, if it is valid: the contract, spelled out.
  std::optional<Entry> entry(int64_t t, int64_t k, int64_t request) const {
    const int64_t index = (*indices)[t * c.width + k];
    if (c.lengths && k >= (*lengths)[t]) return {};
    if (index < 0) return {};
    if (!c.logical) {
      if (index >= c.pages * c.page) return {};
      return Entry{index / c.page, static_cast<int32_t>(index % c.page)};
    }
    if (index / c.page >= table_width || request < 0 || request >= table_rows) return {};
    const int64_t page = (*table)[request * table_width + index / c.page];
    if (page < 0 || page >= c.pages) return {};
    return Entry{page, static_cast<int32_t>(index % c.page)};
  }
};

struct Answer {
  std::vector<float> out, lse, max_logit;  // [T, H, 512], [T, H], [T, H]
  std::vector<float> magnitude;            // [T, H, 512]: sum of p_j |v_j|
  std::vector<float> spread;               // [T, H]: the largest root of a logit's squared terms
  // [T, H]: the number of keys times the largest p_j max |v_j|.
  std::vector<float> peak;
};

struct Problem {
  Case c;
  const Model& model;
  Rng rng;
  std::vector<std::unique_ptr<ProblemList>> lists;
  int64_t q_head, q_token, rope_head, rope_token;  // strides
  Guarded<bf16> q, rope;
  Guarded<int32_t> requests;
  Guarded<float> sink;

  explicit Problem(const Case& c_)
      : c(c_),
        model(model_of_format(c.list[0].format)),
        rng(c.tokens * 7919 + c.heads * 31 + c.list[0].width),
        q_head((c.split_query ? model.d_nope : model.d_qk) + (c.strided ? 24 : 0)),
        q_token(q_head * c.heads + (c.strided ? 40 : 0)),
        rope_head(model.d_rope + (c.strided ? 8 : 0)),
        rope_token(rope_head * c.heads + (c.strided ? 16 : 0)),
        q(c.tokens * q_token, 0xff),
        rope(c.tokens * rope_token, 0xff),
        requests(c.tokens),
        sink(c.heads) {
    for (int i = 0; i < c.lists; ++i)
      lists.push_back(std::make_unique<ProblemList>(c, c.list[i], rng));
    const float size = c.logits == Logits::kHuge ? 1e30f : 1.0f;
    for (int64_t t = 0; t < c.tokens; ++t) {
      // Row 2 of the tables does not exist: one token in eight has no valid logical id.
      requests[t] = static_cast<int32_t>(t % 8 == 7 ? 2 : t % 2);
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t d = 0; d < model.d_qk; ++d) query(t, h, d) = to_bf16(normal(rng) * size);
    }
    const float sinks[] = {-kInf, 0.5f, 3.0f, kInf, -2.0f};
    for (int64_t h = 0; h < c.heads; ++h) sink[h] = sinks[h % 5];
  }

  bf16& query(int64_t t, int64_t h, int64_t d) {
    if (c.split_query && d >= model.d_nope)
      return rope[t * rope_token + h * rope_head + d - model.d_nope];
    return q[t * q_token + h * q_head + d];
  }

  AttendArgs args() {
    AttendArgs a{.q = tensor(q.data(), {c.tokens, c.heads, model.d_qk}, {q_token, q_head, 1}),
                 .scale = c.scale};
    if (c.split_query) {
      a.q.shape[2] = model.d_nope;
      a.q_rope = tensor(rope.data(), {c.tokens, c.heads, model.d_rope}, {rope_token, rope_head, 1});
    }
    bool logical = false;
    for (int i = 0; i < c.lists; ++i) {
      a.lists[i] = lists[i]->view(c.tokens);
      logical |= c.list[i].logical;
    }
    if (logical) a.requests = tensor(requests.data(), {c.tokens});
    if (c.sink) a.sink = tensor(sink.data(), {c.heads});
    return a;
  }

  Answer expected() {
    Answer r;
    for (int64_t t = 0; t < c.tokens; ++t) {
      // Dequantise the token's valid entries once.
      std::vector<float> keys;
      for (const auto& l : lists)
        for (int64_t k = 0; k < l->c.width; ++k)
          if (const auto e = l->entry(t, k, requests[t])) {
            keys.resize(keys.size() + model.d_qk);
            const ListView view{.page = l->cache.page,
                                .data = static_cast<const std::byte*>(l->cache.data),
                                .page_stride = l->cache.page_stride,
                                .format = l->c.format};
            dequantize(view, *e, keys.data() + keys.size() - model.d_qk);
          }
      for (int64_t h = 0; h < c.heads; ++h) row(t, h, keys, r);
    }
    return r;
  }

 private:
  void row(int64_t t, int64_t h, const std::vector<float>& keys, Answer& r) {
    const int64_t n = static_cast<int64_t>(keys.size()) / model.d_qk;
    std::vector<double> s(n), query_row(model.d_qk), out(kValueDim), size(kValueDim);
    for (int64_t d = 0; d < model.d_qk; ++d) query_row[d] = to_float(query(t, h, d));
    // Plain pointers: under sanitizers these two loops are most of the test.
    const double* const row_q = query_row.data();
    double *const o = out.data(), *const m = size.data();
    double max = -kInf, sum = 0, spread = 0, peak = 0;
    for (int64_t j = 0; j < n; ++j) {
      const float* const key = keys.data() + j * model.d_qk;
      double dot = 0, each = 0;
      for (int32_t d = 0; d < model.d_qk; ++d) {
        const double product = row_q[d] * key[d];
        dot += product;
        each += product * product;
      }
      s[j] = dot * c.scale;
      max = std::max(max, s[j]);
      spread = std::max(spread, std::sqrt(each) * std::abs(c.scale));
    }
    for (int64_t j = 0; j < n; ++j) {
      const float* const value = keys.data() + j * model.d_qk;
      const double p = std::exp(s[j] - max);
      sum += p;
      float largest = 0;
      for (int d = 0; d < kValueDim; ++d) largest = std::max(largest, std::abs(value[d]));
      peak = std::max(peak, p * largest);
      for (int d = 0; d < kValueDim; ++d) {
        o[d] += p * value[d];
        m[d] += p * std::abs(value[d]);
      }
    }
    const double lse = max + std::log(sum);
    double factor = n == 0 ? 0 : 1 / sum;
    if (c.sink && n > 0) factor /= 1 + std::exp(sink[h] - lse);
    for (const double x : out) r.out.push_back(static_cast<float>(x * factor));
    for (const double x : size) r.magnitude.push_back(static_cast<float>(x * factor));
    r.lse.push_back(n == 0 ? kInf : static_cast<float>(lse));
    r.max_logit.push_back(static_cast<float>(max));
    r.spread.push_back(static_cast<float>(spread));
    r.peak.push_back(static_cast<float>(static_cast<double>(n) * peak * factor));
  }
};

// Outputs of a call, poisoned, with gaps when the case requests them.
struct Results {
  int64_t tokens, heads, head, token;
  Guarded<bf16> out;
  Guarded<float> lse, max_logit;

  explicit Results(const Case& c)
      : tokens(c.tokens),
        heads(c.heads),
        head(kValueDim + (c.strided ? 16 : 0)),
        token(head * c.heads + (c.strided ? 48 : 0)),
        out(c.tokens * token),
        lse(c.tokens * c.heads),
        max_logit(c.tokens * c.heads) {}

  void attach(AttendArgs& a) {
    a.out = tensor(out.data(), {tokens, heads, kValueDim}, {token, head, 1});
    a.lse = tensor(lse.data(), {tokens, heads});
    a.max_logit = tensor(max_logit.data(), {tokens, heads});
  }
};

// Widens the bounds of an answer to those of Precision::kFp8 (winnow/precision.h), in units of the
// cancellation bound. A logit is off by at most L: each of its terms by 2^-4, or four times that of
// its spread (errors are independent: seven deviations). A weight is off by e^2L - 1 and by its own
// 2^-4, and by what lies below e4m3's range: 2^-13 of the largest weight times the largest value
// that its scale allows, which is up to twice the largest in the record. Sums lose 2^-13 for every
// 32 keys; cases have 2,048 at most.
inline void widen_to_fp8(Answer& want) {
  const auto unit = static_cast<float>(1 / tools::kCancellation);
  for (float& x : want.spread) x *= 4 * 0x1p-4f;
  for (size_t i = 0; i < want.magnitude.size(); ++i) {
    const float off = std::exp(2 * want.spread[i / kValueDim]);
    const float rounded = (1 + 0x1p-4f + 64 * 0x1p-13f) * off - 1;
    want.magnitude[i] *= 1 + unit * rounded;
    want.magnitude[i] += unit * 0x1p-12f * off * want.peak[i / kValueDim];
  }
  for (float& x : want.spread) x *= unit;
}

// `strange_scales`: of V3.2 records, which no writer makes.
inline void expect_close(const AttendArgs& a, Answer& want, bool strange_scales = false) {
  const int64_t t = a.q.shape[0], h = a.q.shape[1];
  const auto check = [](const char* what, const Tensor& got, const tools::Deviation& d) {
    EXPECT_TRUE(d.ok) << what << ": " << d.text(got);
  };
  const auto row = [&](std::vector<float>& x) { return tensor(x.data(), {t, h}); };
  const auto wide = [&](std::vector<float>& x) { return tensor(x.data(), {t, h, kValueDim}); };
  // Hopper's kernel adds products in fp32, where an addition is off by at most 2^-22 of the largest
  // sum. It rounds keys to bf16, each by at most 2^-9, where the formats of two lists differ;
  // V3.2's fp8 to fp16, by 2^-11, with more than 32 heads, or where scales are strange. A logit is
  // off by four times that of its spread at most (errors are independent: seven deviations), the
  // output by twice that of sum p|v|. In units of the cancellation bound:
  const bool on_device = a.target.device.kind == DeviceKind::kCuda;
  const bool mixed = a.lists[1].cache && a.lists[0].cache.format != a.lists[1].cache.format;
  const bool to_fp16 =
      a.lists[0].cache.format == CacheFormat::kV32Fp8 && (h > 32 || strange_scales);
  const float unit = mixed ? 0x1p-9f : to_fp16 ? 0x1p-11f : 0x1p-20f;
  tools::Bar out_bar = tools::kDecodeOut;
  if (a.precision == Precision::kFp8) {
    widen_to_fp8(want);
    // attend_fp8_test looks at means.
    out_bar.cosine = kInf;
  } else {
    for (float& x : want.spread)
      x *= on_device ? 4 * unit / static_cast<float>(tools::kCancellation) : 0.0f;
    for (size_t i = 0; i < want.magnitude.size(); ++i)
      want.magnitude[i] *= 1 + 2 * want.spread[i / kValueDim];
  }
  check("out", a.out, tools::compare(a.out, wide(want.out), out_bar, wide(want.magnitude)));
  check("lse", a.lse, tools::compare(a.lse, row(want.lse), tools::kDecodeLse, row(want.spread)));
  check("max_logit", a.max_logit,
        tools::compare(a.max_logit, row(want.max_logit), tools::kDecodeLse, row(want.spread)));
}

// A test of the kernel that its parameter names.
class KernelTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = testing::why_not("attend", GetParam()); !why.empty())
      GTEST_SKIP() << why;
  }
  AttendArgs args(Problem& p, Results& r) const {
    AttendArgs a = p.args();
    r.attach(a);
    a.target = testing::target("attend", GetParam());
    return a;
  }
};

// The call with a workspace of exactly the size it requests, on the device of its target.
inline void attend_with_workspace(AttendArgs a) {
  testing::DeviceWorkspace workspace(a.target.device, attend_workspace_bytes(a));
  a.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
  winnow::attend(a);
  ASSERT_TRUE(testing::device_finished());
}

}  // namespace winnow::internal::attend
