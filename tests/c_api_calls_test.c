/* Every call of the C ABI outside the decode flow once, with exact numbers, so that no field is
 * carried to the wrong place. Returns the number of failures. */
#include "c_testing.h"

static void projections(void) {
  /* L = 2, H = 1, P = 1, V = 2: W_UK = [3, 5], W_UV = [[1, 2], [4, 8]]. */
  uint16_t weight[6], w_uk[2], w_uv[4], q = to_bf16(2), latent[2], attn[2], o[2];
  const float values[6] = {3, 1, 2, 5, 4, 8};
  for (int i = 0; i < 6; ++i) weight[i] = to_bf16(values[i]);
  winnow_split_kv_b_args split = WINNOW_SPLIT_KV_B_ARGS_INIT;
  split.weight = bf16(weight, 3, SHAPE(2, 1, 3));
  split.w_uk = bf16(w_uk, 3, SHAPE(2, 1, 1));
  split.w_uv = bf16(w_uv, 3, SHAPE(2, 1, 2));
  OK(winnow_split_kv_b(&split));
  winnow_absorb_query_args absorb = WINNOW_ABSORB_QUERY_ARGS_INIT;
  absorb.q_nope = bf16(&q, 3, SHAPE(1, 1, 1));
  absorb.w_uk = split.w_uk;
  absorb.out = bf16(latent, 3, SHAPE(1, 1, 2));
  OK(winnow_absorb_query(&absorb));
  CHECK(from_bf16(latent[0]) == 6 && from_bf16(latent[1]) == 10);
  fill(attn, 2, 1.0f);
  winnow_project_output_args project = WINNOW_PROJECT_OUTPUT_ARGS_INIT;
  project.attn = bf16(attn, 3, SHAPE(1, 1, 2));
  project.w_uv = split.w_uv;
  project.out = bf16(o, 3, SHAPE(1, 1, 2));
  OK(winnow_project_output(&project));
  CHECK(from_bf16(o[0]) == 5 && from_bf16(o[1]) == 10);

  uint16_t row[3] = {to_bf16(1), to_bf16(1), to_bf16(7)}, k[2], v[2];
  winnow_decompress_args decompress = WINNOW_DECOMPRESS_ARGS_INIT;
  decompress.latent = bf16(row, 2, SHAPE(1, 3));
  decompress.w_uk = split.w_uk;
  decompress.w_uv = split.w_uv;
  decompress.k = bf16(k, 3, SHAPE(1, 1, 2));
  decompress.v = bf16(v, 3, SHAPE(1, 1, 2));
  OK(winnow_decompress(&decompress));
  CHECK(from_bf16(k[0]) == 8 && from_bf16(k[1]) == 7 && from_bf16(v[1]) == 10);

  winnow_mha_args mha = WINNOW_MHA_ARGS_INIT;
  float lse = 0;
  mha.q = bf16(attn, 3, SHAPE(1, 1, 2));
  mha.k = decompress.k;
  mha.v = decompress.v;
  mha.scale = 0.5f;
  mha.out = bf16(o, 3, SHAPE(1, 1, 2));
  mha.lse = f32(&lse, 2, SHAPE(1, 1));
  OK(winnow_attend_mha(&mha));
  CHECK(from_bf16(o[0]) == 5 && fabsf(lse - 7.5f) < 1e-3f);
  uint8_t bits[1] = {0xfe}; /* all but the one key */
  mha.bits = winnow_tensor_of(bits, WINNOW_U8, 2, SHAPE(1, 1));
  OK(winnow_attend_mha(&mha));
  CHECK(o[0] == 0 && lse == INFINITY);
  mha.bits = f32(&lse, 2, SHAPE(1, 1));
  INVALID(winnow_attend_mha(&mha), "bits");

  const uint8_t coded[2] = {kOne, kOne};
  const float scale = 4;
  winnow_dequantize_weight_args dequantize = WINNOW_DEQUANTIZE_WEIGHT_ARGS_INIT;
  dequantize.weight = winnow_tensor_of(coded, WINNOW_E4M3, 2, SHAPE(1, 2));
  dequantize.scale = f32(&scale, 1, SHAPE(1));
  dequantize.out = bf16(o, 2, SHAPE(1, 2));
  OK(winnow_dequantize_weight(&dequantize));
  CHECK(from_bf16(o[0]) == 4 && from_bf16(o[1]) == 4);
}

