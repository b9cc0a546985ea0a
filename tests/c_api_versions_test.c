/* A program that was compiled against winnow 0.1 keeps working: the structs below are copies of
 * its header and never change. The views they hold have no struct_size and stay as they are. */
#include "c_testing.h"

typedef struct locate_args_0_1 {
  size_t struct_size;
  const winnow_plan* plan;
  int32_t part;
  winnow_tensor ids, requests, block_table;
  int32_t page;
  int64_t pages;
  int32_t rows_per_page;
  winnow_tensor prefill_requests, workspace_starts;
  int64_t workspace_rows;
  winnow_context_parallel parallel;
  winnow_tensor slots, counts;
  winnow_target target;
} locate_args_0_1;

typedef struct plan_options_0_1 {
  size_t struct_size;
  const char* model;
  winnow_format format;
  int32_t heads, topk, extra_topk, ratio, index_heads, page;
  int64_t pages;
  int32_t max_requests, max_tokens, max_context, decode_threshold;
  bool uniform_decode;
  winnow_mode mode;
  int64_t workspace_rows;
  winnow_split_policy split;
  int32_t split_size;
  winnow_target target;
  bool mha;
} plan_options_0_1;

typedef struct attend_args_0_1 {
  size_t struct_size;
  const winnow_plan* plan;
  int32_t part;
  winnow_tensor q, q_rope;
  winnow_kv_list lists[2];
  winnow_tensor requests;
  float scale;
  winnow_tensor sink;
  winnow_tensor out;
  winnow_tensor lse, max_logit;
  bool empty_lse_negative;
  void* workspace;
  size_t workspace_bytes;
  winnow_target target;
} attend_args_0_1;

static void views(void) {
  CHECK(sizeof(winnow_tensor) == 80 && sizeof(winnow_cache) == 40);
  CHECK(sizeof(winnow_target) == 24 && sizeof(winnow_ints) == 16);
}

static void locate(void) {
  const int32_t ids[2] = {5, 4}, request = 0, table[2] = {7, 3};
  int32_t slots[2] = {0, 0};
  const locate_args_0_1 old = {.struct_size = sizeof old,
                               .part = -1,
                               .ids = i32(ids, 2, SHAPE(1, 2)),
                               .requests = i32(&request, 1, SHAPE(1)),
                               .block_table = i32(table, 2, SHAPE(1, 2)),
                               .page = 4,
                               .pages = 8,
                               .parallel = {.world = 1, .interleave = 1},
                               .slots = i32(slots, 2, SHAPE(1, 2))};
  OK(winnow_locate((const void*)&old));
  CHECK(slots[0] == 3 * 4 + 1 && slots[1] == 3 * 4);
}

static void plan(void) {
  const plan_options_0_1 old = {.struct_size = sizeof old,
                                .model = "v32",
                                .heads = 16,
                                .index_heads = 8,
                                .page = 64,
                                .pages = 4,
                                .max_requests = 2,
                                .max_tokens = 2,
                                .decode_threshold = 1,
                                .split_size = 512};
  winnow_plan* made = NULL;
  OK(winnow_plan_create((const void*)&old, &made));
  if (!made) return;
  /* What stands behind the old struct is not written. */
  struct {
    plan_options_0_1 options;
    uint64_t behind[8];
  } back = {.options = {.struct_size = sizeof(plan_options_0_1)}};
  OK(winnow_plan_get_options(made, (void*)&back.options));
  CHECK(back.options.struct_size == sizeof old && back.options.max_context == 256);
  for (int i = 0; i < 8; ++i) CHECK(back.behind[i] == 0);
  winnow_plan_destroy(made);
}

/* A struct without `precision` requests none, whatever lies after it. */
static void attend(void) {
  static uint16_t q[576], out[512];
  static uint8_t records[64 * 656];
  const int32_t slot = 3;
  q[0] = 0x3f80;           /* 1 */
  records[3 * 656] = 0x38; /* 1, times the scale of 2 */
  memcpy(records + 3 * 656 + 512, &(float){2.0f}, sizeof(float));
  struct {
    attend_args_0_1 args;
    int32_t behind[2];
  } old = {.args = {.struct_size = sizeof(attend_args_0_1),
                    .q = bf16(q, 3, SHAPE(1, 1, 576)),
                    .scale = 1.0f,
                    .out = bf16(out, 3, SHAPE(1, 1, 512))},
           .behind = {WINNOW_PRECISION_FP8, -1}};
  old.args.lists[0].cache = (winnow_cache){records, WINNOW_V32_FP8, 1, 64, 0};
  old.args.lists[0].indices = i32(&slot, 2, SHAPE(1, 1));
  OK(winnow_attend((const void*)&old.args));
  CHECK(out[0] == 0x4000); /* 2 */
}

int main(void) {
  views();
  locate();
  plan();
  attend();
  printf("%d failed\n", failures);
  return failures;
}
