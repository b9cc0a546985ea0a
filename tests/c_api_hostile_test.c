/* Damaged argument structs through the C ABI: a call gives WINNOW_OK, or a code and a message that
 * names its stage, and then has written nothing. What is damaged stands in tables of offsets, so
 * that one function serves every struct. As in tests/hostile.h, sizes that nothing in a call pins
 * down never grow: how long the memory is only the caller knows. WINNOW_HOSTILE_ROUNDS sets how
 * often each struct is damaged. */
#include <stdlib.h>

#include "c_testing.h"

enum { TOKENS = 3, HEADS = 2, WIDTH = 5, PAGE = 8, PAGES = 4, ROWS = 2 };
enum { POISON = 0xcd, OUTPUTS = 3, OUTPUT_BYTES = TOKENS * HEADS * 512 * 2 };

static uint64_t state = 1;
static int64_t draw(int64_t count) { /* 0 .. count - 1 */
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (int64_t)((state >> 33) % (uint64_t)count);
}
#define PICK(...)     \
  ((const int64_t[]){ \
      __VA_ARGS__})[draw((int64_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))]

/* Of a number that may be damaged already. */
static int64_t less(int64_t n) { return n == INT64_MIN ? n : n - 1; }

typedef enum kind { TENSOR, CACHE, TARGET, INT32, INT64, ENUM, FLOAT, SIZE, POINTER } kind;
typedef struct field {
  kind what;
  size_t offset;
  unsigned free; /* of a tensor: bit i where dimension i is not pinned down */
} field;

/* Memory of all calls. Outputs are poisoned before each. */
static _Alignas(64) uint8_t outputs[OUTPUTS][OUTPUT_BYTES + 64];
static _Alignas(64) uint8_t bytes[TOKENS * HEADS * 576 * 2 + 64];
static _Alignas(64) uint8_t pages[PAGES * PAGE * 1152 + 64];
static _Alignas(64) uint8_t workspace[1 << 26];
static int32_t ints[256];

static void damage_tensor(winnow_tensor* t, unsigned free) {
  const int dim = (int)draw(4);
  switch (draw(6)) {
    case 0: t->data = NULL; break;
    case 1: t->data = t->data ? (uint8_t*)t->data + 1 : NULL; break;
    case 2: t->dtype = (int32_t)PICK(0, 1, 5, 6, 99, -1, INT32_MIN, INT32_MAX); break;
    case 3: t->rank = (int32_t)PICK(-1, 0, 1, 2, 3, 4, 5, INT32_MIN, INT32_MAX); break;
    case 4: {
      const int64_t n = t->shape[dim];
      t->shape[dim] = free >> dim & 1 ? PICK(-1, INT64_MIN, 0, less(n))
                                      : PICK(-1, INT64_MIN, 0, less(n), INT64_MAX);
      break;
    }
    default: t->stride[dim] = PICK(-1, INT64_MIN, 0, less(t->stride[dim]), INT64_MAX); break;
  }
}

static void damage_cache(winnow_cache* c) {
  switch (draw(5)) {
    case 0: c->data = NULL; break;
    case 1: c->format = (int32_t)PICK(0, 1, 2, 3, 4, 5, -1, INT32_MAX); break;
    case 2: c->pages = PICK(0, -1, less(c->pages), INT64_MIN, INT64_MAX); break;
    case 3: c->page = (int32_t)PICK(0, -1, less(c->page), INT32_MIN, INT32_MAX); break;
    default: c->page_stride = PICK(-1, 16, less(c->page_stride), INT64_MIN); break;
  }
}

static void damage(void* args, const field* f) {
  uint8_t* at = (uint8_t*)args + f->offset;
  const int32_t number = (int32_t)PICK(0, -1, 7, INT32_MIN, INT32_MAX);
  const int64_t wide = PICK(0, -1, INT64_MIN, INT64_MAX);
  const float real = PICK(0, 1) ? NAN : -INFINITY;
  const size_t size = (size_t)PICK(0, 1, 8, 100000, -1);
  const void* none = NULL;
  winnow_target target = {{number, number, NULL}, draw(2) ? "nothing" : NULL};
  switch (f->what) {
    case TENSOR: damage_tensor((winnow_tensor*)(void*)at, f->free); break;
    case CACHE: damage_cache((winnow_cache*)(void*)at); break;
    case TARGET: memcpy(at, &target, sizeof target); break;
    case INT32:
    case ENUM: memcpy(at, &number, sizeof number); break;
    case INT64: memcpy(at, &wide, sizeof wide); break;
    case FLOAT: memcpy(at, &real, sizeof real); break;
    case SIZE: memcpy(at, &size, sizeof size); break;
    case POINTER: memcpy(at, &none, sizeof none); break;
  }
}

