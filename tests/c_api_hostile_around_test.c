/* What stands around the flow with damaged structs: V4's lists, masked MHA, merging, projections,
 * conversions, what ranks do together (c_hostile.h says what must hold). */
#include "c_hostile.h"

CALL(join, winnow_join_args)
CALL(quantize, winnow_quantize_args)
CALL(compressed_slots, winnow_compressed_slots_args)
CALL(c128a_lists, winnow_c128a_lists_args)
CALL(window_lists, winnow_window_lists_args)
CALL(combined_lists, winnow_combined_lists_args)
CALL(attend_mha, winnow_mha_args)
CALL(topk_mask, winnow_topk_mask_args)
CALL(merge, winnow_merge_args)
CALL(cut, winnow_cut_args)
CALL(combine, winnow_combine_args)
BYTES(cut, winnow_cut_args)
BYTES(combine, winnow_combine_args)
CALL(dequantize_weight, winnow_dequantize_weight_args)
CALL(split_kv_b, winnow_split_kv_b_args)
CALL(absorb_query, winnow_absorb_query_args)
CALL(project_output, winnow_project_output_args)
CALL(decompress, winnow_decompress_args)
static winnow_status call_v4_prefill_chunks(const void* args) {
  winnow_v4_chunk chunks[ROWS];
  int64_t count = -1;
  return winnow_v4_prefill_chunks((const winnow_v4_chunk_args*)args, chunks, ROWS, &count);
}

static void sweep_conversions(void) {
  winnow_join_args join = WINNOW_JOIN_ARGS_INIT;
  join.latent = in_bf16(3, SHAPE(TOKENS, HEADS, 24));
  join.rope = in_bf16(3, SHAPE(TOKENS, HEADS, 8));
  join.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, 32));
  typedef winnow_join_args J;
  SWEEP(join, "join", join, AT(SIZE, J, struct_size), AT(TENSOR, J, latent), AT(TENSOR, J, rope),
        AT(TENSOR, J, out), AT(TARGET, J, target));

  winnow_quantize_args quantize = WINNOW_QUANTIZE_ARGS_INIT;
  quantize.x = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, 37));
  quantize.out = out(0, WINNOW_E4M3, 2, SHAPE(TOKENS, 37));
  quantize.scale = out(1, WINNOW_F32, 1, SHAPE(1));
  typedef winnow_quantize_args Q;
  SWEEP(quantize, "quantize", quantize, AT(SIZE, Q, struct_size), AT(TENSOR, Q, x),
        AT(TENSOR, Q, out), AT(TENSOR, Q, scale), AT(TARGET, Q, target));
}

#define LIST_FIELDS(T)                                                         \
  AT(SIZE, T, struct_size), AT(TENSOR, T, positions), AT(TENSOR, T, requests), \
      FREE(3, T, block_table), AT(INT32, T, page), AT(INT64, T, pages), AT(TARGET, T, target)
#define LIST_ARGS(args)                             \
  do {                                              \
    (args).positions = in_i32(1, SHAPE(TOKENS));    \
    (args).requests = in_i32(1, SHAPE(TOKENS));     \
    (args).block_table = in_i32(2, SHAPE(ROWS, 3)); \
    (args).page = PAGE;                             \
    (args).pages = PAGES;                           \
  } while (0)
