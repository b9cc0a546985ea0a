/* The steps in front of the flow with damaged structs (c_hostile.h says what must hold). */
#include "c_hostile.h"

enum { POSITIONS = 10, ROW = 70 };

CALL(norm, winnow_norm_args)
CALL(rotate, winnow_rotate_args)
CALL(rope_table, winnow_rope_table_args)
CALL(prepare_query, winnow_prepare_query_args)
CALL(index_query, winnow_index_query_args)
CALL(prepare_queries, winnow_prepare_queries_args)
CALL(norm_write, winnow_norm_write_args)
CALL(compress, winnow_compress_args)
CALL(write, winnow_write_args)

static winnow_norm_step norm_step(int64_t width) {
  return (winnow_norm_step){.kind = WINNOW_RMS_NORM,
                            .weight = view(bytes, WINNOW_F32, 1, SHAPE(width)),
                            .bias = view(bytes, WINNOW_F32, 1, SHAPE(width)),
                            .eps = 1e-6f};
}
static winnow_rope rope(void) {
  return (winnow_rope){.table = view(bytes, WINNOW_F32, 3, SHAPE(POSITIONS, 2, 32))};
}
/* Two verbs in one call, whose own struct is whole: the one inside it is damaged. */
static winnow_prepare_queries_args around_index = WINNOW_PREPARE_QUERIES_ARGS_INIT;
static winnow_status call_index_of_both(const void* args) {
  around_index.index = (const winnow_index_query_args*)args;
  return winnow_prepare_queries(&around_index);
}
static winnow_norm_write_args around_write = WINNOW_NORM_WRITE_ARGS_INIT;
static winnow_status call_write_of_both(const void* args) {
  around_write.write[1] = (const winnow_write_args*)args;
  return winnow_norm_write(&around_write);
}

#define NORM_FIELDS(T, member)                                                        \
  AT(ENUM, T, member.kind), AT(TENSOR, T, member.weight), AT(TENSOR, T, member.bias), \
      AT(FLOAT, T, member.eps)
#define ROPE_FIELDS(T, member) \
  FREE(1, T, member.table), AT(ENUM, T, member.pairs), AT(ENUM, T, member.slice)

static void sweep_norm(void) {
  winnow_norm_args norm = WINNOW_NORM_ARGS_INIT;
  norm.rows[0].x = in_bf16(2, SHAPE(TOKENS, 33));
  norm.rows[0].out = out(0, WINNOW_BF16, 2, SHAPE(TOKENS, 33));
  norm.rows[0].norm = norm_step(33);
  norm.rows[1].x = in_bf16(2, SHAPE(TOKENS, 9));
  norm.rows[1].out = out(1, WINNOW_BF16, 2, SHAPE(TOKENS, 9));
  norm.rows[1].norm = norm_step(9);
  typedef winnow_norm_args N;
  SWEEP(norm, "norm", norm, AT(SIZE, N, struct_size), AT(TENSOR, N, rows[0].x),
        AT(TENSOR, N, rows[0].out), NORM_FIELDS(N, rows[0].norm), AT(TENSOR, N, rows[1].x),
        AT(TENSOR, N, rows[1].out), NORM_FIELDS(N, rows[1].norm), AT(TARGET, N, target));
}

static void sweep_rotate(void) {
  winnow_rotate_args rotate = WINNOW_ROTATE_ARGS_INIT;
  rotate.x = in_bf16(3, SHAPE(TOKENS, HEADS, ROW));
  rotate.positions = in_i32(1, SHAPE(TOKENS));
  rotate.rope = rope();
  rotate.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, ROW));
  typedef winnow_rotate_args R;
  SWEEP(rotate, "rotate", rotate, AT(SIZE, R, struct_size), AT(TENSOR, R, x),
        AT(TENSOR, R, positions), ROPE_FIELDS(R, rope), AT(TENSOR, R, out), AT(TENSOR, R, scales),
        AT(ENUM, R, scale), AT(TARGET, R, target));

  winnow_rope_table_args table = WINNOW_ROPE_TABLE_ARGS_INIT;
  table.factor = 4;
  table.original = 64;
  table.table = out(0, WINNOW_F32, 3, SHAPE(POSITIONS, 2, 32));
  typedef winnow_rope_table_args T;
  SWEEP(rope_table, "rope_table", table, AT(SIZE, T, struct_size), AT(DOUBLE, T, theta),
        AT(DOUBLE, T, factor), AT(INT64, T, original), AT(DOUBLE, T, beta_fast),
        AT(DOUBLE, T, beta_slow), FREE(1, T, table), AT(TARGET, T, target));
}

#define INDEX_FIELDS(I)                                                                         \
  AT(SIZE, I, struct_size), AT(TENSOR, I, q), AT(TENSOR, I, weights), AT(TENSOR, I, positions), \
      ROPE_FIELDS(I, rope), AT(ENUM, I, scale), AT(FLOAT, I, factor), AT(TENSOR, I, out),       \
      AT(TENSOR, I, out_weights)
