/* The C ABI from a C11 program: the flow of a decode step with exact numbers, and errors with their
 * message per thread. Returns the number of failures. */
#include <pthread.h>
#include <stdlib.h>

#include "c_testing.h"

enum { KEYS = 10, PAGE = 4, PAGES = 8, HEADS = 3, INDEX_HEADS = 2, TOPK = 4 };
static const int32_t kTable[3] = {6, 0, 3}; /* pages of the one request */

static winnow_cache new_cache(winnow_format format) {
  int64_t shape[2] = {0, 0};
  OK(winnow_cache_shape(format, PAGES, PAGE, shape));
  winnow_cache c = {0};
  c.data = aligned_alloc(64, (size_t)((shape[0] * shape[1] + 63) / 64 * 64));
  memset(c.data, 0xff, (size_t)(shape[0] * shape[1])); /* NaN in what is not written */
  c.format = format;
  c.page = PAGE;
  c.pages = PAGES;
  return c;
}

/* Latent row j is constant, 2^-(j % 3); index key j is constant, ((7 j) % 10 + 1) / 16. Both are
 * exact in e4m3 with a power-of-two scale. */
static float latent_of(int64_t j) { return ldexpf(1.0f, -(int)(j % 3)); }
static float key_of(int64_t j) { return (float)((7 * j) % 10 + 1) / 16; }

static void write_history(winnow_cache cache, winnow_cache keys) {
  static uint16_t kv[KEYS * 576], k[KEYS * 128];
  int64_t slots[KEYS];
  for (int64_t j = 0; j < KEYS; ++j) {
    fill(kv + j * 576, 576, latent_of(j));
    fill(k + j * 128, 128, key_of(j));
    slots[j] = (int64_t)kTable[j / PAGE] * PAGE + j % PAGE;
  }
  winnow_write_args w = WINNOW_WRITE_ARGS_INIT;
  w.kv = bf16(kv, 2, SHAPE(KEYS, 576));
  w.slots = winnow_tensor_of(slots, WINNOW_I64, 1, SHAPE(KEYS));
  w.cache = cache;
  w.scale = WINNOW_POW2;
  OK(winnow_write(&w));
  w.kv = bf16(k, 2, SHAPE(KEYS, 128));
  w.cache = keys;
  OK(winnow_write(&w));
}

/* A plan refilled for one decode token over KEYS keys, and what it says of that batch. */
static winnow_plan* plan_of_one_token(void) {
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = HEADS;
  options.topk = TOPK;
  options.index_heads = INDEX_HEADS;
  options.page = PAGE;
  options.pages = PAGES;
  options.max_requests = 4;
  options.max_tokens = 16;
  winnow_plan* plan = NULL;
  OK(winnow_plan_create(&options, &plan));
  if (!plan) return NULL;
  const int32_t starts[2] = {0, 1}, lens[1] = {KEYS};
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, 2};
  batch.seq_lens = (winnow_ints){lens, 1};
  OK(winnow_plan_refill(plan, &batch));

  CHECK(winnow_plan_tokens(plan) == 1 && winnow_plan_request_count(plan) == 1);
  CHECK(winnow_plan_split(plan).decodes == 1 && winnow_plan_split(plan).prefills == 0);
  CHECK(winnow_plan_positions(plan).count == 1 && winnow_plan_positions(plan).data[0] == KEYS - 1);
  CHECK(winnow_plan_arrays(plan).count > 0);
  CHECK(winnow_plan_schedule(plan, 0).split_starts.count == 2);
  winnow_plan_options resolved = WINNOW_PLAN_OPTIONS_INIT;
  OK(winnow_plan_get_options(plan, &resolved));
  CHECK(resolved.struct_size == sizeof resolved && resolved.max_context == PAGE * PAGES);
  CHECK(strcmp(resolved.model, "v32") == 0);
  CHECK(winnow_plan_mode(plan) != WINNOW_AUTO);
  CHECK(strlen(winnow_plan_kernel(plan, WINNOW_ATTEND, 0)) > 0);
  CHECK(winnow_plan_kernel(plan, 99, 0) == NULL);
  return plan;
}

/* The history comes back as it was written. */
static void gather_history(winnow_cache cache, winnow_tensor table) {
  static uint16_t rows[KEYS * 576];
  const int32_t lens[1] = {KEYS};
  winnow_gather_args gather = WINNOW_GATHER_ARGS_INIT;
  gather.cache = cache;
  gather.block_table = table;
  gather.lengths = i32(lens, 1, SHAPE(1));
  gather.out = bf16(rows, 2, SHAPE(KEYS, 576));
  OK(winnow_gather(&gather));
  for (int j = 0; j < KEYS; ++j) CHECK(from_bf16(rows[j * 576 + 575]) == latent_of(j));
}

