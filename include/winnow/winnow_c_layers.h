/* winnow in C: the steps between a layer's projections and attention. Included by winnow_c.h. */
#ifndef WINNOW_C_LAYERS_H
#define WINNOW_C_LAYERS_H

#include "winnow/winnow_c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- norm (<winnow/norm.h>) ---------------------------------------------------------------- */

typedef int32_t winnow_norm_kind;
enum { WINNOW_NORM_NONE, WINNOW_RMS_NORM, WINNOW_LAYER_NORM };

typedef struct winnow_norm_step {
  winnow_norm_kind kind;
  winnow_tensor weight, bias; /* [d] f32, optional */
  float eps;
} winnow_norm_step;

typedef struct winnow_norm_rows {
  winnow_tensor x, out; /* [T, d] bf16 */
  winnow_norm_step norm;
} winnow_norm_rows;

typedef struct winnow_norm_args {
  size_t struct_size;
  winnow_norm_rows rows[2]; /* the second is optional */
  winnow_target target;
} winnow_norm_args;
/* clang-format off */
#define WINNOW_NORM_ARGS_INIT                                                    \
  {.struct_size = sizeof(winnow_norm_args),                                      \
   .rows = {{.norm = {.kind = WINNOW_RMS_NORM, .eps = 1e-6f}},                   \
            {.norm = {.kind = WINNOW_RMS_NORM, .eps = 1e-6f}}}}
/* clang-format on */
winnow_status winnow_norm(const winnow_norm_args* args);

/* ---- rotate, rope_table (<winnow/rotate.h>) ------------------------------------------------ */

enum { WINNOW_INTERLEAVED_PAIRS, WINNOW_HALF_PAIRS };
enum { WINNOW_LAST_SLICE, WINNOW_FIRST_SLICE };

typedef struct winnow_rope {
  winnow_tensor table; /* [P, 2, 32] f32 */
  int32_t pairs, slice;
  bool inverse;
} winnow_rope;

typedef struct winnow_rotate_args {
  size_t struct_size;
  winnow_tensor x, positions; /* [T, H, d] bf16, [T] int32 */
  winnow_rope rope;
  winnow_tensor out; /* [T, H, d] bf16 or e4m3 */
  winnow_target target;
  winnow_tensor scales; /* [T, H, d / 128] f32, with out in e4m3 */
  winnow_scale_mode scale;
} winnow_rotate_args;
#define WINNOW_ROTATE_ARGS_INIT \
  { .struct_size = sizeof(winnow_rotate_args) }
winnow_status winnow_rotate(const winnow_rotate_args* args);

typedef struct winnow_rope_table_args {
  size_t struct_size;
  double theta, factor;
  int64_t original;
  double beta_fast, beta_slow;
  winnow_tensor table; /* [P, 2, 32] f32 */
  winnow_target target;
} winnow_rope_table_args;
/* clang-format off */
#define WINNOW_ROPE_TABLE_ARGS_INIT                                                   \
  {.struct_size = sizeof(winnow_rope_table_args), .theta = 10000.0, .factor = 1.0,    \
   .beta_fast = 32.0, .beta_slow = 1.0}
/* clang-format on */
winnow_status winnow_rope_table(const winnow_rope_table_args* args);

/* ---- prepare_query, index_query (<winnow/prepare_query.h>, <winnow/index_query.h>) --------- */

typedef struct winnow_prepare_query_args {
  size_t struct_size;
  winnow_tensor q; /* [T, H, d] bf16 */
  winnow_norm_step norm;
  winnow_tensor positions; /* [T] int32 */
  winnow_rope rope;
  winnow_tensor out; /* [T, H, d] bf16 */
  winnow_target target;
} winnow_prepare_query_args;
/* clang-format off */
#define WINNOW_PREPARE_QUERY_ARGS_INIT \
  {.struct_size = sizeof(winnow_prepare_query_args), .norm = {.eps = 1e-6f}}
/* clang-format on */
winnow_status winnow_prepare_query(const winnow_prepare_query_args* args);

typedef struct winnow_index_query_args {
  size_t struct_size;
  winnow_tensor q, weights, positions; /* [T, n, 128] bf16, [T, n] f32 or bf16, [T] int32 */
  winnow_rope rope;
  bool hadamard;
  winnow_scale_mode scale;
  float factor;
  winnow_tensor out, out_weights; /* [T, n, 128] e4m3 or bf16, [T, n] f32 */
  winnow_target target;
} winnow_index_query_args;
#define WINNOW_INDEX_QUERY_ARGS_INIT \
  { .struct_size = sizeof(winnow_index_query_args), .factor = 1.0f }
winnow_status winnow_index_query(const winnow_index_query_args* args);

/* ---- prepare_queries (<winnow/prepare_queries.h>) ------------------------------------------- */

typedef struct winnow_prepare_queries_args {
  size_t struct_size;
  const winnow_prepare_query_args* query; /* either may be null; targets inside do not count */
  const winnow_index_query_args* index;
  winnow_target target;
} winnow_prepare_queries_args;
#define WINNOW_PREPARE_QUERIES_ARGS_INIT \
  { .struct_size = sizeof(winnow_prepare_queries_args) }
winnow_status winnow_prepare_queries(const winnow_prepare_queries_args* args);

/* ---- norm_write (<winnow/norm_write.h>) ----------------------------------------------------- */

struct winnow_write_args;

typedef struct winnow_norm_write_args {
  size_t struct_size;
  const winnow_norm_args* norm; /* any may be null; plans and targets inside do not count */
  const struct winnow_write_args* write[2];
  winnow_target target;
} winnow_norm_write_args;
#define WINNOW_NORM_WRITE_ARGS_INIT \
  { .struct_size = sizeof(winnow_norm_write_args) }
winnow_status winnow_norm_write(const winnow_norm_write_args* args);

/* ---- compress (<winnow/compress.h>) -------------------------------------------------------- */

typedef struct winnow_compress_args {
  size_t struct_size;
  winnow_tensor rows;                /* [N, (gate ? 2 : 1) * e * d] f32 or bf16 */
  winnow_tensor positions, requests; /* [T] int32 */
  int32_t ratio;
  bool overlap, gate;
  winnow_tensor bias;                    /* [ratio, e * d] f32, optional */
  winnow_tensor state_rows, state_table; /* [B, block, 2 * e * d] f32, [R, W] int32 */
  bool state_ring;
  winnow_norm_step norm;
  winnow_rope rope;
  bool hadamard;
  winnow_tensor slots; /* [T] int64 */
  winnow_cache cache;
  winnow_scale_mode scale;
  winnow_tensor latent; /* [T, d] bf16, optional */
  winnow_target target;
} winnow_compress_args;
/* clang-format off */
#define WINNOW_COMPRESS_ARGS_INIT                                                \
  {.struct_size = sizeof(winnow_compress_args), .ratio = 4, .gate = true,        \
   .norm = {.kind = WINNOW_RMS_NORM, .eps = 1e-6f}}
/* clang-format on */
winnow_status winnow_compress(const winnow_compress_args* args);

/* ---- what write() does first (<winnow/write.h>) -------------------------------------------- */

typedef struct winnow_prologue { /* all zero: nothing */
  winnow_norm_step norm;
  winnow_rope rope;
  winnow_tensor positions; /* [T] int32, with rope */
  bool hadamard;
} winnow_prologue;

#ifdef __cplusplus
}
#endif

#endif /* WINNOW_C_LAYERS_H */
