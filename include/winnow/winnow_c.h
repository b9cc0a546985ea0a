/* winnow in C: one symbol per verb of the C++ API. Structs mirror the C++ ones field by field; what
 * a call computes, its edge cases and its cost stand in the C++ header named at each section. On
 * purpose they differ in this: memory is a pointer and its size, small structs are spelled out with
 * their member's name in front (state_rows, index_q), and C++ alone has PlanOptions::route and the
 * communicators of <winnow/mpi.h> and <winnow/nccl.h>.
 *
 * Every pointer stays the caller's; winnow owns plans alone. Calls may run on any thread. Those
 * of several threads may share a plan without a communicator, each with a workspace of its own; a
 * plan must not be refilled or destroyed while another call uses it.
 *
 * Argument structs begin with struct_size and start from their _INIT macro, which also sets the
 * defaults. Later versions append members to them and keep accepting the sizes that were published,
 * from 0.1 on: members that a caller's struct does not have take their defaults. The structs
 * without struct_size stay as they are. */
#ifndef WINNOW_C_H
#define WINNOW_C_H

#include "winnow/winnow_c_layers.h"
#include "winnow/winnow_c_parallel.h"
#include "winnow/winnow_c_plan.h"
#include "winnow/winnow_c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- write (<winnow/write.h>) -------------------------------------------------------------- */

typedef struct winnow_write_args {
  size_t struct_size;
  const winnow_plan* plan; /* optional, here and below */
  winnow_tensor kv;        /* [N, d] bf16 */
  winnow_tensor rope;      /* [N, d_rope] bf16, optional */
  winnow_tensor slots;     /* [T] int64 */
  winnow_cache cache;
  winnow_scale_mode scale;
  winnow_target target;
  winnow_prologue prologue; /* all zero: rows are stored as they are */
} winnow_write_args;
/* clang-format off */
#define WINNOW_WRITE_ARGS_INIT \
  {.struct_size = sizeof(winnow_write_args), .prologue = {.norm = {.eps = 1e-6f}}}
/* clang-format on */
winnow_status winnow_write(const winnow_write_args* args);

typedef struct winnow_gather_args {
  size_t struct_size;
  const winnow_plan* plan;
  winnow_cache cache;
  winnow_tensor block_table;                 /* [R, W] int32 */
  winnow_tensor starts, lengths, out_starts; /* [R] int32; only lengths must be given */
  winnow_tensor out;                         /* [N, d] bf16 */
  winnow_target target;
} winnow_gather_args;
#define WINNOW_GATHER_ARGS_INIT \
  { .struct_size = sizeof(winnow_gather_args) }
winnow_status winnow_gather(const winnow_gather_args* args);

typedef struct winnow_join_args {
  size_t struct_size;
  winnow_tensor latent, rope, out; /* [T, H, d_nope], [T, H, d_rope], [T, H, both] bf16 */
  winnow_target target;
} winnow_join_args;
#define WINNOW_JOIN_ARGS_INIT \
  { .struct_size = sizeof(winnow_join_args) }
winnow_status winnow_join(const winnow_join_args* args);

typedef struct winnow_quantize_args {
  size_t struct_size;
  winnow_tensor x, out, scale; /* bf16 or f32; e4m3 of the same shape; [1] f32 */
  winnow_target target;
} winnow_quantize_args;
#define WINNOW_QUANTIZE_ARGS_INIT \
  { .struct_size = sizeof(winnow_quantize_args) }
winnow_status winnow_quantize(const winnow_quantize_args* args);

/* ---- score, select, locate (<winnow/score.h>, <winnow/select.h>, <winnow/locate.h>) -------- */

typedef struct winnow_select_blocks {
  int32_t size;               /* columns of a block; 0: 8 */
  winnow_tensor within, best; /* [T, B] int32, optional: an input, an output */
} winnow_select_blocks;

