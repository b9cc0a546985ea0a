// write, score, select and locate in C.
#include "c_api/common.h"
#include "c_api/layers.h"
#include "winnow/locate.h"
#include "winnow/score.h"
#include "winnow/select.h"
#include "winnow/write.h"

using winnow::internal::c_api::blocks_of;
using winnow::internal::c_api::guarded;
using winnow::internal::c_api::In;

namespace {

static_assert(int(winnow::ScaleMode::kPow2FloorAmax) == WINNOW_POW2_FLOOR_AMAX);

winnow::ScoreArgs score_args(const winnow_score_args& a, const In& in) {
  return {.plan = in.plan(a.plan),
          .q = in(a.q, "q"),
          .weights = in(a.weights, "weights"),
          .keys = in(a.keys, "keys"),
          .block_table = in(a.block_table, "block_table"),
          .requests = in(a.requests, "requests"),
          .key_rows = in(a.key_rows, "key_rows"),
          .key_scales = in(a.key_scales, "key_scales"),
          .starts = in(a.starts, "starts"),
          .ends = in(a.ends, "ends"),
          .logits = in(a.logits, "logits"),
          .clean = a.clean,
          .target = in(a.target),
          .some_tokens = a.some_tokens};
}

winnow::ScoreSelectArgs score_select_args(const winnow_score_select_args& a, const In& in) {
  return {.score = score_args(in.sized(a.score, "score"), in),
          .ids = in(a.ids, "ids"),
          .values = in(a.values, "values"),
          .relative = a.relative,
          .blocks = blocks_of(a.blocks, in),
          .workspace = in.bytes(a.workspace, a.workspace_bytes)};
}

}  // namespace

extern "C" {

winnow_status winnow_write(const winnow_write_args* args) {
  return guarded("write", args, [](const winnow_write_args& a, const In& in) {
    winnow::write(write_args(a, in));
  });
}

winnow_status winnow_gather(const winnow_gather_args* args) {
  return guarded("gather", args, [](const winnow_gather_args& a, const In& in) {
    winnow::gather({.plan = in.plan(a.plan),
                    .cache = in(a.cache, "cache"),
                    .block_table = in(a.block_table, "block_table"),
                    .starts = in(a.starts, "starts"),
                    .lengths = in(a.lengths, "lengths"),
                    .out_starts = in(a.out_starts, "out_starts"),
                    .out = in(a.out, "out"),
                    .target = in(a.target)});
  });
}

winnow_status winnow_join(const winnow_join_args* args) {
  return guarded("join", args, [](const winnow_join_args& a, const In& in) {
    winnow::join({.latent = in(a.latent, "latent"),
                  .rope = in(a.rope, "rope"),
                  .out = in(a.out, "out"),
                  .target = in(a.target)});
  });
}

winnow_status winnow_quantize(const winnow_quantize_args* args) {
  return guarded("quantize", args, [](const winnow_quantize_args& a, const In& in) {
    winnow::quantize({.x = in(a.x, "x"),
                      .out = in(a.out, "out"),
                      .scale = in(a.scale, "scale"),
                      .target = in(a.target)});
  });
}

winnow_status winnow_score(const winnow_score_args* args) {
  return guarded("score", args, [](const winnow_score_args& a, const In& in) {
    winnow::score(score_args(a, in));
  });
}

winnow_status winnow_score_select(const winnow_score_select_args* args) {
  return guarded("score_select", args, [](const winnow_score_select_args& a, const In& in) {
    winnow::score_select(score_select_args(a, in));
  });
}

winnow_status winnow_score_select_workspace_bytes(const winnow_score_select_args* args,
                                                  size_t* out) {
  return guarded("score_select", args, [&](const winnow_score_select_args& a, const In& in) {
    in.given(out, "out") = winnow::score_select_workspace_bytes(score_select_args(a, in));
  });
}

winnow_status winnow_select(const winnow_select_args* args) {
  return guarded("select", args, [](const winnow_select_args& a, const In& in) {
    winnow::select({.plan = in.plan(a.plan),
                    .logits = in(a.logits, "logits"),
                    .starts = in(a.starts, "starts"),
                    .ends = in(a.ends, "ends"),
                    .ids = in(a.ids, "ids"),
                    .values = in(a.values, "values"),
                    .relative = a.relative,
                    .blocks = blocks_of(a.blocks, in),
                    .target = in(a.target)});
  });
}

winnow_status winnow_locate(const winnow_locate_args* args) {
  return guarded("locate", args, [](const winnow_locate_args& a, const In& in) {
    const winnow_context_parallel& c = a.parallel;
    winnow::locate({.plan = in.plan(a.plan),
                    .part = a.part,
                    .ids = in(a.ids, "ids"),
                    .requests = in(a.requests, "requests"),
                    .block_table = in(a.block_table, "block_table"),
                    .page = a.page,
                    .pages = a.pages,
                    .rows_per_page = a.rows_per_page,
                    .prefill_requests = in(a.prefill_requests, "prefill_requests"),
                    .workspace_starts = in(a.workspace_starts, "workspace_starts"),
                    .workspace_rows = a.workspace_rows,
                    .parallel = {c.world, c.rank, c.interleave, c.compact},
                    .slots = in(a.slots, "slots"),
                    .counts = in(a.counts, "counts"),
                    .target = in(a.target)});
  });
}

}  // extern "C"
