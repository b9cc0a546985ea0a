#include <stdio.h>
#include <string.h>
#include <winnow/winnow_c.h>

/* A call that works and one that fails with its message. */
int main(void) {
  int64_t bytes = 0;
  if (winnow_page_bytes(WINNOW_V4_FP8, 64, &bytes) != WINNOW_OK || bytes != 37440) return 1;
  if (winnow_page_bytes(WINNOW_V4_FP8, 0, &bytes) != WINNOW_INVALID_ARGUMENT) return 2;
  printf("winnow %s: %s\n", winnow_version(), winnow_last_error());
  return strstr(winnow_last_error(), "page") ? 0 : 3;
}