/* write -> plan -> score -> select -> locate -> attend of one decode token over KEYS keys. */
static void decode_step(void) {
  const winnow_cache cache = new_cache(WINNOW_V32_FP8), keys = new_cache(WINNOW_INDEX_KEYS);
  write_history(cache, keys);

  winnow_plan* plan = plan_of_one_token();
  if (!plan) return;
  const winnow_tensor requests = i32(winnow_plan_request_ids(plan).data, 1, SHAPE(1));
  const winnow_tensor table = i32(kTable, 2, SHAPE(1, 3));
  uint8_t index_q[INDEX_HEADS * 128];
  float weights[INDEX_HEADS] = {0.5f, 1.0f}, logits[KEYS];
  memset(index_q, kOne, sizeof index_q);
  winnow_score_args score = WINNOW_SCORE_ARGS_INIT;
  score.plan = plan;
  score.q = winnow_tensor_of(index_q, WINNOW_E4M3, 3, SHAPE(1, INDEX_HEADS, 128));
  score.weights = f32(weights, 2, SHAPE(1, INDEX_HEADS));
  score.keys = keys;
  score.block_table = table;
  score.requests = requests;
  score.ends = i32(winnow_plan_key_ends(plan).data, 1, SHAPE(1));
  score.logits = f32(logits, 2, SHAPE(1, KEYS));
  OK(winnow_score(&score));
  for (int j = 0; j < KEYS; ++j) CHECK(fabsf(logits[j] - 1.5f * 128 * key_of(j)) < 1e-3f);

  int32_t ids[TOPK], slots[TOPK], count = 0, fused[TOPK];
  winnow_select_args select = WINNOW_SELECT_ARGS_INIT;
  select.plan = plan;
  select.logits = score.logits;
  select.ends = score.ends;
  select.ids = i32(ids, 2, SHAPE(1, TOPK));
  OK(winnow_select(&select));
  /* Keys 10/16, 9/16, 8/16 and 7/16 stand at j with 7 j mod 10 = 9, 8, 7, 6. */
  CHECK(ids[0] == 1 && ids[1] == 4 && ids[2] == 7 && ids[3] == 8);
  winnow_score_select_args both = WINNOW_SCORE_SELECT_ARGS_INIT;
  winnow_score_args without = score;
  memset(&without.logits, 0, sizeof without.logits);
  both.score = &without;
  both.ids = i32(fused, 2, SHAPE(1, TOPK));
  OK(winnow_score_select_workspace_bytes(&both, &both.workspace_bytes));
  both.workspace = malloc(both.workspace_bytes + 1);
  OK(winnow_score_select(&both));
  free(both.workspace);
  CHECK(memcmp(fused, ids, sizeof ids) == 0);

  winnow_locate_args locate = WINNOW_LOCATE_ARGS_INIT;
  locate.plan = plan;
  locate.ids = select.ids;
  locate.requests = requests;
  locate.block_table = table;
  locate.page = PAGE;
  locate.pages = PAGES;
  locate.slots = i32(slots, 2, SHAPE(1, TOPK));
  locate.counts = i32(&count, 1, SHAPE(1));
  OK(winnow_locate(&locate));
  CHECK(count == TOPK);
  for (int k = 0; k < TOPK; ++k) CHECK(slots[k] == kTable[ids[k] / PAGE] * PAGE + ids[k] % PAGE);

  static uint16_t q[HEADS * 576], out[HEADS * 512];
  float lse[HEADS], max_logit[HEADS];
  fill(q, HEADS * 576, 1.0f / 64);
  winnow_attend_args attend = WINNOW_ATTEND_ARGS_INIT;
  attend.plan = plan;
  attend.q = bf16(q, 3, SHAPE(1, HEADS, 576));
  attend.lists[0].cache = cache;
  attend.lists[0].indices = locate.slots;
  attend.scale = 0.25f;
  attend.out = bf16(out, 3, SHAPE(1, HEADS, 512));
  attend.lse = f32(lse, 2, SHAPE(1, HEADS));
  attend.max_logit = f32(max_logit, 2, SHAPE(1, HEADS));
  attend.workspace_bytes = winnow_plan_workspace_bytes(plan);
  attend.workspace = malloc(attend.workspace_bytes + 1);
  OK(winnow_attend(&attend));
  double sum = 0, value = 0, most = -INFINITY;
  for (int k = 0; k < TOPK; ++k) {
    const double v = latent_of(ids[k]), s = 0.25 * 576 * v / 64;
    sum += exp(s);
    value += exp(s) * v;
    most = fmax(most, s);
  }
  for (int h = 0; h < HEADS; ++h) {
    CHECK(fabs(lse[h] - log(sum)) < 1e-3 && fabs(max_logit[h] - most) < 1e-3);
    /* P rounded to bf16 (2^-9 each way) and a bf16 output. */
    CHECK(fabs(from_bf16(out[h * 512 + 511]) - value / sum) < 0x1p-7 * value / sum);
  }
  size_t needed = 0;
  attend.plan = NULL;
  OK(winnow_attend_workspace_bytes(&attend, &needed));

  gather_history(cache, table);

  /* The same step as one call: it writes the last token again and must find the same output. */
  static uint16_t kv[576], k[128], again[HEADS * 512];
  const int64_t last = (int64_t)kTable[(KEYS - 1) / PAGE] * PAGE + (KEYS - 1) % PAGE;
  fill(kv, 576, latent_of(KEYS - 1));
  fill(k, 128, key_of(KEYS - 1));
  winnow_pipeline_args all = WINNOW_PIPELINE_ARGS_INIT;
  all.plan = plan;
  all.kv = bf16(kv, 2, SHAPE(1, 576));
  all.slots = winnow_tensor_of(&last, WINNOW_I64, 1, SHAPE(1));
  all.cache = cache;
  all.block_table = table;
  all.indexer.k = bf16(k, 2, SHAPE(1, 128));
  all.indexer.slots = all.slots;
  all.indexer.keys = keys;
  all.indexer.block_table = table;
  all.indexer.q = score.q;
  all.indexer.weights = score.weights;
  all.q = attend.q;
  all.scale = attend.scale;
  all.out = bf16(again, 3, SHAPE(1, HEADS, 512));
  OK(winnow_pipeline_workspace_bytes(plan, &all.workspace_bytes));
  all.workspace = malloc(all.workspace_bytes + 1);
  OK(winnow_pipeline(&all));
  CHECK(fabs(from_bf16(again[0]) - value / sum) < 0x1p-7 * value / sum);
  /* What it chose, and a layer without an indexer that takes this choice. */
  static int32_t chosen[TOPK];
  static uint16_t taken[HEADS * 512];
  all.ids = i32(chosen, 2, SHAPE(1, TOPK));
  OK(winnow_pipeline(&all));
  for (int i = 0; i < TOPK; ++i) CHECK(chosen[i] == ids[i]);
  memset(&all.indexer, 0, sizeof all.indexer);
  all.out = bf16(taken, 3, SHAPE(1, HEADS, 512));
  OK(winnow_pipeline(&all));
  CHECK(memcmp(again, taken, sizeof taken) == 0);
  all.struct_size = offsetof(winnow_pipeline_args, ids); /* a program from before ids */
  INVALID(winnow_pipeline(&all), "indexer.q");
  free(all.workspace);

  free(attend.workspace);
  free(cache.data);
  free(keys.data);
  winnow_plan_destroy(plan);
  winnow_plan_destroy(NULL);
}

