// All stages in one call, in C.
#include "winnow/pipeline.h"

#include "c_api/common.h"
#include "c_api/layers.h"

using winnow::internal::c_api::blocks_of;
using winnow::internal::c_api::guarded;
using winnow::internal::c_api::In;
using winnow::internal::c_api::norm_of;
using winnow::internal::c_api::rope_of;
using winnow::internal::c_api::scale_of;

namespace {

winnow::Compressor compressor_of(const winnow_compressor& c, const In& in) {
  return {.rows = in(c.rows, "rows"),
          .overlap = c.overlap,
          .gate = c.gate,
          .bias = in(c.bias, "bias"),
          .state = {.rows = in(c.state_rows, "state_rows"),
                    .table = in(c.state_table, "state_table"),
                    .ring = c.state_ring},
          .norm = norm_of(c.norm, in),
          .hadamard = c.hadamard,
          .scale = scale_of(c.scale, in)};
}

winnow::LayerSteps steps_of(const winnow_layer_steps& s, const In& in) {
  return {.rope = rope_of(s.rope, in),
          .kv_norm = norm_of(s.kv_norm, in),
          .q_norm = norm_of(s.q_norm, in),
          .scale = scale_of(s.scale, in),
          .states = compressor_of(s.states, in),
          .index = compressor_of(s.index, in),
          .index_query = {.q = in(s.index_q, "index_q"),
                          .weights = in(s.index_weights, "index_weights"),
                          .hadamard = s.index_hadamard,
                          .scale = scale_of(s.index_scale, in),
                          .factor = s.index_factor}};
}

}  // namespace

extern "C" {

winnow_status winnow_pipeline(const winnow_pipeline_args* args) {
  return guarded("pipeline", args, [](const winnow_pipeline_args& a, const In& in) {
    const winnow_indexer& x = a.indexer;
    winnow::pipeline({.plan = in.plan(a.plan),
                      .kv = in(a.kv, "kv"),
                      .slots = in(a.slots, "slots"),
                      .cache = in(a.cache, "cache"),
                      .block_table = in(a.block_table, "block_table"),
                      .compressed_kv = in(a.compressed_kv, "compressed_kv"),
                      .compressed_slots = in(a.compressed_slots, "compressed_slots"),
                      .compressed = in(a.compressed, "compressed"),
                      .compressed_table = in(a.compressed_table, "compressed_table"),
                      .indexer = {.k = in(x.k, "indexer.k"),
                                  .slots = in(x.slots, "indexer.slots"),
                                  .keys = in(x.keys, "indexer.keys"),
                                  .block_table = in(x.block_table, "indexer.block_table"),
                                  .q = in(x.q, "indexer.q"),
                                  .weights = in(x.weights, "indexer.weights")},
                      .q = in(a.q, "q"),
                      .scale = a.scale,
                      .sink = in(a.sink, "sink"),
                      .out = in(a.out, "out"),
                      .lse = in(a.lse, "lse"),
                      .workspace = in.bytes(a.workspace, a.workspace_bytes),
                      .target = in(a.target),
                      .steps = steps_of(a.steps, in),
                      .prefix = in.bytes(a.prefix, a.prefix_bytes),
                      .ids = in(a.ids, "ids"),
                      .blocks = blocks_of(a.blocks, in)});
  });
}

winnow_status winnow_pipeline_workspace_bytes(const winnow_plan* plan, size_t* out) {
  return guarded("pipeline", [&](const In& in) {
    in.given(out, "out") = winnow::pipeline_workspace_bytes(in.given(plan, "plan").plan);
  });
}

}  // extern "C"
