// What pipeline() refuses, and what both it and its checks ask about a layer.
#pragma once

#include "winnow/pipeline.h"

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

// V3.2 always; V4 unless all compressed states are attended to.
inline bool uses_indexer(const PipelineArgs& a) {
  const Layer layer(a.plan->options());
  return !layer.v4 || (layer.compressed && a.indexer.q);
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