static void errors(void) {
  INVALID(winnow_write(NULL), "write: args: expected a pointer, found null");
  INVALID(winnow_attend(NULL), "attend");
  INVALID(winnow_pipeline(NULL), "pipeline");
  INVALID(winnow_plan_create(NULL, NULL), "plan");
  INVALID(winnow_score_select(&(winnow_score_select_args)WINNOW_SCORE_SELECT_ARGS_INIT),
          "score_select: score: expected a pointer, found null");
  winnow_attend_args attend = WINNOW_ATTEND_ARGS_INIT;
  CHECK(isnan(attend.scale)); /* must be given */
  attend.lists[1].cache.format = 9;
  INVALID(winnow_attend(&attend), "attend: lists[1].cache.format: expected 0 to 5, found 9");
  INVALID(winnow_model_of("v5", NULL), "v5");
  INVALID(winnow_model_of(NULL, NULL), "name");
  INVALID(winnow_page_bytes(7, 64, NULL), "format");
  INVALID(winnow_request_ids((winnow_ints){NULL, 3}, NULL, 0), "query_starts");

  winnow_locate_args a = WINNOW_LOCATE_ARGS_INIT;
  a.struct_size -= 1;
  INVALID(winnow_locate(&a),
          "locate: struct_size: expected 656, which WINNOW_LOCATE_ARGS_INIT sets, found 655");
  a.struct_size += 1;
  a.ids.rank = 5;
  INVALID(winnow_locate(&a), "locate: ids.rank: expected 0 to 4, found 5");
  a.counts.data = &a;
  a.ids.rank = 0;
  INVALID(winnow_locate(&a), "locate: counts.rank: expected 1 to 4, found 0");
  a.counts.data = NULL;
  a.ids.rank = 2;
  a.ids.dtype = 6;
  INVALID(winnow_locate(&a), "ids.dtype");
  a.ids.dtype = WINNOW_F32;
  INVALID(winnow_locate(&a), "locate: ids: expected [any, any] int32, found [0, 0] f32");
  memset(&a.ids, 0, sizeof a.ids);
  INVALID(winnow_locate(&a), "ids");
  a.target.device.kind = 2;
  INVALID(winnow_locate(&a), "target.device.kind");

  winnow_plan* plan = NULL;
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = 0;
  INVALID(winnow_plan_create(&options, &plan), "heads");
  options.heads = HEADS;
  options.model = "v4";
  options.format = WINNOW_V4_FP8;
  options.pages = PAGES;
  options.mha = true;
  INVALID(winnow_plan_create(&options, &plan), "mha");
  CHECK(plan == NULL);
  options.mha = false;
  INVALID(winnow_plan_create(&options, NULL), "plan: out"); /* and no plan is lost */
}