static void small_calls(void) {
  uint16_t left[2] = {1, 2}, right[1] = {3}, joined[3];
  winnow_join_args join = WINNOW_JOIN_ARGS_INIT;
  join.latent = bf16(left, 3, SHAPE(1, 1, 2));
  join.rope = bf16(right, 3, SHAPE(1, 1, 1));
  join.out = bf16(joined, 3, SHAPE(1, 1, 3));
  OK(winnow_join(&join));
  CHECK(joined[0] == 1 && joined[1] == 2 && joined[2] == 3);

  const float x[2] = {448, -1};
  uint8_t coded[2];
  float undo = 0;
  winnow_quantize_args quantize = WINNOW_QUANTIZE_ARGS_INIT;
  quantize.x = f32(x, 1, SHAPE(2));
  quantize.out = winnow_tensor_of(coded, WINNOW_E4M3, 1, SHAPE(2));
  quantize.scale = f32(&undo, 1, SHAPE(1));
  OK(winnow_quantize(&quantize));
  CHECK(coded[0] == 0x7e && coded[1] == (kOne | 0x80) && undo == 1);

  const int32_t ids[3] = {9, 1, -2}, length = 9;
  uint8_t mask[2];
  winnow_topk_mask_args topk = WINNOW_TOPK_MASK_ARGS_INIT;
  topk.ids = i32(ids, 2, SHAPE(1, 3));
  topk.lengths = i32(&length, 1, SHAPE(1));
  topk.mask = winnow_tensor_of(mask, WINNOW_U8, 2, SHAPE(1, 2));
  OK(winnow_topk_mask(&topk));
  CHECK(mask[0] == 2 && mask[1] == 0); /* 9 is outside the length */

  const float partial[2] = {1, 3}, partial_lse[2] = {0, 0};
  float merged = 0, lse = 0;
  winnow_merge_args merge = WINNOW_MERGE_ARGS_INIT;
  merge.partial_out = f32(partial, 4, SHAPE(2, 1, 1, 1));
  merge.partial_lse = f32(partial_lse, 3, SHAPE(2, 1, 1));
  merge.out = f32(&merged, 3, SHAPE(1, 1, 1));
  merge.lse = f32(&lse, 2, SHAPE(1, 1));
  OK(winnow_merge(&merge));
  CHECK(fabsf(merged - 2) < 1e-6f && fabsf(lse - 0.6931472f) < 1e-6f);
}

static void lists(void) {
  const int32_t position = 7, request = 0, page_of = 2;
  int64_t slot = 0;
  int32_t list[256], length = 0, width = 0;
  winnow_compressed_slots_args slots = WINNOW_COMPRESSED_SLOTS_ARGS_INIT;
  slots.positions = i32(&position, 1, SHAPE(1));
  slots.requests = i32(&request, 1, SHAPE(1));
  slots.block_table = i32(&page_of, 2, SHAPE(1, 1));
  slots.pages = 3;
  slots.slots = winnow_tensor_of(&slot, WINNOW_I64, 1, SHAPE(1));
  OK(winnow_compressed_slots(&slots));
  CHECK(slot == 2 * 64 + 1); /* state 7 / 4 of page 2 */

  winnow_c128a_lists_args c128a = WINNOW_C128A_LISTS_ARGS_INIT;
  c128a.positions = slots.positions;
  c128a.requests = slots.requests;
  c128a.block_table = slots.block_table;
  c128a.ratio = 4;
  c128a.pages = 3;
  c128a.decode_tokens = 1;
  c128a.lists = i32(list, 2, SHAPE(1, 128));
  c128a.lengths = i32(&length, 1, SHAPE(1));
  OK(winnow_c128a_lists(&c128a));
  CHECK(length == 2 && list[0] == 128 && list[1] == 129 && list[2] == -1 && list[127] == -1);
  OK(winnow_c128a_width(128 * 129 - 1, 128, &width));
  CHECK(width == 256);

  winnow_window_lists_args window = WINNOW_WINDOW_LISTS_ARGS_INIT;
  window.positions = slots.positions;
  window.window = 3;
  window.lists = c128a.lists;
  window.lengths = c128a.lengths;
  OK(winnow_window_lists(&window));
  CHECK(length == 3 && list[0] == 5 && list[2] == 7 && list[3] == -1);

  /* N = 2 compressed rows, then the last 8 tokens: row of the window's position 7 is 2 + 7. */
  const int32_t topk[2] = {0, 1}, eight = 8;
  winnow_combined_lists_args combined = WINNOW_COMBINED_LISTS_ARGS_INIT;
  combined.topk = i32(topk, 2, SHAPE(1, 2));
  combined.positions = slots.positions;
  combined.requests = slots.requests;
  combined.seq_lens = combined.gather_lens = i32(&eight, 1, SHAPE(1));
  combined.window = 1;
  combined.compressed = 2;
  combined.rows = 10;
  combined.lists = c128a.lists;
  combined.lengths = c128a.lengths;
  OK(winnow_combined_lists(&combined));
  CHECK(length == 3 && list[0] == 0 && list[1] == 1 && list[2] == 9 && list[3] == -1);
}

