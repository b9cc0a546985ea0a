// attend and what stands around it in C: masked MHA, merging, projections.
#include "winnow/attend.h"

#include "c_api/common.h"
#include "winnow/absorb.h"

using winnow::internal::c_api::guarded;
using winnow::internal::c_api::In;

namespace {

// As attend() names them.
struct ListNames {
  const char *cache, *indices, *lengths, *block_table;
};
constexpr ListNames kNames[2] = {
    {"lists[0].cache", "lists[0].indices", "lists[0].lengths", "lists[0].block_table"},
    {"lists[1].cache", "lists[1].indices", "lists[1].lengths", "lists[1].block_table"}};

winnow::AttendArgs attend_args(const winnow_attend_args& a, const In& in) {
  const auto list = [&](int i) -> winnow::KvList {
    return {.cache = in(a.lists[i].cache, kNames[i].cache),
            .indices = in(a.lists[i].indices, kNames[i].indices),
            .lengths = in(a.lists[i].lengths, kNames[i].lengths),
            .block_table = in(a.lists[i].block_table, kNames[i].block_table)};
  };
  return {.plan = in.plan(a.plan),
          .part = a.part,
          .q = in(a.q, "q"),
          .q_rope = in(a.q_rope, "q_rope"),
          .lists = {list(0), list(1)},
          .requests = in(a.requests, "requests"),
          .scale = a.scale,
          .sink = in(a.sink, "sink"),
          .out = in(a.out, "out"),
          .lse = in(a.lse, "lse"),
          .max_logit = in(a.max_logit, "max_logit"),
          .empty_lse_negative = a.empty_lse_negative,
          .workspace = in.bytes(a.workspace, a.workspace_bytes),
          .target = in(a.target),
          .precision = in.choice(a.precision, "precision", winnow::Precision::kFp8)};
}

}  // namespace

extern "C" {

winnow_status winnow_attend(const winnow_attend_args* args) {
  return guarded("attend", args, [](const winnow_attend_args& a, const In& in) {
    winnow::attend(attend_args(a, in));
  });
}

winnow_status winnow_attend_workspace_bytes(const winnow_attend_args* args, size_t* out) {
  return guarded("attend", args, [&](const winnow_attend_args& a, const In& in) {
    in.given(out, "out") = winnow::attend_workspace_bytes(attend_args(a, in));
  });
}

winnow_status winnow_attend_mha(const winnow_mha_args* args) {
  return guarded("attend_mha", args, [](const winnow_mha_args& a, const In& in) {
    winnow::attend_mha({.q = in(a.q, "q"),
                        .k = in(a.k, "k"),
                        .v = in(a.v, "v"),
                        .ids = in(a.ids, "ids"),
                        .starts = in(a.starts, "starts"),
                        .lengths = in(a.lengths, "lengths"),
                        .mask = in(a.mask, "mask"),
                        .bits = in(a.bits, "bits"),
                        .bias = in(a.bias, "bias"),
                        .scale = a.scale,
                        .sink = in(a.sink, "sink"),
                        .out = in(a.out, "out"),
                        .lse = in(a.lse, "lse"),
                        .empty_lse_negative = a.empty_lse_negative,
                        .target = in(a.target)});
  });
}

winnow_status winnow_topk_mask(const winnow_topk_mask_args* args) {
  return guarded("topk_mask", args, [](const winnow_topk_mask_args& a, const In& in) {
    winnow::topk_mask({.ids = in(a.ids, "ids"),
                       .lengths = in(a.lengths, "lengths"),
                       .mask = in(a.mask, "mask"),
                       .target = in(a.target)});
  });
}

winnow_status winnow_merge(const winnow_merge_args* args) {
  return guarded("merge", args, [](const winnow_merge_args& a, const In& in) {
    winnow::merge({.partial_out = in(a.partial_out, "partial_out"),
                   .partial_lse = in(a.partial_lse, "partial_lse"),
                   .sink = in(a.sink, "sink"),
                   .out = in(a.out, "out"),
                   .lse = in(a.lse, "lse"),
                   .target = in(a.target)});
  });
}

winnow_status winnow_dequantize_weight(const winnow_dequantize_weight_args* args) {
  return guarded("dequantize_weight", args,
                 [](const winnow_dequantize_weight_args& a, const In& in) {
                   winnow::dequantize_weight({.weight = in(a.weight, "weight"),
                                              .scale = in(a.scale, "scale"),
                                              .out = in(a.out, "out"),
                                              .target = in(a.target)});
                 });
}

winnow_status winnow_split_kv_b(const winnow_split_kv_b_args* args) {
  return guarded("split_kv_b", args, [](const winnow_split_kv_b_args& a, const In& in) {
    winnow::split_kv_b({.weight = in(a.weight, "weight"),
                        .w_uk = in(a.w_uk, "w_uk"),
                        .w_uv = in(a.w_uv, "w_uv"),
                        .target = in(a.target)});
  });
}

winnow_status winnow_absorb_query(const winnow_absorb_query_args* args) {
  return guarded("absorb_query", args, [](const winnow_absorb_query_args& a, const In& in) {
    winnow::absorb_query({.q_nope = in(a.q_nope, "q_nope"),
                          .w_uk = in(a.w_uk, "w_uk"),
                          .out = in(a.out, "out"),
                          .target = in(a.target)});
  });
}

winnow_status winnow_project_output(const winnow_project_output_args* args) {
  return guarded("project_output", args, [](const winnow_project_output_args& a, const In& in) {
    winnow::project_output({.attn = in(a.attn, "attn"),
                            .w_uv = in(a.w_uv, "w_uv"),
                            .out = in(a.out, "out"),
                            .target = in(a.target)});
  });
}

winnow_status winnow_decompress(const winnow_decompress_args* args) {
  return guarded("decompress", args, [](const winnow_decompress_args& a, const In& in) {
    winnow::decompress({.latent = in(a.latent, "latent"),
                        .w_uk = in(a.w_uk, "w_uk"),
                        .w_uv = in(a.w_uv, "w_uv"),
                        .k = in(a.k, "k"),
                        .v = in(a.v, "v"),
                        .target = in(a.target)});
  });
}

}  // extern "C"
