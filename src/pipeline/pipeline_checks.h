// What pipeline() refuses, and what both it and its checks ask about a layer.
#pragma once

#include "winnow/pipeline.h"

// Beside the public verbs, in their namespace: a shared library hides it.
#pragma GCC visibility push(hidden)
namespace winnow {

// Which stages a plan's layer has.
struct Layer {
  bool v4;  // sliding window and, if compressed, a second list
  bool compressed;
  bool separate;
  explicit Layer(const PlanOptions& o)
      : v4(o.model.lists == 2), compressed(o.extra_topk > 0), separate(o.mode == Mode::kSeparate) {}
};

// Whether the call begins at a layer's projections.
inline bool has_steps(const PipelineArgs& a) { return static_cast<bool>(a.steps.rope.table); }

// V3.2 unless the layer takes another's choice; V4 unless that or all compressed states are
// attended to.
inline bool uses_indexer(const PipelineArgs& a) {
  const Layer layer(a.plan->options());
  return layer.v4 ? layer.compressed && a.indexer.q : a.indexer.q || !a.ids;
}

// V4: whether the layer writes compressed states that it is given, or index keys. Where not, and no
// steps make them, it reads those of another layer.
inline bool given_states(const PipelineArgs& a) { return a.compressed_kv || a.compressed_slots; }
inline bool given_keys(const PipelineArgs& a) {
  return !Layer(a.plan->options()).v4 || a.indexer.k || a.indexer.slots;
}

// V4.1: whether index keys are made of the latents' projections.
inline bool projected_keys(const PipelineArgs& a) {
  return has_steps(a) && !a.steps.index.rows && a.indexer.k && !a.indexer.slots;
}

// Whether the plan works with other ranks, and whether they share out the context.
inline bool several_ranks(const PlanOptions& o) {
  return o.parallel.spread != Spread::kNone && o.parallel.comm && o.parallel.comm->size() > 1;
}
inline bool by_context(const PlanOptions& o) {
  return several_ranks(o) && o.parallel.spread == Spread::kContext;
}

// Everything that a stage could throw later is thrown here, with the names of PipelineArgs.
void check_pipeline(const PipelineArgs& args);

}  // namespace winnow
#pragma GCC visibility pop
