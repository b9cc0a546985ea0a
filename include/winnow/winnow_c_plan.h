/* winnow in C: plans, the arithmetic of planning, and V4's index lists. Included by winnow_c.h. */
#ifndef WINNOW_C_PLAN_H
#define WINNOW_C_PLAN_H

#include "winnow/winnow_c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- ranks (<winnow/parallel.h>) ----------------------------------------------------------- */

/* A group of ranks that moves bytes, by functions of the caller's. They return 0, or another number
 * after which the group is spent; `why` says what happened, and may be null. They must give up
 * after a deadline of their own. `stream` is that of the call, a cudaStream_t; null on the host. */
typedef struct winnow_communicator {
  size_t struct_size;
  void* context;      /* handed to every function */
  int32_t rank, size; /* ranks: 1 to 16384 */
  const char* name;
  bool takes_host, takes_cuda; /* memory of all_gather and all_to_all */
  /* recv [size, bytes]: block r is what rank r sent */
  int (*all_gather)(void* context, const void* send, void* recv, size_t bytes, void* stream);
  /* send, recv [size, bytes]: block r of recv is block `rank` of what rank r sent */
  int (*all_to_all)(void* context, const void* send, void* recv, size_t bytes, void* stream);
  /* all_gather of host memory, done on return */
  int (*exchange)(void* context, const void* send, void* recv, size_t bytes);
  const char* (*why)(void* context);
} winnow_communicator;
#define WINNOW_COMMUNICATOR_INIT \
  { .struct_size = sizeof(winnow_communicator), .size = 1 }

typedef int32_t winnow_spread;
enum { WINNOW_SPREAD_NONE, WINNOW_SPREAD_HEADS, WINNOW_SPREAD_CONTEXT, WINNOW_SPREAD_QUERIES };
typedef int32_t winnow_wire;
enum { WINNOW_WIRE_F32, WINNOW_WIRE_BF16 };

/* Position p is on rank (p / interleave) % world. */
typedef struct winnow_shard {
  int32_t world, rank, interleave;
} winnow_shard;

/* The functions of Shard. -1 for a negative number, and for a shard that is none: world or
 * interleave below 1, or a rank outside the world. */
int32_t winnow_shard_owner(winnow_shard shard, int64_t position);
int64_t winnow_shard_local(winnow_shard shard, int64_t position); /* where it stands on its owner */
int64_t winnow_shard_global(winnow_shard shard, int64_t local);   /* of what this rank holds */
int64_t winnow_shard_local_length(winnow_shard shard,
                                  int64_t length); /* this rank's, of [0, length) */

bool winnow_context_is_cheaper(int64_t tokens, int64_t context);

/* ---- plan (<winnow/plan.h>) ---------------------------------------------------------------- */

typedef int32_t winnow_mode;
enum { WINNOW_AUTO, WINNOW_BF16_CACHE, WINNOW_MIXED, WINNOW_SEPARATE, WINNOW_DIRECT };
typedef int32_t winnow_split_policy;
enum { WINNOW_BALANCED, WINNOW_FIXED };
typedef int32_t winnow_stage;
enum {
  WINNOW_WRITE,
  WINNOW_SCORE,
  WINNOW_SELECT,
  WINNOW_LOCATE,
  WINNOW_ATTEND,
  WINNOW_GATHER,
  WINNOW_LISTS
};

typedef struct winnow_plan winnow_plan;

