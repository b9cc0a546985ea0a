// The GIL, left and taken again around the library's work.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

namespace winnow::python {

// Takes the GIL again after PyEval_SaveThread(). Does not return where the interpreter has ended.
void take_gil(PyThreadState* state);

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
  take_gil(state);
  if (failed) std::rethrow_exception(failed);
}

}  // namespace winnow::python