static void sweep_lists(void) {
  winnow_compressed_slots_args slots = WINNOW_COMPRESSED_SLOTS_ARGS_INIT;
  LIST_ARGS(slots);
  slots.slots = out(0, WINNOW_I64, 1, SHAPE(TOKENS + 1));
  typedef winnow_compressed_slots_args S;
  SWEEP(compressed_slots, "lists", slots, LIST_FIELDS(S), AT(INT32, S, ratio), FREE(1, S, slots));

  winnow_c128a_lists_args c128a = WINNOW_C128A_LISTS_ARGS_INIT;
  LIST_ARGS(c128a);
  c128a.ratio = 4;
  c128a.decode_tokens = 2;
  c128a.lists = out(0, WINNOW_I32, 2, SHAPE(TOKENS, 9));
  c128a.lengths = out(1, WINNOW_I32, 1, SHAPE(TOKENS));
  typedef winnow_c128a_lists_args C;
  SWEEP(c128a_lists, "lists", c128a, LIST_FIELDS(C), AT(INT32, C, ratio),
        AT(INT64, C, decode_tokens), FREE(2, C, lists), AT(TENSOR, C, lengths));

  winnow_window_lists_args window = WINNOW_WINDOW_LISTS_ARGS_INIT;
  LIST_ARGS(window);
  window.window = 6;
  window.lists = out(0, WINNOW_I32, 2, SHAPE(TOKENS, 9));
  window.lengths = out(1, WINNOW_I32, 1, SHAPE(TOKENS));
  typedef winnow_window_lists_args V;
  SWEEP(window_lists, "lists", window, LIST_FIELDS(V), AT(INT32, V, window), FREE(2, V, lists),
        AT(TENSOR, V, lengths));

  winnow_combined_lists_args combined = WINNOW_COMBINED_LISTS_ARGS_INIT;
  combined.topk = in_i32(2, SHAPE(TOKENS, WIDTH));
  combined.positions = in_i32(1, SHAPE(TOKENS));
  combined.requests = in_i32(1, SHAPE(TOKENS));
  combined.seq_lens = in_i32(1, SHAPE(ROWS));
  combined.gather_lens = in_i32(1, SHAPE(ROWS));
  combined.window = 6;
  combined.compressed = 8;
  combined.rows = 40;
  combined.lists = out(0, WINNOW_I32, 2, SHAPE(TOKENS, 128));
  combined.lengths = out(1, WINNOW_I32, 1, SHAPE(TOKENS));
  typedef winnow_combined_lists_args B;
  SWEEP(combined_lists, "lists", combined, AT(SIZE, B, struct_size), FREE(2, B, topk),
        AT(TENSOR, B, positions), AT(TENSOR, B, requests), AT(TENSOR, B, seq_lens),
        AT(TENSOR, B, gather_lens), AT(INT32, B, ratio), AT(INT32, B, window),
        AT(INT32, B, compressed), AT(INT32, B, rows), AT(INT32, B, first_request),
        FREE(2, B, lists), AT(TENSOR, B, lengths), AT(TARGET, B, target));

  static const int32_t query_lens[ROWS] = {2, 1}, seq_lens[ROWS] = {9, 5};
  winnow_v4_chunk_args chunks = WINNOW_V4_CHUNK_ARGS_INIT;
  chunks.query_lens = (winnow_ints){query_lens, ROWS};
  chunks.seq_lens = (winnow_ints){seq_lens, ROWS};
  chunks.max_model_len = 64;
  chunks.max_batched_tokens = 8;
  typedef winnow_v4_chunk_args K;
  SWEEP(v4_prefill_chunks, "plan", chunks, AT(SIZE, K, struct_size), AT(INTS, K, query_lens),
        AT(INTS, K, seq_lens), AT(INT32, K, ratio), AT(INT32, K, window),
        AT(INT64, K, max_model_len), AT(INT64, K, max_batched_tokens));
}

