/* The stages of the flow, plans and the pipeline with damaged structs (c_hostile.h says what must
 * hold). */
#include "c_hostile.h"

static _Alignas(64) uint8_t workspace[1 << 26];

CALL(write, winnow_write_args)
CALL(gather, winnow_gather_args)
CALL(score, winnow_score_args)
CALL(score_select, winnow_score_select_args)
CALL(select, winnow_select_args)
CALL(locate, winnow_locate_args)
CALL(attend, winnow_attend_args)
CALL(pipeline, winnow_pipeline_args)
BYTES(score_select, winnow_score_select_args)
BYTES(attend, winnow_attend_args)
static winnow_status call_plan(const void* args) {
  winnow_plan* plan = NULL;
  const winnow_status status = winnow_plan_create((const winnow_plan_options*)args, &plan);
  CHECK((status == WINNOW_OK) == (plan != NULL));
  winnow_plan_destroy(plan);
  return status;
}

static void sweep_write(void) {
  static const int64_t slots[TOKENS] = {1, -1, 9};
  winnow_write_args write = WINNOW_WRITE_ARGS_INIT;
  write.kv = in_bf16(2, SHAPE(TOKENS, 512));
  write.slots = view(slots, WINNOW_I64, 1, SHAPE(TOKENS));
  write.cache = cache_of(WINNOW_V4_FP8);
  typedef winnow_write_args W;
  SWEEP(write, "write", write, AT(SIZE, W, struct_size), FREE(1, W, kv), AT(TENSOR, W, slots),
        AT(CACHE, W, cache), AT(ENUM, W, scale), AT(TARGET, W, target), AT(TENSOR, W, rope));
}

static void sweep_gather(void) {
  winnow_gather_args gather = WINNOW_GATHER_ARGS_INIT;
  gather.cache = cache_of(WINNOW_V4_FP8);
  gather.block_table = in_i32(2, SHAPE(ROWS, 3));
  gather.starts = in_i32(1, SHAPE(ROWS));
  gather.lengths = in_i32(1, SHAPE(ROWS));
  gather.out_starts = in_i32(1, SHAPE(ROWS));
  gather.out = out(0, WINNOW_BF16, 2, SHAPE(TOKENS, 512));
  typedef winnow_gather_args G;
  SWEEP(gather, "gather", gather, AT(SIZE, G, struct_size), AT(CACHE, G, cache),
        FREE(2, G, block_table), AT(TENSOR, G, starts), AT(TENSOR, G, lengths),
        AT(TENSOR, G, out_starts), FREE(1, G, out), AT(TARGET, G, target));
}

static winnow_score_args score_args(void) {
  winnow_score_args score = WINNOW_SCORE_ARGS_INIT;
  score.q = view(bytes, WINNOW_E4M3, 3, SHAPE(TOKENS, HEADS, 128));
  score.weights = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  score.keys = cache_of(WINNOW_INDEX_KEYS);
  score.block_table = in_i32(2, SHAPE(ROWS, 3));
  score.requests = in_i32(1, SHAPE(TOKENS));
  score.ends = in_i32(1, SHAPE(TOKENS));
  return score;
}

/* score_select with its own struct whole and that of scoring damaged. */
static winnow_score_select_args around_score;
static winnow_status call_score_of_both(const void* args) {
  around_score.score = (const winnow_score_args*)args;
  return winnow_score_select(&around_score);
}

#define SCORE_FIELDS(C)                                                                   \
  AT(SIZE, C, struct_size), AT(TENSOR, C, q), AT(TENSOR, C, weights), AT(CACHE, C, keys), \
      FREE(3, C, block_table), AT(TENSOR, C, requests), AT(TENSOR, C, key_rows),          \
      AT(TENSOR, C, key_scales), AT(TENSOR, C, starts), AT(TENSOR, C, ends), AT(TARGET, C, target)
static void sweep_score(void) {
  typedef winnow_score_args C;
  winnow_score_args score = score_args();
  around_score = (winnow_score_select_args)WINNOW_SCORE_SELECT_ARGS_INIT;
  around_score.ids = out(0, WINNOW_I32, 2, SHAPE(TOKENS, WIDTH));
  around_score.workspace = workspace;
  around_score.workspace_bytes = sizeof workspace;
  SWEEP(score_of_both, "score_select", score, SCORE_FIELDS(C), AT(TENSOR, C, logits));
  score.logits = out(0, WINNOW_F32, 2, SHAPE(TOKENS, 3 * PAGE));
  SWEEP(score, "score", score, SCORE_FIELDS(C), FREE(2, C, logits));
}

#define BOTH_FIELDS(B)                                                                     \
  AT(SIZE, B, struct_size), AT(POINTER, B, score), FREE(2, B, ids), AT(TENSOR, B, values), \
      AT(POINTER, B, workspace)