typedef struct winnow_plan_options {
  size_t struct_size;
  const char* model; /* "v32", "v4" */
  winnow_format format;
  int32_t heads, topk, extra_topk, ratio, index_heads, page; /* 0 of topk, ratio: the model's */
  int64_t pages;
  int32_t max_requests, max_tokens, max_context, decode_threshold;
  bool uniform_decode;
  winnow_mode mode;
  int64_t workspace_rows;
  winnow_split_policy split;
  int32_t split_size;
  winnow_target target;
  bool mha; /* of WINNOW_AUTO, V3.2, balanced splits: prefills may be parts for winnow_attend_mha.
               Routes are those of winnow_prefill_route(); C cannot bring its own */
  /* How this rank works with others; the structs are copied, their contexts outlive the plan. */
  const winnow_communicator* comm;
  const winnow_communicator* control; /* null: comm */
  winnow_spread spread;
  int32_t interleave;
  winnow_wire wire;
  int64_t sharded;            /* 0 or 1; WINNOW_SPREAD_QUERIES: caches hold this rank's shard */
  winnow_precision precision; /* of winnow_attend */
} winnow_plan_options;
#define WINNOW_PLAN_OPTIONS_INIT                                                                   \
  {                                                                                                \
    .struct_size = sizeof(winnow_plan_options), .model = "v32", .heads = 128, .index_heads = 64,   \
    .page = 64, .max_requests = 256, .max_tokens = 4096, .decode_threshold = 1, .split_size = 512, \
    .interleave = 1                                                                                \
  }

typedef struct winnow_batch {
  size_t struct_size;
  winnow_ints query_starts; /* [R + 1] */
  winnow_ints seq_lens;     /* [R] */
  int64_t tokens;           /* with padding; 0 means the last of query_starts */
} winnow_batch;
#define WINNOW_BATCH_INIT \
  { .struct_size = sizeof(winnow_batch) }

typedef struct winnow_batch_split {
  int32_t decodes, prefills, decode_tokens, prefill_tokens, active_decodes;
} winnow_batch_split;
typedef struct winnow_chunk {
  int32_t first, last;
} winnow_chunk;
typedef struct winnow_part {
  int32_t first_token, last_token, first_request, last_request;
  bool gathered;
  int32_t compressed, rows;
  bool mha; /* its rows are for winnow_decompress and winnow_attend_mha */
} winnow_part;
typedef struct winnow_tile {
  int32_t token, begin, end, split;
} winnow_tile;
typedef struct winnow_schedule {
  const winnow_tile* tiles;
  int64_t tile_count;
  winnow_ints worker_starts, split_starts;
} winnow_schedule;

winnow_status winnow_plan_create(const winnow_plan_options* options, winnow_plan** out);
winnow_status winnow_plan_refill(winnow_plan* plan, const winnow_batch* batch);
void winnow_plan_destroy(winnow_plan* plan); /* null is fine */

/* The plan's options with defaults resolved, as many of them as out->struct_size covers. */
winnow_status winnow_plan_get_options(const winnow_plan* plan, winnow_plan_options* out);

/* Accessors of a living plan, which must not be null. Addresses stay the same across refills. */
winnow_mode winnow_plan_mode(const winnow_plan* plan);
int32_t winnow_plan_request_count(const winnow_plan* plan);
int32_t winnow_plan_tokens(const winnow_plan* plan);
int32_t winnow_plan_batch_tokens(const winnow_plan* plan); /* of all ranks (queries shared out) */
winnow_ints winnow_plan_token_order(const winnow_plan* plan);
winnow_ints winnow_plan_token_rows(const winnow_plan* plan);
winnow_ints winnow_plan_key_starts(const winnow_plan* plan);
winnow_ints winnow_plan_prefix_lens(const winnow_plan* plan);
winnow_ints winnow_plan_row_starts(const winnow_plan* plan);
int64_t winnow_plan_gathered_rows(const winnow_plan* plan);
winnow_batch_split winnow_plan_split(const winnow_plan* plan);
winnow_ints winnow_plan_query_lens(const winnow_plan* plan);
winnow_ints winnow_plan_seq_lens(const winnow_plan* plan);
winnow_ints winnow_plan_request_ids(const winnow_plan* plan);
winnow_ints winnow_plan_positions(const winnow_plan* plan);
winnow_ints winnow_plan_key_ends(const winnow_plan* plan);
winnow_ints winnow_plan_state_starts(const winnow_plan* plan);
winnow_ints winnow_plan_arrays(const winnow_plan* plan); /* the block the lists here point into */
const winnow_chunk* winnow_plan_chunks(const winnow_plan* plan, int64_t* count);
winnow_ints winnow_plan_workspace_starts(const winnow_plan* plan);
winnow_ints winnow_plan_prefill_requests(const winnow_plan* plan);
winnow_ints winnow_plan_compressed_lens(const winnow_plan* plan);
winnow_ints winnow_plan_gather_starts(const winnow_plan* plan);
winnow_ints winnow_plan_gather_lens(const winnow_plan* plan);
winnow_ints winnow_plan_gather_rows(const winnow_plan* plan);
const winnow_part* winnow_plan_parts(const winnow_plan* plan, int64_t* count);
winnow_schedule winnow_plan_schedule(const winnow_plan* plan, int32_t part);
size_t winnow_plan_workspace_bytes(const winnow_plan* plan);
size_t winnow_plan_gather_bytes(const winnow_plan* plan);
/* The kernel that a stage runs for the current batch; of WINNOW_ATTEND, in one of its parts. Null:
 * no stage. */
