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
  mha.out = bf16(o, 3, SHAPE(1, 1, 2));
  mha.lse = f32(&lse, 2, SHAPE(1, 1));
  INVALID(winnow_attend_mha(&mha), "scale");
  mha.scale = 0.5f;
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

/* A quarter turn: (u, v) becomes (-v, u). */
static winnow_rope quarter_turn(float table[64]) {
  for (int i = 0; i < 64; ++i) table[i] = i < 32 ? 0 : 1;
  const winnow_rope rope = {.table = f32(table, 3, SHAPE(1, 2, 32))};
  return rope;
}

static void layers(void) {
  float table[64], weight[512];
  uint16_t x[512], out[512];
  const int32_t position = 0;
  const int64_t slot = 0;
  for (int i = 0; i < 512; ++i) weight[i] = 3;
  fill(x, 512, 2.0f);
  winnow_norm_args norm = WINNOW_NORM_ARGS_INIT;
  norm.rows[0].x = bf16(x, 2, SHAPE(1, 512));
  norm.rows[0].out = bf16(out, 2, SHAPE(1, 512));
  norm.rows[0].norm.kind = WINNOW_RMS_NORM;
  norm.rows[0].norm.weight = f32(weight, 1, SHAPE(512));
  norm.rows[0].norm.eps = 1e-20f;
  OK(winnow_norm(&norm));
  CHECK(from_bf16(out[0]) == 3 && from_bf16(out[511]) == 3);
  norm.rows[0].norm.kind = 7;
  INVALID(winnow_norm(&norm), "norm.kind");

  winnow_rope_table_args tables = WINNOW_ROPE_TABLE_ARGS_INIT;
  tables.table = f32(table, 3, SHAPE(1, 2, 32));
  OK(winnow_rope_table(&tables));
  CHECK(table[0] == 1 && table[31] == 1 && table[32] == 0 && table[63] == 0);

  winnow_rotate_args rotate = WINNOW_ROTATE_ARGS_INIT;
  rotate.x = bf16(x, 3, SHAPE(1, 4, 128));
  rotate.positions = i32(&position, 1, SHAPE(1));
  rotate.rope = quarter_turn(table);
  rotate.out = bf16(out, 3, SHAPE(1, 4, 128));
  OK(winnow_rotate(&rotate));
  CHECK(from_bf16(out[63]) == 2 && from_bf16(out[64]) == -2 && from_bf16(out[65]) == 2);
  rotate.rope.slice = WINNOW_FIRST_SLICE;
  rotate.rope.pairs = WINNOW_HALF_PAIRS;
  rotate.rope.inverse = true;
  OK(winnow_rotate(&rotate));
  CHECK(from_bf16(out[0]) == 2 && from_bf16(out[32]) == -2 && from_bf16(out[64]) == 2);

  winnow_prepare_query_args query = WINNOW_PREPARE_QUERY_ARGS_INIT;
  query.q = rotate.x;
  query.norm.kind = WINNOW_RMS_NORM;
  query.norm.eps = 1e-20f;
  query.positions = rotate.positions;
  query.rope = quarter_turn(table);
  query.out = rotate.out;
  OK(winnow_prepare_query(&query));
  CHECK(from_bf16(out[0]) == 1 && from_bf16(out[64]) == -1 && from_bf16(out[127]) == 1);

  /* amax 2 of 448: the scale is 2^-7, the codes are 256. */
  uint8_t codes[512];
  float scales[4];
  rotate.out = winnow_tensor_of(codes, WINNOW_E4M3, 3, SHAPE(1, 4, 128));
  rotate.scales = f32(scales, 3, SHAPE(1, 4, 1));
  OK(winnow_rotate(&rotate));
  CHECK(codes[0] == 0x78 && codes[32] == 0xf8 && codes[64] == 0x78 && scales[3] == 0.0078125f);
  rotate.out = bf16(out, 3, SHAPE(1, 4, 128));
  const float raw[4] = {1, 2, 3, 4};
  float weights[4];
  winnow_index_query_args index = WINNOW_INDEX_QUERY_ARGS_INIT;
  index.q = rotate.x;
  index.weights = f32(raw, 2, SHAPE(1, 4));
  index.positions = rotate.positions;
  index.rope = query.rope;
  index.factor = 0.5f;
  index.out = winnow_tensor_of(codes, WINNOW_E4M3, 3, SHAPE(1, 4, 128));
  index.out_weights = f32(weights, 2, SHAPE(1, 4));
  OK(winnow_index_query(&index));
  CHECK(codes[0] == 0x78 && codes[64] == 0xf8 && weights[3] == 4 * 0.0078125f * 0.5f);

  winnow_write_args write = WINNOW_WRITE_ARGS_INIT;
  write.kv = bf16(x, 2, SHAPE(1, 512));
  write.slots = winnow_tensor_of(&slot, WINNOW_I64, 1, SHAPE(1));
  write.cache.data = out;
  write.cache.format = WINNOW_V4_BF16;
  write.cache.page = 1;
  write.cache.pages = 1;
  write.prologue.norm = query.norm;
  write.prologue.rope = query.rope;
  write.prologue.positions = rotate.positions;
  OK(winnow_write(&write));
  CHECK(from_bf16(out[0]) == 1 && from_bf16(out[448]) == -1 && from_bf16(out[449]) == 1);

  /* The same in one call each. */
  memset(codes, 0, sizeof codes);
  memset(weights, 0, sizeof weights);
  memset(out, 0, 512 * sizeof *out);
  winnow_prepare_queries_args queries = WINNOW_PREPARE_QUERIES_ARGS_INIT;
  queries.query = &query;
  queries.index = &index;
  OK(winnow_prepare_queries(&queries));
  CHECK(from_bf16(out[0]) == 1 && from_bf16(out[64]) == -1 && codes[64] == 0xf8);
  queries.query = NULL;
  queries.index = NULL;
  INVALID(winnow_prepare_queries(&queries), "neither");
  memset(out, 0, 512 * sizeof *out);
  winnow_norm_write_args both = WINNOW_NORM_WRITE_ARGS_INIT;
  both.write[1] = &write;
  OK(winnow_norm_write(&both));
  CHECK(from_bf16(out[0]) == 1 && from_bf16(out[448]) == -1 && from_bf16(out[449]) == 1);
  both.write[1] = NULL;
  INVALID(winnow_norm_write(&both), "neither");

  /* Two rows with the same scores: their mean, 3, is normalised to 1 and rotated. */
  float rows[2 * 1024], state[1024];
  uint16_t latent[2 * 512];
  const int32_t positions[2] = {0, 1}, requests[2] = {0, 0};
  const int64_t slots[2] = {-1, 0};
  for (int i = 0; i < 2 * 1024; ++i) rows[i] = i % 1024 >= 512 ? 0 : i < 1024 ? 2 : 4;
  winnow_compress_args compress = WINNOW_COMPRESS_ARGS_INIT;
  compress.rows = f32(rows, 2, SHAPE(2, 1024));
  compress.positions = i32(positions, 1, SHAPE(2));
  compress.requests = i32(requests, 1, SHAPE(2));
  compress.ratio = 2;
  compress.state_rows = f32(state, 3, SHAPE(1, 1, 1024));
  compress.state_ring = true;
  compress.norm.eps = 1e-20f;
  compress.rope = query.rope;
  compress.slots = winnow_tensor_of(slots, WINNOW_I64, 1, SHAPE(2));
  compress.cache = write.cache;
  compress.latent = bf16(latent, 2, SHAPE(2, 512));
  OK(winnow_compress(&compress));
  CHECK(from_bf16(latent[512]) == 1 && from_bf16(out[0]) == 1 && from_bf16(out[448]) == -1);
  CHECK(state[0] == 4 && state[512] == 0); /* the ring's one row: position 1 */
  /* A cache without a page is not one that was left out: its entries would be lost. */
  compress.cache.page = 0;
  INVALID(winnow_compress(&compress), "compress: cache.page: expected 1 to 2147483647, found 0");
  compress.cache = write.cache;
  compress.ratio = 0;
  INVALID(winnow_compress(&compress), "ratio");
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

static winnow_plan* plan_of_two_decodes(void) {
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = 16;
  options.index_heads = 1;
  options.pages = 4;
  options.max_requests = options.max_tokens = 2;
  winnow_plan* plan = NULL;
  OK(winnow_plan_create(&options, &plan));
  const int32_t starts[3] = {0, 1, 2}, lens[2] = {3, 3};
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, 3};
  batch.seq_lens = (winnow_ints){lens, 2};
  if (plan) OK(winnow_plan_refill(plan, &batch));
  return plan;
}