static void sweep_score_select(void) {
  winnow_score_args score = score_args();
  winnow_score_select_args both = WINNOW_SCORE_SELECT_ARGS_INIT;
  both.score = &score;
  both.ids = out(0, WINNOW_I32, 2, SHAPE(TOKENS, WIDTH));
  both.workspace = workspace;
  both.workspace_bytes = sizeof workspace;
  typedef winnow_score_select_args B;
  SWEEP(score_select, "score_select", both, BOTH_FIELDS(B));
  SWEEP(score_select_workspace_bytes, "score_select", both, BOTH_FIELDS(B));
}

static void sweep_select(void) {
  winnow_select_args select = WINNOW_SELECT_ARGS_INIT;
  select.logits = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, 20));
  select.ends = in_i32(1, SHAPE(TOKENS));
  select.ids = out(0, WINNOW_I32, 2, SHAPE(TOKENS, WIDTH));
  select.values = out(2, WINNOW_F32, 2, SHAPE(TOKENS, WIDTH));
  select.blocks.within = in_i32(2, SHAPE(TOKENS, 2));
  select.blocks.best = out(1, WINNOW_I32, 2, SHAPE(TOKENS, 2));
  typedef winnow_select_args S;
  SWEEP(select, "select", select, AT(SIZE, S, struct_size), FREE(2, S, logits),
        AT(TENSOR, S, starts), AT(TENSOR, S, ends), FREE(2, S, ids), AT(TENSOR, S, values),
        AT(INT32, S, blocks.size), FREE(2, S, blocks.within), FREE(2, S, blocks.best),
        AT(TARGET, S, target));
}

static void sweep_locate(void) {
  winnow_locate_args locate = WINNOW_LOCATE_ARGS_INIT;
  locate.ids = in_i32(2, SHAPE(TOKENS, WIDTH));
  locate.requests = in_i32(1, SHAPE(TOKENS));
  locate.block_table = in_i32(2, SHAPE(ROWS, 3));
  locate.page = PAGE;
  locate.pages = PAGES;
  locate.slots = out(0, WINNOW_I32, 2, SHAPE(TOKENS, WIDTH));
  locate.counts = out(1, WINNOW_I32, 1, SHAPE(TOKENS));
  typedef winnow_locate_args L;
  SWEEP(locate, "locate", locate, AT(SIZE, L, struct_size), AT(INT32, L, part), AT(TENSOR, L, ids),
        AT(TENSOR, L, requests), FREE(3, L, block_table), AT(INT32, L, page), AT(INT64, L, pages),
        AT(INT32, L, rows_per_page), AT(TENSOR, L, prefill_requests), AT(INT32, L, parallel.world),
        AT(INT32, L, parallel.rank), AT(INT32, L, parallel.interleave), AT(TENSOR, L, slots),
        AT(TENSOR, L, counts), AT(TARGET, L, target));
}

#define ATTEND_FIELDS(A)                                                                           \
  AT(SIZE, A, struct_size), AT(INT32, A, part), AT(TENSOR, A, q), AT(TENSOR, A, q_rope),           \
      AT(CACHE, A, lists[0].cache), FREE(2, A, lists[0].indices), AT(TENSOR, A, lists[0].lengths), \
      FREE(3, A, lists[0].block_table), AT(CACHE, A, lists[1].cache),                              \
      AT(TENSOR, A, lists[1].indices), AT(TENSOR, A, requests), AT(FLOAT, A, scale),               \
      AT(TENSOR, A, sink), AT(TENSOR, A, out), AT(TENSOR, A, lse), AT(TENSOR, A, max_logit),       \
      AT(POINTER, A, workspace), AT(TARGET, A, target), AT(ENUM, A, precision)
