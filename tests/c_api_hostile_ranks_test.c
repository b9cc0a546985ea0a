/* Queries over ranks with damaged structs and communicators (c_hostile.h says what must hold). */
#include "c_hostile.h"

/* One of two ranks: the other one's bytes are what this one sends. */
static int mirror(void* context, const void* send, void* recv, size_t bytes) {
  (void)context;
  memcpy(recv, send, bytes);
  memcpy((uint8_t*)recv + bytes, send, bytes);
  return 0;
}
static int gather_mirrored(void* context, const void* send, void* recv, size_t bytes,
                           void* stream) {
  (void)stream;
  return mirror(context, send, recv, bytes);
}
static int swap_mirrored(void* context, const void* send, void* recv, size_t bytes, void* stream) {
  (void)context;
  (void)stream;
  memcpy(recv, send, 2 * bytes);
  return 0;
}
static winnow_communicator two_ranks(void) {
  winnow_communicator comm = WINNOW_COMMUNICATOR_INIT;
  comm.size = 2;
  comm.name = "mirror";
  comm.takes_host = true;
  comm.all_gather = gather_mirrored;
  comm.all_to_all = swap_mirrored;
  comm.exchange = mirror;
  return comm;
}

static winnow_plan_options options_of(const winnow_communicator* comm) {
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = HEADS;
  options.topk = WIDTH;
  options.index_heads = HEADS;
  options.page = PAGE;
  options.pages = PAGES;
  options.max_requests = ROWS;
  options.max_tokens = TOKENS;
  options.comm = comm;
  options.spread = WINNOW_SPREAD_QUERIES;
  options.sharded = 1;
  return options;
}

/* A plan whose communicator is damaged. */
static winnow_status call_plan(const void* args) {
  const winnow_plan_options options = options_of((const winnow_communicator*)args);
  winnow_plan* plan = NULL;
  const winnow_status status = winnow_plan_create(&options, &plan);
  CHECK((status == WINNOW_OK) == (plan != NULL));
  winnow_plan_destroy(plan);
  return status;
}

static winnow_batch_share share;
static winnow_shard part;
static winnow_status call_shard_batch(const void* args) {
  int32_t starts[ROWS + 1], lens[ROWS], tokens[TOKENS], positions[TOKENS];
  share = (winnow_batch_share){starts, lens, tokens, positions, TOKENS, 0};
  if (draw(8) == 0) share.tokens = NULL;
  if (draw(8) == 0) share.capacity = PICK(-1, 0, 1, INT64_MIN);
  part = (winnow_shard){(int32_t)PICK(2, 2, 2, 1, 0, -1, INT32_MAX), (int32_t)PICK(0, 0, 1, -1, 9),
                        (int32_t)PICK(1, 4, 4, 0, -1, INT32_MAX)};
  return winnow_shard_batch((const winnow_batch*)args, part, draw(16) == 0 ? NULL : &share);
}

CALL(gather_prefix, winnow_gather_prefix_args)

int main(void) {
  begin();
  static const int32_t starts[] = {0, 1, TOKENS}, lens[] = {9, 5};
  winnow_communicator comm = two_ranks();
  typedef winnow_communicator M;
  SWEEP(plan, "plan", comm, AT(SIZE, M, struct_size), AT(INT32, M, rank), AT(INT32, M, size),
        AT(POINTER, M, name), AT(POINTER, M, all_gather), AT(POINTER, M, exchange));

  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, ROWS + 1};
  batch.seq_lens = (winnow_ints){lens, ROWS};
  typedef winnow_batch B;
  SWEEP(shard_batch, "plan", batch, AT(SIZE, B, struct_size), AT(INTS, B, query_starts),
        AT(INTS, B, seq_lens), AT(INT64, B, tokens));

  const winnow_plan_options options = options_of(&comm);
  winnow_plan* plan = NULL;
  OK(winnow_plan_create(&options, &plan));
  OK(winnow_plan_refill(plan, &batch));
  winnow_gather_prefix_args prefix = WINNOW_GATHER_PREFIX_ARGS_INIT;
  OK(winnow_gather_prefix_bytes(plan, &prefix.rows_bytes));
  CHECK(winnow_gather_prefix_bytes(NULL, &prefix.rows_bytes) == WINNOW_INVALID_ARGUMENT);
  CHECK(winnow_gather_prefix_bytes(plan, NULL) == WINNOW_INVALID_ARGUMENT);
  prefix.rows = malloc(prefix.rows_bytes);
  prefix.plan = plan;
  prefix.cache = cache_of(WINNOW_V32_FP8);
  prefix.block_table = in_i32(2, SHAPE(ROWS, 3));
  prefix.keys = prefix.cache;
  prefix.keys.format = WINNOW_INDEX_KEYS;
  prefix.keys.page_stride = 0;
  prefix.key_table = prefix.block_table;
  typedef winnow_gather_prefix_args G;
  SWEEP(gather_prefix, "plan", prefix, AT(SIZE, G, struct_size), AT(POINTER, G, plan),
        AT(CACHE, G, cache), FREE(3, G, block_table), AT(CACHE, G, keys), FREE(3, G, key_table),
        AT(POINTER, G, rows), AT(TARGET, G, target));
  free(prefix.rows);
  winnow_plan_destroy(plan);
  return end();
}