const char* winnow_plan_kernel(const winnow_plan* plan, winnow_stage stage, int32_t part);
const char* winnow_plan_reasons(const winnow_plan* plan, winnow_stage stage);

/* Where a call with this plan runs whose target is `call`; null: one that names no device. */
winnow_status winnow_plan_device(const winnow_plan* plan, const winnow_target* call,
                                 winnow_device* out);
/* Queues the copy of winnow_plan_arrays() to `to` on the device's stream. The next refill waits for
 * it, as it does not for a copy of the caller's own. For a plan on the CPU there is nothing to do.
 */
winnow_status winnow_plan_upload(const winnow_plan* plan, void* to, winnow_device device);

typedef int32_t winnow_route;
enum { WINNOW_ROUTE_DIRECT, WINNOW_ROUTE_GATHERED, WINNOW_ROUTE_MHA };
typedef struct winnow_route_args {
  size_t struct_size;
  const char* model; /* "v32", "v4" */
  int32_t heads;
  int32_t tokens, context; /* new tokens of the request; all tokens of its sequence */
  bool mha;                /* whether WINNOW_ROUTE_MHA may be chosen */
  winnow_device_kind device;
} winnow_route_args;
#define WINNOW_ROUTE_ARGS_INIT \
  { .struct_size = sizeof(winnow_route_args), .model = "v32", .heads = 128, .device = WINNOW_CUDA }
winnow_status winnow_prefill_route(const winnow_route_args* args, winnow_route* out);

/* The arithmetic of planning. `out` of the chunk calls holds `capacity` chunks; *count is how many
 * there are, and more than fit is WINNOW_INVALID_ARGUMENT with *count set and nothing written. */
winnow_status winnow_request_ids(winnow_ints query_starts, int32_t* out, int64_t tokens);
winnow_status winnow_split_batch(winnow_ints query_starts, int64_t tokens, int32_t threshold,
                                 bool uniform, winnow_batch_split* out);
winnow_status winnow_prefill_chunks(winnow_ints seq_lens, int64_t rows, winnow_chunk* out,
                                    int64_t capacity, int64_t* count);
winnow_status winnow_workspace_starts(winnow_ints seq_lens, const winnow_chunk* chunks,
                                      int64_t chunk_count, int32_t* out);
winnow_status winnow_prefill_request_ids(winnow_ints query_starts, int32_t decodes, int32_t* out,
                                         int64_t tokens);

typedef struct winnow_v4_chunk {
  int32_t first, last, compressed, rows;
} winnow_v4_chunk;
typedef struct winnow_v4_chunk_args {
  size_t struct_size;
  winnow_ints query_lens, seq_lens; /* [R] */
  int32_t ratio, window;
  int64_t max_model_len, max_batched_tokens;
} winnow_v4_chunk_args;
#define WINNOW_V4_CHUNK_ARGS_INIT \
  { .struct_size = sizeof(winnow_v4_chunk_args), .ratio = 4, .window = 128 }
