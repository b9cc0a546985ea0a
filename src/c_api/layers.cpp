// The steps in front of the stages in C.
#include "c_api/layers.h"

#include "winnow/compress.h"
#include "winnow/norm_write.h"
#include "winnow/prepare_queries.h"

namespace winnow::internal::c_api {

static_assert(int(NormKind::kLayer) == WINNOW_LAYER_NORM);
static_assert(int(RopePairs::kHalf) == WINNOW_HALF_PAIRS);
static_assert(int(RopeSlice::kFirst) == WINNOW_FIRST_SLICE);

Norm norm_of(const winnow_norm_step& norm, const In& in) {
  return {.kind = in.choice(norm.kind, "norm.kind", NormKind::kLayer),
          .weight = in(norm.weight, "norm.weight"),
          .bias = in(norm.bias, "norm.bias"),
          .eps = norm.eps};
}

Rope rope_of(const winnow_rope& rope, const In& in) {
  return {.table = in(rope.table, "rope.table"),
          .pairs = in.choice(rope.pairs, "rope.pairs", RopePairs::kHalf),
          .slice = in.choice(rope.slice, "rope.slice", RopeSlice::kFirst),
          .inverse = rope.inverse};
}

ScaleMode scale_of(winnow_scale_mode scale, const In& in) {
  return in.choice(scale, "scale", ScaleMode::kPow2FloorAmax);
}

namespace {

NormRows rows_of(const winnow_norm_rows& rows, const In& in) {
  return {.x = in(rows.x, "x"), .out = in(rows.out, "out"), .norm = norm_of(rows.norm, in)};
}

NormArgs norm_args(const winnow_norm_args& a, const In& in) {
  return {.rows = {rows_of(a.rows[0], in), rows_of(a.rows[1], in)}, .target = in(a.target)};
}

PrepareQueryArgs prepare_query_args(const winnow_prepare_query_args& a, const In& in) {
  return {.q = in(a.q, "q"),
          .norm = norm_of(a.norm, in),
          .positions = in(a.positions, "positions"),
          .rope = rope_of(a.rope, in),
          .out = in(a.out, "out"),
          .target = in(a.target)};
}

IndexQueryArgs index_query_args(const winnow_index_query_args& a, const In& in) {
  return {.q = in(a.q, "q"),
          .weights = in(a.weights, "weights"),
          .positions = in(a.positions, "positions"),
          .rope = rope_of(a.rope, in),
          .hadamard = a.hadamard,
          .scale = scale_of(a.scale, in),
          .factor = a.factor,
          .out = in(a.out, "out"),
          .out_weights = in(a.out_weights, "out_weights"),
          .target = in(a.target)};
}

}  // namespace

WriteArgs write_args(const winnow_write_args& a, const In& in) {
  return {.plan = in.plan(a.plan),
          .kv = in(a.kv, "kv"),
          .rope = in(a.rope, "rope"),
          .slots = in(a.slots, "slots"),
          .cache = in(a.cache, "cache"),
          .scale = scale_of(a.scale, in),
          .prologue = {.norm = norm_of(a.prologue.norm, in),
                       .rope = rope_of(a.prologue.rope, in),
                       .positions = in(a.prologue.positions, "prologue.positions"),
                       .hadamard = a.prologue.hadamard},
          .target = in(a.target)};
}

}  // namespace winnow::internal::c_api

using namespace winnow::internal::c_api;

extern "C" {

winnow_status winnow_norm(const winnow_norm_args* args) {
  return guarded("norm", args,
                 [](const winnow_norm_args& a, const In& in) { winnow::norm(norm_args(a, in)); });
}

winnow_status winnow_rotate(const winnow_rotate_args* args) {
  return guarded("rotate", args, [](const winnow_rotate_args& a, const In& in) {
    winnow::rotate({.x = in(a.x, "x"),
                    .positions = in(a.positions, "positions"),
                    .rope = rope_of(a.rope, in),
                    .out = in(a.out, "out"),
                    .scales = in(a.scales, "scales"),
                    .scale = scale_of(a.scale, in),
                    .target = in(a.target)});
  });
}

winnow_status winnow_rope_table(const winnow_rope_table_args* args) {
  return guarded("rope_table", args, [](const winnow_rope_table_args& a, const In& in) {
    winnow::rope_table({.theta = a.theta,
                        .factor = a.factor,
                        .original = a.original,
                        .beta_fast = a.beta_fast,
                        .beta_slow = a.beta_slow,
                        .table = in(a.table, "table"),
                        .target = in(a.target)});
  });
}

winnow_status winnow_prepare_query(const winnow_prepare_query_args* args) {
  return guarded("prepare_query", args, [](const winnow_prepare_query_args& a, const In& in) {
    winnow::prepare_query(prepare_query_args(a, in));
  });
}

winnow_status winnow_index_query(const winnow_index_query_args* args) {
  return guarded("index_query", args, [](const winnow_index_query_args& a, const In& in) {
    winnow::index_query(index_query_args(a, in));
  });
}

winnow_status winnow_prepare_queries(const winnow_prepare_queries_args* args) {
  return guarded("prepare_queries", args, [](const winnow_prepare_queries_args& a, const In& in) {
    winnow::PrepareQueriesArgs all;
    if (a.query != nullptr) all.query = prepare_query_args(in.sized(a.query, "query"), in);
    if (a.index != nullptr) all.index = index_query_args(in.sized(a.index, "index"), in);
    all.target = in(a.target);
    winnow::prepare_queries(all);
  });
}

winnow_status winnow_norm_write(const winnow_norm_write_args* args) {
  return guarded("norm_write", args, [](const winnow_norm_write_args& a, const In& in) {
    winnow::NormWriteArgs all;
    if (a.norm != nullptr) all.norm = norm_args(in.sized(a.norm, "norm"), in);
    for (int i = 0; i < 2; ++i)
      if (a.write[i] != nullptr) all.write[i] = write_args(in.sized(a.write[i], "write"), in);
    all.target = in(a.target);
    winnow::norm_write(all);
  });
}

winnow_status winnow_compress(const winnow_compress_args* args) {
  return guarded("compress", args, [](const winnow_compress_args& a, const In& in) {
    winnow::compress({.rows = in(a.rows, "rows"),
                      .positions = in(a.positions, "positions"),
                      .requests = in(a.requests, "requests"),
                      .ratio = a.ratio,
                      .overlap = a.overlap,
                      .gate = a.gate,
                      .bias = in(a.bias, "bias"),
                      .state = {.rows = in(a.state_rows, "state_rows"),
                                .table = in(a.state_table, "state_table"),
                                .ring = a.state_ring},
                      .norm = norm_of(a.norm, in),
                      .rope = rope_of(a.rope, in),
                      .hadamard = a.hadamard,
                      .slots = in(a.slots, "slots"),
                      .cache = in(a.cache, "cache"),
                      .scale = scale_of(a.scale, in),
                      .latent = in(a.latent, "latent"),
                      .target = in(a.target)});
  });
}

}  // extern "C"
