// Random problems with hostile values, from fixed seeds: every CPU kernel against the reference
// (bit for bit where sums are exact), and damaged files against the reader. WINNOW_FUZZ_ROUNDS sets
// the number of rounds per target.
#include <cmath>

#include "accuracy.h"
#include "core/formats.h"
#include "fuzz.h"
#include "safetensors.h"
#include "winnow/error.h"
#include "winnow/winnow.h"

namespace winnow {
namespace {

using testing::chance;
using testing::draw;
using testing::fuzz;
using testing::Guarded;
using testing::index_for;
using testing::indices;
using testing::page_size;
using testing::Rng;
using testing::runnable;

TEST(Fuzz, Locate) {
  fuzz(20, [](Rng& rng) {
    const int64_t T = draw(rng, 0, 9), K = draw(rng, 0, 200), R = draw(rng, 0, 4);
    const int64_t W = draw(rng, 0, 12), P = draw(rng, 0, 3);
    const int32_t page = page_size(rng), world = static_cast<int32_t>(draw(rng, 1, 4));
    const int64_t pages = draw(rng, 1, 40);
    auto ids = indices(rng, T * K, W * page), requests = indices(rng, T, R);
    auto table = indices(rng, R * W, pages), prefills = indices(rng, T, P, 50);
    auto starts = indices(rng, P, 500);
    LocateArgs a{
        .ids = tensor(ids.data(), {T, K}),
        .requests = tensor(requests.data(), {T}),
        .block_table = tensor(table.data(), {R, W}),
        .page = page,
        .pages = pages,
        .rows_per_page = chance(rng, 50) ? 0 : page + static_cast<int32_t>(draw(rng, 0, 9))};
    if (chance(rng, 30))
      a.parallel = {world, static_cast<int32_t>(draw(rng, 0, world - 1)),
                    static_cast<int32_t>(draw(rng, 1, 9)), chance(rng, 50)};
    if (chance(rng, 40)) {
      a.prefill_requests = tensor(prefills.data(), {T});
      a.workspace_starts = tensor(starts.data(), {P});
      a.workspace_rows = draw(rng, 0, 600);
    }
    std::vector<int32_t> want, want_counts;
    for (const std::string& kernel : runnable("locate")) {
      Guarded<int32_t> slots(T * K), counts(T);
      a.slots = tensor(slots.data(), {T, K});
      a.counts = tensor(counts.data(), {T});
      a.target.kernel = kernel.c_str();
      locate(a);
      if (kernel == "reference") want = slots.values(), want_counts = counts.values();
      EXPECT_EQ(slots.values(), want) << kernel;
      EXPECT_EQ(counts.values(), want_counts) << kernel;
    }
  });
}

// Few distinct values, so that ties are common; NaN, infinities and both zeros among them.
float logit(Rng& rng) {
  static const float special[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-40f};
  if (chance(rng, 10)) return special[draw(rng, 0, 6)];
  return chance(rng, 50) ? static_cast<float>(draw(rng, -4, 4)) : testing::normal(rng);
}

TEST(Fuzz, Select) {
  fuzz(5, [](Rng& rng) {
    const int64_t T = draw(rng, 0, 6), N = draw(rng, 0, 3000), K = draw(rng, 0, 300);
    Guarded<float> logits(T * N);
    for (float& x : logits) x = logit(rng);
    auto starts = indices(rng, T, N / 3 + 1, 20), ends = indices(rng, T, N + 1, 20);
    SelectArgs a{.logits = tensor(logits.data(), {T, N}), .relative = chance(rng, 50)};
    if (chance(rng, 70)) a.starts = tensor(starts.data(), {T});
    if (chance(rng, 70)) a.ends = tensor(ends.data(), {T});
    std::vector<int32_t> want;
    for (const std::string& kernel : runnable("select")) {
      Guarded<int32_t> ids(T * K);
      a.ids = tensor(ids.data(), {T, K});
      a.target.kernel = kernel.c_str();
      select(a);
      if (kernel == "reference") want = ids.values();
      EXPECT_EQ(ids.values(), want) << kernel;
    }
  });
}

// Queries and keys are multiples of 1/2 up to 1, weights multiples of 1/8 up to 2, scales powers of
// two: a logit of up to 64 heads is a multiple of 2^-5 below 2^14, times the scale, so fp32 sums
// are exact in any order and all kernels must agree bit for bit.
struct ScoreProblem {
  int64_t T, heads, N, R, W, pages;
  int32_t page;
  Guarded<e4m3> q, rows;
  Guarded<float> weights, scales;
  Guarded<uint8_t> cache;
  Guarded<int32_t> table, requests, starts, ends;
  ScoreArgs args;

