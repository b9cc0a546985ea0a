/* Functions of numbers, lists and names through the C ABI: a plan's arithmetic and accessors, sizes
 * of caches, the list of kernels. A call gives WINNOW_OK, or a code and a message that names it,
 * and then has written nothing. */
#include "c_hostile.h"

enum { REQUESTS = 4, ROOM = 12 };

static int64_t odd(void) {
  return PICK(INT64_MIN, INT32_MIN, -1, 0, 1, 2, 7, 64, 1 << 20, INT32_MAX, (int64_t)1 << 32,
              INT64_MAX);
}
static int32_t odd32(void) { return (int32_t)PICK(INT32_MIN, -1, 0, 1, 2, 5, 64, INT32_MAX); }
static void* maybe(void* pointer) { return draw(8) == 0 ? NULL : pointer; }

/* Ascending starts or lengths, at times hostile ones; never longer than there is memory. */
static winnow_ints list(int32_t* data, int64_t count, int ascending) {
  for (int64_t i = 0; i < count; ++i) {
    data[i] = (int32_t)draw(4) + (ascending && i > 0 ? data[i - 1] : 0);
    if (ascending && i == 0) data[i] = 0;
  }
  if (draw(4) == 0) data[draw(count)] = odd32();
  return (winnow_ints){maybe(data), PICK(-1, INT64_MIN, 0, count, count, count, count)};
}

static int64_t succeeded = 0;

static bool names(const char* message, const char* name) {
  const size_t length = strlen(name);
  return strncmp(message, name, length) == 0 && message[length] == ':';
}

/* The function did what it should, or says why not, by its name or the group's, and left
 * `out` alone. */
static void answered(winnow_status status, const char* name, const char* group, const void* out,
                     size_t size) {
  ++calls;
  CHECK(status >= WINNOW_OK && status <= WINNOW_RUNTIME);
  succeeded += status == WINNOW_OK;
  if (status == WINNOW_OK) return;
  CHECK(all_are((const uint8_t*)out, size, POISON));
  if (names(winnow_last_error(), name) || names(winnow_last_error(), group)) return;
  printf("%s: %s\n", name, winnow_last_error());
  ++failures;
}
#define ANSWERED(name, group, out, call)              \
  do {                                                \
    memset(&(out), POISON, sizeof(out));              \
    answered(call, name, group, &(out), sizeof(out)); \
  } while (0)

static void sweep_models(void) {
  static const char* const names[] = {"v32", "v4", "", "V4", "index_keys", "no such name"};
  const char* name = draw(8) == 0 ? NULL : names[draw(6)];
  const winnow_format format = (winnow_format)PICK(0, 1, 2, 3, 4, 5, 6, -1, INT32_MIN, INT32_MAX);
  winnow_model model;
  ANSWERED("model", "model", model, winnow_model_of(name, maybe(&model)));
  winnow_format found;
  ANSWERED("format", "model", found, winnow_format_of(name, maybe(&found)));
  CHECK((winnow_format_name(format) != NULL) == (format >= 0 && format <= WINNOW_INDEX_KEYS_BF16));
  int64_t bytes, shape[2], count;
  ANSWERED("page_bytes", "model", bytes, winnow_page_bytes(format, odd(), maybe(&bytes)));
  ANSWERED("page_bytes_used", "model", bytes, winnow_page_bytes_used(format, odd(), maybe(&bytes)));
  ANSWERED("cache_shape", "model", shape, winnow_cache_shape(format, odd(), odd(), maybe(shape)));
  int32_t dim;
  ANSWERED("record_dim", "model", dim, winnow_record_dim(format, maybe(&dim)));
  int32_t width;
  ANSWERED("c128a_width", "lists", width, winnow_c128a_width(odd32(), odd32(), maybe(&width)));
  winnow_kernel_info kernel;
  ANSWERED("support", "model", kernel, winnow_support(odd(), maybe(&kernel)));
  ANSWERED("support", "model", count, winnow_support_count(maybe(&count)));
  CHECK(winnow_cache_formats(maybe(&count)) != NULL);
  CHECK(winnow_head_sizes(maybe(&count)) != NULL);
  const int64_t heads = odd();
  CHECK(winnow_supports_heads(heads) == (heads >= 1 && heads <= 128));
  CHECK(winnow_cpu_name() != NULL && winnow_version() != NULL && winnow_threads() >= 1);
}

