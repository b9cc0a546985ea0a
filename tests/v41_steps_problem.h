// Layers of V4.1 that share: one keeps states and index keys and finds blocks, one chooses anew
// inside these, one takes that choice. Their batches go through pipeline() and through the single
// verbs one after the other.
#pragma once

#include <cstring>
#include <deque>
#include <vector>

#include "layer_steps_problem.h"

namespace winnow::testing::steps {

inline constexpr float kTinyEps = 1e-20f;

enum class Role : uint8_t { kSource, kChooses, kTakes };
inline constexpr Role kRoles[] = {Role::kSource, Role::kChooses, Role::kTakes};

// Entries of a layer's kind that a token attends to, and the blocks that they are looked for in.
struct Choice {
  int32_t blocks = 4, block_size = 8;
};

// A layer's part of a model: its own window, and what it shares with the layers after it.
struct Shared {
  Side source;
  std::deque<Side> windows;  // of kRoles; a Side does not move
  Guarded<int32_t> ids, blocks;
  Guarded<bf16> latent, projected, out;

  explicit Shared(const Kind& k, const Choice& choice = {})
      : source(k),
        ids(k.tokens * k.extra),
        blocks(k.tokens * choice.blocks),
        latent(k.tokens * kDim),
        projected(k.tokens * 128),
        out(k.tokens * kHeads * kDim) {
    for (size_t i = 0; i < std::size(kRoles); ++i) windows.emplace_back(k);
    for (bf16& x : latent) x = bf16{0};
  }
};

class SharingLayers {
 public:
  explicit SharingLayers(const Kind& kind, const Choice& choice_ = {})
      : layer(kind), choice(choice_), weight(kDim) {
    for (float& x : weight) x = 1 + 0.3f * layer.values.normal();
  }

  // What a call of pipeline() takes in this role, from projections on.
  PipelineArgs args(Shared& s, Role role) {
    PipelineArgs a = layer.fused(s.windows[static_cast<size_t>(role)], s.out.data());
    a.compressed = s.source.states.cache;
    a.compressed_table = s.source.states.view();
    a.indexer.keys = s.source.keys.cache;
    a.indexer.block_table = s.source.keys.view();
    a.steps.states = a.steps.index = {};
    a.steps.q_norm.kind = NormKind::kNone;
    a.steps.kv_norm.eps = kTinyEps;
    a.ids = tensor(s.ids.data(), {layer.tokens, layer.k.extra});
    const Tensor blocks = tensor(s.blocks.data(), {layer.tokens, choice.blocks});
    if (role != Role::kTakes) a.blocks.size = choice.block_size;
    if (role == Role::kSource) {
      a.indexer.k = tensor(s.projected.data(), {layer.tokens, 128});
      a.steps.index.norm = norm_of(128);
      a.blocks.best = blocks;
    } else if (role == Role::kChooses) {
      a.blocks.within = blocks;
    } else {
      a.indexer = {};
      a.steps.index_query = {};
    }
    return a;
  }

  // Entries and their latents, and a projection of these.
  void compress_states(Shared& s, bool fused) {
    MappedVector<int64_t> slots(layer.tokens);
    find_slots(s.source.states, slots);
    CompressArgs a = layer.compressor(s.source, kDim);
    a.norm = norm_of(kDim);
    a.latent = tensor(s.latent.data(), {layer.tokens, kDim});
    if (fused) {
      a.rope = layer.rope();
      a.slots = tensor(slots.data(), {layer.tokens});
      a.cache = s.source.states.cache;
    }
    compress(a);
    EXPECT_TRUE(device_finished());
    for (int64_t t = 0; t < layer.tokens; ++t)
      std::memcpy(&s.projected[t * 128], &s.latent[t * kDim], 128 * sizeof(bf16));
    if (fused) return;
    MappedVector<bf16> turned(s.latent.begin(), s.latent.begin() + layer.tokens * kDim);
    turn(turned, kDim, state_starts());
    write({.kv = tensor(turned.data(), {layer.tokens, kDim}),
           .slots = tensor(slots.data(), {layer.tokens}),
           .cache = s.source.states.cache,
           .target = layer.target()});
    EXPECT_TRUE(device_finished());
  }

  // The step of args() by the single verbs.
  void by_verbs(Shared& s, Role role) {
    PipelineArgs a = args(s, role);
    prepare_query({.q = a.q,
                   .norm = a.steps.q_norm,
                   .positions = layer.positions(),
                   .rope = layer.rope(),
                   .out = a.q,
                   .target = layer.target()});
    MappedVector<bf16> kv = layer.kv;
    normalise(kv, kDim, a.steps.kv_norm);
    turn(kv, kDim, layer.positions());
    a.kv.data = kv.data();
    write({.plan = a.plan, .kv = a.kv, .slots = a.slots, .cache = a.cache});
    if (role == Role::kSource) write_keys(s);
    if (role != Role::kTakes) choose(a);
    Rope back = layer.rope();
    back.inverse = true;
    if (layer.plan.mode() == Mode::kSeparate) {
      // Chunks are gathered: the stages as one call, which other tests take apart.
      a.steps = {};
      a.indexer = {};
      a.blocks = {};
      pipeline(a);
    } else {
      attend_to(a);
    }
    rotate({.x = a.out,
            .positions = layer.positions(),
            .rope = back,
            .out = a.out,
            .target = layer.target()});
    EXPECT_TRUE(device_finished());
  }

  Layer layer;
  Choice choice;

 private:
  Norm norm_of(int64_t d) { return {.weight = tensor(weight.data(), {d}), .eps = kTinyEps}; }
  Tensor state_starts() { return tensor(layer.plan.state_starts().data(), {layer.tokens}); }

