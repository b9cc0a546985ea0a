// Layers of V4.1 that share states, blocks and ids through pipeline(), bit for bit what the single
// verbs give one after the other, with hostile block tables; and choices that name what is not
// there.
#include "target.h"
#include "v41_steps_problem.h"

namespace winnow::testing {
namespace {

steps::Kind any_kind(Source& s) {
  steps::Kind k{.name = "", .ratio = draw32(s, 1, 2)};
  k.context = 32;
  k.tokens = 12;
  k.page = draw32(s, 2, 5);
  k.window = draw32(s, 1, 5);
  k.extra = draw32(s, 1, 12);
  k.gate = k.ratio > 1;
  k.bias = k.gate && chance(s, 30);
  k.indexed = true;
  k.wide = chance(s, 30);
  k.ring = chance(s, 50);
  constexpr Mode modes[] = {Mode::kAuto, Mode::kMixed, Mode::kSeparate, Mode::kDirect};
  if (!k.wide) k.mode = modes[draw(s, 0, 3)];
  if (chance(s, 30)) k.kernel = "reference";
  return k;
}

// The same entries of the tables name no page on both sides.
void damage(Source& s, steps::Pages& one, steps::Pages& other) {
  for (size_t i = 0; i < one.table.size(); ++i)
    if (chance(s, 5)) one.table[i] = other.table[i] = index_for(s, one.cache.pages, 100);
}

// Ids that name nothing are attended to as -1 is; the others are states that the request has.
void take_any_ids(Source& s, steps::SharingLayers& layers, steps::Shared& one,
                  steps::Shared& other) {
  const Plan& plan = layers.layer.plan;
  const int64_t chosen = layers.layer.k.extra;
  const int64_t room = one.source.states.view().shape[1] * layers.layer.k.page;
  for (int64_t t = 0; t < layers.layer.tokens; ++t)
    for (int64_t i = 0; i < chosen; ++i) {
      const int32_t states = (plan.positions()[t] + 1) / layers.layer.k.ratio;
      const bool there = states > 0 && chance(s, 60);
      const int32_t id = there ? draw32(s, 0, states - 1) : index_for(s, room, 100);
      one.ids[t * chosen + i] = id;
      other.ids[t * chosen + i] = there ? id : -1;
    }
  const MappedVector<bf16> q = layers.layer.q;
  pipeline(layers.args(one, steps::Role::kTakes));
  layers.layer.q = q;
  pipeline(layers.args(other, steps::Role::kTakes));
  const auto bytes = static_cast<size_t>(layers.layer.tokens * steps::kHeads * steps::kDim) * 2;
  EXPECT_EQ(std::memcmp(one.out.data(), other.out.data(), bytes), 0);
}

void run(Source& s) {
  const steps::Kind kind = any_kind(s);
  const steps::Choice choice{draw32(s, 1, 4), draw32(s, 1, 6)};
  steps::SharingLayers layers(kind, choice);
  layers.layer.values = Source(s());
  steps::Shared one(kind, choice), other(kind, choice);
  damage(s, one.source.states, other.source.states);
  damage(s, one.source.keys, other.source.keys);
  for (size_t i = 0; i < one.windows.size(); ++i)
    damage(s, one.windows[i].window, other.windows[i].window);
  int32_t done[] = {0, 0};
  for (int64_t n = draw(s, 1, 3); n > 0; --n) {
    steps::Step step{};
    for (int r = 0; r < 2; ++r) {
      step.query[r] = draw32(s, r == 0 ? 1 : 0, 6);
      step.seq[r] = done[r] += step.query[r];
    }
    steps::expect_same_shared_step(layers, step, one, other);
    if (::testing::Test::HasFailure()) return;
  }
  take_any_ids(s, layers, one, other);
}

const FuzzTarget shared_layers_target{"shared_layers", 1, run};

}  // namespace
}  // namespace winnow::testing
