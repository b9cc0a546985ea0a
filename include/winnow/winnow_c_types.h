/* winnow in C: status codes, views, models, and what this build can do. Included by winnow_c.h. */
#ifndef WINNOW_C_TYPES_H
#define WINNOW_C_TYPES_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Errors (<winnow/error.h>) ------------------------------------------------------------- */

typedef int32_t winnow_status;
enum {
  WINNOW_OK = 0,
  WINNOW_INVALID_ARGUMENT = 1, /* an argument breaks the contract; nothing was written */
  WINNOW_UNSUPPORTED = 2,      /* valid, but no kernel of this build and machine can do it */
  WINNOW_RUNTIME = 3           /* the device or the operating system refused; out of memory */
};

/* Message of this thread's last call that failed: "stage: argument: expected ..., found ...". Empty
 * when none did. Valid until this thread's next failure or its end; atexit() handlers ask again. */
const char* winnow_last_error(void);

/* ---- Views (<winnow/tensor.h>) ------------------------------------------------------------- */

typedef int32_t winnow_dtype; /* bf16 and e4m3 are bits in uint16_t and uint8_t */
enum { WINNOW_BF16, WINNOW_E4M3, WINNOW_F32, WINNOW_I32, WINNOW_I64, WINNOW_U8 };

typedef struct winnow_tensor { /* all zero: not given */
  void* data;
  winnow_dtype dtype;
  int32_t rank;                /* 1..4 */
  int64_t shape[4], stride[4]; /* strides count elements */
} winnow_tensor;

/* A pointer taken as a place, not read: compilers then do not ask for what stands there. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define WINNOW_PLACE(parameter) __attribute__((access(none, parameter)))
#else
#define WINNOW_PLACE(parameter)
#endif

/* Views are of inputs, too, whose bytes a call does not change. */
#ifdef __cplusplus
#define WINNOW_WITHOUT_CONST(pointer) (const_cast<void*>(pointer))
#else
#define WINNOW_WITHOUT_CONST(pointer) ((void*)(pointer))
#endif

/* A contiguous view. */
WINNOW_PLACE(1)
static inline winnow_tensor winnow_tensor_of(const void* data, winnow_dtype dtype, int32_t rank,
                                             const int64_t* shape) {
  winnow_tensor t = {WINNOW_WITHOUT_CONST(data), dtype, rank, {0, 0, 0, 0}, {0, 0, 0, 0}};
  int64_t stride = 1;
  for (int32_t i = rank < 4 ? rank - 1 : 3; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

typedef int32_t winnow_format;
enum {
  WINNOW_V32_FP8,
  WINNOW_V32_BF16,
  WINNOW_V4_FP8,
  WINNOW_V4_BF16,
  WINNOW_INDEX_KEYS,
  WINNOW_INDEX_KEYS_BF16
};

typedef int32_t winnow_scale_mode; /* <winnow/scale.h> */
enum { WINNOW_SCALE_DEFAULT, WINNOW_AMAX, WINNOW_POW2, WINNOW_POW2_FLOOR_AMAX };

typedef int32_t winnow_precision; /* <winnow/precision.h> */
enum { WINNOW_PRECISION_FULL, WINNOW_PRECISION_FP8 };

typedef struct winnow_cache { /* all zero: not given */
  void* data;
  winnow_format format;
  int64_t pages;
  int32_t page;        /* tokens per page; no default: a cache with data needs it */
  int64_t page_stride; /* bytes; 0 means winnow_page_bytes() */
} winnow_cache;

/* A number that has no right default and was not given. */
#define WINNOW_NOT_GIVEN NAN

typedef int32_t winnow_device_kind;
enum { WINNOW_CPU, WINNOW_CUDA };
typedef struct winnow_device { /* all zero: the CPU */
  winnow_device_kind kind;
  int32_t index;
  void* stream; /* cudaStream_t */
} winnow_device;

typedef struct winnow_target {
  winnow_device device;
  const char* kernel; /* null: WINNOW_KERNEL of the environment, else the fastest that fits */
} winnow_target;

typedef struct winnow_ints { /* int32 values on the host */
  const int32_t* data;
  int64_t count;
} winnow_ints;

/* ---- Models and this build (<winnow/model.h>, <winnow/support.h>) -------------------------- */

typedef struct winnow_model {
  const char* name;
  int32_t d_qk, d_v, d_nope, d_rope;
  winnow_format fp8, bf16;
  int32_t lists, default_topk, window;
} winnow_model;

winnow_status winnow_model_of(const char* name, winnow_model* out); /* "v32", "v4" */
const char* winnow_format_name(winnow_format format);               /* null when unknown */
winnow_status winnow_format_of(const char* name, winnow_format* out);
const winnow_format* winnow_cache_formats(int64_t* count);
const int32_t* winnow_head_sizes(int64_t* count);
bool winnow_supports_heads(int64_t heads);
winnow_status winnow_page_bytes(winnow_format format, int64_t page, int64_t* out);
winnow_status winnow_page_bytes_used(winnow_format format, int64_t page, int64_t* out);
winnow_status winnow_cache_shape(winnow_format format, int64_t pages, int64_t page, int64_t out[2]);
winnow_status winnow_record_dim(winnow_format format, int32_t* out);

typedef struct winnow_kernel_info { /* strings live as long as the process */
  const char *stage, *kernel, *device;
  bool available;
  const char* reason; /* why not; empty when available */
} winnow_kernel_info;

winnow_status winnow_support_count(int64_t* count);
winnow_status winnow_support(int64_t index, winnow_kernel_info* out); /* in the order of trying */
const char* winnow_version(void);
const char* winnow_cpu_name(void); /* null when out of memory */
int32_t winnow_threads(void);

#ifdef __cplusplus
}
#endif

#endif /* WINNOW_C_TYPES_H */
