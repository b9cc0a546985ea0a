#include <winnow/winnow.h>

#include <cstdio>
#include <cstring>

// Runs a stage and asks what is there; fails if either does not answer.
int main() {
  int32_t ids[] = {5, -1}, request = 0, table[] = {7, 3}, slots[2];
  winnow::locate({.ids = winnow::tensor(ids, {1, 2}),
                  .requests = winnow::tensor(&request, {1}),
                  .block_table = winnow::tensor(table, {1, 2}),
                  .page = 4,
                  .pages = 8,
                  .slots = winnow::tensor(slots, {1, 2})});
  std::printf("winnow %s: slots %d %d\n", winnow::version(), slots[0], slots[1]);
  return slots[0] == 3 * 4 + 1 && slots[1] == -1 && !winnow::support().empty() ? 0 : 1;
}
