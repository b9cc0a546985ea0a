/* Ranks in C: a group of threads whose functions the test brings, cut, combine and a plan over it.
 */
#define _POSIX_C_SOURCE 200809L /* barriers, in C11 without extensions */
#include <pthread.h>
#include <stdlib.h>

#include "c_testing.h"

enum { kRanks = 2 };

/* What the ranks share. A call meets twice: all have brought their bytes, all have taken them. */
typedef struct group {
  pthread_barrier_t meet;
  const char* sent[kRanks];
} group;
typedef struct member {
  group* all;
  int32_t rank;
  int calls, failing;
} member;

static int gather(void* context, const void* send, void* recv, size_t bytes) {
  member* m = context;
  ++m->calls;
  if (m->failing) return 7;
  m->all->sent[m->rank] = send;
  pthread_barrier_wait(&m->all->meet);
  for (size_t r = 0; r < kRanks; ++r) memcpy((char*)recv + r * bytes, m->all->sent[r], bytes);
  pthread_barrier_wait(&m->all->meet);
  return 0;
}
static int all_gather(void* context, const void* send, void* recv, size_t bytes, void* stream) {
  (void)stream;
  return gather(context, send, recv, bytes);
}
static int all_to_all(void* context, const void* send, void* recv, size_t bytes, void* stream) {
  member* m = context;
  (void)stream;
  m->all->sent[m->rank] = send;
  pthread_barrier_wait(&m->all->meet);
  for (size_t r = 0; r < kRanks; ++r)
    memcpy((char*)recv + r * bytes, m->all->sent[r] + (size_t)m->rank * bytes, bytes);
  pthread_barrier_wait(&m->all->meet);
  return 0;
}
static const char* why(void* context) {
  (void)context;
  return "the cable is out";
}

static winnow_communicator communicator(member* m) {
  winnow_communicator c = WINNOW_COMMUNICATOR_INIT;
  c.context = m;
  c.rank = m->rank;
  c.size = kRanks;
  c.name = "barrier";
  c.takes_host = true;
  c.all_gather = all_gather;
  c.all_to_all = all_to_all;
  c.exchange = gather;
  c.why = why;
  return c;
}

/* Positions 0, 2, 4, ... are rank 0's; the three largest of the row are 5, 3 and 0. */
static void cuts(member* m) {
  const winnow_communicator comm = communicator(m);
  const int32_t ids[2][3] = {{0, 1, 2}, {0, 1, 2}};
  const float values[2][3] = {{5, 0, 1}, {2, 6, 9}};
  int32_t kept[3], count = -1, positions[3];
  winnow_cut_args cut = WINNOW_CUT_ARGS_INIT;
  cut.comm = &comm;
  cut.shard = (winnow_shard){kRanks, m->rank, 1};
  cut.ids = i32(ids[m->rank], 2, SHAPE(1, 3));
  cut.values = f32(values[m->rank], 2, SHAPE(1, 3));
  cut.kept = i32(kept, 2, SHAPE(1, 3));
  cut.counts = i32(&count, 1, SHAPE(1));
  cut.positions = i32(positions, 2, SHAPE(1, 3));
  OK(winnow_cut(&cut));
  CHECK(positions[0] == 0 && positions[1] == 3 && positions[2] == 5);
  CHECK(m->rank == 0 ? count == 1 && kept[0] == 0 && kept[1] == -1
                     : count == 2 && kept[0] == 1 && kept[1] == 2);
  size_t bytes = 0;
  OK(winnow_cut_workspace_bytes(&cut, &bytes));
  CHECK(bytes > 0);
}

static void combines(member* m) {
  const winnow_communicator comm = communicator(m);
  const float out[2] = {(float)m->rank, 10.0f + (float)m->rank}, lse[2] = {0, 0};
  float merged = 0, sum = 0;
  winnow_combine_args combine = WINNOW_COMBINE_ARGS_INIT;
  combine.comm = &comm;
  combine.partial_out = f32(out, 3, SHAPE(1, 2, 1));
  combine.partial_lse = f32(lse, 2, SHAPE(1, 2));
  combine.out = f32(&merged, 3, SHAPE(1, 1, 1));
  combine.lse = f32(&sum, 2, SHAPE(1, 1));
  OK(winnow_combine(&combine));
  CHECK(fabsf(merged - (0.5f + 10.0f * (float)m->rank)) < 1e-6f);
  CHECK(fabsf(sum - 0.6931472f) < 1e-6f);
  size_t bytes = 0;
  OK(winnow_combine_workspace_bytes(&combine, &bytes));
  CHECK(bytes > 0);
}

