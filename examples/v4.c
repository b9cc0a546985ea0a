/* A V4 layer in C: a prefill and decode steps through winnow_pipeline(). A token attends to two
 * lists under one softmax: the last 128 tokens (a sliding window), and compressed states, one for
 * every four tokens, of which the indexer picks the best. An engine would get the tensors from its
 * model; here they are a simple pattern. examples/v4.cpp goes through the single verbs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <winnow/winnow_c.h>

enum { HEADS = 16, INDEX_HEADS = 8, WINDOW = 128, PICKED = 64, RATIO = 4, DIM = 512 };
enum { PAGE = 64, PAGES = 16, PROMPT = 500, STEPS = 5 };

/* Leaves the program with the message of the call that failed. */
static void must(winnow_status status) {
  if (status == WINNOW_OK) return;
  fprintf(stderr, "%s\n", winnow_last_error());
  exit(EXIT_FAILURE);
}

static winnow_tensor view(const void* data, winnow_dtype dtype, int64_t n0, int64_t n1,
                          int64_t n2) {
  const int64_t shape[3] = {n0, n1, n2};
  return winnow_tensor_of(data, dtype, n2 > 0 ? 3 : n1 > 0 ? 2 : 1, shape);
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
static uint16_t* pattern(int64_t count, uint32_t state) {
  uint16_t* values = malloc((size_t)count * sizeof *values);
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const float x = (float)(state >> 8) / (float)(1 << 23) - 1.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    values[i] = (uint16_t)(bits >> 16);
  }
  return values;
}

/* Where tokens (ratio 1) or the states that they complete (ratio 4; else -1) go. */
static winnow_tensor slots_of(const winnow_plan* plan, winnow_tensor table, int32_t ratio,
                              int64_t* slots) {
  const int64_t tokens = winnow_plan_tokens(plan);
  winnow_compressed_slots_args args = WINNOW_COMPRESSED_SLOTS_ARGS_INIT;
  args.positions = view(winnow_plan_positions(plan).data, WINNOW_I32, tokens, 0, 0);
  args.requests = view(winnow_plan_request_ids(plan).data, WINNOW_I32, tokens, 0, 0);
  args.block_table = table;
  args.ratio = ratio;
  args.page = PAGE;
  args.pages = PAGES;
  args.slots = view(slots, WINNOW_I64, tokens, 0, 0);
  must(winnow_compressed_slots(&args));
  return args.slots;
}

int main(void) {
  /* Once: capacities in, kernels chosen. */
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.model = "v4";
  options.format = WINNOW_V4_FP8;
  options.heads = HEADS;
  options.topk = WINDOW;
  options.extra_topk = PICKED;
  options.ratio = RATIO;
  options.index_heads = INDEX_HEADS;
  options.page = PAGE;
  options.pages = PAGES;
  options.max_requests = 1;
  options.max_tokens = PROMPT;
  winnow_plan* plan;
  must(winnow_plan_create(&options, &plan));

  int32_t pages[PAGES]; /* of the request, in order */
  for (int i = 0; i < PAGES; ++i) pages[i] = (i * 5 + 3) % PAGES;
  static int64_t slots[PROMPT], state_slots[PROMPT];
  static uint8_t index_q[PROMPT * INDEX_HEADS * 128];
  static float weights[PROMPT * INDEX_HEADS], sink[HEADS], lse[PROMPT * HEADS];
  static uint16_t out[PROMPT * HEADS * DIM];
  memset(index_q, 0x38, sizeof index_q); /* 1.0 in e4m3 */
  for (int i = 0; i < PROMPT * INDEX_HEADS; ++i) weights[i] = 0.01f;

  winnow_pipeline_args step = WINNOW_PIPELINE_ARGS_INIT;
  step.plan = plan;
  step.scale = 0.0442f; /* 512^-1/2 */
  step.cache = new_cache(WINNOW_V4_FP8);
  step.compressed = new_cache(WINNOW_V4_FP8);
  step.indexer.keys = new_cache(WINNOW_INDEX_KEYS);
  step.block_table = view(pages, WINNOW_I32, 1, PAGES, 0);
  step.compressed_table = step.block_table;
  step.indexer.block_table = step.block_table;
  step.sink = view(sink, WINNOW_F32, HEADS, 0, 0);
  must(winnow_pipeline_workspace_bytes(plan, &step.workspace_bytes));
  step.workspace = malloc(step.workspace_bytes);
  printf("winnow %s, attend by %s\n", winnow_version(), winnow_plan_kernel(plan, WINNOW_ATTEND, 0));

  int32_t context = 0;
  for (uint32_t i = 0; i < STEPS; ++i) {
    const int32_t tokens = i == 0 ? PROMPT : 1, starts[2] = {0, tokens};
    context += tokens;
    winnow_batch batch = WINNOW_BATCH_INIT;
    batch.query_starts = (winnow_ints){starts, 2};
    batch.seq_lens = (winnow_ints){&context, 1};
    must(winnow_plan_refill(plan, &batch));

    uint16_t* kv = pattern(tokens * DIM, 4 * i);
    uint16_t* states = pattern(tokens * DIM, 4 * i + 1);
    uint16_t* keys = pattern(tokens * 128, 4 * i + 2);
    uint16_t* q = pattern((int64_t)tokens * HEADS * DIM, 4 * i + 3);
    step.kv = view(kv, WINNOW_BF16, tokens, DIM, 0);
    step.slots = slots_of(plan, step.block_table, 1, slots);
    step.compressed_kv = view(states, WINNOW_BF16, tokens, DIM, 0);
    step.compressed_slots = slots_of(plan, step.compressed_table, RATIO, state_slots);
    step.indexer.k = view(keys, WINNOW_BF16, tokens, 128, 0);
    step.indexer.slots = step.compressed_slots;
    step.indexer.q = view(index_q, WINNOW_E4M3, tokens, INDEX_HEADS, 128);
    step.indexer.weights = view(weights, WINNOW_F32, tokens, INDEX_HEADS, 0);
    step.q = view(q, WINNOW_BF16, tokens, HEADS, DIM);
    step.out = view(out, WINNOW_BF16, tokens, HEADS, DIM);
    step.lse = view(lse, WINNOW_F32, tokens, HEADS, 0);
    must(winnow_pipeline(&step));
    printf("%3d tokens: %d states of %d attended to, lse of head 0 %.3f\n", tokens,
           context / RATIO < PICKED ? context / RATIO : PICKED, context / RATIO,
           lse[(tokens - 1) * HEADS]);
    free(q);
    free(keys);
    free(states);
    free(kv);
  }
  free(step.workspace);
  free(step.indexer.keys.data);
  free(step.compressed.data);
  free(step.cache.data);
  winnow_plan_destroy(plan);
  return 0;
}