static void planning(void) {
  const int32_t starts[5] = {0, 1, 2, 7, 9}, lens[4] = {2, 3, 4, 2};
  const winnow_ints s = {starts, 5}, l = {lens, 4};
  int32_t ids[9], rows[4];
  OK(winnow_request_ids(s, ids, 9));
  CHECK(ids[0] == 0 && ids[6] == 2 && ids[8] == 3);
  winnow_batch_split split;
  OK(winnow_split_batch(s, 9, 1, false, &split));
  CHECK(split.decodes == 2 && split.prefills == 2 && split.prefill_tokens == 7);
  OK(winnow_prefill_request_ids(s, 2, ids, 9));
  CHECK(ids[1] == -1 && ids[2] == 0 && ids[8] == 1);
  winnow_chunk chunks[3];
  int64_t count = 0;
  INVALID(winnow_prefill_chunks(l, 5, chunks, 2, &count), "capacity");
  CHECK(count == 3);
  OK(winnow_prefill_chunks(l, 5, chunks, 3, &count));
  CHECK(count == 3 && chunks[0].last == 2 && chunks[2].first == 3 && chunks[2].last == 4);
  OK(winnow_workspace_starts(l, chunks, 3, rows));
  CHECK(rows[0] == 0 && rows[1] == 2 && rows[2] == 0 && rows[3] == 0);
  winnow_v4_chunk_args v4 = WINNOW_V4_CHUNK_ARGS_INIT;
  winnow_v4_chunk v4_chunks[4];
  v4.query_lens = v4.seq_lens = l;
  v4.max_model_len = 16;
  v4.max_batched_tokens = 9;
  OK(winnow_v4_prefill_chunks(&v4, v4_chunks, 4, &count));
  CHECK(count == 1 && v4_chunks[0].last == 4 && v4_chunks[0].rows == 1 + 4);
}

static void queries(void) {
  winnow_model model;
  OK(winnow_model_of("v4", &model));
  CHECK(model.d_qk == 512 && model.fp8 == WINNOW_V4_FP8 && strcmp(model.name, "v4") == 0);
  winnow_format format;
  OK(winnow_format_of("index_keys", &format));
  CHECK(format == WINNOW_INDEX_KEYS && strcmp(winnow_format_name(format), "index_keys") == 0);
  CHECK(winnow_format_name(-1) == NULL);
  int64_t count = 0, bytes = 0;
  int32_t dim = 0;
  CHECK(winnow_cache_formats(&count)[2] == WINNOW_V4_FP8 && count == 5);
  CHECK(winnow_head_sizes(&count)[0] == 576 && count == 2);
  CHECK(winnow_supports_heads(12) && !winnow_supports_heads(129));
  OK(winnow_page_bytes(WINNOW_V4_FP8, 64, &bytes));
  CHECK(bytes == 37440);
  OK(winnow_page_bytes_used(WINNOW_V4_FP8, 64, &bytes));
  CHECK(bytes == 37376);
  OK(winnow_record_dim(WINNOW_V32_FP8, &dim));
  CHECK(dim == 576);
  winnow_kernel_info kernel;
  OK(winnow_support_count(&count));
  OK(winnow_support(count - 1, &kernel));
  CHECK(strlen(kernel.stage) > 0 && kernel.available == (strlen(kernel.reason) == 0));
  INVALID(winnow_support(count, &kernel), "index");
  CHECK(strlen(winnow_version()) > 0 && strlen(winnow_cpu_name()) > 0 && winnow_threads() > 0);
}

int main(void) {
  projections();
  small_calls();
  lists();
  planning();
  queries();
  printf("%d failed\n", failures);
  return failures;
}