static void sweep_batches(void) {
  static int32_t numbers[REQUESTS + 1];
  int32_t out[ROOM];
  int64_t tokens = PICK(-1, INT64_MIN, 0, ROOM, ROOM);
  ANSWERED("request_ids", "plan", out,
           winnow_request_ids(list(numbers, REQUESTS + 1, 1), maybe(out), tokens));
  ANSWERED("prefill_request_ids", "plan", out,
           winnow_prefill_request_ids(list(numbers, REQUESTS + 1, 1), odd32(), maybe(out), tokens));
  winnow_batch_split split;
  ANSWERED("split_batch", "plan", split,
           winnow_split_batch(list(numbers, REQUESTS + 1, 1), odd(), odd32(), draw(2) != 0,
                              maybe(&split)));
  winnow_chunk chunks[REQUESTS];
  int64_t count;
  const int64_t capacity = PICK(-1, INT64_MIN, 0, 1, REQUESTS);
  ANSWERED("prefill_chunks", "plan", chunks,
           winnow_prefill_chunks(list(numbers, REQUESTS, 0), odd(), maybe(chunks), capacity,
                                 maybe(&count)));
  winnow_chunk given[2] = {{0, 2}, {2, REQUESTS}};
  if (draw(2)) *(draw(2) ? &given[0].last : &given[1].first) = odd32();
  ANSWERED("workspace_starts", "plan", out,
           winnow_workspace_starts(list(numbers, REQUESTS, 0), maybe(given),
                                   PICK(-1, INT64_MIN, 0, 1, 2, 2), maybe(out)));
}

static void sweep_shards_and_routes(void) {
  const winnow_shard shard = {odd32(), odd32(), odd32()};
  const int64_t number = odd(), where = winnow_shard_global(shard, number);
  CHECK(winnow_shard_owner(shard, number) < (shard.world > 0 ? shard.world : 1));
  CHECK(winnow_shard_local(shard, number) <= number || number < 0);
  CHECK(winnow_shard_local_length(shard, number) <= number || number < 0);
  CHECK(where == -1 || (winnow_shard_owner(shard, where) == shard.rank &&
                        winnow_shard_local(shard, where) == number));
  (void)winnow_context_is_cheaper(number, odd());
  winnow_route_args args = WINNOW_ROUTE_ARGS_INIT;
  if (draw(8) == 0) args.struct_size = (size_t)odd();
  if (draw(8) == 0) args.model = NULL;
  if (draw(4) == 0) args.heads = odd32();
  if (draw(4) == 0) args.device = odd32();
  args.tokens = odd32();
  args.context = odd32();
  args.mha = draw(2) != 0;
  winnow_route route;
  ANSWERED("prefill_route", "model", route, winnow_prefill_route(maybe(&args), maybe(&route)));
}

static volatile int64_t seen; /* so that every number is read */
static void read_all(winnow_ints all) {
  CHECK(all.count >= 0 && (all.count == 0 || all.data != NULL));
  for (int64_t i = 0; i < all.count; ++i) seen += all.data[i];
}