  explicit ScoreProblem(Rng& rng)
      : T(draw(rng, 0, 5)),
        heads(draw(rng, 1, 64)),
        N(draw(rng, 0, 300)),
        R(draw(rng, 0, 3)),
        W(draw(rng, 0, 8)),
        pages(draw(rng, 0, 9)),
        page(page_size(rng)),
        q(T * heads * kIndexDim),
        rows(N * kIndexDim),
        weights(T * heads),
        scales(N),
        cache(pages * page_bytes(CacheFormat::kIndexKeys, page)),
        table(indices(rng, R * W, pages)),
        requests(indices(rng, T, R)),
        starts(indices(rng, T, N / 2 + 1, 20)),
        ends(indices(rng, T, N + 1, 20)) {
    const auto value = [&] { return to_e4m3(0.5f * static_cast<float>(draw(rng, -2, 2))); };
    const auto scale = [&] { return std::ldexp(1.0f, static_cast<int>(draw(rng, -9, 3))); };
    for (e4m3& x : q) x = value();
    for (e4m3& x : rows) x = value();
    for (float& x : weights) x = 0.125f * static_cast<float>(draw(rng, -16, 16));
    for (float& x : scales) x = scale();
    const int64_t stride = page_bytes(CacheFormat::kIndexKeys, page);
    for (int64_t p = 0; p < pages; ++p)
      for (int64_t off = 0; off < page; ++off) {
        uint8_t* base = cache.data() + p * stride;
        for (int d = 0; d < kIndexDim; ++d) base[off * kIndexDim + d] = value().bits;
        const float s = scale();
        std::memcpy(base + page * kIndexDim + off * 4, &s, 4);
      }
    args.q = tensor(q.data(), {T, heads, kIndexDim});
    args.weights = tensor(weights.data(), {T, heads});
    if (chance(rng, 60)) {
      args.keys = {cache.data(), CacheFormat::kIndexKeys, pages, page};
      if (pages == 0) args.keys.data = cache.data();
      args.block_table = tensor(table.data(), {R, W});
      args.requests = tensor(requests.data(), {T});
    } else {
      args.key_rows = tensor(rows.data(), {N, kIndexDim});
      args.key_scales = tensor(scales.data(), {N});
    }
    if (chance(rng, 50)) args.starts = tensor(starts.data(), {T});
    args.ends = tensor(ends.data(), {T});
    args.clean = chance(rng, 50);
  }
};

TEST(Fuzz, ScoreAndSelect) {
  fuzz(2, [](Rng& rng) {
    ScoreProblem p(rng);
    const int64_t K = draw(rng, 0, 100);
    std::vector<float> want;
    std::vector<int32_t> want_ids;
    for (const std::string& kernel : runnable("score")) {
      Guarded<float> logits(p.T * p.N);
      ScoreArgs a = p.args;
      a.logits = tensor(logits.data(), {p.T, p.N});
      a.target.kernel = kernel.c_str();
      score(a);
      // The poison left outside the range is a number, so plain comparison holds.
      if (kernel == "reference") want = logits.values();
      EXPECT_EQ(logits.values(), want) << kernel;
    }
    if (!p.args.key_rows) return;  // paged keys are bounded by the table there, by N here
    for (const std::string& kernel : runnable("score_select")) {
      Guarded<int32_t> ids(p.T * K);
      ScoreSelectArgs a{.score = p.args, .ids = tensor(ids.data(), {p.T, K})};
      a.score.target.kernel = kernel.c_str();
      score_select(a);
      if (want_ids.empty()) want_ids = ids.values();
      EXPECT_EQ(ids.values(), want_ids) << kernel;
    }
  });
}

// A cache in which the slots of odd pages are NaN and those of even pages hold records.
struct FuzzCache {
  int32_t page;
  int64_t pages;
  Guarded<uint8_t> bytes;
  Cache view;
  std::vector<int32_t> good;  // slots that hold records

  FuzzCache(Rng& rng, const Model& model, CacheFormat format)
      : page(page_size(rng)),
        pages(draw(rng, 1, 12)),
        bytes(pages * page_bytes(format, page), 0xff),
        view{bytes.data(), format, pages, page} {
    std::vector<int64_t> slots;
    for (int32_t s = 0; s < pages * page; ++s)
      if (s / page % 2 == 0) good.push_back(s), slots.push_back(s);
    const int64_t n = static_cast<int64_t>(slots.size());
    std::vector<bf16> kv(n * model.d_qk);
    for (bf16& x : kv) x = to_bf16(testing::normal(rng) * 0.1f);
    write({.kv = tensor(kv.data(), {n, model.d_qk}),
           .slots = tensor(slots.data(), {n}),
           .cache = view,
           .scale = format == model.fp8 ? ScaleMode::kPow2 : ScaleMode::kDefault});
  }
};

// One list over a cache: slots, or ids with a block table. Entries behind the length, and pages
// that only hostile table entries name, are NaN: who reads them shows it.
struct FuzzList {
  FuzzCache cache;
  int64_t width, R, W;
  Guarded<int32_t> entries, lengths, table;
  KvList view;