static void sweep_mha(void) {
  winnow_mha_args mha = WINNOW_MHA_ARGS_INIT;
  mha.q = in_bf16(3, SHAPE(TOKENS, HEADS, 24));
  mha.k = in_bf16(3, SHAPE(20, HEADS, 24));
  mha.v = in_bf16(3, SHAPE(20, HEADS, 16));
  mha.ids = in_i32(2, SHAPE(TOKENS, WIDTH));
  mha.starts = in_i32(1, SHAPE(TOKENS));
  mha.lengths = in_i32(1, SHAPE(TOKENS));
  mha.mask = view(bytes, WINNOW_U8, 2, SHAPE(TOKENS, 20));
  mha.bias = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, 20));
  mha.bits = view(bytes, WINNOW_U8, 2, SHAPE(TOKENS, 3));
  mha.scale = 0.2f;
  mha.sink = view(bytes, WINNOW_F32, 1, SHAPE(HEADS));
  mha.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, 16));
  mha.lse = out(1, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  typedef winnow_mha_args M;
  SWEEP(attend_mha, "mha", mha, AT(SIZE, M, struct_size), AT(TENSOR, M, q), AT(TENSOR, M, k),
        AT(TENSOR, M, v), FREE(2, M, ids), AT(TENSOR, M, starts), AT(TENSOR, M, lengths),
        FREE(2, M, mask), FREE(2, M, bias), FREE(2, M, bits), AT(FLOAT, M, scale),
        AT(TENSOR, M, sink), AT(TENSOR, M, out), AT(TENSOR, M, lse), AT(TARGET, M, target));

  winnow_topk_mask_args mask = WINNOW_TOPK_MASK_ARGS_INIT;
  mask.ids = in_i32(2, SHAPE(TOKENS, WIDTH));
  mask.lengths = in_i32(1, SHAPE(TOKENS));
  mask.mask = out(0, WINNOW_U8, 2, SHAPE(TOKENS, 4));
  typedef winnow_topk_mask_args T;
  SWEEP(topk_mask, "mask", mask, AT(SIZE, T, struct_size), FREE(2, T, ids), AT(TENSOR, T, lengths),
        FREE(2, T, mask), AT(TARGET, T, target));

  winnow_merge_args merge = WINNOW_MERGE_ARGS_INIT;
  merge.partial_out = view(bytes, WINNOW_F32, 4, SHAPE(2, TOKENS, HEADS, 16));
  merge.partial_lse = view(bytes, WINNOW_F32, 3, SHAPE(2, TOKENS, HEADS));
  merge.sink = view(bytes, WINNOW_F32, 1, SHAPE(HEADS));
  merge.out = out(0, WINNOW_F32, 3, SHAPE(TOKENS, HEADS, 16));
  merge.lse = out(1, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  typedef winnow_merge_args G;
  SWEEP(merge, "merge", merge, AT(SIZE, G, struct_size), AT(TENSOR, G, partial_out),
        AT(TENSOR, G, partial_lse), AT(TENSOR, G, sink), AT(TENSOR, G, out), AT(TENSOR, G, lse),
        AT(TARGET, G, target));
}

/* A rank that is alone. */
#define CUT_FIELDS(T)                                                                          \
  AT(SIZE, T, struct_size), AT(INT32, T, shard.world), AT(INT32, T, shard.rank),               \
      AT(INT32, T, shard.interleave), AT(TENSOR, T, ids), AT(TENSOR, T, values),               \
      AT(TENSOR, T, kept), AT(TENSOR, T, counts), AT(TENSOR, T, positions), AT(ENUM, T, form), \
      AT(TARGET, T, target)
#define COMBINE_FIELDS(T)                                                                      \
  AT(SIZE, T, struct_size), AT(ENUM, T, wire), AT(TENSOR, T, partial_out),                     \
      AT(TENSOR, T, partial_lse), AT(TENSOR, T, sink), AT(TENSOR, T, out), AT(TENSOR, T, lse), \
      AT(TARGET, T, target)
static void sweep_ranks(void) {
  winnow_cut_args cut = WINNOW_CUT_ARGS_INIT;
  cut.ids = in_i32(2, SHAPE(TOKENS, WIDTH));
  cut.values = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, WIDTH));
  cut.kept = out(0, WINNOW_I32, 2, SHAPE(TOKENS, WIDTH));
  cut.counts = out(1, WINNOW_I32, 1, SHAPE(TOKENS));
  cut.positions = out(2, WINNOW_I32, 2, SHAPE(TOKENS, WIDTH));
  typedef winnow_cut_args C;
  SWEEP(cut, "cut", cut, CUT_FIELDS(C));
  SWEEP(cut_workspace_bytes, "cut", cut, CUT_FIELDS(C));

  winnow_combine_args combine = WINNOW_COMBINE_ARGS_INIT;
  combine.partial_out = view(bytes, WINNOW_F32, 3, SHAPE(TOKENS, HEADS, 16));
  combine.partial_lse = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  combine.sink = view(bytes, WINNOW_F32, 1, SHAPE(HEADS));
  combine.out = out(0, WINNOW_F32, 3, SHAPE(TOKENS, HEADS, 16));
  combine.lse = out(1, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  typedef winnow_combine_args B;
  SWEEP(combine, "merge", combine, COMBINE_FIELDS(B));
  SWEEP(combine_workspace_bytes, "combine", combine, COMBINE_FIELDS(B));
}