/* What a plan reports can be read, whatever is asked. */
static void sweep_accessors(const winnow_plan* plan) {
  winnow_ints (*const lists[])(const winnow_plan*) = {
      winnow_plan_query_lens,       winnow_plan_seq_lens,         winnow_plan_request_ids,
      winnow_plan_positions,        winnow_plan_key_ends,         winnow_plan_arrays,
      winnow_plan_workspace_starts, winnow_plan_prefill_requests, winnow_plan_compressed_lens,
      winnow_plan_gather_starts,    winnow_plan_gather_lens,      winnow_plan_gather_rows,
      winnow_plan_token_order,      winnow_plan_token_rows,       winnow_plan_key_starts,
      winnow_plan_prefix_lens,      winnow_plan_row_starts,       winnow_plan_state_starts};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; ++i) read_all(lists[i](plan));
  int64_t parts = 0, chunks = 0;
  const winnow_part* part = winnow_plan_parts(plan, &parts);
  const winnow_chunk* chunk = winnow_plan_chunks(plan, &chunks);
  for (int64_t i = 0; i < parts; ++i) seen += part[i].last_token;
  for (int64_t i = 0; i < chunks; ++i) seen += chunk[i].last;
  winnow_plan_parts(plan, NULL);
  winnow_plan_chunks(plan, NULL);
  const winnow_schedule schedule = winnow_plan_schedule(plan, odd32());
  for (int64_t i = 0; i < schedule.tile_count; ++i) seen += schedule.tiles[i].end;
  read_all(schedule.worker_starts);
  read_all(schedule.split_starts);
  const winnow_stage stage = (winnow_stage)PICK(0, 1, 2, 3, 4, 5, 6, -1, INT32_MIN, INT32_MAX);
  const char* kernel = winnow_plan_kernel(plan, stage, odd32());
  const char* reasons = winnow_plan_reasons(plan, stage);
  if (kernel) seen += (int64_t)strlen(kernel);
  if (reasons) seen += (int64_t)strlen(reasons);
  seen += winnow_plan_mode(plan) + winnow_plan_request_count(plan) + winnow_plan_tokens(plan) +
          winnow_plan_split(plan).decodes;
  seen += winnow_plan_batch_tokens(plan) + winnow_plan_gathered_rows(plan);
  seen += (int64_t)(winnow_plan_workspace_bytes(plan) + winnow_plan_gather_bytes(plan));
  winnow_device device;
  const winnow_target target = {{odd32(), odd32(), NULL}, NULL};
  ANSWERED("plan", "plan", device,
           winnow_plan_device(draw(8) == 0 ? NULL : plan, maybe((void*)&target), maybe(&device)));
  char nothing; /* a plan on the CPU copies nothing */
  ANSWERED("plan", "plan", nothing,
           winnow_plan_upload(draw(8) == 0 ? NULL : plan, maybe(&nothing), target.device));
  size_t bytes;
  ANSWERED("pipeline", "plan", bytes,
           winnow_pipeline_workspace_bytes(draw(8) == 0 ? NULL : plan, maybe(&bytes)));
  union {
    size_t struct_size;
    winnow_plan_options whole;
    uint8_t bytes[sizeof(winnow_plan_options)];
  } options;
  memset(&options, POISON, sizeof options);
  options.struct_size = (size_t)PICK(0, 1, 8, 16, sizeof(winnow_plan_options), 100000, -1);
  const winnow_status status =
      winnow_plan_get_options(draw(8) == 0 ? NULL : plan, maybe(&options.whole));
  answered(status, "plan", "plan", options.bytes + sizeof(size_t), sizeof options - sizeof(size_t));
  winnow_plan_destroy(NULL);
}

int main(void) {
  begin();
  const int32_t starts[] = {0, 1, TOKENS}, lens[] = {9, 5};
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.heads = HEADS;
  options.topk = WIDTH;
  options.pages = PAGES;
  options.mode = WINNOW_SEPARATE;
  options.max_requests = ROWS;
  options.max_tokens = TOKENS;
  winnow_plan* plan = NULL;
  OK(winnow_plan_create(&options, &plan));
  const int64_t count = rounds();
  for (int64_t i = 0; i < count && plan; ++i) {
    sweep_models();
    sweep_batches();
    sweep_shards_and_routes();
    if (i == count / 2) { /* the first half asks a plan that has no batch yet */
      winnow_batch batch = WINNOW_BATCH_INIT;
      batch.query_starts = (winnow_ints){starts, ROWS + 1};
      batch.seq_lens = (winnow_ints){lens, ROWS};
      OK(winnow_plan_refill(plan, &batch));
    }
    sweep_accessors(plan);
  }
  winnow_plan_destroy(plan);
  CHECK(succeeded > calls / 20 && succeeded < calls);
  return end();
}