static void plans(member* m) {
  const winnow_communicator comm = communicator(m);
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = 4;
  options.pages = 8;
  options.max_tokens = 4;
  options.max_requests = 2;
  options.comm = &comm;
  options.spread = WINNOW_SPREAD_CONTEXT;
  options.interleave = 2;
  winnow_plan* plan = NULL;
  OK(winnow_plan_create(&options, &plan));
  const int32_t starts[2] = {0, 1}, length = 7;
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, 2};
  batch.seq_lens = (winnow_ints){&length, 1};
  OK(winnow_plan_refill(plan, &batch));
  /* Of positions 0 to 6, in twos, rank 0 holds 0 1 4 5. */
  CHECK(winnow_plan_key_ends(plan).data[0] == (m->rank == 0 ? 4 : 3));
  winnow_plan_options resolved = WINNOW_PLAN_OPTIONS_INIT;
  OK(winnow_plan_get_options(plan, &resolved));
  CHECK(resolved.spread == WINNOW_SPREAD_CONTEXT && resolved.interleave == 2);
  winnow_plan_destroy(plan);
  /* Another interleave on rank 1: both ranks hear of it. */
  options.interleave = 2 + m->rank;
  plan = NULL;
  CHECK(winnow_plan_create(&options, &plan) == WINNOW_INVALID_ARGUMENT && !plan);
  CHECK(strstr(winnow_last_error(), "parallel.interleave") != NULL);
  CHECK(strstr(winnow_last_error(), "rank 1") != NULL);
}

/* Five tokens behind a prefix of six, in twos over two ranks: positions 8 and 9 are rank 0's. */
static void queries(member* m) {
  winnow_communicator comm = communicator(m);
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.pages = 4;
  options.heads = 8;
  options.max_context = 64;
  options.comm = &comm;
  options.spread = WINNOW_SPREAD_QUERIES;
  options.interleave = 2;
  options.sharded = 1;
  winnow_plan* plan = NULL;
  OK(winnow_plan_create(&options, &plan));
  const int32_t starts[2] = {0, 5}, length = 11;
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = (winnow_ints){starts, 2};
  batch.seq_lens = (winnow_ints){&length, 1};
  OK(winnow_plan_refill(plan, &batch));
  const int32_t own = m->rank == 0 ? 2 : 3;
  CHECK(winnow_plan_tokens(plan) == own && winnow_plan_batch_tokens(plan) == 5);
  int32_t own_starts[2], own_lens[1], tokens[5], positions[5];
  winnow_batch_share share = {own_starts, own_lens, tokens, positions, 5, 0};
  const winnow_shard shard = {2, m->rank, 2};
  OK(winnow_shard_batch(&batch, shard, &share));
  CHECK(share.count == own && own_starts[1] == own);
  const int32_t first = m->rank == 0 ? 8 : 6;
  CHECK(positions[0] == first && tokens[0] == first - 6);
  CHECK(winnow_plan_positions(plan).data[0] == first);
  CHECK(own_lens[0] == (m->rank == 0 ? 10 : 11));
  const winnow_ints order = winnow_plan_token_order(plan), rows = winnow_plan_token_rows(plan);
  CHECK(order.count == 6 && rows.count == 6 && order.data[0] == 2 && order.data[2] == -1);
  CHECK(order.data[3] == 0 && rows.data[3] == 6 && winnow_plan_gathered_rows(plan) == 11);
  CHECK(winnow_plan_prefix_lens(plan).data[0] == 6 && winnow_plan_row_starts(plan).data[0] == 0);
  CHECK(winnow_plan_key_starts(plan).count == own);
  share.capacity = own - 1;
  CHECK(winnow_shard_batch(&batch, shard, &share) == WINNOW_INVALID_ARGUMENT);

  /* What both ranks hold of the prefix, as rows: from zeroed caches, zeros. */
  size_t bytes = 0;
  OK(winnow_gather_prefix_bytes(plan, &bytes));
  CHECK(bytes > 64 * 788);
  unsigned char* const memory = calloc(1, bytes);
  unsigned char* const records = calloc(4, 64 * 656);
  unsigned char* const keys = calloc(4, 64 * 132);
  memset(memory, 0xff, bytes);
  const int32_t table[4] = {0, 1, 2, 3};
  winnow_gather_prefix_args args = WINNOW_GATHER_PREFIX_ARGS_INIT;
  args.plan = plan;
  args.cache = (winnow_cache){records, WINNOW_V32_FP8, 4, 64, 0};
  args.keys = (winnow_cache){keys, WINNOW_INDEX_KEYS, 4, 64, 0};
  args.block_table = args.key_table = i32(table, 2, SHAPE(1, 4));
  args.rows = memory;
  args.rows_bytes = bytes;
  OK(winnow_gather_prefix(&args));
  unsigned char* const aligned = memory + (64 - (size_t)memory % 64) % 64;
  CHECK(aligned[0] == 0 && aligned[6 * 656 - 1] == 0 && aligned[6 * 656] == 0xff);
  args.rows_bytes = 8;
  CHECK(winnow_gather_prefix(&args) == WINNOW_INVALID_ARGUMENT);
  free(memory);
  free(records);
  free(keys);
  winnow_plan_destroy(plan);
}