/* Where the caller holds the projections, a plan may have parts for winnow_attend_mha. */
static void plan_with_mha(void) {
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = HEADS;
  options.page = 64;
  options.pages = 16;
  options.max_tokens = 1024;
  options.mha = true;
  winnow_plan* plan = NULL;
  OK(winnow_plan_create(&options, &plan));
  if (!plan) return;
  winnow_plan_options resolved = WINNOW_PLAN_OPTIONS_INIT;
  OK(winnow_plan_get_options(plan, &resolved));
  CHECK(resolved.mha);
  resolved.struct_size = 1;
  INVALID(winnow_plan_get_options(plan, &resolved), "WINNOW_PLAN_OPTIONS_INIT");
  const int32_t starts[2] = {0, 1024}, lens[1] = {1024};
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, 2};
  batch.seq_lens = (winnow_ints){lens, 1};
  OK(winnow_plan_refill(plan, &batch));
  int64_t count = 0;
  const winnow_part* parts = winnow_plan_parts(plan, &count);
  CHECK(count == 1 && parts[0].last_token == 1024);
  CHECK(parts[0].gathered == parts[0].mha); /* neither where AMX reads the pages faster */
  winnow_plan_destroy(plan);
}

static void* other_thread(void* message) {
  CHECK(strcmp(winnow_last_error(), "") == 0); /* the other thread's failures are not ours */
  winnow_page_bytes(WINNOW_V32_FP8, 0, (int64_t[1]){0});
  strncpy(message, winnow_last_error(), 255);
  return NULL;
}

static void messages_per_thread(void) {
  INVALID(winnow_select(NULL), "select");
  char theirs[256] = "";
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, other_thread, theirs) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(strstr(theirs, "page"));
  CHECK(strstr(winnow_last_error(), "select")); /* still ours */
}

/* A decode and a prefill that may run per head: each part names its kernel, or none if it is mha.
 */
static void kernels_of_parts(void) {
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = 16;
  options.pages = 8;
  options.max_tokens = 512;
  options.mha = true;
  winnow_plan* plan = NULL;
  OK(winnow_plan_create(&options, &plan));
  if (!plan) return;
  const int32_t starts[3] = {0, 1, 257}, lens[2] = {100, 256};
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, 3};
  batch.seq_lens = (winnow_ints){lens, 2};
  OK(winnow_plan_refill(plan, &batch));
  int64_t count = 0;
  const winnow_part* parts = winnow_plan_parts(plan, &count);
  CHECK(count >= 1);
  for (int32_t i = 0; i < count; ++i)
    CHECK((winnow_plan_kernel(plan, WINNOW_ATTEND, i)[0] == 0) == parts[i].mha);
  winnow_plan_destroy(plan);
}

int main(void) {
  kernels_of_parts();
  decode_step();
  errors();
  plan_with_mha();
  messages_per_thread();
  printf("%d failed\n", failures);
  return failures;
}
