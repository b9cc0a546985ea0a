// All stages in one call, in C.
#include "winnow/pipeline.h"

#include "c_api/common.h"

using winnow::internal::c_api::guarded;
using winnow::internal::c_api::In;

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
                      .target = in(a.target)});
  });
}

winnow_status winnow_pipeline_workspace_bytes(const winnow_plan* plan, size_t* out) {
  return guarded("pipeline", [&](const In& in) {
    in.given(out, "out") = winnow::pipeline_workspace_bytes(in.given(plan, "plan").plan);
  });
}

}  // extern "C"
