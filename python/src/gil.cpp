#include "gil.h"

#include <unistd.h>

namespace winnow::python {

void wait_for_the_end() {
  for (;;) pause();
}

}  // namespace winnow::python
