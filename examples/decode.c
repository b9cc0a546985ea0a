/* One decode step of a V3.2 layer through the C ABI: plan -> write -> score -> select -> locate ->
 * attend. An engine would get the tensors from its model; here they are a simple pattern. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <winnow/winnow_c.h>

enum { KEYS = 300, HEADS = 16, INDEX_HEADS = 8, TOPK = 64, PAGE = 64, PAGES = 8, WIDTH = 5 };

/* Leaves the program with the message of the call that failed. */
static void must(winnow_status status) {
  if (status == WINNOW_OK) return;
  fprintf(stderr, "%s\n", winnow_last_error());
  exit(EXIT_FAILURE);
}

static winnow_tensor view(const void* data, winnow_dtype dtype, int64_t n0, int64_t n1) {
  const int64_t shape[2] = {n0, n1};
  return winnow_tensor_of(data, dtype, 2, shape);
}

static winnow_tensor vector(const void* data, winnow_dtype dtype, int64_t n) {
  return winnow_tensor_of(data, dtype, 1, &n);
}

static winnow_cache new_cache(winnow_format format) {
  int64_t shape[2];
  must(winnow_cache_shape(format, PAGES, PAGE, shape));
  return (winnow_cache){.data = calloc((size_t)shape[0], (size_t)shape[1]),
                        .format = format,
                        .pages = PAGES,
                        .page = PAGE};
}

/* bf16 values between -1 and 1, from a small linear generator. */
static uint16_t* pattern(int64_t count) {
  uint16_t* values = malloc((size_t)count * sizeof *values);
  uint32_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const float x = (float)(state >> 8) / (float)(1 << 23) - 1.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    values[i] = (uint16_t)(bits >> 16);
  }
  return values;
}

int main(void) {
  /* Once: capacities in, kernels chosen. */
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = HEADS;
  options.topk = TOPK;
  options.index_heads = INDEX_HEADS;
  options.page = PAGE;
  options.pages = PAGES;
  options.max_requests = 1;
  options.max_tokens = 1;
  winnow_plan* plan;
  must(winnow_plan_create(&options, &plan));

  /* Every step: one request, one new token, KEYS tokens in all. */
  const int32_t starts[2] = {0, 1}, seq_len = KEYS, table[WIDTH] = {6, 0, 3, 7, 1};
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, 2};
  batch.seq_lens = (winnow_ints){&seq_len, 1};
  must(winnow_plan_refill(plan, &batch));
  const winnow_tensor requests = vector(winnow_plan_request_ids(plan).data, WINNOW_I32, 1);
  const winnow_tensor ends = vector(winnow_plan_key_ends(plan).data, WINNOW_I32, 1);
  const winnow_tensor pages = view(table, WINNOW_I32, 1, WIDTH);

  const winnow_cache cache = new_cache(WINNOW_V32_FP8), keys = new_cache(WINNOW_INDEX_KEYS);
  uint16_t *kv = pattern(KEYS * 576), *k = pattern(KEYS * 128);
  int64_t slot_of[KEYS];
  for (int p = 0; p < KEYS; ++p) slot_of[p] = (int64_t)table[p / PAGE] * PAGE + p % PAGE;
  winnow_write_args write = WINNOW_WRITE_ARGS_INIT;
  write.slots = vector(slot_of, WINNOW_I64, KEYS);
  write.kv = view(kv, WINNOW_BF16, KEYS, 576);
  write.cache = cache;
  must(winnow_write(&write));
  write.kv = view(k, WINNOW_BF16, KEYS, 128);
  write.cache = keys;
  must(winnow_write(&write));

  static uint8_t index_q[INDEX_HEADS * 128];
  static float weights[INDEX_HEADS], logits[WIDTH * PAGE];
  memset(index_q, 0x38, sizeof index_q); /* 1.0 in e4m3 */
  for (int h = 0; h < INDEX_HEADS; ++h) weights[h] = 0.01f;
  winnow_score_args score = WINNOW_SCORE_ARGS_INIT;
  score.plan = plan;
  score.q = winnow_tensor_of(index_q, WINNOW_E4M3, 3, (int64_t[]){1, INDEX_HEADS, 128});
  score.weights = view(weights, WINNOW_F32, 1, INDEX_HEADS);
  score.keys = keys;
  score.block_table = pages;
  score.requests = requests;
  score.ends = ends;
  score.logits = view(logits, WINNOW_F32, 1, WIDTH * PAGE);
  must(winnow_score(&score));

  static int32_t ids[TOPK], slots[TOPK], count;
  winnow_select_args select = WINNOW_SELECT_ARGS_INIT;
  select.plan = plan;
  select.logits = score.logits;
  select.ends = ends;
  select.ids = view(ids, WINNOW_I32, 1, TOPK);
  must(winnow_select(&select));

  winnow_locate_args locate = WINNOW_LOCATE_ARGS_INIT;
  locate.plan = plan;
  locate.ids = select.ids;
  locate.requests = requests;
  locate.block_table = pages;
  locate.page = PAGE;
  locate.pages = PAGES;
  locate.slots = view(slots, WINNOW_I32, 1, TOPK);
  locate.counts = vector(&count, WINNOW_I32, 1);
  must(winnow_locate(&locate));

  uint16_t* q = pattern(HEADS * 576);
  static uint16_t out[HEADS * 512];
  static float lse[HEADS];
  winnow_attend_args attend = WINNOW_ATTEND_ARGS_INIT;
  attend.plan = plan;
  attend.q = winnow_tensor_of(q, WINNOW_BF16, 3, (int64_t[]){1, HEADS, 576});
  attend.lists[0].cache = cache;
  attend.lists[0].indices = locate.slots;
  attend.scale = 0.1352f; /* 192^-1/2 * (0.1 ln 40 + 1)^2 */
  attend.out = winnow_tensor_of(out, WINNOW_BF16, 3, (int64_t[]){1, HEADS, 512});
  attend.lse = view(lse, WINNOW_F32, 1, HEADS);
  attend.workspace_bytes = winnow_plan_workspace_bytes(plan);
  attend.workspace = malloc(attend.workspace_bytes);
  must(winnow_attend(&attend));

  printf("winnow %s, attend by %s: %d of %d keys, lse of head 0 %.3f\n", winnow_version(),
         winnow_plan_kernel(plan, WINNOW_ATTEND, 0), count, KEYS, lse[0]);
  free(attend.workspace);
  free(q);
  free(k);
  free(kv);
  free(keys.data);
  free(cache.data);
  winnow_plan_destroy(plan);
  return count == TOPK ? EXIT_SUCCESS : EXIT_FAILURE;
}
