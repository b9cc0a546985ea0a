// A layer with contents, a batch of requests for pipeline(), and the answer in fp64 straight from
// the bytes that ended up in the caches. Every number of a request depends on its seed and the
// position alone, so that a request can be moved to another batch. Index keys, queries and weights
// are small integers and powers of two: logits are exact, ties are many, and the ids have one right
// answer whatever the kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "core/arithmetic.h"
#include "core/formats.h"
#include "model/records.h"
#include "testing.h"
#include "winnow/pipeline.h"

namespace winnow::testing {

struct Layout {
  std::string name;
  Model model = kV32;
  CacheFormat format = CacheFormat::kV32Fp8;
  Mode mode = Mode::kMixed;
  int32_t topk = 24, extra = 0;
  bool indexed = true;  // V4: false attends to all compressed states
  SplitPolicy split = SplitPolicy::kBalanced;
  bool routed = false;  // of kAuto: V3.2's prefills of 20 tokens and more are gathered, V4's below
  int32_t tokens_per_state = 4;  // V4
  bool separate() const {        // a fixed split has no routes
    return mode == Mode::kSeparate || (routed && split == SplitPolicy::kBalanced);
  }
  bool v4() const { return model.lists == 2; }
  int32_t ratio() const { return v4() ? tokens_per_state : 1; }
};

struct Request {
  uint64_t seed;
  int32_t query, seq;  // seq 0: padding
};

// One paged cache, all ones (NaN in every format) where nothing was written.
struct Pages {
  CacheFormat format;
  int32_t page;
  int64_t requests, width, pages;
  Guarded<uint8_t> bytes;
  MappedVector<int32_t> table;

  Pages(CacheFormat f, int32_t page_, int64_t requests_, int64_t longest)
      : format(f),
        page(page_),
        requests(requests_),
        width(ceil_div(longest, page) + 1),
        pages(requests * width + 3),
        bytes(pages * page_bytes(f, page), 0xff),
        table(requests * width) {
    // Pages are dealt out from the back; the last column of each request names none.
    int32_t next = static_cast<int32_t>(pages) - 1;
    for (size_t i = 0; i < table.size(); ++i)
      table[i] = static_cast<int64_t>(i) % width == width - 1 ? -1 : next--;
  }
  Cache cache() { return {bytes.data(), format, pages, page}; }
  Tensor view() { return tensor(table.data(), {requests, width}); }
  int64_t slot(int64_t request, int64_t index) const {
    return int64_t{table[request * width + index / page]} * page + index % page;
  }
  // The record of a slot; `rounded`: as gathering to bf16 gives it.
  std::vector<double> record(int64_t slot, bool rounded) const {
    const uint8_t* base = bytes.data() + slot / page * page_bytes(format, page);
    const int64_t off = slot % page;
    return with_latent(format, [&](auto r) {
      using Record = decltype(r);
      std::vector<double> x(Record::kDim);
      const auto half = [&](int64_t at) {
        bf16 v;
        std::memcpy(&v, base + at, 2);
        return static_cast<double>(to_float(v));
      };
      if constexpr (Record::kQuantized) {
        for (int i = 0; i < Record::kNope; ++i) {
          typename Record::Scale stored;
          std::memcpy(&stored,
                      base + Record::scales(off, page) +
                          i / Record::kTile * static_cast<int64_t>(sizeof(stored)),
                      sizeof(stored));
          float scale;
          if constexpr (sizeof(stored) == 1) scale = from_ue8m0(stored);
          else scale = stored;
          const float v = to_float(e4m3{base[Record::row(off, page) + i]}) * scale;
          x[i] = rounded ? to_float(to_bf16(v)) : v;
        }
        for (int i = 0; i < Record::kRope; ++i)
          x[Record::kNope + i] = half(Record::rope(off, page) + 2 * i);
      } else {
        for (int i = 0; i < Record::kDim; ++i) x[i] = half(Record::row(off, page) + 2 * i);
      }
      return x;
    });
  }
};

class World {
 public:
  static constexpr int32_t kHeads = 3, kIndexHeads = 2;
  enum What : uint64_t { kToken = 1, kState, kQuery, kKey, kIndexQuery, kWeight };

  Layout layout;
  std::vector<Request> requests;
  int64_t count, tokens, d;
  std::vector<int32_t> starts{0}, seq_lens;
  Pages main, states, keys;
  MappedVector<bf16> kv, state_kv, index_k, q;
  MappedVector<int64_t> slots, state_slots, index_slots;
  MappedVector<e4m3> index_q;
  MappedVector<float> weights, sink{0.5f, -1.0f, 2.0f};
  Guarded<bf16> out;
  Guarded<float> lse;
  // By expected(): what rounding an fp8 record's scale and values to fp16 (2^-11 each, as Hopper's
  // kernel does) can do to a row's logits.
  std::vector<float> rounding;

