/* Damaged argument structs through the C ABI: a call gives WINNOW_OK, or a code and a message that
 * names its stage, and then has written nothing. What is damaged stands in tables of offsets, so
 * that one function serves every struct. As in tests/hostile.h, sizes that nothing in a call pins
 * down never grow: how long the memory is only the caller knows. WINNOW_HOSTILE_ROUNDS sets how
 * often each struct is damaged. */
#ifndef WINNOW_C_HOSTILE_H
#define WINNOW_C_HOSTILE_H

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

typedef enum kind {
  TENSOR,
  CACHE,
  TARGET,
  INTS,
  INT32,
  INT64,
  ENUM,
  FLOAT,
  DOUBLE,
  SIZE,
  POINTER
} kind;
typedef struct field {
  kind what;
  size_t offset;
  unsigned free; /* of a tensor: bit i where dimension i is not pinned down */
} field;

/* Memory of all calls. Outputs are poisoned before each, and pages are what they were. */
enum { VALUE = 0x3c, PAGE_VALUE = 0x38 };
static _Alignas(64) uint8_t outputs[OUTPUTS][OUTPUT_BYTES + 64];
static _Alignas(64) uint8_t bytes[TOKENS * HEADS * 576 * 2 + 64];
static _Alignas(64) uint8_t pages[PAGES * PAGE * 1152 + 64];
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

static void damage_ints(winnow_ints* list) {
  if (draw(2)) list->data = NULL;
  else list->count = PICK(-1, INT64_MIN, 0, less(list->count));
}

static void damage(void* args, const field* f) {
  uint8_t* at = (uint8_t*)args + f->offset;
  const int32_t number = (int32_t)PICK(0, -1, 7, INT32_MIN, INT32_MAX);
  const int64_t wide = PICK(0, -1, INT64_MIN, INT64_MAX);
  const float real = PICK(0, 1) ? NAN : -INFINITY;
  const double precise = PICK(0, 1) ? (double)NAN : (double)PICK(0, -1, INT64_MAX);
  const size_t size = (size_t)PICK(0, 1, 8, 100000, -1);
  const void* none = NULL;
  winnow_target target = {{number, number, NULL}, draw(2) ? "nothing" : NULL};
  switch (f->what) {
    case TENSOR: damage_tensor((winnow_tensor*)(void*)at, f->free); break;
    case CACHE: damage_cache((winnow_cache*)(void*)at); break;
    case INTS: damage_ints((winnow_ints*)(void*)at); break;
    case TARGET: memcpy(at, &target, sizeof target); break;
    case INT32:
    case ENUM: memcpy(at, &number, sizeof number); break;
    case INT64: memcpy(at, &wide, sizeof wide); break;
    case FLOAT: memcpy(at, &real, sizeof real); break;
    case DOUBLE: memcpy(at, &precise, sizeof precise); break;
    case SIZE: memcpy(at, &size, sizeof size); break;
    case POINTER: memcpy(at, &none, sizeof none); break;
  }
}

static bool all_are(const uint8_t* data, size_t count, uint8_t value) {
  return data[0] == value && memcmp(data, data + 1, count - 1) == 0;
}
static bool outputs_untouched(void) {
  return all_are(outputs[0], sizeof outputs, POISON) && all_are(pages, sizeof pages, PAGE_VALUE);
}
static int32_t number_at(size_t i) { return (int32_t)(i % 3) - 1; }
static bool inputs_untouched(void) {
  for (size_t i = 0; i < sizeof ints / sizeof *ints; ++i)
    if (ints[i] != number_at(i)) return false;
  return all_are(bytes, sizeof bytes, VALUE);
}

static winnow_tensor view(const void* data, winnow_dtype dtype, int32_t rank,
                          const int64_t* shape) {
  return winnow_tensor_of(data, dtype, rank, shape);
}
static inline winnow_tensor in_bf16(int32_t rank, const int64_t* shape) {
  return view(bytes, WINNOW_BF16, rank, shape);
}
static inline winnow_tensor in_i32(int32_t rank, const int64_t* shape) {
  return view(ints, WINNOW_I32, rank, shape);
}
static inline winnow_tensor out(int number, winnow_dtype dtype, int32_t rank,
                                const int64_t* shape) {
  return view(outputs[number], dtype, rank, shape);
}
static inline winnow_cache cache_of(winnow_format format) {
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

static int64_t calls = 0;

static int64_t rounds(void) {
  const char* asked = getenv("WINNOW_HOSTILE_ROUNDS");
  return asked ? atoll(asked) : 2000;
}

static inline void sweep(const subject* s) {
  const int64_t count = rounds();
  static uint64_t copy[8192 / sizeof(uint64_t)];
  int64_t succeeded = 0;
  if (s->size > sizeof copy) abort();
  for (int64_t i = 0; i < count; ++i) {
    memcpy(copy, s->args, s->size);
    memset(outputs, POISON, sizeof outputs);
    memset(pages, PAGE_VALUE, sizeof pages);
    for (int64_t n = draw(3); n > 0; --n) damage(copy, &s->fields[draw(s->count)]);
    const winnow_status status = s->call(copy);
    CHECK(status >= WINNOW_OK && status <= WINNOW_RUNTIME);
    CHECK(inputs_untouched());
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
  calls += count;
  if (succeeded <= count / 20 || succeeded == count) {
    printf("%s: %lld of %lld calls succeeded\n", s->stage, (long long)succeeded, (long long)count);
    ++failures;
  }
}

#define CALL(verb, type) \
  static winnow_status call_##verb(const void* args) { return winnow_##verb((const type*)args); }
/* The workspace of the same call. */
#define BYTES(verb, type)                                                \
  static winnow_status call_##verb##_workspace_bytes(const void* args) { \
    size_t needed = 0;                                                   \
    return winnow_##verb##_workspace_bytes((const type*)args, &needed);  \
  }
#define AT(kind, type, member) \
  { kind, offsetof(type, member), 0 }
#define FREE(dims, type, member) \
  { TENSOR, offsetof(type, member), dims }
#define SWEEP(name, table, args, ...) SWEEP_AS(#name, call_##name, table, args, __VA_ARGS__)
#define SWEEP_AS(stage, call, table, args, ...)                      \
  do {                                                               \
    static const field fields[] = {__VA_ARGS__};                     \
    const subject s = {stage,                                        \
                       table,                                        \
                       &(args),                                      \
                       sizeof(args),                                 \
                       call,                                         \
                       fields,                                       \
                       (int64_t)(sizeof fields / sizeof fields[0])}; \
    sweep(&s);                                                       \
  } while (0)

/* Before the first sweep, and after the last: the result of main(). */
static void begin(void) {
  memset(bytes, VALUE, sizeof bytes);
  for (size_t i = 0; i < sizeof ints / sizeof *ints; ++i) ints[i] = number_at(i);
}
static int end(void) {
  printf("%lld damaged calls, %d failed\n", (long long)calls, failures);
  return failures != 0;
}

#endif /* WINNOW_C_HOSTILE_H */