static void* rank(void* context) {
  cuts(context);
  combines(context);
  plans(context);
  queries(context);
  return NULL;
}

static void refusals(group* all) {
  member m = {all, 0, 0, 1};
  winnow_communicator comm = communicator(&m);
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.pages = 8;
  options.comm = &comm;
  options.spread = WINNOW_SPREAD_HEADS;
  winnow_plan* plan = NULL;
  CHECK(winnow_plan_create(&options, &plan) == WINNOW_RUNTIME);
  CHECK(strstr(winnow_last_error(), "plan: barrier: exchange: the cable is out") != NULL);
  comm.exchange = NULL;
  CHECK(winnow_plan_create(&options, &plan) == WINNOW_INVALID_ARGUMENT);
  CHECK(strstr(winnow_last_error(), "comm") != NULL);
  comm = communicator(&m);
  comm.struct_size = 3;
  CHECK(winnow_plan_create(&options, &plan) == WINNOW_INVALID_ARGUMENT && !plan);
  options.comm = NULL;
  CHECK(winnow_plan_create(&options, &plan) == WINNOW_INVALID_ARGUMENT && !plan);
  CHECK(strstr(winnow_last_error(), "parallel.comm") != NULL);
}

/* Positions 0 to 10 on three ranks, two by two: rank 1 holds 2, 3, 8 and 9. */
static void shards(void) {
  const winnow_shard shard = {3, 1, 2}, none = {0, 0, 0}, outside = {2, 2, 1};
  CHECK(winnow_shard_owner(shard, 8) == 1 && winnow_shard_owner(shard, 10) == 2);
  CHECK(winnow_shard_local(shard, 9) == 3 && winnow_shard_local(shard, 10) == 2);
  CHECK(winnow_shard_global(shard, 2) == 8 && winnow_shard_global(shard, INT64_MAX) == -1);
  CHECK(winnow_shard_local_length(shard, 11) == 4 && winnow_shard_local_length(shard, 9) == 3);
  CHECK(winnow_shard_owner(none, 8) == -1 && winnow_shard_local(shard, -1) == -1);
  CHECK(winnow_shard_local_length(outside, 8) == -1);
  CHECK(winnow_context_is_cheaper(1, 100000) && !winnow_context_is_cheaper(1000, 100000));
}

int main(void) {
  shards();
  group all;
  pthread_barrier_init(&all.meet, NULL, kRanks);
  member members[kRanks];
  pthread_t threads[kRanks];
  for (int32_t r = 0; r < kRanks; ++r) {
    members[r] = (member){&all, r, 0, 0};
    pthread_create(&threads[r], NULL, rank, &members[r]);
  }
  for (int32_t r = 0; r < kRanks; ++r) pthread_join(threads[r], NULL);
  CHECK(members[0].calls > 0 && members[0].calls == members[1].calls);
  refusals(&all);
  pthread_barrier_destroy(&all.meet);
  printf("%d failed\n", failures);
  return failures;
}
