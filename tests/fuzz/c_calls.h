// Every C function that takes a struct, called with small valid arguments: what the fuzz target
// damages, and what the tests of faults call while memory fails.
#pragma once

#include "c_layer_calls.h"
#include "damaged_call.h"

namespace winnow::testing::c_calls {

inline constexpr int64_t T = 3, H = 2, K = 5, R = 2, W = 3, N = 7;

inline void write_call(DamagedCall& c) {
  winnow_write_args a = WINNOW_WRITE_ARGS_INIT;
  a.kv = c.in(WINNOW_BF16, {T, 576});
  a.rope = {};
  a.slots = c.in(WINNOW_I64, {T});
  a.cache = c.cache(WINNOW_V32_FP8, 4, 2, true);
  c.tensors({&a.kv, &a.rope, &a.slots});
  c.caches({&a.cache});
  c.ints({&a.scale});
  c.run(a, winnow_write);
}

inline void gather_call(DamagedCall& c) {
  winnow_gather_args a = WINNOW_GATHER_ARGS_INIT;
  a.cache = c.cache(WINNOW_V4_FP8, 4, 2);
  a.block_table = c.in(WINNOW_I32, {R, W});
  a.starts = c.in(WINNOW_I32, {R});
  a.lengths = c.in(WINNOW_I32, {R});
  a.out = c.out(WINNOW_BF16, {N, 512});
  c.tensors({&a.block_table, &a.starts, &a.lengths, &a.out_starts, &a.out});
  c.caches({&a.cache});
  c.run(a, winnow_gather);
}

inline void join_call(DamagedCall& c) {
  winnow_join_args a = WINNOW_JOIN_ARGS_INIT;
  a.latent = c.in(WINNOW_BF16, {T, H, 8});
  a.rope = c.in(WINNOW_BF16, {T, H, 4});
  a.out = c.out(WINNOW_BF16, {T, H, 12});
  c.tensors({&a.latent, &a.rope, &a.out});
  c.run(a, winnow_join);
}

inline void quantize_call(DamagedCall& c) {
  winnow_quantize_args a = WINNOW_QUANTIZE_ARGS_INIT;
  a.x = c.in(WINNOW_F32, {T, 9});
  a.out = c.out(WINNOW_E4M3, {T, 9});
  a.scale = c.out(WINNOW_F32, {1});
  c.tensors({&a.x, &a.out, &a.scale});
  c.run(a, winnow_quantize);
}

inline winnow_score_args score_args(DamagedCall& c) {
  winnow_score_args a = WINNOW_SCORE_ARGS_INIT;
  const bool wide = c.choose(4) == 0;  // queries and keys in bf16
  a.q = c.in(wide ? WINNOW_BF16 : WINNOW_E4M3, {T, H, 128});
  a.weights = c.in(WINNOW_F32, {T, H});
  a.keys = c.cache(wide ? WINNOW_INDEX_KEYS_BF16 : WINNOW_INDEX_KEYS, 4, 3);
  a.block_table = c.in(WINNOW_I32, {R, W});
  a.requests = c.in(WINNOW_I32, {T});
  a.ends = c.in(WINNOW_I32, {T});
  return a;
}

inline void score_call(DamagedCall& c) {
  winnow_score_args a = score_args(c);
  a.logits = c.out(WINNOW_F32, {T, 12});
  c.tensors({&a.q, &a.weights, &a.block_table, &a.requests, &a.key_rows, &a.key_scales, &a.starts,
             &a.ends, &a.logits});
  c.caches({&a.keys});
  c.run(a, winnow_score);
}

// The struct of scoring is damaged; its own has no target.
inline void score_select_call(DamagedCall& c) {
  static thread_local winnow_score_select_args both;
  both = WINNOW_SCORE_SELECT_ARGS_INIT;
  winnow_score_args a = score_args(c);
  both.score = &a;
  both.ids = c.out(WINNOW_I32, {T, K});
  c.tensors(
      {&a.q, &a.weights, &a.block_table, &a.requests, &a.starts, &a.ends, &a.logits, &both.ids});
  c.caches({&a.keys});
  c.run(
      a, +[](const winnow_score_args*) { return winnow_score_select(&both); });
}

inline void select_call(DamagedCall& c) {
  winnow_select_args a = WINNOW_SELECT_ARGS_INIT;
  a.logits = c.in(WINNOW_F32, {T, 20});
  a.starts = c.in(WINNOW_I32, {T});
  a.ends = c.in(WINNOW_I32, {T});
  a.ids = c.out(WINNOW_I32, {T, K});
  a.values = c.out(WINNOW_F32, {T, K});
  if (c.choose(2) == 1) {
    a.blocks.size = 4;
    a.blocks.within = c.in(WINNOW_I32, {T, 2});
    a.blocks.best = c.out(WINNOW_I32, {T, 3});
  }
  c.tensors({&a.logits, &a.starts, &a.ends, &a.ids, &a.values, &a.blocks.within, &a.blocks.best});
  c.ints({&a.blocks.size});
  c.run(a, winnow_select);
}

inline void locate_call(DamagedCall& c) {
  winnow_locate_args a = WINNOW_LOCATE_ARGS_INIT;
  a.ids = c.in(WINNOW_I32, {T, K});
  a.requests = c.in(WINNOW_I32, {T});
  a.block_table = c.in(WINNOW_I32, {R, W});
  a.page = 4;
  a.pages = 3;
  a.slots = c.out(WINNOW_I32, {T, K});
  a.counts = c.out(WINNOW_I32, {T});
  c.tensors({&a.ids, &a.requests, &a.block_table, &a.prefill_requests, &a.workspace_starts,
             &a.slots, &a.counts});
  c.ints({&a.part, &a.page, &a.rows_per_page, &a.parallel.world, &a.parallel.rank,
          &a.parallel.interleave});
  c.longs({&a.pages, &a.workspace_rows});
  c.run(a, winnow_locate);
}

inline void attend_call(DamagedCall& c) {
  winnow_attend_args a = WINNOW_ATTEND_ARGS_INIT;
  a.scale = 0.1f;
  a.q = c.in(WINNOW_BF16, {T, H, 512});
  a.requests = c.in(WINNOW_I32, {T});
  for (winnow_kv_list& list : a.lists) {
    list.cache = c.cache(WINNOW_V4_BF16, 4, 2);
    list.indices = c.in(WINNOW_I32, {T, K});
    list.lengths = c.in(WINNOW_I32, {T});
  }
  a.sink = c.in(WINNOW_F32, {H});
  a.out = c.out(WINNOW_BF16, {T, H, 512});
  a.lse = c.out(WINNOW_F32, {T, H});
  a.max_logit = c.out(WINNOW_F32, {T, H});
  for (winnow_kv_list& list : a.lists) {
    c.tensors({&list.indices, &list.lengths, &list.block_table});
    c.caches({&list.cache});
  }
  c.tensors({&a.q, &a.q_rope, &a.requests, &a.sink, &a.out, &a.lse, &a.max_logit});
  c.ints({&a.part});
  c.run(a, winnow_attend);
}

inline void mha_call(DamagedCall& c) {
  winnow_mha_args a = WINNOW_MHA_ARGS_INIT;
  a.scale = 0.3f;
  a.q = c.in(WINNOW_BF16, {T, H, 16});
  a.k = c.in(WINNOW_BF16, {N, H, 16});
  a.v = c.in(WINNOW_BF16, {N, H, 8});
  a.ids = c.in(WINNOW_I32, {T, K});
  a.starts = c.in(WINNOW_I32, {T});
  a.lengths = c.in(WINNOW_I32, {T});
  a.mask = c.in(WINNOW_U8, {T, N});
  a.bias = c.in(WINNOW_F32, {T, N});
  a.bits = c.in(WINNOW_U8, {T, 1});
  a.sink = c.in(WINNOW_F32, {H});
  a.out = c.out(WINNOW_BF16, {T, H, 8});
  a.lse = c.out(WINNOW_F32, {T, H});
  c.tensors({&a.q, &a.k, &a.v, &a.ids, &a.starts, &a.lengths, &a.mask, &a.bias, &a.bits, &a.sink,
             &a.out, &a.lse});
  c.run(a, winnow_attend_mha);
}

inline void mask_call(DamagedCall& c) {
  winnow_topk_mask_args a = WINNOW_TOPK_MASK_ARGS_INIT;
  a.ids = c.in(WINNOW_I32, {T, K});
  a.lengths = c.in(WINNOW_I32, {T});
  a.mask = c.out(WINNOW_U8, {T, 2});
  c.tensors({&a.ids, &a.lengths, &a.mask});
  c.run(a, winnow_topk_mask);
}

inline void merge_call(DamagedCall& c) {
  winnow_merge_args a = WINNOW_MERGE_ARGS_INIT;
  a.partial_out = c.in(WINNOW_F32, {2, T, H, 8});
  a.partial_lse = c.in(WINNOW_F32, {2, T, H});
  a.sink = c.in(WINNOW_F32, {H});
  a.out = c.out(WINNOW_F32, {T, H, 8});
  a.lse = c.out(WINNOW_F32, {T, H});
  c.tensors({&a.partial_out, &a.partial_lse, &a.sink, &a.out, &a.lse});
  c.run(a, winnow_merge);
}

// One rank, which has nobody to agree with.
inline void cut_call(DamagedCall& c) {
  winnow_cut_args a = WINNOW_CUT_ARGS_INIT;
  a.ids = c.in(WINNOW_I32, {T, K});
  a.values = c.in(WINNOW_F32, {T, K});
  a.kept = c.out(WINNOW_I32, {T, K});
  a.counts = c.out(WINNOW_I32, {T});
  a.positions = c.out(WINNOW_I32, {T, K});
  c.tensors({&a.ids, &a.values, &a.kept, &a.counts, &a.positions});
  c.ints({&a.shard.world, &a.shard.rank, &a.shard.interleave, &a.form});
  c.run(a, winnow_cut);
}
inline void combine_call(DamagedCall& c) {
  winnow_combine_args a = WINNOW_COMBINE_ARGS_INIT;
  a.partial_out = c.in(WINNOW_F32, {T, H, 8});
  a.partial_lse = c.in(WINNOW_F32, {T, H});
  a.sink = c.in(WINNOW_F32, {H});
  a.out = c.out(WINNOW_BF16, {T, H, 8});
  a.lse = c.out(WINNOW_F32, {T, H});
  c.tensors({&a.partial_out, &a.partial_lse, &a.sink, &a.out, &a.lse});
  c.ints({&a.wire});
  c.run(a, winnow_combine);
}

inline void dequantize_call(DamagedCall& c) {
  winnow_dequantize_weight_args a = WINNOW_DEQUANTIZE_WEIGHT_ARGS_INIT;
  a.weight = c.in(WINNOW_E4M3, {6, 5});
  a.scale = c.in(WINNOW_F32, {1});
  a.out = c.out(WINNOW_BF16, {6, 5});
  c.tensors({&a.weight, &a.scale, &a.out});
  c.run(a, winnow_dequantize_weight);
}
inline void split_call(DamagedCall& c) {
  winnow_split_kv_b_args a = WINNOW_SPLIT_KV_B_ARGS_INIT;
  a.weight = c.in(WINNOW_BF16, {8, H, 9});
  a.w_uk = c.out(WINNOW_BF16, {8, H, 5});
  a.w_uv = c.out(WINNOW_BF16, {8, H, 4});
  c.tensors({&a.weight, &a.w_uk, &a.w_uv});
  c.run(a, winnow_split_kv_b);
}
inline void query_call(DamagedCall& c) {
  winnow_absorb_query_args a = WINNOW_ABSORB_QUERY_ARGS_INIT;
  a.q_nope = c.in(WINNOW_BF16, {T, H, 5});
  a.w_uk = c.in(WINNOW_BF16, {8, H, 5});
  a.out = c.out(WINNOW_BF16, {T, H, 8});
  c.tensors({&a.q_nope, &a.w_uk, &a.out});
  c.run(a, winnow_absorb_query);
}
inline void project_call(DamagedCall& c) {
  winnow_project_output_args a = WINNOW_PROJECT_OUTPUT_ARGS_INIT;
  a.attn = c.in(WINNOW_BF16, {T, H, 8});
  a.w_uv = c.in(WINNOW_BF16, {8, H, 4});
  a.out = c.out(WINNOW_BF16, {T, H, 4});
  c.tensors({&a.attn, &a.w_uv, &a.out});
  c.run(a, winnow_project_output);
}
inline void decompress_call(DamagedCall& c) {
  winnow_decompress_args a = WINNOW_DECOMPRESS_ARGS_INIT;
  a.latent = c.in(WINNOW_BF16, {N, 10});
  a.w_uk = c.in(WINNOW_BF16, {8, H, 5});
  a.w_uv = c.in(WINNOW_BF16, {8, H, 4});
  a.k = c.out(WINNOW_BF16, {N, H, 7});
  a.v = c.out(WINNOW_BF16, {N, H, 4});
  c.tensors({&a.latent, &a.w_uk, &a.w_uv, &a.k, &a.v});
  c.run(a, winnow_decompress);
}

template <class Args>
void table_args(DamagedCall& c, Args& a) {
  a.positions = c.in(WINNOW_I32, {T});
  a.requests = c.in(WINNOW_I32, {T});
  a.block_table = c.in(WINNOW_I32, {R, W});
  a.page = 4;
  a.pages = 3;
  c.tensors({&a.positions, &a.requests, &a.block_table});
  c.ints({&a.page});
  c.longs({&a.pages});
}
inline void slots_call(DamagedCall& c) {
  winnow_compressed_slots_args a = WINNOW_COMPRESSED_SLOTS_ARGS_INIT;
  table_args(c, a);
  a.slots = c.out(WINNOW_I64, {T + 2});
  c.tensors({&a.slots});
  c.ints({&a.ratio});
  c.run(a, winnow_compressed_slots);
}
inline void c128a_call(DamagedCall& c) {
  winnow_c128a_lists_args a = WINNOW_C128A_LISTS_ARGS_INIT;
  table_args(c, a);
  a.decode_tokens = 1;
  a.lists = c.out(WINNOW_I32, {T, K});
  a.lengths = c.out(WINNOW_I32, {T});
  c.tensors({&a.lists, &a.lengths});
  c.ints({&a.ratio});
  c.longs({&a.decode_tokens});
  c.run(a, winnow_c128a_lists);
}
inline void window_call(DamagedCall& c) {
  winnow_window_lists_args a = WINNOW_WINDOW_LISTS_ARGS_INIT;
  table_args(c, a);
  a.window = 4;
  a.lists = c.out(WINNOW_I32, {T, K});
  a.lengths = c.out(WINNOW_I32, {T});
  c.tensors({&a.lists, &a.lengths});
  c.ints({&a.window});
  c.run(a, winnow_window_lists);
}
inline void combined_call(DamagedCall& c) {
  winnow_combined_lists_args a = WINNOW_COMBINED_LISTS_ARGS_INIT;
  a.topk = c.in(WINNOW_I32, {T, K});
  a.positions = c.in(WINNOW_I32, {T});
  a.requests = c.in(WINNOW_I32, {T});
  a.seq_lens = c.in(WINNOW_I32, {R});
  a.gather_lens = c.in(WINNOW_I32, {R});
  a.window = 4;
  a.compressed = 3;
  a.rows = 20;
  a.lists = c.out(WINNOW_I32, {T, 128});
  a.lengths = c.out(WINNOW_I32, {T});
  c.tensors(
      {&a.topk, &a.positions, &a.requests, &a.seq_lens, &a.gather_lens, &a.lists, &a.lengths});
  c.ints({&a.ratio, &a.window, &a.compressed, &a.rows, &a.first_request});
  c.run(a, winnow_combined_lists);
}

// A plan, made or refused; one that was made is refilled and given back.
inline void plan_call(DamagedCall& c) {
  winnow_plan_options a = WINNOW_PLAN_OPTIONS_INIT;
  a.heads = 4;
  a.pages = 20;
  a.page = 4;
  a.max_requests = 4;
  a.max_tokens = 16;
  a.max_context = 64;
  c.ints({&a.format, &a.heads, &a.topk, &a.extra_topk, &a.ratio, &a.index_heads, &a.page,
          &a.decode_threshold, &a.mode, &a.split, &a.split_size});
  c.longs({&a.pages});
  c.run(
      a, +[](const winnow_plan_options* options) {
        winnow_plan* plan = nullptr;
        const winnow_status status = winnow_plan_create(options, &plan);
        EXPECT_EQ(plan != nullptr, status == WINNOW_OK);
        if (!plan) return status;
        const int32_t starts[] = {0, 1, 4}, lens[] = {9, 5};
        winnow_batch batch = WINNOW_BATCH_INIT;
        batch.query_starts = {starts, 3};
        batch.seq_lens = {lens, 2};
        winnow_plan_refill(plan, &batch);
        winnow_plan_destroy(plan);
        return status;
      });
}

struct NamedCall {
  const char* name;
  void (*run)(DamagedCall&);
};
inline constexpr NamedCall kCalls[] = {
    {"write", write_call},
    {"gather", gather_call},
    {"join", join_call},
    {"quantize", quantize_call},
    {"score", score_call},
    {"score_select", score_select_call},
    {"select", select_call},
    {"locate", locate_call},
    {"attend", attend_call},
    {"mha", mha_call},
    {"mask", mask_call},
    {"merge", merge_call},
    {"cut", cut_call},
    {"combine", combine_call},
    {"dequantize", dequantize_call},
    {"split", split_call},
    {"query", query_call},
    {"project", project_call},
    {"decompress", decompress_call},
    {"slots", slots_call},
    {"c128a", c128a_call},
    {"window", window_call},
    {"combined", combined_call},
    {"plan", plan_call},
    {"norm", norm_call},
    {"rotate", rotate_call},
    {"rope_table", rope_table_call},
    {"prepare_query", prepare_query_call},
    {"index_query", index_query_call},
    {"prepare_queries", prepare_queries_call},
    {"compress", compress_call},
    {"write_prologue", prologue_call},
    {"norm_write", norm_write_call},
    {"pipeline", pipeline_call},
    {"pipeline_steps", steps_call},
    {"gather_prefix", prefix_call},
};

}  // namespace winnow::testing::c_calls
