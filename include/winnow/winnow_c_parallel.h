/* winnow in C: the stages over several ranks. Included by winnow_c.h. */
#ifndef WINNOW_C_PARALLEL_H
#define WINNOW_C_PARALLEL_H

#include "winnow/winnow_c_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- cut, combine (<winnow/cut.h>, <winnow/combine.h>) ------------------------------------- */

typedef int32_t winnow_cut_form;
enum { WINNOW_CUT_AUTO, WINNOW_CUT_GATHER, WINNOW_CUT_OWNER };

typedef struct winnow_cut_args {
  size_t struct_size;
  const winnow_plan* plan;
  const winnow_communicator* comm; /* without a plan; null: one rank */
  winnow_shard shard;
  winnow_tensor ids, values;  /* [T, K] int32, f32 */
  winnow_tensor kept, counts; /* [T, K] int32, [T] int32, out; optional */
  winnow_tensor positions;    /* [T, K] int32, out; optional */
  winnow_cut_form form;
  void* workspace; /* null: a call without a plan makes its own */
  size_t workspace_bytes;
  winnow_target target;
} winnow_cut_args;
#define WINNOW_CUT_ARGS_INIT                                     \
  {                                                              \
    .struct_size = sizeof(winnow_cut_args), .shard = { 1, 0, 1 } \
  }
winnow_status winnow_cut(const winnow_cut_args* args);
winnow_status winnow_cut_workspace_bytes(const winnow_cut_args* args, size_t* out);

typedef struct winnow_combine_args {
  size_t struct_size;
  const winnow_plan* plan;
  const winnow_communicator* comm; /* without a plan; null: one rank */
  winnow_wire wire;
  winnow_tensor partial_out, partial_lse; /* [T, H, d_v] f32, [T, H] f32 */
  winnow_tensor sink;                     /* [H / W] f32, optional */
  winnow_tensor out, lse; /* [T, H / W, d_v] bf16 or f32, [T, H / W] f32, optional */
  void* workspace;        /* null: a call without a plan makes its own */
  size_t workspace_bytes;
  winnow_target target;
} winnow_combine_args;
#define WINNOW_COMBINE_ARGS_INIT \
  { .struct_size = sizeof(winnow_combine_args) }
winnow_status winnow_combine(const winnow_combine_args* args);
winnow_status winnow_combine_workspace_bytes(const winnow_combine_args* args, size_t* out);

/* ---- queries over ranks (<winnow/plan.h>, <winnow/gather_prefix.h>) ------------------------- */

/* A rank's part of a batch. The arrays are the caller's: [R + 1], [R], and twice [capacity], at
 * least as many as the batch has tokens. */
typedef struct winnow_batch_share {
  int32_t *query_starts, *seq_lens, *tokens, *positions;
  int64_t capacity;
  int64_t count; /* out: tokens of this rank */
} winnow_batch_share;
winnow_status winnow_shard_batch(const winnow_batch* batch, winnow_shard shard,
                                 winnow_batch_share* out);

typedef struct winnow_gather_prefix_args {
  size_t struct_size;
  const winnow_plan* plan;         /* WINNOW_SPREAD_QUERIES with sharded caches, refilled */
  winnow_cache cache;              /* this rank's records */
  winnow_tensor block_table;       /* [R, W] int32 */
  winnow_cache keys;               /* this rank's index keys */
  winnow_tensor key_table;         /* [R, W] int32 */
  void* rows;                      /* out: `prefix` of winnow_pipeline_args */
  size_t rows_bytes;               /* winnow_gather_prefix_bytes() */
  const winnow_communicator* comm; /* null: the plan's */
  winnow_target target;
} winnow_gather_prefix_args;
#define WINNOW_GATHER_PREFIX_ARGS_INIT \
  { .struct_size = sizeof(winnow_gather_prefix_args) }
winnow_status winnow_gather_prefix(const winnow_gather_prefix_args* args);
winnow_status winnow_gather_prefix_bytes(const winnow_plan* plan, size_t* out);

#ifdef __cplusplus
}
#endif

#endif