  void find_slots(Pages& pages, MappedVector<int64_t>& slots) {
    compressed_slots({.positions = layer.positions(),
                      .requests = layer.requests(),
                      .block_table = pages.view(),
                      .ratio = layer.k.ratio,
                      .page = pages.page,
                      .pages = pages.cache.pages,
                      .slots = tensor(slots.data(), {layer.tokens}),
                      .target = layer.target()});
  }
  void normalise(MappedVector<bf16>& rows, int64_t d, const Norm& by) {
    const Tensor view = tensor(rows.data(), {layer.tokens, d});
    NormArgs a;
    a.rows[0] = {.x = view, .out = view, .norm = by};
    a.target = layer.target();
    norm(a);
  }
  void turn(MappedVector<bf16>& rows, int64_t d, const Tensor& positions) {
    const Tensor view = tensor(rows.data(), {layer.tokens, 1, d});
    rotate({.x = view,
            .positions = positions,
            .rope = layer.rope(),
            .out = view,
            .target = layer.target()});
  }
  void write_keys(Shared& s) {
    MappedVector<bf16> keys(s.projected.begin(), s.projected.begin() + layer.tokens * 128);
    MappedVector<int64_t> slots(layer.tokens);
    find_slots(s.source.keys, slots);
    normalise(keys, 128, norm_of(128));
    turn(keys, 128, state_starts());
    write({.kv = tensor(keys.data(), {layer.tokens, 128}),
           .slots = tensor(slots.data(), {layer.tokens}),
           .cache = s.source.keys.cache,
           .target = layer.target()});
    EXPECT_TRUE(device_finished());
  }
  void choose(const PipelineArgs& a) {
    const RawIndexQuery& raw = a.steps.index_query;
    index_query({.q = raw.q,
                 .weights = raw.weights,
                 .positions = layer.positions(),
                 .rope = layer.rope(),
                 .factor = raw.factor,
                 .out = a.indexer.q,
                 .out_weights = a.indexer.weights,
                 .target = layer.target()});
    const int64_t columns = layer.k.context / layer.k.ratio;
    MappedVector<float> logits(layer.tokens * columns);
    const Tensor ends = tensor(layer.plan.key_ends().data(), {layer.tokens});
    score({.plan = a.plan,
           .q = a.indexer.q,
           .weights = a.indexer.weights,
           .keys = a.indexer.keys,
           .block_table = a.indexer.block_table,
           .requests = layer.requests(),
           .ends = ends,
           .logits = tensor(logits.data(), {layer.tokens, columns})});
    select({.logits = tensor(logits.data(), {layer.tokens, columns}),
            .ends = ends,
            .ids = a.ids,
            .blocks = a.blocks,
            .target = layer.target()});
    EXPECT_TRUE(device_finished());
  }
  void attend_to(const PipelineArgs& a) {
    const int64_t tokens = layer.tokens, window = layer.k.window, chosen = layer.k.extra;
    MappedVector<int32_t> slots(tokens * chosen), near(tokens * window), lengths(tokens);
    locate({.ids = a.ids,
            .requests = layer.requests(),
            .block_table = a.compressed_table,
            .page = a.compressed.page,
            .pages = a.compressed.pages,
            .slots = tensor(slots.data(), {tokens, chosen}),
            .target = layer.target()});
    window_lists({.positions = layer.positions(),
                  .requests = layer.requests(),
                  .block_table = a.block_table,
                  .window = layer.k.window,
                  .page = a.cache.page,
                  .pages = a.cache.pages,
                  .lists = tensor(near.data(), {tokens, window}),
                  .lengths = tensor(lengths.data(), {tokens}),
                  .target = layer.target()});
    attend({.plan = a.plan,
            .q = a.q,
            .lists = {KvList{.cache = a.cache, .indices = tensor(near.data(), {tokens, window})},
                      KvList{.cache = a.compressed,
                             .indices = tensor(slots.data(), {tokens, chosen})}},
            .scale = a.scale,
            .out = a.out,
            .workspace = a.workspace});
    EXPECT_TRUE(device_finished());
  }

  Guarded<float> weight;
};

// One batch through all three, in both ways. Whether all that they wrote is the same, bit for bit.
inline void expect_same_shared_step(SharingLayers& layers, const Step& step, Shared& one,
                                    Shared& other) {
  for (const Role role : kRoles) {
    SCOPED_TRACE(static_cast<int>(role));
    layers.layer.draw(step);
    const MappedVector<bf16> q = layers.layer.q;
    if (role == Role::kSource)
      for (Shared* s : {&one, &other}) layers.compress_states(*s, s == &one);
    pipeline(layers.args(one, role));
    ASSERT_TRUE(device_finished());
    layers.layer.q = q;
    layers.by_verbs(other, role);
    const auto part = [&](auto& values, int64_t width) {
      return std::vector(values.begin(), values.begin() + layers.layer.tokens * width);
    };
    ASSERT_EQ(part(one.ids, layers.layer.k.extra), part(other.ids, layers.layer.k.extra));
    ASSERT_EQ(part(one.blocks, layers.choice.blocks), part(other.blocks, layers.choice.blocks));
    const auto at = static_cast<size_t>(role);
    ASSERT_TRUE(same(one.windows[at].window.bytes, other.windows[at].window.bytes));
    ASSERT_TRUE(same(one.source.states.bytes, other.source.states.bytes));
    ASSERT_TRUE(same(one.source.keys.bytes, other.source.keys.bytes));
    ASSERT_TRUE(same(one.source.state, other.source.state));
    ASSERT_EQ(std::memcmp(one.out.data(), other.out.data(),
                          layers.layer.tokens * kHeads * kDim * sizeof(bf16)),
              0);
  }
}

}  // namespace winnow::testing::steps
