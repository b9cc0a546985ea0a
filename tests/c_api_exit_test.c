/* Calls from atexit() handlers: tables of kernels, their names and the messages of failed calls are
 * still there when the process ends. */
#include <stdlib.h>

#include "c_testing.h"

static winnow_kernel_info first;
static char first_kernel[64], cpu[256];

/* The place of the largest of two values. */
static int32_t choose(void) {
  const float logits[2] = {1, 2};
  int32_t id = -2;
  winnow_select_args select = WINNOW_SELECT_ARGS_INIT;
  select.logits = f32(logits, 2, SHAPE(1, 2));
  select.ids = i32(&id, 2, SHAPE(1, 1));
  OK(winnow_select(&select));
  return id;
}

static void at_exit(void) {
  /* The message of main()'s last failure, then those of calls that fail now. */
  CHECK(strstr(winnow_last_error(), "norm: x: expected [any, any] bf16, found nothing"));
  winnow_locate_args locate = WINNOW_LOCATE_ARGS_INIT;
  INVALID(winnow_locate(&locate), "locate: ids: expected [any, any] int32, found nothing");
  winnow_select_args select = WINNOW_SELECT_ARGS_INIT;
  INVALID(winnow_select(&select), "select: logits: expected [any, any] f32, found nothing");

  /* Registered before these were requested first, so what they hold would be destroyed by now. */
  CHECK(strcmp(first.kernel, first_kernel) == 0);
  winnow_kernel_info again;
  OK(winnow_support(0, &again));
  CHECK(again.kernel == first.kernel);
  CHECK(strcmp(winnow_cpu_name(), cpu) == 0);
  CHECK(choose() == 1);
  if (failures) _Exit(1);
}

int main(void) {
  CHECK(atexit(at_exit) == 0);
  OK(winnow_support(0, &first));
  snprintf(first_kernel, sizeof(first_kernel), "%s", first.kernel);
  snprintf(cpu, sizeof(cpu), "%s", winnow_cpu_name());
  CHECK(choose() == 1);
  winnow_norm_args norm = WINNOW_NORM_ARGS_INIT;
  INVALID(winnow_norm(&norm), "norm: x: expected [any, any] bf16, found nothing");
  return failures != 0;
}