  World(const Layout& s, const std::vector<Request>& batch, int64_t padding)
      : layout(s),
        requests(batch),
        count(static_cast<int64_t>(batch.size())),
        tokens(padding + std::accumulate(batch.begin(), batch.end(), int64_t{0},
                                         [](int64_t n, const Request& r) { return n + r.query; })),
        d(s.model.d_qk),
        main(s.format, 16, count, 320),
        states(s.format, 8, count, 320 / s.ratio()),
        keys(CacheFormat::kIndexKeys, 8, count, 320 / s.ratio()),
        kv(tokens * d),
        state_kv(tokens * d),
        index_k(tokens * kIndexDim),
        q(tokens * kHeads * d),
        slots(tokens, -1),
        state_slots(tokens, -1),
        index_slots(tokens, -1),
        index_q(tokens * kIndexHeads * kIndexDim),
        weights(tokens * kIndexHeads),
        out(tokens * kHeads * s.model.d_v),
        lse(tokens * kHeads) {
    for (int64_t i = 0; i < count; ++i) {
      const Request& r = requests[i];
      starts.push_back(starts.back() + r.query);
      seq_lens.push_back(r.seq);
      if (r.seq == 0) continue;
      const int64_t old = r.seq - r.query, ratio = layout.ratio();
      insert_old(main, i, old, kToken);
      if (layout.extra > 0) insert_old(states, i, old / ratio, kState);
      insert_old(keys, i, old / ratio, kKey);
      for (int64_t p = old; p < r.seq; ++p) new_token(i, p, starts[i] + p - old);
    }
  }

  PlanOptions options(const char* kernel) const {
    PlanOptions o{.model = layout.model,
                  .format = layout.format,
                  .heads = kHeads,
                  .topk = layout.topk,
                  .extra_topk = layout.extra,
                  .ratio = layout.ratio(),
                  .index_heads = kIndexHeads,
                  .page = main.page,
                  .pages = main.pages,
                  .max_requests = 8,
                  .max_tokens = 64,
                  .max_context = 320,
                  .decode_threshold = 2,
                  .mode = layout.mode,
                  .split = layout.split,
                  .split_size = 10,
                  .target = {.kernel = kernel}};
    if (kernel && std::string(kernel) == "sm90") o.target.device = cuda();
    if (layout.routed)
      o.route = [](const RouteArgs& a) noexcept {
        return (a.tokens >= 20) == (a.model.lists == 1) ? Route::kGathered : Route::kDirect;
      };
    if (layout.separate()) o.workspace_rows = 60;  // two chunks, see batches below
    return o;
  }
  Batch batch() const { return {starts, seq_lens, tokens}; }

  PipelineArgs args(const Plan& plan, std::span<std::byte> workspace) {
    PipelineArgs a{.plan = &plan,
                   .kv = tensor(kv.data(), {tokens, d}),
                   .slots = tensor(slots.data(), {tokens}),
                   .cache = main.cache(),
                   .block_table = main.view(),
                   .q = tensor(q.data(), {tokens, kHeads, d}),
                   .scale = scale(),
                   .sink = tensor(sink.data(), {kHeads}),
                   .out = tensor(out.data(), {tokens, kHeads, layout.model.d_v}),
                   .lse = tensor(lse.data(), {tokens, kHeads}),
                   .workspace = workspace};
    if (layout.extra > 0) {
      a.compressed_kv = tensor(state_kv.data(), {tokens, d});
      a.compressed_slots = tensor(state_slots.data(), {tokens});
      a.compressed = states.cache();
      a.compressed_table = states.view();
    }
    if (layout.indexed)
      a.indexer = {.k = tensor(index_k.data(), {tokens, kIndexDim}),
                   .slots = tensor(index_slots.data(), {tokens}),
                   .keys = keys.cache(),
                   .block_table = keys.view(),
                   .q = tensor(index_q.data(), {tokens, kIndexHeads, kIndexDim}),
                   .weights = tensor(weights.data(), {tokens, kIndexHeads})};
    return a;
  }