/* One of the two tokens of a plan's batch is scored where the caller says that this is meant. A
 * caller whose struct is older than that member cannot say so. */
static void some_tokens(void) {
  uint8_t q[128], keys[3 * 128];
  memset(q, kOne, sizeof q);
  memset(keys, kOne, sizeof keys);
  const float weight = 1, scales[3] = {1, 2, 3};
  const int32_t end = 3;
  float logits[3];
  winnow_plan* plan = plan_of_two_decodes();
  if (!plan) return;
  winnow_score_args score = WINNOW_SCORE_ARGS_INIT;
  score.plan = plan;
  score.q = winnow_tensor_of(q, WINNOW_E4M3, 3, SHAPE(1, 1, 128));
  score.weights = f32(&weight, 2, SHAPE(1, 1));
  score.key_rows = winnow_tensor_of(keys, WINNOW_E4M3, 2, SHAPE(3, 128));
  score.key_scales = f32(scales, 1, SHAPE(3));
  score.ends = i32(&end, 1, SHAPE(1));
  score.logits = f32(logits, 2, SHAPE(1, 3));
  INVALID(winnow_score(&score), "score: plan");
  score.some_tokens = true;
  OK(winnow_score(&score));
  CHECK(logits[0] == 128 && logits[2] == 3 * 128);
  score.struct_size = offsetof(winnow_score_args, some_tokens);
  INVALID(winnow_score(&score), "score: plan");
  winnow_plan_destroy(plan);
}