typedef struct winnow_score_args {
  size_t struct_size;
  const winnow_plan* plan;
  winnow_tensor q, weights;            /* [T, H_I, 128] e4m3 or bf16, [T, H_I] f32 */
  winnow_cache keys;                   /* paged keys, with ... */
  winnow_tensor block_table, requests; /* [R, W] int32, [T] int32 */
  winnow_tensor key_rows, key_scales;  /* or contiguous ones: [N, 128], [N] f32 (bf16: none) */
  winnow_tensor starts, ends;          /* [T] int32; starts optional */
  winnow_tensor logits;                /* [T, N] f32; empty in winnow_score_select() */
  bool clean;
  winnow_target target;
  bool some_tokens; /* with a plan: a part of its tokens, as a rank's share of the rows */
} winnow_score_args;
#define WINNOW_SCORE_ARGS_INIT \
  { .struct_size = sizeof(winnow_score_args) }
winnow_status winnow_score(const winnow_score_args* args);

typedef struct winnow_score_select_args {
  size_t struct_size;
  const winnow_score_args* score; /* logits stays empty */
  winnow_tensor ids;              /* [T, K] int32 */
  bool relative;
  void* workspace; /* null: a CPU call without a plan makes its own */
  size_t workspace_bytes;
  winnow_select_blocks blocks;
  winnow_tensor values; /* [T, K] f32, optional */
} winnow_score_select_args;
#define WINNOW_SCORE_SELECT_ARGS_INIT \
  { .struct_size = sizeof(winnow_score_select_args) }
winnow_status winnow_score_select(const winnow_score_select_args* args);
winnow_status winnow_score_select_workspace_bytes(const winnow_score_select_args* args,
                                                  size_t* out);

typedef struct winnow_select_args {
  size_t struct_size;
  const winnow_plan* plan;
  winnow_tensor logits;       /* [T, N] f32 */
  winnow_tensor starts, ends; /* [T] int32, optional */
  winnow_tensor ids;          /* [T, K] int32 */
  bool relative;
  winnow_target target;
  winnow_select_blocks blocks;
  winnow_tensor values; /* [T, K] f32, optional */
} winnow_select_args;
#define WINNOW_SELECT_ARGS_INIT \
  { .struct_size = sizeof(winnow_select_args) }
winnow_status winnow_select(const winnow_select_args* args);

typedef struct winnow_context_parallel {
  int32_t world, rank, interleave;
  bool compact;
} winnow_context_parallel;

typedef struct winnow_locate_args {
  size_t struct_size;
  const winnow_plan* plan;
  int32_t part;                             /* of the plan; -1: all tokens */
  winnow_tensor ids, requests, block_table; /* [T, K], [T], [R, W] int32 */
  int32_t page;
  int64_t pages;
  int32_t rows_per_page;                            /* 0 means page */
  winnow_tensor prefill_requests, workspace_starts; /* [T], [P] int32, optional */
  int64_t workspace_rows;
  winnow_context_parallel parallel;
  winnow_tensor slots, counts; /* [T, K], [T] int32; counts optional */
  winnow_target target;
} winnow_locate_args;
/* clang-format off */
#define WINNOW_LOCATE_ARGS_INIT                                            \
  {.struct_size = sizeof(winnow_locate_args), .part = -1, .page = 64,      \
   .parallel = {.world = 1, .interleave = 1}}
/* clang-format on */
winnow_status winnow_locate(const winnow_locate_args* args);

/* ---- attend (<winnow/attend.h>) ------------------------------------------------------------ */

typedef struct winnow_kv_list { /* all zero: no such list */
  winnow_cache cache;
  winnow_tensor indices, lengths,
      block_table; /* [T, K], [T], [R, W] int32; the last two optional */
} winnow_kv_list;

typedef struct winnow_attend_args {
  size_t struct_size;
  const winnow_plan* plan;
  int32_t part;            /* of the plan */
  winnow_tensor q, q_rope; /* [T, H, d_qk] bf16, or d_nope and d_rope of it */
  winnow_kv_list lists[2];
  winnow_tensor requests;       /* [T] int32, with block tables */
  float scale;                  /* no default: <winnow/attend.h> says what models have */
  winnow_tensor sink;           /* [H] f32, optional */
  winnow_tensor out;            /* [T, H, d_v] bf16 */
  winnow_tensor lse, max_logit; /* [T, H] f32, optional */
  bool empty_lse_negative;
  void* workspace; /* null, without a plan: a CPU call takes its own, a CUDA call with few tokens
                      is slower */
  size_t workspace_bytes;
  winnow_target target;
  winnow_precision precision;
} winnow_attend_args;
#define WINNOW_ATTEND_ARGS_INIT \
  { .struct_size = sizeof(winnow_attend_args), .scale = WINNOW_NOT_GIVEN }