static bool outputs_untouched(void) {
  for (int i = 0; i < OUTPUTS; ++i)
    for (size_t j = 0; j < sizeof outputs[i]; ++j)
      if (outputs[i][j] != POISON) return false;
  return true;
}

static winnow_tensor view(const void* data, winnow_dtype dtype, int32_t rank,
                          const int64_t* shape) {
  return winnow_tensor_of(data, dtype, rank, shape);
}
static winnow_tensor in_bf16(int32_t rank, const int64_t* shape) {
  return view(bytes, WINNOW_BF16, rank, shape);
}
static winnow_tensor in_i32(int32_t rank, const int64_t* shape) {
  return view(ints, WINNOW_I32, rank, shape);
}
static winnow_tensor out(int number, winnow_dtype dtype, int32_t rank, const int64_t* shape) {
  return view(outputs[number], dtype, rank, shape);
}
static winnow_cache cache_of(winnow_format format) {
  int64_t stride = 0;
  OK(winnow_page_bytes(format, PAGE, &stride));
  return (winnow_cache){
      .data = pages, .format = format, .pages = PAGES, .page = PAGE, .page_stride = stride};
}

typedef struct subject {
  const char* stage;
  const char* table; /* the stage that kernels are listed under, where it has another name */
  void* args;        /* the correct ones; damaged in a copy */
  size_t size;
  winnow_status (*call)(const void*);
  const field* fields;
  int64_t count;
} subject;

static void sweep(const subject* s, int64_t rounds, int64_t* calls) {
  uint64_t copy[2048 / sizeof(uint64_t)];
  int64_t succeeded = 0;
  if (s->size > sizeof copy) abort();
  for (int64_t i = 0; i < rounds; ++i) {
    memcpy(copy, s->args, s->size);
    memset(outputs, POISON, sizeof outputs);
    for (int64_t n = draw(3); n > 0; --n) damage(copy, &s->fields[draw(s->count)]);
    const winnow_status status = s->call(copy);
    CHECK(status >= WINNOW_OK && status <= WINNOW_RUNTIME);
    succeeded += status == WINNOW_OK;
    if (status == WINNOW_OK) continue;
    CHECK(outputs_untouched());
    const char* message = winnow_last_error();
    const size_t stage = strlen(s->stage), table = strlen(s->table);
    const bool named = strncmp(message, s->stage, stage) == 0 && message[stage] == ':';
    if (!named && !(strncmp(message, s->table, table) == 0 && message[table] == ':')) {
      printf("%s: %s\n", s->stage, message);
      ++failures;
    }
  }
  *calls += rounds;
  CHECK(succeeded > rounds / 20 && succeeded < rounds);
}

#define CALL(verb, type) \
  static winnow_status call_##verb(const void* args) { return winnow_##verb((const type*)args); }
CALL(write, winnow_write_args)
CALL(select, winnow_select_args)
CALL(locate, winnow_locate_args)
CALL(attend, winnow_attend_args)
CALL(score_select, winnow_score_select_args)
CALL(window_lists, winnow_window_lists_args)
CALL(quantize, winnow_quantize_args)
CALL(absorb_query, winnow_absorb_query_args)
static winnow_status call_plan(const void* args) {
  winnow_plan* plan = NULL;
  const winnow_status status = winnow_plan_create((const winnow_plan_options*)args, &plan);
  CHECK((status == WINNOW_OK) == (plan != NULL));
  winnow_plan_destroy(plan);
  return status;
}

#define AT(kind, type, member) \
  { kind, offsetof(type, member), 0 }
#define FREE(dims, type, member) \
  { TENSOR, offsetof(type, member), dims }
#define SWEEP(name, table, args, ...)                                \
  do {                                                               \
    static const field fields[] = {__VA_ARGS__};                     \
    const subject s = {#name,                                        \
                       table,                                        \
                       &(args),                                      \
                       sizeof(args),                                 \
                       call_##name,                                  \
                       fields,                                       \
                       (int64_t)(sizeof fields / sizeof fields[0])}; \
    sweep(&s, rounds, &calls);                                       \
  } while (0)