  // Output and lse of every token by the book. Prefills of kSeparate read bf16 copies.
  void expected(const Plan& plan, std::vector<float>& want, std::vector<float>& want_lse) {
    const int64_t dv = layout.model.d_v;
    rounding.assign(tokens * kHeads, 0.0f);
    want.assign(tokens * kHeads * dv, 0.0f);
    want_lse.assign(tokens * kHeads, std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < count; ++i)
      for (int64_t t = starts[i]; t < starts[i + 1] && requests[i].seq > 0; ++t) {
        const int64_t pos = requests[i].seq - (starts[i + 1] - t);
        const bool rounded = layout.separate() && plan.prefill_requests()[t] >= 0;
        std::vector<std::vector<double>> list;
        if (!layout.v4())
          for (int64_t id : picked(i, pos)) list.push_back(main.record(main.slot(i, id), rounded));
        for (int64_t p = std::max<int64_t>(pos - layout.topk + 1, 0); layout.v4() && p <= pos; ++p)
          list.push_back(main.record(main.slot(i, p), rounded));
        if (layout.extra > 0)
          for (int64_t id : picked(i, pos))
            list.push_back(states.record(states.slot(i, id), rounded));
        for (int64_t h = 0; h < kHeads; ++h)
          attend_one(list, t, h, &want[(t * kHeads + h) * dv], &want_lse[t * kHeads + h]);
      }
  }

 private:
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(d)); }

  static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = (a ^ b * 0x9e3779b97f4a7c15u) + 0x7f4a7c159e3779b9u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  // Number j of item i of a request: a uniform hash.
  uint64_t hash(int64_t request, What what, int64_t i, int64_t j) const {
    return mix(mix(mix(requests[request].seed, what), i), j);
  }
  bf16 value(int64_t request, What what, int64_t i, int64_t j) const {
    if (what == kKey) return to_bf16(static_cast<float>(key(request, i, j)));
    const auto unit = static_cast<float>(hash(request, what, i, j) >> 40) / (1 << 24);
    // Queries of about unit variance, latents a tenth of that: what the absolute bar is made for.
    return to_bf16((2 * unit - 1) * (what == kQuery ? 1.7f : 0.17f));
  }
  int32_t key(int64_t request, int64_t i, int64_t j) const {
    return static_cast<int32_t>(hash(request, kKey, i, j) % 7) - 3;
  }
  int32_t index_query(int64_t request, int64_t pos, int64_t j) const {
    return static_cast<int32_t>(hash(request, kIndexQuery, pos, j) % 5) - 2;
  }
  float weight(int64_t request, int64_t pos, int64_t h) const {
    const uint64_t x = hash(request, kWeight, pos, h);
    return std::ldexp(x & 1 ? 1.0f : -1.0f, static_cast<int>(x >> 1 & 3) - 1);
  }

  // Items [0, n) of a request, written before the batch came.
  void insert_old(Pages& pages, int64_t request, int64_t n, What what) {
    const int64_t width = record_dim(pages.format);
    std::vector<bf16> rows(n * width);
    std::vector<int64_t> where(n);
    for (int64_t i = 0; i < n; ++i) {
      where[i] = pages.slot(request, i);
      for (int64_t j = 0; j < width; ++j) rows[i * width + j] = value(request, what, i, j);
    }
    write({.kv = tensor(rows.data(), {n, width}),
           .slots = tensor(where.data(), {n}),
           .cache = pages.cache(),
           .target = {.kernel = "reference"}});
  }

  void new_token(int64_t i, int64_t p, int64_t t) {
    slots[t] = main.slot(i, p);
    for (int64_t j = 0; j < d; ++j) kv[t * d + j] = value(i, kToken, p, j);
    for (int64_t j = 0; j < kHeads * d; ++j) q[t * kHeads * d + j] = value(i, kQuery, p, j);
    for (int64_t h = 0; h < kIndexHeads; ++h) weights[t * kIndexHeads + h] = weight(i, p, h);
    for (int64_t j = 0; j < kIndexHeads * kIndexDim; ++j)
      index_q[t * kIndexHeads * kIndexDim + j] = to_e4m3(static_cast<float>(index_query(i, p, j)));
    if ((p + 1) % layout.ratio() != 0) return;  // this token ends no state
    const int64_t s = p / layout.ratio();
    state_slots[t] = states.slot(i, s);
    index_slots[t] = keys.slot(i, s);
    for (int64_t j = 0; j < d; ++j) state_kv[t * d + j] = value(i, kState, s, j);
    for (int64_t j = 0; j < kIndexDim; ++j) index_k[t * kIndexDim + j] = value(i, kKey, s, j);
  }

  // Ids that the token at `pos` attends to, by the indexer or all of them.
  std::vector<int64_t> picked(int64_t i, int64_t pos) const {
    std::vector<int64_t> ids((pos + 1) / layout.ratio());
    std::iota(ids.begin(), ids.end(), 0);
    if (!layout.indexed) return ids;
    std::vector<double> logit(ids.size(), 0.0);
    for (size_t s = 0; s < ids.size(); ++s)
      for (int64_t h = 0; h < kIndexHeads; ++h) {
        int64_t dot = 0;
        for (int64_t j = 0; j < kIndexDim; ++j)
          dot += index_query(i, pos, h * kIndexDim + j) * key(i, static_cast<int64_t>(s), j);
        logit[s] += weight(i, pos, h) * static_cast<double>(std::max<int64_t>(dot, 0));
      }
    std::stable_sort(ids.begin(), ids.end(),
                     [&](int64_t a, int64_t b) { return logit[a] > logit[b]; });
    const size_t k = layout.v4() ? layout.extra : layout.topk;
    if (ids.size() > k) ids.resize(k);
    return ids;
  }

  void attend_one(const std::vector<std::vector<double>>& list, int64_t t, int64_t h, float* o,
                  float* lse_out) {
    std::vector<double> s(list.size());
    for (size_t j = 0; j < list.size(); ++j) {
      double terms = 0;
      for (int64_t i = 0; i < d; ++i) {
        const double term = static_cast<double>(to_float(q[(t * kHeads + h) * d + i])) * list[j][i];
        s[j] += term;
        terms += std::abs(term);
      }
      s[j] *= scale();
      float& most = rounding[t * kHeads + h];
      most = std::max(most, static_cast<float>(terms * scale() * 0x1p-10));
    }
    const double top = *std::max_element(s.begin(), s.end());
    double sum = 0;
    for (double x : s) sum += std::exp(x - top);
    const double l = top + std::log(sum);
    *lse_out = static_cast<float>(l);
    for (int64_t i = 0; i < layout.model.d_v; ++i) {
      double x = 0;
      for (size_t j = 0; j < list.size(); ++j) x += std::exp(s[j] - l) * list[j][i];
      o[i] = static_cast<float>(x / (1 + std::exp(sink[h] - l)));
    }
  }
};

