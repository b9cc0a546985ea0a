/* Queries over ranks with damaged structs (c_hostile.h says what must hold): a plan of two ranks of
 * which the other says what this one says. */
#include "c_hostile.h"

static int twice(void* context, const void* send, void* recv, size_t size) {
  (void)context;
  memcpy(recv, send, size);
  memcpy((uint8_t*)recv + size, send, size);
  return 0;
}
static int move_twice(void* context, const void* send, void* recv, size_t size, void* stream) {
  (void)stream;
  return twice(context, send, recv, size);
}

static int32_t own_starts[ROWS + 1], own_lens[ROWS], own_tokens[TOKENS], own_positions[TOKENS];
static winnow_status call_shard_batch(const void* args) {
  winnow_batch_share share = {own_starts, own_lens, own_tokens, own_positions, TOKENS, 0};
  const winnow_shard shard = {(int32_t)PICK(2, 2, 2, 3, 0, -1, INT32_MAX),
                              (int32_t)PICK(0, 0, 1, -1), (int32_t)PICK(1, 2, 2, 0, INT32_MAX)};
  const winnow_status status = winnow_shard_batch((const winnow_batch*)args, shard, &share);
  CHECK(status != WINNOW_OK || (share.count >= 0 && share.count <= TOKENS));
  return status;
}
CALL(gather_prefix, winnow_gather_prefix_args)

static winnow_plan_options options_of(const winnow_communicator* comm) {
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = HEADS;
  options.topk = WIDTH;
  options.page = PAGE;
  options.pages = PAGES;
  options.max_requests = ROWS;
  options.max_tokens = TOKENS;
  options.max_context = 64;
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

int main(void) {
  (void)in_bf16; /* of c_hostile.h, for others */
  (void)out;
  begin();
  static const int32_t starts[] = {0, 1, TOKENS}, lens[] = {9, 5};
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, ROWS + 1};
  batch.seq_lens = (winnow_ints){lens, ROWS};
  typedef winnow_batch B;
  SWEEP(shard_batch, "plan", batch, AT(SIZE, B, struct_size), AT(INTS, B, query_starts),
        AT(INTS, B, seq_lens), AT(INT64, B, tokens));
  const winnow_shard shard = {2, 0, 1};
  CHECK(winnow_shard_batch(&batch, shard, NULL) == WINNOW_INVALID_ARGUMENT);
  CHECK(winnow_shard_batch(NULL, shard, NULL) == WINNOW_INVALID_ARGUMENT);

  winnow_communicator comm = WINNOW_COMMUNICATOR_INIT;
  comm.size = 2;
  comm.takes_host = true;
  comm.all_gather = move_twice;
  comm.all_to_all = move_twice;
  comm.exchange = twice;
  typedef winnow_communicator M;
  SWEEP(plan, "plan", comm, AT(SIZE, M, struct_size), AT(INT32, M, rank), AT(INT32, M, size),
        AT(POINTER, M, name), AT(POINTER, M, all_gather), AT(POINTER, M, exchange));

  winnow_plan_options options = options_of(&comm);
  options.sharded = 2;
  winnow_plan* plan = NULL;
  CHECK(winnow_plan_create(&options, &plan) == WINNOW_INVALID_ARGUMENT);
  options.sharded = 1;
  OK(winnow_plan_create(&options, &plan));
  OK(winnow_plan_refill(plan, &batch));
  CHECK(winnow_plan_batch_tokens(plan) == TOKENS && winnow_plan_gathered_rows(plan) == 14);
  CHECK(winnow_plan_token_order(plan).count == winnow_plan_token_rows(plan).count);
  CHECK(winnow_plan_prefix_lens(plan).count == ROWS && winnow_plan_row_starts(plan).count == ROWS);
  CHECK(winnow_plan_key_starts(plan).count == winnow_plan_tokens(plan));

  static _Alignas(64) uint8_t rows[1 << 20];
  winnow_gather_prefix_args prefix = WINNOW_GATHER_PREFIX_ARGS_INIT;
  OK(winnow_gather_prefix_bytes(plan, &prefix.rows_bytes));
  CHECK(prefix.rows_bytes <= sizeof rows);
  CHECK(winnow_gather_prefix_bytes(NULL, &prefix.rows_bytes) == WINNOW_INVALID_ARGUMENT);
  CHECK(winnow_gather_prefix_bytes(plan, NULL) == WINNOW_INVALID_ARGUMENT);
  prefix.plan = plan;
  prefix.cache = cache_of(WINNOW_V32_FP8);
  prefix.block_table = in_i32(2, SHAPE(ROWS, 3));
  prefix.keys = cache_of(WINNOW_INDEX_KEYS);
  prefix.key_table = in_i32(2, SHAPE(ROWS, 3));
  prefix.rows = rows;
  typedef winnow_gather_prefix_args G;
  SWEEP(gather_prefix, "plan", prefix, AT(SIZE, G, struct_size), AT(POINTER, G, plan),
        AT(CACHE, G, cache), FREE(2, G, block_table), AT(CACHE, G, keys), FREE(2, G, key_table),
        AT(POINTER, G, rows), AT(POINTER, G, comm), AT(TARGET, G, target));
  winnow_plan_destroy(plan);
  return end();
}