int main(void) {
  const char* asked = getenv("WINNOW_HOSTILE_ROUNDS");
  const int64_t rounds = asked ? atoll(asked) : 2000;
  int64_t calls = 0;
  memset(bytes, 0x3c, sizeof bytes);
  memset(pages, 0x38, sizeof pages);
  for (size_t i = 0; i < sizeof ints / sizeof *ints; ++i) ints[i] = (int32_t)(i % 3) - 1;

  static const int64_t slots[TOKENS] = {1, -1, 9};
  winnow_write_args write = WINNOW_WRITE_ARGS_INIT;
  write.kv = in_bf16(2, SHAPE(TOKENS, 512));
  write.slots = view(slots, WINNOW_I64, 1, SHAPE(TOKENS));
  write.cache = cache_of(WINNOW_V4_FP8);
  typedef winnow_write_args W;
  SWEEP(write, "write", write, AT(SIZE, W, struct_size), FREE(1, W, kv), AT(TENSOR, W, slots),
        AT(CACHE, W, cache), AT(ENUM, W, scale), AT(TARGET, W, target), AT(TENSOR, W, rope));

  winnow_select_args select = WINNOW_SELECT_ARGS_INIT;
  select.logits = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, 20));
  select.ends = in_i32(1, SHAPE(TOKENS));
  select.ids = out(0, WINNOW_I32, 2, SHAPE(TOKENS, WIDTH));
  typedef winnow_select_args S;
  SWEEP(select, "select", select, AT(SIZE, S, struct_size), FREE(2, S, logits),
        AT(TENSOR, S, starts), AT(TENSOR, S, ends), FREE(2, S, ids), AT(TARGET, S, target));

  winnow_locate_args locate = WINNOW_LOCATE_ARGS_INIT;
  locate.ids = in_i32(2, SHAPE(TOKENS, WIDTH));
  locate.requests = in_i32(1, SHAPE(TOKENS));
  locate.block_table = in_i32(2, SHAPE(ROWS, 3));
  locate.page = PAGE;
  locate.pages = PAGES;
  locate.slots = out(0, WINNOW_I32, 2, SHAPE(TOKENS, WIDTH));
  locate.counts = out(1, WINNOW_I32, 1, SHAPE(TOKENS));
  typedef winnow_locate_args L;
  SWEEP(locate, "locate", locate, AT(SIZE, L, struct_size), AT(INT32, L, part), AT(TENSOR, L, ids),
        AT(TENSOR, L, requests), FREE(3, L, block_table), AT(INT32, L, page), AT(INT64, L, pages),
        AT(INT32, L, rows_per_page), AT(TENSOR, L, prefill_requests), AT(INT32, L, parallel.world),
        AT(INT32, L, parallel.rank), AT(INT32, L, parallel.interleave), AT(TENSOR, L, slots),
        AT(TENSOR, L, counts), AT(TARGET, L, target));

  winnow_attend_args attend = WINNOW_ATTEND_ARGS_INIT;
  attend.q = in_bf16(3, SHAPE(TOKENS, HEADS, 576));
  attend.lists[0].cache = cache_of(WINNOW_V32_FP8);
  attend.lists[0].indices = in_i32(2, SHAPE(TOKENS, WIDTH));
  attend.lists[0].lengths = in_i32(1, SHAPE(TOKENS));
  attend.scale = 0.1f;
  attend.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, 512));
  attend.lse = out(1, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  attend.max_logit = out(2, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  attend.workspace = workspace;
  attend.workspace_bytes = sizeof workspace;
  typedef winnow_attend_args A;
  SWEEP(attend, "attend", attend, AT(SIZE, A, struct_size), AT(INT32, A, part), AT(TENSOR, A, q),
        AT(TENSOR, A, q_rope), AT(CACHE, A, lists[0].cache), FREE(2, A, lists[0].indices),
        AT(TENSOR, A, lists[0].lengths), FREE(3, A, lists[0].block_table),
        AT(CACHE, A, lists[1].cache), AT(TENSOR, A, lists[1].indices), AT(TENSOR, A, requests),
        AT(FLOAT, A, scale), AT(TENSOR, A, sink), AT(TENSOR, A, out), AT(TENSOR, A, lse),
        AT(TENSOR, A, max_logit), AT(POINTER, A, workspace), AT(TARGET, A, target));

  winnow_score_args score = WINNOW_SCORE_ARGS_INIT;
  score.q = view(bytes, WINNOW_E4M3, 3, SHAPE(TOKENS, HEADS, 128));
  score.weights = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, HEADS));
  score.keys = cache_of(WINNOW_INDEX_KEYS);
  score.block_table = in_i32(2, SHAPE(ROWS, 3));
  score.requests = in_i32(1, SHAPE(TOKENS));
  score.ends = in_i32(1, SHAPE(TOKENS));
  winnow_score_select_args both = WINNOW_SCORE_SELECT_ARGS_INIT;
  both.score = &score;
  both.ids = out(0, WINNOW_I32, 2, SHAPE(TOKENS, WIDTH));
  both.workspace = workspace;
  both.workspace_bytes = sizeof workspace;
  typedef winnow_score_select_args B;
  SWEEP(score_select, "score_select", both, AT(SIZE, B, struct_size), AT(POINTER, B, score),
        FREE(2, B, ids), AT(POINTER, B, workspace));

  winnow_window_lists_args window = WINNOW_WINDOW_LISTS_ARGS_INIT;
  window.positions = in_i32(1, SHAPE(TOKENS));
  window.requests = in_i32(1, SHAPE(TOKENS));
  window.block_table = in_i32(2, SHAPE(ROWS, 3));
  window.window = 6;
  window.page = PAGE;
  window.pages = PAGES;
  window.lists = out(0, WINNOW_I32, 2, SHAPE(TOKENS, 9));
  window.lengths = out(1, WINNOW_I32, 1, SHAPE(TOKENS));
  typedef winnow_window_lists_args V;
  SWEEP(window_lists, "lists", window, AT(SIZE, V, struct_size), AT(TENSOR, V, positions),
        AT(TENSOR, V, requests), FREE(3, V, block_table), AT(INT32, V, window), AT(INT32, V, page),
        AT(INT64, V, pages), FREE(2, V, lists), AT(TENSOR, V, lengths), AT(TARGET, V, target));

  winnow_quantize_args quantize = WINNOW_QUANTIZE_ARGS_INIT;
  quantize.x = view(bytes, WINNOW_F32, 2, SHAPE(TOKENS, 37));
  quantize.out = out(0, WINNOW_E4M3, 2, SHAPE(TOKENS, 37));
  quantize.scale = out(1, WINNOW_F32, 1, SHAPE(1));
  typedef winnow_quantize_args Q;
  SWEEP(quantize, "quantize", quantize, AT(SIZE, Q, struct_size), AT(TENSOR, Q, x),
        AT(TENSOR, Q, out), AT(TENSOR, Q, scale), AT(TARGET, Q, target));

  winnow_absorb_query_args absorb = WINNOW_ABSORB_QUERY_ARGS_INIT;
  absorb.q_nope = in_bf16(3, SHAPE(TOKENS, HEADS, 10));
  absorb.w_uk = in_bf16(3, SHAPE(24, HEADS, 10));
  absorb.out = out(0, WINNOW_BF16, 3, SHAPE(TOKENS, HEADS, 24));
  typedef winnow_absorb_query_args U;
  SWEEP(absorb_query, "absorb", absorb, AT(SIZE, U, struct_size), AT(TENSOR, U, q_nope),
        AT(TENSOR, U, w_uk), AT(TENSOR, U, out), AT(TARGET, U, target));

  winnow_plan_options plan = WINNOW_PLAN_OPTIONS_INIT;
  plan.heads = HEADS;
  plan.topk = WIDTH;
  plan.pages = PAGES;
  plan.max_requests = 2;
  plan.max_tokens = 8;
  typedef winnow_plan_options P;
  SWEEP(plan, "plan", plan, AT(SIZE, P, struct_size), AT(POINTER, P, model), AT(ENUM, P, format),
        AT(INT32, P, heads), AT(INT32, P, extra_topk), AT(INT32, P, ratio),
        AT(INT32, P, index_heads), AT(INT32, P, page), AT(INT64, P, pages),
        AT(INT32, P, max_requests), AT(INT32, P, max_tokens), AT(INT32, P, max_context),
        AT(INT32, P, decode_threshold), AT(ENUM, P, mode), AT(INT64, P, workspace_rows),
        AT(ENUM, P, split), AT(INT32, P, split_size));

  printf("%lld damaged calls, %d failed\n", (long long)calls, failures);
  return failures != 0;
}
