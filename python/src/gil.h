// The GIL, left and taken again around the library's work.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

namespace winnow::python {

// Waits for the end of the process, which is near.
[[noreturn]] void wait_for_the_end();

// Runs a function of Python's C API that asks for the GIL, as running Python code does again and
// again. A daemon thread of an interpreter that has ended never gets it. Python up to 3.13 ends
// such a thread with pthread_exit(), which unwinds its stack by an exception: a destructor on the
// way would release objects without the GIL, a noexcept one or a catch clause abort the process.
// Caught at once, the thread waits for the end instead, as later versions of Python let it.
template <class F>
auto asking_for_gil(F&& call) {
  try {
    return call();
  } catch (...) {  // the C API throws nothing else
    wait_for_the_end();
  }
}

// Runs `body`, which touches no Python object, without the GIL.
template <class F>
void without_gil(F&& body) {
  PyThreadState* const state = PyEval_SaveThread();
  std::exception_ptr failed;
  try {
    body();
  } catch (...) {
    failed = std::current_exception();
  }
  asking_for_gil([&] { PyEval_RestoreThread(state); });
  if (failed) std::rethrow_exception(failed);
}

}  // namespace winnow::python
