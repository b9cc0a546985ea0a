// A V4 layer of any kind whose batches go from its projections through pipeline() in one call
// (LayerSteps), and through the single verbs one after the other.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "core/formats.h"
#include "fuzz/source.h"
#include "testing.h"
#include "winnow/winnow.h"

namespace winnow::testing::steps {

inline constexpr int64_t kHeads = 3, kIndexHeads = 2, kRequests = 2, kDim = 512;

struct Kind {
  std::string name;
  int32_t ratio = 4, extra = 0;
  bool overlap = false, gate = true, bias = true, indexed = false;
  bool wide = false;  // caches in bf16
  bool ring = false;
  Mode mode = Mode::kAuto;
  const char* kernel = nullptr;
  int32_t context = 320, page = 8, window = 16, tokens = 256;  // the most
  SplitPolicy split = SplitPolicy::kBalanced;
  DeviceKind device = DeviceKind::kCpu;
};

// Each kind on the CPU, and on a Hopper device where one is requested.
inline std::vector<Kind> on_devices(std::vector<Kind> kinds) {
  if (!device_present()) return kinds;
  for (size_t i = 0, count = kinds.size(); i < count; ++i) {
    Kind k = kinds[i];
    if (k.kernel) continue;  // a CPU kernel
    k.name += "_cuda";
    k.device = DeviceKind::kCuda;
    kinds.push_back(k);
  }
  return kinds;
}

// New tokens of each request, and its length with them: decodes stand first.
struct Step {
  int32_t query[kRequests], seq[kRequests];
};
// A cache that both sides have, all pages dealt out to the requests in turn.
struct Pages {
  int32_t page;
  Guarded<uint8_t> bytes;
  Guarded<int32_t> table;
  Cache cache;

  Pages(CacheFormat format, int64_t tokens, int32_t page_)
      : page(page_),
        bytes(count(tokens, page) * page_bytes(format, page), 0),
        table(count(tokens, page)) {
    cache = {bytes.data(), format, count(tokens, page), page};
    const int64_t wide = count(tokens, page) / kRequests;
    for (int64_t i = 0; i < count(tokens, page); ++i)
      table[i] = static_cast<int32_t>(i % wide * kRequests + i / wide);
  }
  static int64_t count(int64_t tokens, int32_t page) { return kRequests * (tokens / page + 1); }
  Tensor view() {
    return tensor(table.data(), {kRequests, std::ssize(table.values()) / kRequests});
  }
  int64_t slot(int64_t request, int64_t position) const {
    const int64_t wide = static_cast<int64_t>(table.size()) / kRequests;
    const int64_t at = table[request * wide + position / page];
    return at < 0 || at >= cache.pages ? -1 : at * page + position % page;
  }
};

// What one side keeps between steps.
struct Side {
  Pages window, states, keys;
  Guarded<float> state, index_state;

  explicit Side(const Kind& k)
      : window(k.wide ? CacheFormat::kV4Bf16 : CacheFormat::kV4Fp8, k.context, k.page),
        states(window.cache.format, k.context / k.ratio, k.page),
        keys(k.wide ? CacheFormat::kIndexKeysBf16 : CacheFormat::kIndexKeys, k.context / k.ratio,
             k.page),
        state(kRequests * k.context * 2 * values(k, kDim), 0),
        index_state(kRequests * k.context * 2 * values(k, 128), 0) {}
  static int64_t values(const Kind& k, int64_t d) { return k.overlap ? 2 * d : d; }
};

class Layer {
 public:
  explicit Layer(const Kind& kind)
      : k(kind),
        plan({.model = kV4,
              .format = kind.wide ? CacheFormat::kV4Bf16 : CacheFormat::kV4Fp8,
              .heads = kHeads,
              .topk = kind.window,
              .extra_topk = kind.extra,
              .ratio = kind.ratio,
              .index_heads = kIndexHeads,
              .page = kind.page,
              .pages = Pages::count(kind.context, kind.page),
              .max_requests = kRequests,
              .max_tokens = kind.tokens,
              .max_context = kind.context,
              .mode = kind.mode,
              .split = kind.split,
              .target = {.device = {kind.device}, .kernel = kind.kernel}}),
        angles(kind.context * 64),
        kv_weight(kDim),
        weight(kDim),
        bias(kind.ratio * 2 * kDim),
        state_table(kRequests),
        workspace(pipeline_workspace_bytes(plan)) {
    for (Guarded<float>* of : {&kv_weight, &weight, &bias})
      for (float& x : *of) x = 1 + 0.3f * values.normal();
    rope_table({.theta = 160000, .table = tensor(angles.data(), {k.context, 2, 32})});
    for (int64_t r = 0; r < kRequests; ++r) state_table[r] = static_cast<int32_t>(r);
  }