winnow_status winnow_attend(const winnow_attend_args* args);
winnow_status winnow_attend_workspace_bytes(const winnow_attend_args* args, size_t* out);

typedef struct winnow_mha_args {
  size_t struct_size;
  winnow_tensor q, k, v;              /* [T, H, d_qk], [N, H, d_qk], [N, H, d_v] bf16 */
  winnow_tensor ids, starts, lengths; /* [T, K], [T], [T] int32, optional */
  winnow_tensor mask, bias;           /* [T, M] uint8, [T, M] f32, optional */
  float scale;                        /* no default, as in winnow_attend_args */
  winnow_tensor sink, out, lse; /* [H] f32, [T, H, d_v] bf16, [T, H] f32; only out must be given */
  bool empty_lse_negative;
  winnow_target target;
  winnow_tensor bits; /* [T, M] uint8, optional: of winnow_topk_mask */
} winnow_mha_args;
#define WINNOW_MHA_ARGS_INIT \
  { .struct_size = sizeof(winnow_mha_args), .scale = WINNOW_NOT_GIVEN }
winnow_status winnow_attend_mha(const winnow_mha_args* args);

typedef struct winnow_topk_mask_args {
  size_t struct_size;
  winnow_tensor ids, lengths, mask; /* [T, K] int32, [T] int32 (optional), [T, M] uint8 */
  winnow_target target;
} winnow_topk_mask_args;
#define WINNOW_TOPK_MASK_ARGS_INIT \
  { .struct_size = sizeof(winnow_topk_mask_args) }
winnow_status winnow_topk_mask(const winnow_topk_mask_args* args);

typedef struct winnow_merge_args {
  size_t struct_size;
  winnow_tensor partial_out, partial_lse; /* [P, T, H, d_v] f32 or bf16, [P, T, H] f32 */
  winnow_tensor sink, out, lse; /* [H] f32, [T, H, d_v] bf16 or f32, [T, H] f32; out is needed */
  winnow_target target;
} winnow_merge_args;
#define WINNOW_MERGE_ARGS_INIT \
  { .struct_size = sizeof(winnow_merge_args) }
winnow_status winnow_merge(const winnow_merge_args* args);

/* ---- absorb (<winnow/absorb.h>), all bf16 unless said ---------------------------------------- */

typedef struct winnow_dequantize_weight_args {
  size_t struct_size;
  winnow_tensor weight, scale, out; /* [rows, cols] e4m3, per 128 x 128 block or [1] f32, bf16 */
  winnow_target target;
} winnow_dequantize_weight_args;
#define WINNOW_DEQUANTIZE_WEIGHT_ARGS_INIT \
  { .struct_size = sizeof(winnow_dequantize_weight_args) }
winnow_status winnow_dequantize_weight(const winnow_dequantize_weight_args* args);

typedef struct winnow_split_kv_b_args {
  size_t struct_size;
  winnow_tensor weight, w_uk, w_uv; /* [L, H, P + V], [L, H, P], [L, H, V] */
  winnow_target target;
} winnow_split_kv_b_args;
#define WINNOW_SPLIT_KV_B_ARGS_INIT \
  { .struct_size = sizeof(winnow_split_kv_b_args) }
winnow_status winnow_split_kv_b(const winnow_split_kv_b_args* args);

typedef struct winnow_absorb_query_args {
  size_t struct_size;
  winnow_tensor q_nope, w_uk, out; /* [T, H, P], [L, H, P], [T, H, L] */
  winnow_target target;
} winnow_absorb_query_args;
#define WINNOW_ABSORB_QUERY_ARGS_INIT \
  { .struct_size = sizeof(winnow_absorb_query_args) }
winnow_status winnow_absorb_query(const winnow_absorb_query_args* args);

typedef struct winnow_project_output_args {
  size_t struct_size;
  winnow_tensor attn, w_uv, out; /* [T, H, L], [L, H, V], [T, H, V] */
  winnow_target target;
} winnow_project_output_args;
#define WINNOW_PROJECT_OUTPUT_ARGS_INIT \
  { .struct_size = sizeof(winnow_project_output_args) }
