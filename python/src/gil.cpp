#include "gil.h"

#include <unistd.h>

namespace winnow::python {

// A daemon thread that asks for the GIL of an interpreter that has ended never gets it. Python up
// to 3.13 ends such a thread with pthread_exit(), which unwinds its stack by an exception; the
// first noexcept destructor or catch clause on the way would abort the process. Caught here, the
// thread waits for the process's end instead, as later versions of Python let it.
void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    for (;;) pause();
  }
}

}  // namespace winnow::python