/* Where a plan's calls run, its copy to a device, and the routes of its prefills. */
static void devices_and_routes(void) {
  winnow_plan* plan = plan_of_two_decodes();
  if (!plan) return;
  winnow_device device = {WINNOW_CUDA, 3, NULL};
  const winnow_target other = {device, NULL};
  OK(winnow_plan_device(plan, NULL, &device));
  CHECK(device.kind == WINNOW_CPU && device.index == 0);
  INVALID(winnow_plan_device(plan, &other, &device), "target.device.kind");
  INVALID(winnow_plan_upload(plan, &device, other.device), "target.device.kind");
  INVALID(winnow_plan_upload(plan, NULL, device), "to");
  OK(winnow_plan_upload(plan, &device, device));
  winnow_plan_destroy(plan);

  winnow_route_args args = WINNOW_ROUTE_ARGS_INIT;
  winnow_route route = WINNOW_ROUTE_DIRECT;
  args.tokens = args.context = 4096;
  OK(winnow_prefill_route(&args, &route));
  CHECK(route == WINNOW_ROUTE_GATHERED);
  args.mha = true;
  OK(winnow_prefill_route(&args, &route));
  CHECK(route == WINNOW_ROUTE_MHA);
  args.tokens = 1;
  OK(winnow_prefill_route(&args, &route));
  CHECK(route == WINNOW_ROUTE_DIRECT);
  args.model = "v5";
  INVALID(winnow_prefill_route(&args, &route), "v5");
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
  CHECK(winnow_cache_formats(&count)[2] == WINNOW_V4_FP8 && count == 6);
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

/* The best of three blocks and the last one; then the top of these alone. */
static void blocks(void) {
  const float logits[6] = {1, 5, 9, 2, 3, 0};
  int32_t ids[2], best[2];
  winnow_select_args select = WINNOW_SELECT_ARGS_INIT;
  select.logits = f32(logits, 2, SHAPE(1, 6));
  select.ids = i32(ids, 2, SHAPE(1, 2));
  select.blocks.size = 2;
  select.blocks.best = i32(best, 2, SHAPE(1, 2));
  OK(winnow_select(&select));
  CHECK(ids[0] == 1 && ids[1] == 2 && best[0] == 1 && best[1] == 2);
  select.blocks.within = select.blocks.best;
  select.blocks.best = (winnow_tensor){0};
  OK(winnow_select(&select));
  CHECK(ids[0] == 2 && ids[1] == 4);
  select.blocks.size = -1;
  CHECK(winnow_select(&select) == WINNOW_INVALID_ARGUMENT);
}

int main(void) {
  blocks();
  projections();
  small_calls();
  lists();
  layers();
  planning();
  some_tokens();
  devices_and_routes();
  queries();
  printf("%d failed\n", failures);
  return failures;
}