inline std::vector<Layout> layouts() {
  using enum Mode;
  const CacheFormat v32 = CacheFormat::kV32Fp8, v4 = CacheFormat::kV4Fp8;
  return {
      {"v32_mixed", kV32, v32, kMixed},
      {"v32_direct", kV32, v32, kDirect},
      {"v32_separate", kV32, v32, kSeparate},
      {.name = "v32_routed", .format = v32, .mode = kAuto, .routed = true},
      {"v32_bf16", kV32, CacheFormat::kV32Bf16, kBf16},
      {"v4_mixed", kV4, v4, kMixed, 8, 6},
      {"v4_direct", kV4, v4, kDirect, 8, 6},
      {"v4_separate", kV4, v4, kSeparate, 8, 6},
      {.name = "v4_routed",
       .model = kV4,
       .format = v4,
       .mode = kAuto,
       .topk = 8,
       .extra = 6,
       .routed = true},
      {.name = "v4_all_states_routed",
       .model = kV4,
       .format = v4,
       .mode = kAuto,
       .topk = 8,
       .extra = 20,
       .indexed = false,
       .routed = true},
      {"v4_bf16", kV4, CacheFormat::kV4Bf16, kBf16, 8, 6},
      {"v4_all_states_mixed", kV4, v4, kMixed, 8, 20, false},
      {"v4_all_states_separate", kV4, v4, kSeparate, 8, 20, false},
      {.name = "v41_ratio_1_mixed",
       .model = kV4,
       .format = v4,
       .topk = 8,
       .extra = 6,
       .tokens_per_state = 1},
      {.name = "v41_ratio_2_separate",
       .model = kV4,
       .format = v4,
       .mode = kSeparate,
       .topk = 8,
       .extra = 6,
       .tokens_per_state = 2},
      {"v4_window_direct", kV4, v4, kDirect, 8, 0, false},
      {"v4_window_separate", kV4, v4, kSeparate, 8, 0, false},
  };
}

inline Layout layout_named(const std::string& name) {
  for (const Layout& l : layouts())
    if (l.name == name) return l;
  throw std::runtime_error("no layout " + name);
}

// The same with cuts that do not depend on the batch.
inline std::vector<Layout> fixed_layouts() {
  std::vector<Layout> s = layouts();
  for (Layout& l : s) l.split = SplitPolicy::kFixed;
  return s;
}

// Decodes with a speculative token, one without, a prefill behind a prefix, one from the start (in
// 60 workspace rows they do not fit together), a padded request; padding after them.
inline std::vector<Request> mixed_batch() {
  return {{1, 2, 70}, {2, 1, 37}, {3, 2, 2}, {4, 20, 53}, {5, 17, 17}, {6, 3, 0}};
}
inline constexpr int64_t kPadding = 4;

}  // namespace winnow::testing