winnow_status winnow_v4_prefill_chunks(const winnow_v4_chunk_args* args, winnow_v4_chunk* out,
                                       int64_t capacity, int64_t* count);

/* ---- V4's index lists (<winnow/lists.h>) --------------------------------------------------- */

typedef struct winnow_compressed_slots_args {
  size_t struct_size;
  const winnow_plan* plan;                        /* optional, here and below */
  winnow_tensor positions, requests, block_table; /* [T], [T], [R, W] int32 */
  int32_t ratio, page;
  int64_t pages;
  winnow_tensor slots; /* [N >= T] int64 */
  winnow_target target;
  winnow_shard shard; /* of states, here and below of what a list holds */
} winnow_compressed_slots_args;
#define WINNOW_COMPRESSED_SLOTS_ARGS_INIT                                                   \
  {                                                                                         \
    .struct_size = sizeof(winnow_compressed_slots_args), .ratio = 4, .page = 64, .shard = { \
      1,                                                                                    \
      0,                                                                                    \
      1                                                                                     \
    }                                                                                       \
  }
winnow_status winnow_compressed_slots(const winnow_compressed_slots_args* args);

typedef struct winnow_c128a_lists_args {
  size_t struct_size;
  const winnow_plan* plan;
  winnow_tensor positions, requests, block_table; /* [T], [T], [R, W] int32 */
  int32_t ratio, page;
  int64_t pages;
  int64_t decode_tokens;        /* the first rows hold slots, the others workspace rows */
  winnow_tensor lists, lengths; /* [T, capacity], [T] int32 */
  winnow_target target;
  winnow_shard shard; /* of states */
} winnow_c128a_lists_args;
#define WINNOW_C128A_LISTS_ARGS_INIT                                                               \
  {                                                                                                \
    .struct_size = sizeof(winnow_c128a_lists_args), .ratio = 128, .page = 64, .shard = { 1, 0, 1 } \
  }
winnow_status winnow_c128a_lists(const winnow_c128a_lists_args* args);
winnow_status winnow_c128a_width(int32_t max_position, int32_t ratio, int32_t* out);

typedef struct winnow_window_lists_args {
  size_t struct_size;
  const winnow_plan* plan;
  winnow_tensor positions, requests, block_table; /* [T], [T], [R, W] int32; the last optional */
  int32_t window, page;
  int64_t pages;
  winnow_tensor lists, lengths; /* [T, capacity >= window], [T] int32 */
  winnow_target target;
  winnow_shard shard; /* of positions */
} winnow_window_lists_args;
#define WINNOW_WINDOW_LISTS_ARGS_INIT                                                      \
  {                                                                                        \
    .struct_size = sizeof(winnow_window_lists_args), .window = 128, .page = 64, .shard = { \
      1,                                                                                   \
      0,                                                                                   \
      1                                                                                    \
    }                                                                                      \
  }
winnow_status winnow_window_lists(const winnow_window_lists_args* args);

typedef struct winnow_combined_lists_args {
  size_t struct_size;
  const winnow_plan* plan;
  winnow_tensor topk, positions, requests; /* [T, K], [T], [T] int32 */
  winnow_tensor seq_lens, gather_lens;     /* [R] int32 */
  int32_t ratio, window, compressed, rows; /* compressed and rows: N and M of the chunk */
  int32_t first_request;                   /* number of the chunk's first request in `requests` */
  winnow_tensor lists, lengths;            /* [T, >= ceil128(K + window)], [T] int32 */
  winnow_target target;
} winnow_combined_lists_args;
#define WINNOW_COMBINED_LISTS_ARGS_INIT \
  { .struct_size = sizeof(winnow_combined_lists_args), .ratio = 4, .window = 128 }
winnow_status winnow_combined_lists(const winnow_combined_lists_args* args);

#ifdef __cplusplus
}
#endif

#endif /* WINNOW_C_PLAN_H */