enum { LATENT = 24, NOPE = 10, ROPE = 4, HEAD_VALUE = 6 };
static void sweep_projections(void) {
  winnow_dequantize_weight_args whole = WINNOW_DEQUANTIZE_WEIGHT_ARGS_INIT;
  whole.weight = view(bytes, WINNOW_E4M3, 2, SHAPE(130, 20));
  whole.scale = view(bytes, WINNOW_F32, 2, SHAPE(2, 1));
  whole.out = out(0, WINNOW_BF16, 2, SHAPE(130, 20));
  typedef winnow_dequantize_weight_args D;
  SWEEP(dequantize_weight, "absorb", whole, AT(SIZE, D, struct_size), AT(TENSOR, D, weight),
        AT(TENSOR, D, scale), AT(TENSOR, D, out), AT(TARGET, D, target));

  winnow_split_kv_b_args split = WINNOW_SPLIT_KV_B_ARGS_INIT;
  split.weight = in_bf16(3, SHAPE(LATENT, HEADS, NOPE + HEAD_VALUE));
  split.w_uk = out(0, WINNOW_BF16, 3, SHAPE(LATENT, HEADS, NOPE));
  split.w_uv = out(1, WINNOW_BF16, 3, SHAPE(LATENT, HEADS, HEAD_VALUE));
  typedef winnow_split_kv_b_args K;
  SWEEP(split_kv_b, "absorb", split, AT(SIZE, K, struct_size), AT(TENSOR, K, weight),
        AT(TENSOR, K, w_uk), AT(TENSOR, K, w_uv), AT(TARGET, K, target));

  winnow_absorb_query_args absorb = WINNOW_ABSORB_QUERY_ARGS_INIT;
  absorb.q_nope = in_bf16(3, SHAPE(TOKENS, HEADS, 10));
  absorb.w_uk = in_bf16(3, SHAPE(24, HEADS, 10));
  absorb.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, 24));
  typedef winnow_absorb_query_args U;
  SWEEP(absorb_query, "absorb", absorb, AT(SIZE, U, struct_size), AT(TENSOR, U, q_nope),
        AT(TENSOR, U, w_uk), AT(TENSOR, U, out), AT(TARGET, U, target));

  winnow_project_output_args project = WINNOW_PROJECT_OUTPUT_ARGS_INIT;
  project.attn = in_bf16(3, SHAPE(TOKENS, HEADS, LATENT));
  project.w_uv = in_bf16(3, SHAPE(LATENT, HEADS, HEAD_VALUE));
  project.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, HEAD_VALUE));
  typedef winnow_project_output_args P;
  SWEEP(project_output, "absorb", project, AT(SIZE, P, struct_size), AT(TENSOR, P, attn),
        AT(TENSOR, P, w_uv), AT(TENSOR, P, out), AT(TARGET, P, target));

  winnow_decompress_args decompress = WINNOW_DECOMPRESS_ARGS_INIT;
  decompress.latent = in_bf16(2, SHAPE(TOKENS, LATENT + ROPE));
  decompress.w_uk = in_bf16(3, SHAPE(LATENT, HEADS, NOPE));
  decompress.w_uv = in_bf16(3, SHAPE(LATENT, HEADS, HEAD_VALUE));
  decompress.k = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, NOPE + ROPE));
  decompress.v = out(1, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, HEAD_VALUE));
  typedef winnow_decompress_args E;
  SWEEP(decompress, "absorb", decompress, AT(SIZE, E, struct_size), AT(TENSOR, E, latent),
        AT(TENSOR, E, w_uk), AT(TENSOR, E, w_uv), AT(TENSOR, E, k), AT(TENSOR, E, v),
        AT(TARGET, E, target));
}

int main(void) {
  begin();
  sweep_conversions();
  sweep_lists();
  sweep_mha();
  sweep_ranks();
  sweep_projections();
  return end();
}