  FuzzList(Rng& rng, const Model& model, int64_t T, int64_t requests)
      : cache(rng, model, chance(rng, 60) ? model.fp8 : model.bf16),
        width(draw(rng, 0, 150)),
        R(requests),
        W(draw(rng, 1, 6)),
        entries(T * width),
        lengths(indices(rng, T, width + 1, 20)),
        table(R * W) {
    const bool logical = chance(rng, 40), with_lengths = chance(rng, 60);
    const int64_t capacity = cache.pages * cache.page;
    for (int32_t& t : table) {
      t = index_for(rng, cache.pages, 15);
      if (t >= 0 && t < cache.pages) t = t / 2 * 2;
    }
    for (int64_t i = 0; i < T * width; ++i) {
      const int64_t length = with_lengths ? lengths[i / width] : width;
      int32_t& e = entries[i];
      e = index_for(rng, logical ? W * cache.page : capacity, 15);
      if (logical || e < 0 || e >= capacity) continue;
      e = cache.good[e % cache.good.size()];
      if (i % width >= length && cache.pages > 1) e = cache.page;  // the first slot that is NaN
    }
    view = {.cache = cache.view, .indices = tensor(entries.data(), {T, width})};
    if (with_lengths) view.lengths = tensor(lengths.data(), {T});
    if (logical) view.block_table = tensor(table.data(), {R, W});
  }
};

template <class T>
void expect_close(const std::string& what, const Tensor& got, const std::vector<T>& want,
                  const tools::Bar& bar) {
  Tensor expected = got;
  expected.data = const_cast<T*>(want.data());
  const tools::Deviation d = tools::compare(got, expected, bar);
  EXPECT_TRUE(d.ok) << what << ": " << d.text(got);
}

TEST(Fuzz, Attend) {
  fuzz(1, [](Rng& rng) {
    const Model& model = chance(rng, 50) ? kV32 : kV4;
    const int64_t T = draw(rng, 0, 4), R = draw(rng, 1, 3);
    const int64_t H = chance(rng, 80) ? draw(rng, 1, 20) : draw(rng, 21, 128);
    std::vector<FuzzList> lists;
    lists.reserve(2);
    for (int64_t n = draw(rng, 1, model.lists); n > 0; --n) lists.emplace_back(rng, model, T, R);
    Guarded<bf16> q(T * H * model.d_qk);
    for (bf16& x : q) x = to_bf16(testing::normal(rng));
    Guarded<float> sink(H);
    for (float& x : sink) x = chance(rng, 10) ? -INFINITY : testing::normal(rng);
    auto requests = indices(rng, T, R);
    AttendArgs a{.q = tensor(q.data(), {T, H, model.d_qk}),
                 .requests = tensor(requests.data(), {T}),
                 .scale = 1 / std::sqrt(static_cast<float>(model.d_qk)),
                 .empty_lse_negative = chance(rng, 50)};
    for (size_t l = 0; l < lists.size(); ++l) a.lists[l] = lists[l].view;
    if (chance(rng, 50)) a.sink = tensor(sink.data(), {H});
    // |q| and |K| are about sqrt(d) long: a logit's fp32 sum of d terms walks sqrt(d) 2^-24 of
    // that.
    tools::Bar lse_bar = tools::kDecodeLse;
    lse_bar.absolute = model.d_qk * 0x1p-24 * a.scale * std::sqrt(model.d_qk);
    const tools::Bar out_bar = tools::kDecodeOut;

    std::vector<bf16> want_out;
    std::vector<float> want_lse, want_max;
    for (const std::string& kernel : runnable("attend")) {
      Guarded<bf16> out(T * H * model.d_v);
      Guarded<float> lse(T * H), max_logit(T * H);
      a.out = tensor(out.data(), {T, H, model.d_v});
      a.lse = tensor(lse.data(), {T, H});
      a.max_logit = tensor(max_logit.data(), {T, H});
      a.target.kernel = kernel.c_str();
      attend(a);
      if (kernel == "reference") {
        want_out = out.values();
        want_lse = lse.values();
        want_max = max_logit.values();
      }
      expect_close(kernel + " out", a.out, want_out, out_bar);
      expect_close(kernel + " lse", a.lse, want_lse, lse_bar);
      expect_close(kernel + " max_logit", a.max_logit, want_max, lse_bar);
    }
  });
}

TEST(Fuzz, MaskedHeads) {
  fuzz(1, [](Rng& rng) {
    const int64_t T = draw(rng, 0, 4), N = draw(rng, 0, 90), H = draw(rng, 1, 5);
    const int64_t K = draw(rng, 0, 60), d_qk = draw(rng, 1, 80), d_v = draw(rng, 1, 80);
    const auto values = [&](int64_t count) {
      Guarded<bf16> x(count);
      for (bf16& v : x) v = to_bf16(testing::normal(rng));
      return x;
    };
    auto q = values(T * H * d_qk), k = values(N * H * d_qk), v = values(N * H * d_v);
    auto ids = indices(rng, T * K, N), starts = indices(rng, T, N / 2 + 1);
    auto lengths = indices(rng, T, N + 1, 20);
    MhaArgs a{.q = tensor(q.data(), {T, H, d_qk}),
              .k = tensor(k.data(), {N, H, d_qk}),
              .v = tensor(v.data(), {N, H, d_v}),
              .scale = 1 / std::sqrt(static_cast<float>(d_qk)),
              .empty_lse_negative = chance(rng, 50)};
    if (chance(rng, 70)) a.ids = tensor(ids.data(), {T, K});
    if (chance(rng, 50)) a.starts = tensor(starts.data(), {T});
    if (chance(rng, 70)) a.lengths = tensor(lengths.data(), {T});
    tools::Bar lse_bar = tools::kDecodeLse;  // as in Attend
    lse_bar.absolute = d_qk * 0x1p-24 * a.scale * std::sqrt(d_qk);

    const int64_t bytes = draw(rng, 0, 12);
    std::vector<bf16> want_out;
    std::vector<float> want_lse;
    for (const std::string& kernel : runnable("mha")) {
      Guarded<bf16> out(T * H * d_v);
      Guarded<float> lse(T * H);
      a.out = tensor(out.data(), {T, H, d_v});
      a.lse = tensor(lse.data(), {T, H});
      a.target.kernel = kernel.c_str();
      attend_mha(a);
      if (kernel == "reference") want_out = out.values(), want_lse = lse.values();
      expect_close(kernel + " out", a.out, want_out, tools::kDecodeOut);
      expect_close(kernel + " lse", a.lse, want_lse, lse_bar);
    }
    std::vector<uint8_t> want_mask;
    for (const std::string& kernel : runnable("mask")) {
      Guarded<uint8_t> mask(T * bytes);
      topk_mask({.ids = tensor(ids.data(), {T, K}),
                 .lengths = a.lengths,
                 .mask = tensor(mask.data(), {T, bytes}),
                 .target = {.kernel = kernel.c_str()}});
      if (kernel == "reference") want_mask = mask.values();
      EXPECT_EQ(mask.values(), want_mask) << kernel;
    }
  });
}

// Splices, cuts and flips of a valid file: an Error or tensors whose every byte can be read.
TEST(Fuzz, Safetensors) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<int32_t> b = {-1, 7};
  const std::vector<std::byte> whole =
      tools::encode_safetensors({{"a", tensor(a.data(), {2, 3})}, {"b", tensor(b.data(), {2})}});
  fuzz(50, [&](Rng& rng) {
    std::vector<std::byte> file = whole;
    for (int64_t edits = draw(rng, 1, 4); edits > 0 && !file.empty(); --edits) {
      const int64_t at = draw(rng, 0, static_cast<int64_t>(file.size()) - 1);
      const int64_t from = draw(rng, 0, static_cast<int64_t>(whole.size()) - 1);
      const int64_t n = draw(rng, 0, static_cast<int64_t>(whole.size()) - from);
      switch (draw(rng, 0, 3)) {
        case 0: file[at] ^= static_cast<std::byte>(1 << draw(rng, 0, 7)); break;
        case 1: file.resize(at); break;
        case 2:
          file.insert(file.begin() + at, whole.begin() + from, whole.begin() + from + n);
          break;
        default: file[at] = whole[from];
      }
    }
    try {
      const auto parsed = tools::Safetensors::parse(file, "fuzz");
      double sum = 0;
      for (const auto& [name, t] : parsed.tensors())
        for (int64_t i = 0; i < t.size(); ++i) sum += tools::element(t, i);
      ::testing::Test::RecordProperty("sum", std::to_string(sum));
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("fuzz"), std::string::npos) << e.what();
    }
  });
}

}  // namespace
}  // namespace winnow