static void sweep_queries(void) {
  winnow_prepare_query_args prepare = WINNOW_PREPARE_QUERY_ARGS_INIT;
  prepare.q = in_bf16(3, SHAPE(TOKENS, HEADS, ROW));
  prepare.norm = norm_step(ROW);
  prepare.positions = in_i32(1, SHAPE(TOKENS));
  prepare.rope = rope();
  prepare.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, ROW));
  typedef winnow_prepare_query_args P;
  SWEEP(prepare_query, "prepare_query", prepare, AT(SIZE, P, struct_size), AT(TENSOR, P, q),
        NORM_FIELDS(P, norm), AT(TENSOR, P, positions), ROPE_FIELDS(P, rope), AT(TENSOR, P, out),
        AT(TARGET, P, target));

  winnow_index_query_args index = WINNOW_INDEX_QUERY_ARGS_INIT;
  index.q = in_bf16(3, SHAPE(TOKENS, HEADS, 128));
  index.weights = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  index.positions = in_i32(1, SHAPE(TOKENS));
  index.rope = rope();
  index.hadamard = true;
  index.out = out(0, WINNOW_E4M3, 3, SHAPE(TOKENS, HEADS, 128));
  index.out_weights = out(1, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  typedef winnow_index_query_args I;
  SWEEP(index_query, "index_query", index, INDEX_FIELDS(I), AT(TARGET, I, target));
  prepare.out = out(2, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, ROW));
  around_index.query = &prepare;
  SWEEP_AS("prepare_queries", call_index_of_both, "index_query", index, INDEX_FIELDS(I));

  winnow_prepare_queries_args queries = WINNOW_PREPARE_QUERIES_ARGS_INIT;
  queries.index = &index;
  typedef winnow_prepare_queries_args Q;
  SWEEP(prepare_queries, "prepare_queries", queries, AT(SIZE, Q, struct_size),
        AT(TARGET, Q, target));
}

#define PROLOGUE_FIELDS(W)                                                              \
  AT(SIZE, W, struct_size), FREE(1, W, kv), AT(TENSOR, W, slots), AT(CACHE, W, cache),  \
      AT(ENUM, W, scale), NORM_FIELDS(W, prologue.norm), ROPE_FIELDS(W, prologue.rope), \
      AT(TENSOR, W, prologue.positions)
static void sweep_compress(void) {
  static const int64_t slots[TOKENS] = {1, -1, 9};
  winnow_compress_args compress = WINNOW_COMPRESS_ARGS_INIT;
  compress.rows = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, 256));
  compress.positions = in_i32(1, SHAPE(TOKENS));
  compress.requests = in_i32(1, SHAPE(TOKENS));
  compress.ratio = 2;
  compress.bias = view(bytes, WINNOW_F32, 2, SHAPE(2, 128));
  compress.state_rows = out(0, WINNOW_F32, 3, SHAPE(2, 2, 256));
  compress.state_table = in_i32(2, SHAPE(ROWS, 3));
  compress.norm = norm_step(128);
  compress.rope = rope();
  compress.slots = view(slots, WINNOW_I64, 1, SHAPE(TOKENS));
  compress.cache = cache_of(WINNOW_INDEX_KEYS);
  compress.latent = out(1, WINNOW_BF16, 2, SHAPE(TOKENS, 128));
  typedef winnow_compress_args C;
  SWEEP(compress, "compress", compress, AT(SIZE, C, struct_size), AT(TENSOR, C, rows),
        AT(TENSOR, C, positions), AT(TENSOR, C, requests), AT(INT32, C, ratio), AT(TENSOR, C, bias),
        FREE(3, C, state_rows), FREE(3, C, state_table), NORM_FIELDS(C, norm), ROPE_FIELDS(C, rope),
        AT(TENSOR, C, slots), AT(CACHE, C, cache), AT(ENUM, C, scale), AT(TENSOR, C, latent),
        AT(TARGET, C, target));

  winnow_write_args write = WINNOW_WRITE_ARGS_INIT;
  write.kv = in_bf16(2, SHAPE(TOKENS, 128));
  write.slots = compress.slots;
  write.cache = cache_of(WINNOW_INDEX_KEYS);
  write.prologue.norm = norm_step(128);
  write.prologue.rope = rope();
  write.prologue.positions = in_i32(1, SHAPE(TOKENS));
  write.prologue.hadamard = true;
  typedef winnow_write_args W;
  SWEEP(write, "write", write, PROLOGUE_FIELDS(W), AT(TARGET, W, target));
  SWEEP_AS("norm_write", call_write_of_both, "write", write, PROLOGUE_FIELDS(W));

  winnow_norm_write_args both = WINNOW_NORM_WRITE_ARGS_INIT;
  both.write[0] = &write;
  typedef winnow_norm_write_args B;
  SWEEP(norm_write, "norm_write", both, AT(SIZE, B, struct_size), AT(TARGET, B, target));
}

int main(void) {
  begin();
  sweep_norm();
  sweep_rotate();
  sweep_queries();
  sweep_compress();
  return end();
}