static void sweep_attend(void) {
  winnow_attend_args attend = WINNOW_ATTEND_ARGS_INIT;
  attend.q = in_bf16(3, SHAPE(TOKENS, HEADS, 576));
  attend.lists[0].cache = cache_of(WINNOW_V32_FP8);
  attend.lists[0].indices = in_i32(2, SHAPE(TOKENS, WIDTH));
  attend.lists[0].lengths = in_i32(1, SHAPE(TOKENS));
  attend.scale = 0.1f;
  attend.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, 512));
  attend.lse = out(1, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  attend.max_logit = out(2, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  attend.workspace = workspace;
  attend.workspace_bytes = sizeof workspace;
  typedef winnow_attend_args A;
  SWEEP(attend, "attend", attend, ATTEND_FIELDS(A));
  SWEEP(attend_workspace_bytes, "attend", attend, ATTEND_FIELDS(A));
}

static void sweep_plan(void) {
  winnow_plan_options plan = WINNOW_PLAN_OPTIONS_INIT;
  plan.heads = HEADS;
  plan.topk = WIDTH;
  plan.pages = PAGES;
  plan.max_requests = 2;
  plan.max_tokens = 8;
  typedef winnow_plan_options P;
  SWEEP(plan, "plan", plan, AT(SIZE, P, struct_size), AT(POINTER, P, model), AT(ENUM, P, format),
        AT(INT32, P, heads), AT(INT32, P, extra_topk), AT(INT32, P, ratio),
        AT(INT32, P, index_heads), AT(INT32, P, page), AT(INT64, P, pages),
        AT(INT32, P, max_requests), AT(INT32, P, max_tokens), AT(INT32, P, max_context),
        AT(INT32, P, decode_threshold), AT(ENUM, P, mode), AT(INT64, P, workspace_rows),
        AT(ENUM, P, split), AT(INT32, P, split_size), AT(ENUM, P, precision));
}

static winnow_plan* the_plan;
static winnow_status call_refill(const void* args) {
  return winnow_plan_refill(the_plan, (const winnow_batch*)args);
}

/* A plan whose batch is damaged, then a pipeline over it. */
static void sweep_pipeline(void) {
  static const int32_t starts[] = {0, 1, TOKENS}, lens[] = {9, 5};
  static const int64_t slots[TOKENS] = {1, -1, 9};
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = HEADS;
  options.index_heads = HEADS;
  options.topk = WIDTH;
  options.page = PAGE;
  options.pages = PAGES;
  options.max_requests = ROWS;
  options.max_tokens = TOKENS;
  OK(winnow_plan_create(&options, &the_plan));
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, ROWS + 1};
  batch.seq_lens = (winnow_ints){lens, ROWS};
  typedef winnow_batch R;
  SWEEP(refill, "plan", batch, AT(SIZE, R, struct_size), AT(INTS, R, query_starts),
        AT(INTS, R, seq_lens), AT(INT64, R, tokens));
  OK(winnow_plan_refill(the_plan, &batch));

  winnow_pipeline_args pipeline = WINNOW_PIPELINE_ARGS_INIT;
  pipeline.plan = the_plan;
  pipeline.kv = in_bf16(2, SHAPE(TOKENS, 576));
  pipeline.slots = view(slots, WINNOW_I64, 1, SHAPE(TOKENS));
  pipeline.cache = cache_of(WINNOW_V32_FP8);
  pipeline.block_table = in_i32(2, SHAPE(ROWS, 3));
  pipeline.indexer.k = in_bf16(2, SHAPE(TOKENS, 128));
  pipeline.indexer.slots = pipeline.slots;
  pipeline.indexer.keys = cache_of(WINNOW_INDEX_KEYS);
  pipeline.indexer.block_table = pipeline.block_table;
  pipeline.indexer.q = view(bytes, WINNOW_E4M3, 3, SHAPE(TOKENS, HEADS, 128));
  pipeline.indexer.weights = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  pipeline.q = in_bf16(3, SHAPE(TOKENS, HEADS, 576));
  pipeline.scale = 0.1f;
  pipeline.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, 512));
  pipeline.lse = out(1, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  pipeline.workspace = workspace;
  pipeline.workspace_bytes = sizeof workspace;
  typedef winnow_pipeline_args I;
  SWEEP(pipeline, "plan", pipeline, AT(SIZE, I, struct_size), AT(POINTER, I, plan),
        AT(TENSOR, I, kv), AT(TENSOR, I, slots), AT(CACHE, I, cache), FREE(2, I, block_table),
        AT(TENSOR, I, compressed_kv), AT(TENSOR, I, compressed_slots), AT(CACHE, I, compressed),
        AT(TENSOR, I, compressed_table), AT(TENSOR, I, indexer.k), AT(TENSOR, I, indexer.slots),
        AT(CACHE, I, indexer.keys), FREE(2, I, indexer.block_table), AT(TENSOR, I, indexer.q),
        AT(TENSOR, I, indexer.weights), AT(TENSOR, I, q), AT(FLOAT, I, scale),
        AT(TENSOR, I, steps.rope.table), AT(TENSOR, I, sink), AT(TENSOR, I, out),
        AT(TENSOR, I, lse), AT(TENSOR, I, ids), AT(TENSOR, I, blocks.within),
        AT(TENSOR, I, blocks.best), AT(INT32, I, blocks.size), AT(POINTER, I, workspace),
        AT(TARGET, I, target));
  winnow_plan_destroy(the_plan);
}

int main(void) {
  begin();
  sweep_write();
  sweep_gather();
  sweep_score();
  sweep_score_select();
  sweep_select();
  sweep_locate();
  sweep_attend();
  sweep_plan();
  sweep_pipeline();
  return end();
}