  void draw(const Step& step) {
    std::vector<int32_t> starts = {0};
    for (const int32_t n : step.query) starts.push_back(starts.back() + n);
    plan.refill({starts, step.seq});
    tokens = plan.tokens();
    const auto fill = [&](auto& numbers, int64_t count) {
      numbers.resize(count);
      for (auto& x : numbers)
        if constexpr (sizeof x == 4) x = values.normal();
        else x = to_bf16(values.normal());
    };
    fill(q, tokens * kHeads * kDim);
    fill(kv, tokens * kDim);
    fill(rows, tokens * columns(kDim));
    fill(index_rows, tokens * columns(128));
    fill(index_q, tokens * kIndexHeads * 128);
    fill(index_weights, tokens * kIndexHeads);
  }
  int64_t columns(int64_t d) const { return (k.gate ? 2 : 1) * Side::values(k, d); }
  Rope rope() { return {.table = tensor(angles.data(), {k.context, 2, 32})}; }
  Tensor positions() { return tensor(plan.positions().data(), {tokens}); }
  Tensor requests() { return tensor(plan.request_ids().data(), {tokens}); }
  Target target() const { return {.device = {k.device}, .kernel = k.kernel}; }

  // Rows of the compressor of width d, as both sides have it.
  CompressArgs compressor(Side& s, int64_t d) {
    const bool main = d == kDim;
    const int64_t width = Side::values(k, d);
    CompressArgs a{.rows = tensor((main ? rows : index_rows).data(), {tokens, columns(d)}),
                   .positions = positions(),
                   .requests = requests(),
                   .ratio = k.ratio,
                   .overlap = k.overlap,
                   .gate = k.gate,
                   .norm = {.weight = tensor(weight.data(), {d})},
                   .target = target()};
    if (k.bias) a.bias = tensor(bias.data(), {k.ratio, width});
    if (k.gate)
      a.state = {.rows = tensor((main ? s.state : s.index_state).data(),
                                {kRequests, k.context, 2 * width}),
                 .table = tensor(state_table.data(), {kRequests, 1}),
                 .ring = k.ring};
    return a;
  }
  PipelineArgs args(Side& s, bf16* out) {
    slots.resize(tokens);
    for (int64_t t = 0; t < tokens; ++t)
      slots[t] = s.window.slot(plan.request_ids()[t], plan.positions()[t]);
    PipelineArgs a{.plan = &plan,
                   .kv = tensor(kv.data(), {tokens, kDim}),
                   .slots = tensor(slots.data(), {tokens}),
                   .cache = s.window.cache,
                   .block_table = s.window.view(),
                   .q = tensor(q.data(), {tokens, kHeads, kDim}),
                   .scale = 0.05f,
                   .out = tensor(out, {tokens, kHeads, kDim}),
                   .workspace = {workspace.data(), workspace.size()}};
    if (k.extra > 0) {
      a.compressed = s.states.cache;
      a.compressed_table = s.states.view();
    }
    if (k.indexed) {
      a.indexer.keys = s.keys.cache;
      a.indexer.block_table = s.keys.view();
      codes.assign(tokens * kIndexHeads * 128, 0);
      made_weights.assign(tokens * kIndexHeads, 0);
      a.indexer.q = k.wide
                        ? tensor(reinterpret_cast<bf16*>(codes.data()), {tokens, kIndexHeads, 128})
                        : tensor(reinterpret_cast<e4m3*>(codes.data()), {tokens, kIndexHeads, 128});
      a.indexer.weights = tensor(made_weights.data(), {tokens, kIndexHeads});
    }
    return a;
  }
  // The same step in one call.
  PipelineArgs fused(Side& s, bf16* out) {
    PipelineArgs a = args(s, out);
    a.steps = {
        .rope = rope(), .kv_norm = {.weight = tensor(kv_weight.data(), {kDim})}, .q_norm = {}};
    const auto set = [&](Compressor& to, const CompressArgs& from) {
      to = {.rows = from.rows,
            .overlap = from.overlap,
            .gate = from.gate,
            .bias = from.bias,
            .state = from.state,
            .norm = from.norm};
    };
    if (k.extra > 0) set(a.steps.states, compressor(s, kDim));
    if (k.indexed) {
      set(a.steps.index, compressor(s, 128));
      a.steps.index_query = {.q = tensor(index_q.data(), {tokens, kIndexHeads, 128}),
                             .weights = tensor(index_weights.data(), {tokens, kIndexHeads}),
                             .factor = 0.0625f};
    }
    return a;
  }
  // Entries as rows of their own, rotated, and their slots.
  void entries(Side& s, int64_t d, MappedVector<bf16>& latent, MappedVector<int64_t>& to) {
    Pages& pages = d == kDim ? s.states : s.keys;
    latent.assign(tokens * d, bf16{0});
    to.resize(tokens);
    CompressArgs a = compressor(s, d);
    a.latent = tensor(latent.data(), {tokens, d});
    compress(a);
    MappedVector<int32_t> first(tokens, -1);
    for (int64_t t = 0; t < tokens; ++t)
      if (const int32_t p = plan.positions()[t]; (p + 1) % k.ratio == 0)
        first[t] = p / k.ratio * k.ratio;
    const Tensor view = tensor(latent.data(), {tokens, 1, d});
    rotate({.x = view,
            .positions = tensor(first.data(), {tokens}),
            .rope = rope(),
            .out = view,
            .target = target()});
    compressed_slots({.positions = positions(),
                      .requests = requests(),
                      .block_table = pages.view(),
                      .ratio = k.ratio,
                      .page = k.page,
                      .pages = pages.cache.pages,
                      .slots = tensor(to.data(), {tokens}),
                      .target = {.device = {k.device}}});
    EXPECT_TRUE(device_finished());
  }
  void composed(Side& s, bf16* out) {
    PipelineArgs a = args(s, out);
    prepare_query({.q = a.q,
                   .norm = {},
                   .positions = positions(),
                   .rope = rope(),
                   .out = a.q,
                   .target = target()});
    NormArgs normed;
    normed.rows[0] = {.x = a.kv, .out = a.kv, .norm = {.weight = tensor(kv_weight.data(), {kDim})}};
    normed.target = target();
    norm(normed);
    const Tensor view = tensor(kv.data(), {tokens, 1, kDim});
    rotate({.x = view, .positions = positions(), .rope = rope(), .out = view, .target = target()});
    MappedVector<bf16> states, keys;
    MappedVector<int64_t> state_slots, key_slots;
    if (k.extra > 0) {
      entries(s, kDim, states, state_slots);
      a.compressed_kv = tensor(states.data(), {tokens, kDim});
      a.compressed_slots = tensor(state_slots.data(), {tokens});
    }
    if (k.indexed) {
      entries(s, 128, keys, key_slots);
      a.indexer.k = tensor(keys.data(), {tokens, 128});
      a.indexer.slots = tensor(key_slots.data(), {tokens});
      index_query({.q = tensor(index_q.data(), {tokens, kIndexHeads, 128}),
                   .weights = tensor(index_weights.data(), {tokens, kIndexHeads}),
                   .positions = positions(),
                   .rope = rope(),
                   .factor = 0.0625f,
                   .out = a.indexer.q,
                   .out_weights = a.indexer.weights,
                   .target = target()});
    }
    pipeline(a);
    Rope back = rope();
    back.inverse = true;
    rotate({.x = a.out, .positions = positions(), .rope = back, .out = a.out, .target = target()});
    EXPECT_TRUE(device_finished());
  }

