/* What the C test programs share: checks that print and count, exact bf16 values, views. */
#ifndef WINNOW_C_TESTING_H
#define WINNOW_C_TESTING_H

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <winnow/winnow_c.h>

static int failures = 0;

#define CHECK(condition)                                     \
  do {                                                       \
    if (!(condition)) {                                      \
      printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                            \
    }                                                        \
  } while (0)
#define OK(call)                                                                 \
  do {                                                                           \
    if ((call) != WINNOW_OK) {                                                   \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, winnow_last_error()); \
      ++failures;                                                                \
    }                                                                            \
  } while (0)
/* The call fails as an invalid argument and its message holds `words`. */
#define INVALID(call, words)                                                                 \
  do {                                                                                       \
    CHECK((call) == WINNOW_INVALID_ARGUMENT);                                                \
    if (!strstr(winnow_last_error(), words)) {                                               \
      printf("%s:%d: '%s' is not in: %s\n", __FILE__, __LINE__, words, winnow_last_error()); \
      ++failures;                                                                            \
    }                                                                                        \
  } while (0)

static const uint8_t kOne = 0x38; /* 1.0 in e4m3 */

static inline uint16_t to_bf16(float x) { /* exact for the short values used here */
  uint32_t u;
  memcpy(&u, &x, 4);
  return (uint16_t)(u >> 16);
}
static inline float from_bf16(uint16_t x) {
  const uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline void fill(uint16_t* out, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(value);
}

#define SHAPE(...) \
  (const int64_t[]) { __VA_ARGS__ }
WINNOW_PLACE(1)
static inline winnow_tensor bf16(const void* p, int32_t rank, const int64_t* shape) {
  return winnow_tensor_of(p, WINNOW_BF16, rank, shape);
}
WINNOW_PLACE(1)
static inline winnow_tensor f32(const void* p, int32_t rank, const int64_t* shape) {
  return winnow_tensor_of(p, WINNOW_F32, rank, shape);
}
WINNOW_PLACE(1)
static inline winnow_tensor i32(const void* p, int32_t rank, const int64_t* shape) {
  return winnow_tensor_of(p, WINNOW_I32, rank, shape);
}

#endif /* WINNOW_C_TESTING_H */