winnow_status winnow_project_output(const winnow_project_output_args* args);

typedef struct winnow_decompress_args {
  size_t struct_size;
  winnow_tensor latent, w_uk, w_uv, k, v; /* [N, L + R], [L, H, P], [L, H, V], [N, H, P + R], ... */
  winnow_target target;
} winnow_decompress_args;
#define WINNOW_DECOMPRESS_ARGS_INIT \
  { .struct_size = sizeof(winnow_decompress_args) }
winnow_status winnow_decompress(const winnow_decompress_args* args);

/* ---- pipeline (<winnow/pipeline.h>) -------------------------------------------------------- */

typedef struct winnow_indexer {
  winnow_tensor k, slots;    /* [T, 128] bf16, [T] int64 */
  winnow_cache keys;         /* V4 without the two above: only read */
  winnow_tensor block_table; /* [R, W] int32 */
  winnow_tensor q, weights;  /* [T, H_I, 128] e4m3, [T, H_I] f32 */
} winnow_indexer;

/* V4's steps between projections and the stages; given by rope.table. */
typedef struct winnow_compressor {
  winnow_tensor rows; /* [T, ...] f32 or bf16; all zero: no such step */
  bool overlap, gate;
  winnow_tensor bias;
  winnow_tensor state_rows, state_table;
  bool state_ring;
  winnow_norm_step norm;
  bool hadamard;
  winnow_scale_mode scale;
} winnow_compressor;

typedef struct winnow_layer_steps {
  winnow_rope rope;
  winnow_norm_step kv_norm, q_norm; /* q is prepared in place */
  winnow_scale_mode scale;
  winnow_compressor states, index;      /* V4.1: of index norm, hadamard and scale, for indexer.k */
  winnow_tensor index_q, index_weights; /* [T, H_I, 128] bf16, [T, H_I] f32 or bf16 */
  bool index_hadamard;
  winnow_scale_mode index_scale;
  float index_factor;
} winnow_layer_steps;

typedef struct winnow_pipeline_args {
  size_t struct_size;
  const winnow_plan* plan; /* refilled for this batch */
  winnow_tensor kv, slots; /* [T, d] bf16, [T] int64 */
  winnow_cache cache;
  winnow_tensor block_table;                     /* [R, W] int32 */
  winnow_tensor compressed_kv, compressed_slots; /* V4: [S, d] bf16, [S] int64 */
  winnow_cache compressed;                       /* V4; without the two above it is only read */
  winnow_tensor compressed_table;                /* V4: [R, W2] int32 */
  winnow_indexer indexer;
  winnow_tensor q;              /* [T, H, d_qk] bf16 */
  float scale;                  /* no default, as in winnow_attend_args */
  winnow_tensor sink, out, lse; /* [H] f32, [T, H, d_v] bf16, [T, H] f32; only out must be given */
  void* workspace;
  size_t workspace_bytes; /* winnow_pipeline_workspace_bytes() */
  winnow_target target;   /* the stream, if not the plan's */
  winnow_layer_steps steps;
  void* prefix; /* what winnow_gather_prefix() filled; null: the call gathers it where needed */
  size_t prefix_bytes;
  winnow_tensor ids; /* [T, K] int32, optional: the indexer's choice; without indexer.q an input */
  winnow_select_blocks blocks;
} winnow_pipeline_args;
/* clang-format off */
#define WINNOW_PIPELINE_ARGS_INIT                                                                 \
  {.struct_size = sizeof(winnow_pipeline_args), .scale = WINNOW_NOT_GIVEN,                        \
   .steps = {.kv_norm = {.eps = 1e-6f}, .q_norm = {.eps = 1e-6f},                                 \
             .states = {.gate = true, .norm = {.kind = WINNOW_RMS_NORM, .eps = 1e-6f}},           \
             .index = {.gate = true, .norm = {.kind = WINNOW_RMS_NORM, .eps = 1e-6f}},            \
             .index_factor = 1.0f}}
/* clang-format on */
winnow_status winnow_pipeline(const winnow_pipeline_args* args);
winnow_status winnow_pipeline_workspace_bytes(const winnow_plan* plan, size_t* out);

#ifdef __cplusplus
}
#endif

#endif /* WINNOW_C_H */