  Kind k;
  Plan plan;
  Source values{5};
  int64_t tokens = 0;
  MappedVector<bf16> q, kv, index_q;
  MappedVector<float> rows, index_rows, index_weights, made_weights;
  MappedVector<int64_t> slots;
  MappedVector<uint16_t> codes;

 private:
  Guarded<float> angles, kv_weight, weight, bias;
  Guarded<int32_t> state_table;
  Guarded<std::byte> workspace;
};

template <class T>
bool same(const Guarded<T>& a, const Guarded<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// One batch through both. Whether all that they wrote is the same, bit for bit.
inline void expect_same_step(Layer& layer, const Step& step, Side& one, Side& other) {
  layer.draw(step);
  const MappedVector<bf16> q = layer.q, kv = layer.kv;
  Guarded<bf16> got(layer.tokens * kHeads * kDim), want(layer.tokens * kHeads * kDim);
  pipeline(layer.fused(one, got.data()));
  ASSERT_TRUE(device_finished());
  const MappedVector<uint16_t> codes = layer.codes;
  ASSERT_EQ(std::memcmp(kv.data(), layer.kv.data(), kv.size() * 2), 0) << "kv is an input";
  layer.q = q;
  layer.composed(other, want.data());
  ASSERT_EQ(codes, layer.codes);
  ASSERT_TRUE(same(one.window.bytes, other.window.bytes));
  ASSERT_TRUE(same(one.states.bytes, other.states.bytes));
  ASSERT_TRUE(same(one.keys.bytes, other.keys.bytes));
  ASSERT_TRUE(same(one.state, other.state));
  ASSERT_TRUE(same(one.index_state, other.index_state));
  ASSERT_TRUE(same(got, want));
}

}  // namespace winnow::testing::steps
